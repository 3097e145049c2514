"""Forming texts as an animated SVG: a picture without scripts, for a README, a slide or a page."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from string import Template
from xml.sax.saxutils import escape

from rich.console import Console
from rich.text import Text

from difflm.app.live_view import ON_DARK, ON_LIGHT, draw_words, printable
from difflm.errors import UsageError
from difflm.player.frames import PlayedText
from difflm.runtime.files import write_atomic

COLUMNS, MOST_TEXTS, MOST_LINES = 76, 8, 32
FRAMES = 36  # a viewer can tell this many apart, and a picture of two texts has 60 kB
PLAYED, HELD = 6.0, 3.0  # seconds: from noise to text, and of the finished text
EDGE, SIZE, LINE = 26, 15, 25  # pixels
NOT_XML = dict.fromkeys((0xFFFE, 0xFFFF))
CLASSES = [f"c{level}" for level in range(len(ON_LIGHT))]  # of words, from low to high confidence

STYLE = Template(Path(__file__).with_suffix(".css").read_text(encoding="utf-8"))


def check_animation(path: Path, n: int) -> None:
    """Reject a file that is not an .svg, and more texts than fit into one picture."""
    if path.suffix.lower() != ".svg":
        raise UsageError(f"--svg writes an .svg file, not {path.name}.")
    if n > MOST_TEXTS:
        raise UsageError(f"--svg holds at most {MOST_TEXTS} texts, not {n:,}. Ask for fewer with -n.")


def write_animation(path: Path, texts: Sequence[PlayedText], caption: str) -> None:
    write_atomic(path, draw_animation(texts, caption).encode("utf-8"))


def draw_animation(texts: Sequence[PlayedText], caption: str) -> str:
    """The words of every text from noise to the end, coloured by the model's confidence. Without animation, the
    finished texts are shown."""
    count = min(FRAMES, max((len(played.drafts) for played in texts), default=1))
    frames = [[draw_moment(played, k, count) for played in texts] for k in range(count)]
    heights = [max(len(frame[number]) for frame in frames) for number in range(len(texts))]
    if sum(heights) > MOST_LINES:
        raise UsageError(f"{sum(heights)} lines of text are too many for one picture; {MOST_LINES} fit.")
    tops = [EDGE + SIZE + LINE * (sum(heights[:number]) + 0.6 * number) for number in range(len(texts))]
    bottom = tops[-1] + LINE * heights[-1]
    width, height, each, total = 2 * EDGE + 0.61 * SIZE * COLUMNS, bottom + 34, PLAYED / count, PLAYED + HELD
    shares = {"one": each, "last": each + HELD, "played": PLAYED}  # of the whole time, in per cent
    style = STYLE.substitute(
        {name: f"{100 * seconds / total:.3f}" for name, seconds in shares.items()},
        **{"size": SIZE, "edge": EDGE, "total": total, "light": paint(ON_LIGHT), "dark": paint(ON_DARK)},
    )
    ramp = "".join(f'<tspan class="{kind}">■</tspan>' for kind in CLASSES)
    said = to_xml(printable(" / ".join(played.text for played in texts)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{said}"><style>{style}</style>',
        f'<rect class="page" x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="12"/>',
        f'<text class="small" x="{EDGE}" y="{bottom + 10:.0f}">{to_xml(shorten(printable(caption)))}</text>',
        f'<rect class="bar" x="{EDGE}" y="{height - 12:.0f}" width="{width - 2 * EDGE:.0f}" height="2"/>',
        f'<text class="small" x="{width - EDGE:.0f}" y="{bottom + 10:.0f}" text-anchor="end">unsure {ramp} sure</text>',
    ]
    for k, frame in enumerate(frames):
        kind, hidden = ("l", "") if k == count - 1 else ("f", ' visibility="hidden"')
        parts.append(f'<g class="{kind}" style="animation-delay:{k * each - total:.3f}s"{hidden}>')
        for lines, top in zip(frame, tops, strict=True):
            parts += [f'<text x="{EDGE}" y="{top + LINE * row:.0f}">{line}</text>' for row, line in enumerate(lines)]
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def paint(ramp: Sequence[str]) -> str:
    return "".join(f".{kind}{{fill:{colour}}}" for kind, colour in zip(CLASSES, ramp, strict=True))


def draw_moment(played: PlayedText, frame: int, count: int) -> list[str]:
    """The lines of a text at one of `count` moments: of a draft, or at the last one of the finished text."""
    if frame < count - 1:
        words = draw_words(played.drafts[frame * (len(played.drafts) - 1) // (count - 1)], CLASSES)
    else:
        words = Text().append(printable(played.text.replace("\n", " ")), CLASSES[-1])
    return [mark_runs(line) for line in words.wrap(Console(), COLUMNS)]


def mark_runs(line: Text) -> str:
    """Mark a line's runs of one class; a space gets the class of the character before it."""
    classes = {at: str(span.style) for span in line.spans for at in range(span.start, span.end)}
    kinds: list[str] = []
    for at in range(len(line.plain)):
        kinds.append(classes.get(at) or "".join(kinds[-1:]))
    runs = groupby(zip(kinds, line.plain, strict=True), key=itemgetter(0))
    return "".join(f'<tspan class="{kind}">{to_xml("".join(sign for _, sign in run))}</tspan>' for kind, run in runs)


def shorten(caption: str) -> str:
    return caption if len(caption) <= COLUMNS else f"{caption[: COLUMNS - 2]} …"


def to_xml(text: str) -> str:
    return escape(text.translate(NOT_XML), {'"': "&quot;"})
