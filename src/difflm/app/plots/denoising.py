"""One text while it condenses: how sure the model is of each place at each step, and when each word settled."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from difflm.app.plots.canvas import sheet
from difflm.errors import UsageError
from difflm.generation.jobs import Draft

ROW = 0.17  # inches a word
MOST_ROWS = 120


@dataclass(frozen=True)
class Condensing:
    """`confidence` [L, N] of places and steps, NaN before a place is written; `revised` [L, N]: a new word came;
    `settled` [L] is the step, 1 … N, that brought the last word."""

    words: list[str]
    confidence: NDArray[np.float64]
    revised: NDArray[np.bool_]
    settled: NDArray[np.int64]


def condensing(drafts: Iterable[Draft]) -> Condensing:
    """From the drafts of one text, first to last; places that end up empty behind its last word are left out."""
    seen = list(drafts)
    last = seen[-1].tokens
    length = max((place + 1 for place, word in enumerate(last) if word.strip()), default=len(last))
    changed = np.array([draft.changed[:length] for draft in seen]).T
    written = np.logical_or.accumulate(changed, axis=1)  # the twin writes one place after the other
    revised = changed.copy()
    revised[:, 0] = False
    revised[:, 1:] &= written[:, :-1]
    confidence = np.where(written, np.array([draft.confidence[:length] for draft in seen]).T, np.nan)
    settled = len(seen) - changed[:, ::-1].argmax(axis=1)
    return Condensing([word.strip() or "·" for word in last[:length]], confidence, revised, settled)


def draw_denoising(out: Path, text: Condensing, title: str, dark: bool = False) -> None:
    places, steps = text.confidence.shape
    if places > MOST_ROWS:
        raise UsageError(f"a text of {places} tokens is too long for a picture; {MOST_ROWS} fit.")
    with sheet(out, max(3.0, 1.3 + ROW * places), dark) as (figure, look):
        heat, bars = figure.subplots(1, 2, sharey=True, width_ratios=[3.2, 1])
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        extent = (0.5, steps + 0.5, places - 0.5, -0.5)
        image = heat.imshow(text.confidence, aspect="auto", cmap="cividis", vmin=0, vmax=1, extent=extent)
        place, step = np.nonzero(text.revised)
        heat.plot(step + 1, place, "o", color="white", markersize=2.6, markeredgecolor="black", markeredgewidth=0.4)
        heat.set(title="confidence in the word  (dots: it changed)", xlabel="step")
        heat.set_xticks(step_ticks(steps))
        heat.set_yticks(range(places), text.words, fontsize=8)
        heat.tick_params(axis="y", length=0)
        bars.barh(range(places), text.settled, height=0.72, color=look.lines[0])
        for row, settled in enumerate(text.settled):
            bars.text(settled + steps * 0.02, row, str(settled), va="center", fontsize=7, color=look.ink)
        bars.set(title="last changed at step", xlabel="step", xlim=(0, steps * 1.12))
        bars.set_xticks(step_ticks(steps))
        bars.tick_params(axis="y", length=0, labelleft=False)
        heat.grid(False)
        bars.grid(False, axis="y")
        bar = figure.colorbar(image, ax=heat, location="right", pad=0.01, fraction=0.03, aspect=40)
        bar.outline.set_visible(False)


def step_ticks(steps: int) -> list[int]:
    """The first, the last, and the quarters between."""
    return sorted({1, steps, *(max(1, round(steps * part)) for part in (0.25, 0.5, 0.75))})
