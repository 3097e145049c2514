"""Shared by all plots: a light and a dark theme, colours that the colour-blind can tell apart, atomic writes."""

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import check_place, write_atomic

FORMATS = (".png", ".svg")
WIDTH, DPI = 8.0, 150  # inches and dots an inch: 1,200 pixels wide
OTHER_SCRIPTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans Arabic", "Noto Sans Devanagari", "Noto Sans")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))  # lines differ not only in colour

STYLES = tuple(str(Path(__file__).with_name(f"{name}.mplstyle")) for name in ("light", "dark"))
T = TypeVar("T")


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
def open_figure(out: Path, height: float, dark: bool) -> Iterator[Any]:
    """Yield a figure in our theme to draw on, and write it to `out` when the block succeeds."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    fonts = {"font.family": ["DejaVu Sans", *(name for name in OTHER_SCRIPTS if name in installed)]}
    with style.context([*STYLES[: 1 + dark], fonts]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a character that is in no installed font is drawn as a box
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        kind = out.suffix.lower().removeprefix(".")
        drawn = io.BytesIO()
        figure.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else None)
    write_atomic(out, drawn.getvalue())


@contextmanager
def draw_panels(out: Path, contents: Mapping[str, T], dark: bool = False) -> Iterator[tuple[Any, list[tuple[Any, T]]]]:
    """Yield the figure, and a panel for each content under its title, two panels to a row."""
    columns = min(2, len(contents))
    rows = -(-len(contents) // columns)
    with open_figure(out, 0.6 + 2.6 * rows, dark) as figure:
        panels = [figure.add_subplot(rows, columns, number + 1, title=title) for number, title in enumerate(contents)]
        yield figure, list(zip(panels, contents.values(), strict=True))


def line_style(number: int) -> dict[str, Any]:
    """The colour and dashes of the line with this number."""
    return {"color": f"C{number}", "linestyle": DASHES[number % len(DASHES)]}
