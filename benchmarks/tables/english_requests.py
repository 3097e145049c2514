"""Two hundred requests to `english` (tests/support/english_requests.jsonl), its answers, and the page of them.

  python -m benchmarks.tables.english_requests answer --out answers.jsonl
  python -m benchmarks.tables.english_requests page answers.jsonl --readings one.json two.json --out page.md

The requests were written after the training, by somebody who had seen no text of the model. `answer` gives the first
text of each, seed 0, with nothing else asked for, and its seconds. A reading is a JSON list of the numbers of the
answers that were found right: grammatical, sensible, what was asked for, and what an ordinary person could have
written. The page marks what two readings found right, and what one of them did, and counts both.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import Request
from difflm.runtime.files import Json, read_json

REQUESTS = Path("tests/support/english_requests.jsonl")
KEYS = {"infill": "infill", "json": "json_schema", "words": "contains", "length": "length", "edit": "edit"}


def read_lines(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answer(lm: TextDiffusion, row: Json) -> Json:
    begun = time.perf_counter()
    asked = lm.settle(Request(**{KEYS[key]: value for key, value in row["request"].items()}))
    try:
        job = {key: value for key, value in asked.job().items() if key not in ("n", "seed")}
        said = lm.generate(1, 0, **job)[0].text
    except UsageError as error:
        said = f"({error})"
    return {**row, "answer": said, "seconds": round(time.perf_counter() - begun, 2)}


def show(row: Json) -> str:
    """An answer, and what was asked for where the answer does not show it."""
    asked, said = row["request"], " / ".join(row["answer"].split("\n"))
    if "edit" in asked:
        return f"{asked['edit']} → **{said}**"
    if "words" in asked:
        return f"**{said}** ({', '.join(asked['words'])}; {asked['length']})"
    return f"{' / '.join(asked['infill'].split(chr(10)))} → **{said}**" if "infill" in asked else f"**`{said}`**"


def page(rows: Sequence[Json], readings: Sequence[Sequence[int]]) -> str:
    first, second = map(set, readings)
    kinds = [*dict.fromkeys(row["kind"] for row in rows)]
    numbers = {kind: {k for k, row in enumerate(rows) if row["kind"] == kind} for kind in kinds}
    agree = sum((k in first) == (k in second) for k in range(len(rows)))
    lines = ["| asked | answers | right, first reading | second | both |", "|---|---|---|---|---|"]
    for kind, own in {**numbers, "all": {*range(len(rows))}}.items():
        lines.append(
            f"| {kind} | {len(own)} | {len(own & first)} | {len(own & second)} | {len(own & first & second)} |"
        )
    lines += ["", f"The readings agree on {agree} of {len(rows)}."]
    for kind in kinds:
        marks = ((k, " ✓" * ((k in first) + (k in second))) for k in sorted(numbers[kind]))
        lines += ["", f"## {kind.capitalize()}", "", *(f"- {show(rows[k])}{mark}" for k, mark in marks)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("answer", "page"))
    parser.add_argument("answers", nargs="?", type=Path)
    parser.add_argument("--readings", nargs=2, type=Path)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if asked.what == "answer":
        lm = TextDiffusion.from_pretrained("english")
        with asked.out.open("w", encoding="utf-8") as out:
            for row in read_lines(REQUESTS):
                out.write(json.dumps(answer(lm, row), ensure_ascii=False) + "\n")
    else:
        asked.out.write_text(page(read_lines(asked.answers), [*map(read_json, asked.readings)]), encoding="utf-8")


if __name__ == "__main__":
    main()
