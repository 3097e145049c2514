"""Texts that do not fit on the canvas: how many there are, and the change that would make room for them."""

from difflm.data.texts import LONGEST, MOST_TOKENS
from difflm.data.tokenfile import HELD, Selection, TokenFile, tokens_that_hold_most
from difflm.training.recipe import Recipe


def count_left_out(recipe: Recipe, selection: Selection) -> dict[str, int]:
    """The number of texts that are not trained on, for the config; `repeated` if a recipe asks for each text once."""
    return {"left_out": selection.too_long, **({"repeated": selection.repeated} if recipe.distinct else {})}


def advise_longest(recipe: Recipe, extra: int, tokens: TokenFile) -> str:
    """The change with which nearly all texts fit, plus the `extra` positions that some models need; "" if none is
    possible."""
    needed = {"longest": round_up(tokens_that_hold_most(tokens.lengths) + extra)}
    needed["source_longest"] = round_up(tokens_that_hold_most(tokens.sources.lengths)) if tokens.sources else 0
    raised = {key: value for key, value in needed.items() if value > getattr(recipe, key)}
    if recipe.init or not raised or sum(needed.values()) > (MOST_TOKENS if tokens.sources else LONGEST):
        return ""
    widths = " widths=[]" if recipe.widths and max(recipe.widths) < needed["longest"] else ""
    changes = " ".join(f"{key}={value}" for key, value in raised.items())
    return f"Train with {changes}{widths}, which fits {HELD:.0%} of them, or split them into shorter texts."


def round_up(tokens: int) -> int:
    """Round up to a multiple of eight, like the widths of batches."""
    return -(-tokens // 8) * 8
