"""One text while it is denoised: the confidence of each position at each step, and when each word last changed."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from difflm.app.plots.canvas import open_figure
from difflm.errors import UsageError
from difflm.player.frames import Draft

ROW = 0.17  # inches a word
MAX_ROWS = 120


@dataclass(frozen=True)
class DenoisingHistory:
    """`confidence` [L, N] of positions and steps, NaN before a position has a word; `revised` [L, N]: its word changed;
    `last_changed` [L] is the step, 1 … N, that brought its final word."""

    words: list[str]
    confidence: NDArray[np.float64]
    revised: NDArray[np.bool_]
    last_changed: NDArray[np.int64]


def read_denoising(drafts: Iterable[Draft]) -> DenoisingHistory:
    """Collect the drafts of one text, first to last; positions that stay empty behind its last word are left out."""
    steps = list(drafts)
    last = steps[-1].tokens
    length = max((position + 1 for position, word in enumerate(last) if word.strip()), default=len(last))
    changed = np.array([draft.changed[:length] for draft in steps]).T
    written = np.logical_or.accumulate(changed, axis=1)  # an autoregressive model writes one position after the other
    revised = changed.copy()
    revised[:, 0] = False
    revised[:, 1:] &= written[:, :-1]
    confidence = np.where(written, np.array([draft.confidence[:length] for draft in steps]).T, np.nan)
    last_changed = len(steps) - changed[:, ::-1].argmax(axis=1)
    return DenoisingHistory([word.strip() or "·" for word in last[:length]], confidence, revised, last_changed)


def draw_denoising(out: Path, text: DenoisingHistory, title: str, dark: bool = False) -> None:
    positions, steps = text.confidence.shape
    if positions > MAX_ROWS:
        raise UsageError(f"a text of {positions} tokens is too long for a picture; {MAX_ROWS} fit.")
    with open_figure(out, max(3.0, 1.3 + ROW * positions), dark) as figure:
        heat, bars = figure.subplots(1, 2, sharey=True, width_ratios=[3.2, 1])
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        extent = (0.5, steps + 0.5, positions - 0.5, -0.5)
        image = heat.imshow(text.confidence, aspect="auto", cmap="cividis", vmin=0, vmax=1, extent=extent)
        position, step = np.nonzero(text.revised)
        heat.plot(step + 1, position, "o", color="white", markersize=2.6, markeredgecolor="black", markeredgewidth=0.4)
        heat.set(title="confidence in the word  (dots: it changed)", xlabel="step", xticks=step_ticks(steps))
        heat.set_yticks(range(positions), text.words, fontsize=8)
        heat.tick_params(axis="y", length=0)
        bars.barh(range(positions), text.last_changed, height=0.72, color="C0")
        for row, changed in enumerate(text.last_changed):
            bars.text(changed + steps * 0.02, row, str(changed), va="center", fontsize=7)
        bars.set(title="last changed at step", xlabel="step", xlim=(0, steps * 1.12), xticks=step_ticks(steps))
        bars.tick_params(axis="y", length=0, labelleft=False)
        heat.grid(False)
        bars.grid(False, axis="y")
        bar = figure.colorbar(image, ax=heat, location="right", pad=0.01, fraction=0.03, aspect=40)
        bar.outline.set_visible(False)


def step_ticks(steps: int) -> list[int]:
    """Mark the first step, the last, and the quarters between."""
    return sorted({1, steps, *(max(1, round(steps * part)) for part in (0.25, 0.5, 0.75))})
