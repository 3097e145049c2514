"""Forming texts as an animated SVG: a picture without scripts, for a README, a slide or a page."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from jinja2 import Environment
from rich.console import Console
from rich.text import Text

from difflm.app.live_view import ON_DARK, ON_LIGHT, draw_words, printable
from difflm.errors import UsageError
from difflm.player.frames import PlayedText

COLUMNS, MOST_TEXTS, MOST_LINES = 76, 8, 32
FRAMES = 36  # a viewer can tell this many apart, and a picture of two texts has 60 kB
PLAYED, HELD = 6.0, 3.0  # seconds: from noise to text, and of the finished text
EDGE, SIZE, LINE = 26, 15, 25  # pixels
NOT_XML = dict.fromkeys((0xFFFE, 0xFFFF))
CLASSES = [f"c{level}" for level in range(len(ON_LIGHT))]  # of words, from low to high confidence
PICTURE = Path(__file__).with_suffix(".svg.jinja").read_text(encoding="utf-8")


def check_animation(path: Path, n: int) -> None:
    """Reject a file that is not an .svg, and more texts than fit into one picture."""
    if path.suffix.lower() != ".svg":
        raise UsageError(f"--svg writes an .svg file, not {path.name}.")
    if n > MOST_TEXTS:
        raise UsageError(f"--svg holds at most {MOST_TEXTS} texts, not {n:,}. Ask for fewer with -n.")


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
    caption = printable(caption)
    sizes = {"edge": EDGE, "size": SIZE, "pitch": LINE, "tops": tops, "bottom": bottom, "height": bottom + 34}
    times = {"each": PLAYED / count, "played": PLAYED, "held": HELD, "total": PLAYED + HELD}
    drawn = (
        Environment(autoescape=True, trim_blocks=True)
        .from_string(PICTURE)
        .render(
            frames=frames,
            width=2 * EDGE + 0.61 * SIZE * COLUMNS,
            said=printable(" / ".join(played.text for played in texts)),
            caption=caption if len(caption) <= COLUMNS else f"{caption[: COLUMNS - 2]} …",
            light=ON_LIGHT,
            dark=ON_DARK,
            **sizes,
            **times,
        )
    )
    return drawn.translate(NOT_XML)


def draw_moment(played: PlayedText, frame: int, count: int) -> list[list[tuple[str, str]]]:
    """The lines of a text at one of `count` moments, of a draft, or at the last one of the finished text: runs of one
    class. A space gets the class of the character before it."""
    if frame < count - 1:
        words = draw_words(played.drafts[frame * (len(played.drafts) - 1) // (count - 1)], CLASSES)
    else:
        words = Text().append(printable(played.text.replace("\n", " ")), CLASSES[-1])
    lines = []
    for line in words.wrap(Console(), COLUMNS):
        classes = {at: str(span.style) for span in line.spans for at in range(span.start, span.end)}
        kinds = list[str]()
        for at in range(len(line)):
            kinds.append(classes.get(at) or "".join(kinds[-1:]))
        runs = groupby(zip(kinds, line.plain, strict=True), key=itemgetter(0))
        lines.append([(kind, "".join(sign for _, sign in run)) for kind, run in runs])
    return lines
