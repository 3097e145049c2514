"""What all pictures share: one look, light or dark, colours that the colour-blind can tell apart, whole files."""

import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import write_atomic

FORMATS = (".png", ".svg")
WIDTH, DPI = 8.0, 150  # inches and dots an inch: 1,200 pixels wide
OTHER_SCRIPTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans Arabic", "Noto Sans Devanagari", "Noto Sans")


@dataclass(frozen=True)
class Look:
    """`lines` are the colours of Okabe and Ito (2008), those first that stand out on this paper."""

    paper: str
    ink: str
    faint: str
    lines: tuple[str, ...]


LIGHT = Look(
    "white", "#222222", "#dddddd", ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
)
DARK = Look(
    "#14161a", "#e6e6e6", "#3a3d44", ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#ffffff")
)
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))  # lines differ without colour, too


def check_out(out: Path) -> Path:
    """Say before any work that a picture cannot be written so."""
    if out.suffix.lower() not in FORMATS:
        raise UsageError(f"{out} should end in {' or '.join(FORMATS)}, such as {out.with_suffix('.png').name}.")
    if out.is_dir():
        raise UsageError(f"{out} is a directory. Give --out the name of a file.")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file, so {out} cannot lie in it. Choose another place with --out.")
    if not os.access(folder, os.W_OK):
        raise DifflmError(f"no permission to write {out}. Choose another place with --out.")
    return out


def need_plot_extra() -> None:
    try:
        import matplotlib  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError:
        raise DifflmError("pictures need matplotlib and scikit-learn: pip install 'difflm[plot]'") from None


@contextmanager
def sheet(out: Path, height: float, dark: bool) -> Iterator[tuple[Any, Look]]:
    """A figure in our look, to draw on; it is written to `out` when the block ends well."""
    need_plot_extra()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    look = DARK if dark else LIGHT
    with matplotlib.rc_context(style(look)), quiet():
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, look
        kind = out.suffix.lower().removeprefix(".")
        drawn = io.BytesIO()
        # No date, and names from the content: the same picture is the same file.
        figure.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else None)
    write_atomic(out, drawn.getvalue())


@contextmanager
def quiet() -> Iterator[None]:
    """A sign that no installed font has is drawn as a box; nobody needs a warning for each."""
    log = logging.getLogger("matplotlib")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")
            yield
    finally:
        log.setLevel(before)


def style(look: Look) -> Any:
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return {
        "font.family": ["DejaVu Sans", *(name for name in OTHER_SCRIPTS if name in installed)],
        "font.size": 9,
        "text.parse_math": False,  # "$" is a word like any other
        "text.color": look.ink,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.labelcolor": look.ink,
        "axes.edgecolor": look.ink,
        "axes.facecolor": look.paper,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": look.faint,
        "grid.linewidth": 0.6,
        "xtick.color": look.ink,
        "ytick.color": look.ink,
        "xtick.major.size": 3,
        "ytick.major.size": 3,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "figure.facecolor": look.paper,
        "savefig.facecolor": look.paper,
        "svg.hashsalt": "difflm",
    }
