"""Texts that a canvas does not hold: how many they are, and the change by which it would."""

from difflm.data.texts import LONGEST, MOST_TOKENS
from difflm.data.tokenfile import HELD, Selection, TokenFile, tokens_that_hold_most
from difflm.training.recipe import Recipe


def count_left_out(recipe: Recipe, selection: Selection) -> dict[str, int]:
    """How many texts are not trained on, for the config; `repeated` where a recipe asks for each text once."""
    return {"left_out": selection.too_long, **({"repeated": selection.repeated} if recipe.distinct else {})}


def advise_longest(recipe: Recipe, extra: int, tokens: TokenFile) -> str:
    """The change by which nearly all texts fit, with the `extra` positions that some models need; "" where no change
    is possible."""
    needed = {"longest": round_up(tokens_that_hold_most(tokens.lengths) + extra)}
    needed["source_longest"] = round_up(tokens_that_hold_most(tokens.sources.lengths)) if tokens.sources else 0
    raised = {key: value for key, value in needed.items() if value > getattr(recipe, key)}
    if recipe.init or not raised or sum(needed.values()) > (MOST_TOKENS if tokens.sources else LONGEST):
        return ""
    widths = " widths=[]" if recipe.widths and max(recipe.widths) < needed["longest"] else ""
    changes = " ".join(f"{key}={value}" for key, value in raised.items())
    return f"Train with {changes}{widths}, which fits {HELD:.0%} of them, or split them into shorter texts."


def round_up(tokens: int) -> int:
    """To a multiple of eight, as the widths of batches are."""
    return -(-tokens // 8) * 8
