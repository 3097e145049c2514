"""What `difflm bench` found: texts a second over texts made together, growth, and training."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from difflm.app.plots.canvas import DASHES, sheet
from difflm.errors import DifflmError

Curves = dict[str, list[tuple[float, float]]]
NOUNS = {"length": "positions", "vocabulary": "words", "batch": "texts together"}


def writing_curves(rows: Iterable[Mapping[str, Any]], control: str | None = None) -> Curves:
    """Texts a second over texts made together, a curve for each number of steps."""
    found: Curves = {}
    for row in rows:
        if row.get("control") == control:
            name = f"{row['steps']} steps{', compiled' if row.get('compiled') else ''}"
            found.setdefault(name, []).append((row["texts"], row["texts_per_second"]))
    return found


def rival_curves(rows: Iterable[Mapping[str, Any]]) -> Curves:
    """The same of rivals; of two ways to run one, the faster."""
    best: dict[str, dict[float, float]] = {}
    for row in rows:
        if "texts_per_second" in row:
            own = best.setdefault(row["rival"], {})
            own[row["texts"]] = max(own.get(row["texts"], 0), row["texts_per_second"])
    return {name: list(own.items()) for name, own in best.items()}


def panels_of(report: Mapping[str, Any]) -> dict[str, tuple[str, str, Curves]]:
    """Title, axis names and curves of every panel that has something to show."""
    together, rate = "texts together", "texts a second"
    free = writing_curves(report.get("sampling", ())) | rival_curves(report.get("rivals", ()))
    found = {"free texts": (together, rate, free)}
    for control in dict.fromkeys(row["control"] for row in report.get("control", ())):
        found[f"under control: {control}"] = (together, rate, writing_curves(report["control"], control))
    for along, noun in NOUNS.items():
        rows = [row for row in report.get("growth", ()) if row["along"] == along]
        seconds = {"seconds a text": [(row["size"], row["seconds"] / row["texts"]) for row in rows]}
        found[f"growth with {along}"] = (noun, "seconds a text", seconds)
    trained: Curves = {}
    for row in report.get("training", ()):
        trained.setdefault(row["model"], []).append((row["texts"], row["positions_per_second"]))
    found["training"] = ("texts a step", "positions a second", trained)
    return {title: panel for title, panel in found.items() if any(panel[2].values())}


def draw_speed(out: Path, report: Mapping[str, Any], dark: bool = False) -> None:
    found = panels_of(report)
    if not found:
        raise DifflmError("nothing was measured that a picture could show: leave out --only, or name another part.")
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    machine = report["machine"]
    with sheet(out, 0.6 + 2.6 * rows, dark) as (figure, look):
        figure.suptitle(f"{machine['processor']}, torch {machine['torch']}", fontsize=10, x=0.01, ha="left")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel, (title, (across, up, curves)) in zip(grid, found.items(), strict=False):
            for place, (name, points) in enumerate(curves.items()):
                x, y = zip(*sorted(points), strict=True)
                colour, dash = look.lines[place % len(look.lines)], DASHES[place % len(DASHES)]
                panel.plot(x, y, color=colour, linestyle=dash, marker="o", markersize=4, label=name)
            panel.set(title=title, xlabel=across, ylabel=up, xscale="log", yscale="log")
            plain_ticks(panel, {x for points in curves.values() for x, _ in points})
            if [*curves] != [up]:
                panel.legend(fontsize=7)
        for panel in grid[len(found) :]:
            panel.set_visible(False)


def plain_ticks(panel: Any, places: set[float]) -> None:
    """Numbers instead of powers; across, the sizes that were measured, but for those that would stand in another."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = panel.get_ylim()
    subs = (1, 1.5, 2, 3, 4, 5, 7) if high < 8 * low else (1, 2, 5) if high < 300 * low else (1,)
    panel.yaxis.set_major_locator(LogLocator(subs=subs))
    shown: list[float] = []
    for place in sorted(places, reverse=True):
        if not shown or shown[-1] / place >= (max(places) / min(places)) ** (1 / 7):
            shown.append(place)
    panel.set_xticks(shown)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_locator(NullLocator())
