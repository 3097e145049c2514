"""Draw the trade-off of docs/control.md from its own table: success against the judge, over guidance strength.

python -m benchmarks.tables.trade_off docs/control.md docs/images/control-trade-off.png
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from difflm.app.plots.canvas import open_figure

INK = "#222222"

TITLE = "### The trade-off"
FIRST = ", the first classifiers"
BEST = "best of"
# What the table calls it: its heading, its axis, the goal in %, the judge's figure of real text.
PANELS = {
    "tags": ("parts of speech", "whole sequences right, %", 95.0, 1.572),
    "tree": ("tree", "whole trees right, %", 80.0, 1.555),
    "field": ("one field", "texts that say it, %", 99.0, 1.643),
}


@dataclass(frozen=True)
class Point:
    panel: str
    first: bool  # of the classifiers before the bundled ones
    how: str  # the strength, or "10, best of 4"
    success: float
    judge: float
    self_bleu: float


def points(page: str) -> Iterator[Point]:
    """The rows of the table; an empty first cell is that of the row before, of two successes the last is drawn."""
    lines = page[page.index(TITLE) :].splitlines()
    name = ""
    for line in (line for line in lines if line.startswith("| ")):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 5 or cells[1] == "w":
            continue
        name = cells[0] or name
        success = float(cells[2].split("/")[-1])
        yield Point(
            name.split(":")[0].split(",")[0], FIRST in name, cells[1], success, float(cells[3]), float(cells[4])
        )


def draw(found: list[Point], out: Path) -> None:
    with open_figure(out, 3.8, False) as figure:
        for axes, (panel, (title, label, goal, real)) in zip(figure.subplots(1, 3), PANELS.items(), strict=True):
            own = [p for p in found if p.panel == panel and not (p.first and BEST in p.how)]
            for first in (False, True):
                line = [p for p in own if p.first == first and BEST not in p.how]
                style = {"mfc": "white", "ls": "--"} if first else {"ls": "-"}
                xs, ys = [p.judge for p in line], [p.success for p in line]
                name = "the first classifiers" if first else "bundled classifiers"
                axes.plot(xs, ys, marker="o", color="C0", lw=1.3, label=name, **style)
            best = [p for p in own if BEST in p.how]
            star = {"marker": "*", "ms": 12, "ls": "", "label": "bundled, best of 4"}
            axes.plot([p.judge for p in best], [p.success for p in best], color="C1", **star)
            for point in own:
                beside(axes, point, INK)
            axes.axvline(real, color=INK, lw=0.8, ls=":", label="real text")
            axes.axhline(goal, color="C2", lw=0.8, label="goal")
            axes.margins(0.6, 0.12)
            axes.set(title=title, ylabel=label, xlabel="judge, nats/token")
            axes.grid(False)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)


def beside(axes: Any, point: Point, ink: str) -> None:
    """The strength and the self-BLEU, right of the point, of the first classifiers left of it."""
    text = f"{'best of 4' if BEST in point.how else f'w {point.how}'} · {point.self_bleu:.2f}"
    shift, side = ((-9, -5), "right") if point.first else ((10, 1), "left")
    where = {"xytext": shift, "textcoords": "offset points", "ha": side, "va": "center"}
    axes.annotate(text, (point.judge, point.success), fontsize=7.5, color=ink, **where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    draw(list(points(asked.page.read_text(encoding="utf-8"))), asked.out)


if __name__ == "__main__":
    main()
