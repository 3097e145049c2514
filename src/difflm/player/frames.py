"""The drafts of a text as frames: plain objects for a stream, packed ones for a page that holds all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from difflm.data.words import join_words
from difflm.runtime.files import Json

# One character per confidence, 64 levels: an error of at most 1/126, which is invisible.
SIGNS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


@dataclass(frozen=True)
class Draft:
    """One text at one denoising step."""

    sample: int
    step: int
    t: float  # the time; the mean if every position has its own
    tokens: list[str]  # one per position; with byte pairs, pieces of words
    confidence: list[float]
    changed: list[bool]
    edits: list[str] = field(default_factory=list)  # models that edit: what the next step does with each token
    picture: str = ""  # models of pixels: these as the address of a PNG; the tokens are the characters read from them

    def __repr__(self) -> str:
        return f"Draft(step {self.step}: {' '.join(token or '_' for token in self.tokens)})"


@dataclass(frozen=True)
class PlayedText:
    """A finished text and what is known of its making."""

    text: str
    tokens: list[str]  # its words
    steps: int
    denoiser_calls: int
    seconds: float  # of its batch; with candidates, the sum over all batches and their ranking
    seed: int
    controls: list[Json] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # why the text may not be as requested
    changed: list[list[str]] = field(default_factory=list)  # of an edited text: what was written, and is now
    classifier_calls: int = 0  # calls of classifiers, in addition to denoiser_calls
    drafts: list[Draft] = field(default_factory=list, compare=False)  # every step, with `frames=True`


def made_of_pieces(tokens: Sequence[str]) -> bool:
    """Whether the tokens are byte pairs, which carry their own spaces, rather than words."""
    return any(token[:1] == " " for token in tokens)


def spaces(tokens: Sequence[str], pieces: bool) -> list[bool]:
    """Whether a space is written before each token; a token that shows nothing has none."""
    text, at, before = written(tokens, pieces), 0, []
    for token in tokens:
        before.append(bool(token) and not text.startswith(token, at))
        at += before[-1] + len(token)
    return before


def written(tokens: Sequence[str], pieces: bool) -> str:
    """Join tokens to a text."""
    return "".join(tokens) if pieces else join_words([token for token in tokens if token])


def pack_drafts(drafts: Sequence[Draft], pieces: bool, table: dict[str, int]) -> list[Json]:
    """Drafts as small objects: tokens by their number in a `table`, to which new ones are added, and only where they
    differ from before.

    A cell is 2 × the token's number, plus 1 where a space is written before it. A frame holds its step `s`, its time
    `t`, its length `n`, the cells that differ from the frame before as pairs [position, cell, …] `w`, the
    confidences `c`, a character each, and the positions of changed words `x`. Of a model that edits it also holds the
    first letter of what the next step does with each token, `e`; of pixels the picture
    `p`."""
    packed: list[Json] = []
    before: list[int] = []
    for draft in drafts:
        apart = spaces(draft.tokens, pieces)
        numbers = [table.setdefault(token, len(table)) for token in draft.tokens]
        cells = [2 * number + space for number, space in zip(numbers, apart, strict=True)]
        new = [i for i, cell in enumerate(cells) if i >= len(before) or before[i] != cell]
        packed.append(
            {
                "s": draft.step,
                "t": round(draft.t, 4),
                "n": len(cells),
                "w": [value for i in new for value in (i, cells[i])],
                "c": "".join(SIGNS[round(min(1.0, max(0.0, c)) * (len(SIGNS) - 1))] for c in draft.confidence),
                "x": [i for i, changed in enumerate(draft.changed) if changed],
                **({"p": draft.picture} if draft.picture else {}),
                **({"e": "".join(edit[0] for edit in draft.edits)} if draft.edits else {}),
            }
        )
        before = cells
    return packed
