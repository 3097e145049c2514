"""Characters as small pictures: our own font, any font file through Pillow, and how tokens are spelt in glyphs.

A glyph (`sign` in the code) is what one cell of a picture shows: a character; a byte, if a character cannot be drawn;
or the unknown word."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from difflm.data.tokenizers import SPECIALS, UNK, Tokenizer
from difflm.errors import UsageError

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError:  # it comes with the extra `font`
    ImageFont = None  # type: ignore[assignment]

Pictures = NDArray[np.float32]  # [signs, height, width], 1 where there is ink

HEIGHT, WIDTH = 8, 6  # of the built-in font's cells, in pixels
BLANK = " "
UNKNOWN = "\ud800"  # no text has it
REPLACED = "\ufffd"  # what is printed for glyphs that are not text
BYTES = 0xDC00  # the glyph of a byte is this plus the byte: the same as Python's for undecodable bytes (PEP 383)


@cache
def builtin_font() -> dict[str, Pictures]:
    """The characters of `glyphs.txt`, each [8, 6]. It has lines of characters, and eight lines of pixels under each."""
    lines = (Path(__file__).parent / "glyphs.txt").read_text(encoding="utf-8").splitlines()
    found: dict[str, Pictures] = {BLANK: np.zeros((HEIGHT, WIDTH), np.float32)}
    for start in range(0, len(lines), HEIGHT + 1):
        rows = np.array([[*f"{line} "] for line in lines[start + 1 : start + 1 + HEIGHT]]) == "#"
        found |= zip(lines[start], np.split(rows.astype(np.float32), len(lines[start]), axis=1), strict=True)
    return found


def draw_byte(byte: int, height: int, width: int) -> Pictures:
    """A byte as two columns of four dots behind a line, the highest bit first."""
    bits = np.array([byte >> k & 1 for k in range(7, -1, -1)], np.float32).reshape(4, 2)
    dots = bits[np.arange(height) * 4 // height][:, np.arange(width - 1) * 2 // (width - 1)]
    return np.concatenate([np.ones((height, 1), np.float32), dots], 1)


def draw_box(height: int, width: int) -> Pictures:
    """An empty box, as fonts draw what they do not know."""
    box = np.zeros((height, width), np.float32)
    box[:, :-1] = 1
    box[1:-1, 1:-2] = 0
    return box


@dataclass(frozen=True)
class Spelling:
    """How tokens are drawn as glyphs: `tokens` are the glyphs of each token, with what follows it."""

    tokens: Sequence[str]
    gap: str  # what separates tokens: a blank after words, nothing after pieces of words
    tokenizer: Tokenizer | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, vocabulary: int, from_file: bool) -> "Spelling":
        """The spelling of a tokenizer's tokens; without a tokenizer, tokens are spelled as their numbers. Characters
        that the built-in font lacks are spelled in UTF-8, byte by byte; a font file should have all printable ones."""
        gap = BLANK if tokenizer is None else tokenizer.between
        pieces = [str(i) for i in range(len(SPECIALS), vocabulary)] if tokenizer is None else tokenizer.spellings()
        drawn = str.isprintable if from_file else builtin_font().__contains__
        spelled = ["".join(spell_character(c, drawn(c)) for c in piece) + gap for piece in pieces]
        specials = [UNKNOWN + gap if token == UNK else "" for token in range(len(SPECIALS))]
        return cls([*specials, *spelled], gap, tokenizer)

    @cached_property
    def signs(self) -> list[str]:
        """All glyphs in order, the blank first."""
        return [BLANK, *sorted({*"".join(self.tokens)} - {BLANK})]

    def draw(self, height: int, width: int, font: str = "") -> Pictures:
        """The pictures of all glyphs, from a font file or the built-in font."""
        characters = "".join(sign for sign in self.signs if not is_byte(sign) and sign not in (BLANK, UNKNOWN))
        if not font and (height, width) != (HEIGHT, WIDTH):
            raise UsageError(f"the built-in font has cells of {HEIGHT} by {WIDTH} pixels; others need model.font=FILE.")
        drawn = read_font(font, characters, height, width) if font else builtin_font()
        drawn = {**drawn, BLANK: np.zeros((height, width), np.float32), UNKNOWN: draw_box(height, width)}
        pictures = [draw_byte(ord(s) - BYTES, height, width) if is_byte(s) else drawn[s] for s in self.signs]
        seen: dict[bytes, str] = {}
        for sign, picture in zip(self.signs, pictures, strict=True):
            if (other := seen.setdefault(picture.tobytes(), sign)) != sign:
                size = f"{height} by {width} pixels"
                raise UsageError(
                    f"{font} draws {other!r} and {sign!r} alike in {size}: give larger cells or another font."
                )
        return np.stack(pictures)


def spell_character(character: str, drawn: bool) -> str:
    """The character itself, or the glyphs of its bytes."""
    if drawn or is_byte(character):
        return character
    return "".join(chr(BYTES + byte) for byte in character.encode())


def read_signs(signs: str) -> str:
    """The text that glyphs spell; invalid bytes and unknown words are replaced."""
    known = signs.replace(UNKNOWN, REPLACED)
    parts = (bytes([ord(one) - BYTES]) if is_byte(one) else one.encode() for one in known)
    return b"".join(parts).decode("utf-8", "replace")


def is_byte(sign: str) -> bool:
    return BYTES <= ord(sign) < BYTES + 256


def show_sign(sign: str) -> str:
    """A glyph as printable text."""
    return REPLACED if unicodedata.category(sign) == "Cs" else sign


def read_font(path: str, characters: str, height: int, width: int) -> dict[str, Pictures]:
    """Characters in shades of grey, in the largest size in which all of them fit into the cells, centred over one
    baseline."""
    if ImageFont is None:
        raise UsageError('a font file is read by Pillow. Install it: pip install ".[font]"')
    try:
        fonts = [ImageFont.truetype(path, size) for size in range(2 * height, 0, -1)]
    except (OSError, ValueError):
        raise UsageError(f"{path} is not a font file that Pillow can read.") from None
    missing = bytes(fonts[0].getmask("\U0010ffff"))
    if lacking := [one for one in characters if bytes(fonts[0].getmask(one)) == missing]:
        raise UsageError(f"{path} lacks {lacking[0]!r}" + f" and {len(lacking) - 1} more" * (len(lacking) > 1) + ".")
    found = {}
    for font in fonts:
        left, top, right, bottom = np.array([font.getbbox(one, anchor="ms") for one in characters]).T
        if bottom.max() - top.min() <= height and right.max() - left.min() <= width:
            break
    for one in characters:
        cell = Image.new("L", (width, height))
        ImageDraw.Draw(cell).text((-left.min(), -top.min()), one, 255, font, anchor="ms")
        found[one] = np.asarray(cell, np.float32) / np.float32(255)
    return found
