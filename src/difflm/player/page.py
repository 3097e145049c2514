"""The HTML player: one file that shows texts being denoised, on any machine, without a network."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, isfinite
from pathlib import Path
from string import Template
from typing import TypeVar

from difflm.errors import UsageError
from difflm.player.frames import Draft, PlayedText, made_of_pieces, pack_drafts, written
from difflm.runtime.files import Json, write_atomic

MOST_TEXTS = 100  # few enough for a browser
MOST_FRAMES = 250  # the most drafts of a text; of more steps, only every second, third … is kept
HERE = Path(__file__).parent
Text = TypeVar("Text", bound=PlayedText)
# JSON is ASCII, and no HTML parser takes it for markup without these.
NOT_MARKUP = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"}


class Recording:
    """Records drafts: pass its `frame` as `watch`, then call `texts`."""

    def __init__(self, n: int, steps: int, candidates: int = 1) -> None:
        if n > MOST_TEXTS:
            raise UsageError(f"--html holds at most {MOST_TEXTS} texts, not {n:,}. Ask for fewer with -n.")
        self._candidates = candidates
        self._stride = ceil(steps / MOST_FRAMES)
        self._kept: dict[int, list[Draft]] = {}
        self._passing: dict[int, Draft] = {}  # the latest draft, if it is not kept

    def frame(self, drafts: Sequence[Draft]) -> None:
        for draft in drafts:
            if skipped := self._passing.pop(draft.sample, None):  # the lengths of a text's drafts may differ
                earlier = dict(enumerate(skipped.changed))
                changed = [now or earlier.get(place, False) for place, now in enumerate(draft.changed)]
                draft = replace(draft, changed=changed)
            if draft.step % self._stride == 0:
                self._kept.setdefault(draft.sample, []).append(draft)
            else:
                self._passing[draft.sample] = draft

    def texts(self, made: Sequence[Text]) -> list[Text]:
        """The texts with their drafts; of several candidates, with those of the chosen one."""
        return [replace(text, drafts=self.drafts_of(number, text)) for number, text in enumerate(made)]

    def drafts_of(self, number: int, made: PlayedText) -> list[Draft]:
        """All drafts of a text, or of the candidate that was chosen, that were kept, and always the last."""
        samples = range(number * self._candidates, (number + 1) * self._candidates)
        every = [[*self._kept.get(k, ()), *filter(None, [self._passing.get(k)])] for k in samples]
        return next((drafts for drafts in every if drafts and count_spelling(drafts[-1], made.text)), every[0])


def write_player(path: Path, texts: Sequence[PlayedText], about: Mapping[str, object]) -> None:
    """Write the page. `about` says where the texts come from: "model" and "command" have fields on the page, other
    entries are listed by name."""
    write_atomic(path, page(texts, about))


def page(texts: Sequence[PlayedText], about: Mapping[str, object]) -> bytes:
    table, style = dict[str, int](), read_asset("look.css") + read_asset("player.css")
    packed = [pack_text(played, table) for played in texts]
    module, script = join_modules(["player.js", "parts.js", "time.js"]), join_modules(["player-page.js"])
    data = {"about": dict(about), "tokens": [*table], "texts": packed}
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, module, script)]
    own, *allowed = [f"'sha256-{digest}'" for digest in digests]
    sources = f"style-src {own}; script-src {' '.join(allowed)}; img-src data:"
    filled = Template(read_page(HERE / "player.html")).substitute(
        # Its own style and scripts, pictures that it holds, and nothing else.
        policy=f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'",
        title=html.escape(f"{about['model']}: texts out of noise" if "model" in about else "Texts out of noise"),
        style=style,
        plain="".join(f"<p>{html.escape(played.text)}</p>" for played in texts),
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).translate(NOT_MARKUP),
        module=module,
        script=script,
    )
    return filled.encode("utf-8", errors="replace")


def read_asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def read_page(path: Path) -> str:
    """Read a page with the parts that all pages share: `<!-- legend.html -->` stands for the text of that file."""
    return re.sub(r"<!-- (\w+\.html) -->\n", lambda part: read_asset(part[1]), path.read_text(encoding="utf-8"))


def join_modules(names: Sequence[str]) -> str:
    """Join modules to one script, for a page that loads nothing: exports become names that later modules find."""
    lines = [line for name in names for line in read_asset(name).splitlines() if not line.startswith("import ")]
    return "\n".join(['"use strict";', *(line.removeprefix("export ") for line in lines)]) + "\n"


def pack_text(made: PlayedText, table: dict[str, int]) -> Json:
    drafts = made.drafts
    pieces = any(made_of_pieces(draft.tokens) for draft in drafts)
    for last in drafts[-1:]:
        if end := count_spelling(last, made.text, pieces):  # some models write words after the end of a text
            cut: Json = {key: getattr(last, key)[:end] for key in ("tokens", "confidence", "changed", "edits")}
            drafts = [*drafts[:-1], replace(last, **cut)]
    scores = [one.get("score") for one in made.controls]
    finite = [score if score is not None and isfinite(score) else None for score in scores]  # JSON has no infinity
    return {
        "text": made.text,
        "seed": made.seed,
        "steps": made.steps,
        "controls": [{**one, "score": score} for one, score in zip(made.controls, finite, strict=True)],
        "warnings": made.warnings,
        "frames": pack_drafts(drafts, pieces, table),
    }


def count_spelling(draft: Draft, text: str, pieces: bool | None = None) -> int:
    """Count the first tokens that spell `text`; 0 where none do."""
    pieces = made_of_pieces(draft.tokens) if pieces is None else pieces
    ends = range(len(draft.tokens), 0, -1)
    return next((end for end in ends if written(draft.tokens[:end], pieces) == text), 0)
