"""Controlled masked diffusion on E2E: train `mdlm` and its classifier, and generate the texts of a file of targets.

  python -m benchmarks.tables.token_control --data DIR --labels words.jsonl --targets targets.jsonl --out runs/tokens \\
      --steps 4000 --guide-steps 2500 --device cuda
  difflm evaluate runs/tokens/mdlm --task control --data DIR --targets targets.jsonl --controls field,pos \\
      --texts runs/tokens/best.jsonl

`benchmarks/assets/label_e2e.py words` writes `words.jsonl`; targets are those of `difflm evaluate --task control`.
Existing files are kept. Texts are not checked here: `evaluate` does it, on a machine with spaCy.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from difflm.app.console import TrainingView
from difflm.controls.guidance import GuidanceSettings
from difflm.evaluation.control import System, by_control, write_texts
from difflm.evaluation.targets import Target, choose, read_targets
from difflm.generation import jobs, pipeline
from difflm.generation.checks import check_device
from difflm.generation.jobs import Generation
from difflm.generation.pipeline import TextDiffusion
from difflm.runtime.files import read_checked, write_atomic
from difflm.training.fit import train_run
from difflm.training.recipe import load_recipe
from difflm.training.texts import Setup

CONTROLS = ("length", "field", "field+length", "pos", "field+pos", "infill")
WAYS: dict[str, tuple[int, bool, float]] = {  # candidates, whether wordings are imposed, and how much is guided
    "one": (1, True, 1.0),
    "best": (4, True, 1.0),
    "chosen": (4, True, 0.0),
    "guided": (1, False, 1.0),
}


@dataclass(frozen=True)
class Asked:
    data: Path | None
    labels: Path
    targets: Path
    out: Path
    recipe: str
    steps: int
    guide_steps: int
    ways: Sequence[str]
    each: int
    samples: int
    controls: Sequence[str]
    guidance: float | None
    sampler: str | None
    sampling_steps: int | None
    compile: bool
    device: str
    more: Sequence[str]

    @property
    def run(self) -> Path:
        return self.out / "mdlm"


def budget(steps: int, asked: Asked) -> list[str]:
    """Settings of a short run: an average over its last fifth, and one validation at the end."""
    every = [f"{key}={steps}" for key in ("save_every", "validate_every")]
    shape = [f"warmup={max(1, steps // 10)}", f"ema={max(0.0, 1 - 4.5 / steps):.6f}", "sample_every=0"]
    usual = [f"steps={steps}", f"log_every={max(1, steps // 5)}", f"compile={str(asked.compile).lower()}"]
    return [*usual, *every, *shape]


def train(run: Path, recipe: str, changes: Sequence[str], asked: Asked) -> None:
    """Train the run of a recipe, unless it exists."""
    if (run / "config.json").exists() and "trained" in read_checked(run / "config.json"):
        return
    shutil.rmtree(run, ignore_errors=True)
    chosen = load_recipe(recipe, changes)
    with TrainingView(run, as_json=False) as view:
        train_run(Setup(chosen, run, check_device(asked.device), view.reading, asked.data), view)


def train_both(asked: Asked) -> None:
    """Train the model and its classifier, inside the run that it guides."""
    train(asked.run, asked.recipe, [*budget(asked.steps, asked), *asked.more], asked)
    own = [f"data={asked.labels}", f"model.guides={asked.run}"]
    train(asked.run / "guide", "e2e-guide", [*budget(asked.guide_steps, asked), *own], asked)


def write(lm: TextDiffusion, targets: Sequence[Target], way: str, asked: Asked) -> None:
    """Generate the texts of one setting: a file for each control when it is done, and one of all."""
    candidates, impose, share = WAYS[way]
    guidance = lm.guidance_settings(None if asked.guidance is None else GuidanceSettings(size=asked.guidance))
    guidance = replace(guidance, size=share * guidance.size, impose=impose)
    settings = {"sampler": asked.sampler, "steps": asked.sampling_steps}
    system = System(lm, asked.each, 0, candidates, guidance, settings)
    pieces: list[Path] = []
    for control, own in by_control(targets).items():
        pieces.append(asked.out / way / f"{control}.jsonl")
        if not pieces[-1].exists():
            system.warm_up(own[0])
            clock = time.perf_counter()
            made = system.write(own)
            tell(way, control, [text for one in made for text in one.texts], time.perf_counter() - clock)
            write_texts(pieces[-1], made)
        write_atomic(asked.out / f"{way}.jsonl", b"".join(piece.read_bytes() for piece in pieces))


def tell(way: str, control: str, texts: Sequence[Generation], seconds: float) -> None:
    calls = sum(text.denoiser_calls for text in texts) / len(texts)
    about = {"way": way, "control": control, "texts": len(texts), "denoiser_calls": calls}
    print(json.dumps({**about, "seconds": round(seconds, 1), "first": texts[0].text}, ensure_ascii=False), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comma: Callable[[str], list[str]] = lambda names: names.split(",")  # noqa: E731
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--targets", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="e2e-mdlm")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--guide-steps", type=int, default=2500)
    parser.add_argument("--ways", type=comma, default=list(WAYS), help=f"of {', '.join(WAYS)}, with commas")
    parser.add_argument("--each", type=int, default=5, help="texts a target")
    parser.add_argument("--samples", type=int, default=200, help="targets a control")
    parser.add_argument("--controls", type=comma, default=CONTROLS)
    parser.add_argument("--guidance", type=float, default=None)
    parser.add_argument("--sampler", default=None)
    parser.add_argument("--sampling-steps", type=int, default=None)
    parser.add_argument("--compile", action="store_true", help="compile training")
    parser.add_argument("--device", default="auto")
    parser.add_argument("more", nargs="*", help="key=value changes to the model's recipe")
    asked = Asked(**vars(parser.parse_intermixed_args()))
    targets = choose(read_targets(asked.targets), asked.controls, asked.samples, asked.targets)
    train_both(asked)
    for module in (jobs, pipeline):
        module.check_text = lambda *_: []  # type: ignore[attr-defined]  # who checks need not be installed here
    lm = TextDiffusion.from_pretrained(asked.run, asked.device)
    for way in asked.ways:
        write(lm, targets, way, asked)


if __name__ == "__main__":
    main()
