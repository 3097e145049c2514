"""Shared by all plots: a light and a dark theme, colours that the colour-blind can tell apart, atomic writes."""

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import check_place, write_atomic

FORMATS = (".png", ".svg")
WIDTH, DPI = 8.0, 150  # inches and dots an inch: 1,200 pixels wide
OTHER_SCRIPTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans Arabic", "Noto Sans Devanagari", "Noto Sans")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))  # lines differ not only in colour

T = TypeVar("T")


@dataclass(frozen=True)
class Theme:
    """`lines` are the colours of Okabe and Ito (2008), starting with the best contrast on this background."""

    background: str
    ink: str
    faint: str
    lines: tuple[str, ...]

    def line(self, number: int) -> dict[str, Any]:
        """The colour and dashes of the line with this number."""
        return {"color": self.lines[number % len(self.lines)], "linestyle": DASHES[number % len(DASHES)]}


LIGHT = Theme(
    "white", "#222222", "#dddddd", ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
)
DARK = Theme(
    "#14161a", "#e6e6e6", "#3a3d44", ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#ffffff")
)


def check_out(out: Path) -> Path:
    """Refuse a path that cannot be written, before any work."""
    if out.suffix.lower() not in FORMATS:
        raise UsageError(f"{out} should end in {' or '.join(FORMATS)}, such as {out.with_suffix('.png').name}.")
    check_place(out)
    return out


def need_plot_extra() -> None:
    try:
        import matplotlib  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError:
        raise DifflmError('pictures need matplotlib and scikit-learn: pip install ".[plot]"') from None


@contextmanager
def open_figure(out: Path, height: float, dark: bool) -> Iterator[tuple[Any, Theme]]:
    """Yield a figure in our theme to draw on, and write it to `out` when the block succeeds."""
    need_plot_extra()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    theme = DARK if dark else LIGHT
    with matplotlib.rc_context(style(theme)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a character that is in no installed font is drawn as a box
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, theme
        kind = out.suffix.lower().removeprefix(".")
        drawn = io.BytesIO()
        # No date, and ids derived from the content: the same plot gives the same file.
        figure.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else None)
    write_atomic(out, drawn.getvalue())


@contextmanager
def draw_panels(
    out: Path, contents: Mapping[str, T], dark: bool = False
) -> Iterator[tuple[Any, Theme, list[tuple[Any, T]]]]:
    """Yield the figure, its theme, and a panel for each content under its title, two panels to a row."""
    columns = min(2, len(contents))
    rows = -(-len(contents) // columns)
    with open_figure(out, 0.6 + 2.6 * rows, dark) as (figure, theme):
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel, title in zip(grid, contents, strict=False):
            panel.set(title=title)
        for panel in grid[len(contents) :]:
            panel.set_visible(False)
        yield figure, theme, list(zip(grid, contents.values(), strict=False))


def style(theme: Theme) -> Any:
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    return {
        "font.family": ["DejaVu Sans", *(name for name in OTHER_SCRIPTS if name in installed)],
        "font.size": 9,
        "text.parse_math": False,  # "$" is a token like any other
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.faint,
        "grid.linewidth": 0.6,
        "xtick.major.size": 3,
        "ytick.major.size": 3,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "svg.hashsalt": "difflm",
        **dict.fromkeys(inked, theme.ink),
        **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), theme.background),
    }
