"""How many files and named functions of difflm one text under one `Field` enters, and how many before denoising begins.

    python benchmarks/call_path.py [--list]

The model and its classifier are loaded, and the text has been made once before. Comprehensions, lambdas and what
dataclasses generate are not counted; denoising begins where `SamplerInputs.frames` is entered.
"""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import difflm
from difflm.controls import Field
from difflm.generation.pipeline import TextDiffusion

ROOT = Path(difflm.__file__).parent
LOOP = "SamplerInputs.frames"
MOST = {"files": 24, "functions": 140, "functions before denoising": 60}


def entered_functions() -> list[tuple[str, str]]:
    """File and name of every function that is entered, in the order of first calls."""
    lm, control = TextDiffusion.from_pretrained("e2e", dtype=None), Field("food", "Japanese")
    lm.generate(1, controls=[control])
    found: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and not code.co_name.startswith("<"):
            found.setdefault((str(path.relative_to(ROOT)), code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        lm.generate(1, controls=[control])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(found)


def main() -> None:
    found = entered_functions()
    if "--list" in sys.argv[1:]:
        print(*(f"{path}: {name}" for path, name in found), sep="\n")
    before = next(k for k, (_, name) in enumerate(found) if name == LOOP)
    counts = {"files": len({path for path, _ in found}), "functions": len(found), "functions before denoising": before}
    for what, count in counts.items():
        print(f"{what}: {count} (at most {MOST[what]})")


if __name__ == "__main__":
    main()
