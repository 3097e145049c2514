"""How the best of several candidates is chosen: all candidates of targets are kept with what the classifiers and the
model say of each, and the choice is repeated for several weights of labels and numbers of candidates.

  python -m benchmarks.tables.candidates write kept.jsonl --targets TARGETS --control tree --candidates 64 --guidance 10
  python -m benchmarks.tables.candidates choose kept.jsonl --targets TARGETS --control tree --counts 4 16 --weights 30

TARGETS is a file that `benchmarks.tables.last_points draw` wrote. `choose` asks the checkers of this machine (spaCy,
for tags) and the bundled judge; `any` is how often one of the candidates does all that was asked.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.tables.last_points import JUDGE, SEED, WHOLE
from benchmarks.tables.timed import read_results
from difflm.app.commands.options import load_model
from difflm.controls.guidance import STANDARD
from difflm.controls.plan import ControlPlan, check_text
from difflm.data.words import split_words
from difflm.evaluation.checkers import Checkers
from difflm.evaluation.control import Made, Measure, System
from difflm.evaluation.targets import Target, choose, read_targets
from difflm.generation import jobs, pipeline
from difflm.generation.jobs import Choice, Chosen
from difflm.generation.texts import Generation
from difflm.runtime.files import write_atomic

Candidate = tuple[float, float, str]  # nats of the labels, of all words, and the text


def write_candidates(
    out: Path, targets: Sequence[Target], candidates: int, size: float, steps: int, device: str
) -> None:
    """Write all candidates of the targets; each target asks for one text."""
    lm = load_model("e2e", device)
    kept: list[list[Candidate]] = []

    def keep_candidates(plan: ControlPlan) -> Choice:
        own: list[Candidate] = []
        kept.append(own)

        def keep_rows(_: Any, ids: list[list[list[int]]], decode: list[list[Callable[[], Generation]]]) -> list[Chosen]:
            for rows, texts in zip(ids, decode, strict=True):
                nats = zip(plan.classifier_nats(rows), plan.word_nats(rows), strict=True)
                own.extend((*both, text().text) for both, text in zip(nats, texts, strict=True))
            return [Chosen(0) for _ in ids]

        return keep_rows

    for module in (jobs, pipeline):
        module.check_text = lambda *_: []  # type: ignore[attr-defined]  # checkers have no part in this
    pipeline.choose_by_classifiers = keep_candidates  # type: ignore[assignment]
    settings = {"steps": steps, "temperature": 1.0}
    system = System(lm, 1, SEED, candidates, replace(STANDARD, size=size), settings)
    for _ in lm.run_jobs([system.make_job(target, number) for number, target in enumerate(targets)]):
        pass
    write_atomic(out, "".join(json.dumps({"candidates": own}, ensure_ascii=False) + "\n" for own in kept))


def repeat_choice(kept: Path, targets: Sequence[Target], counts: Sequence[int], weights: Sequence[float]) -> None:
    """Choose anew for every number of candidates and weight, and measure the chosen texts."""
    measure = Measure(load_model("judge", "auto"), Checkers.load(None))
    found: list[list[Candidate]] = [[(a, b, text) for a, b, text in row["candidates"]] for row in read_results(kept)]

    @cache
    def check_candidate(number: int, text: str) -> Generation:
        checks = check_text(targets[number].asked.controls(), text)
        return Generation(text, split_words(text), 0, 0, 0.0, 0, controls=checks)

    for count in counts:
        for weight in weights:
            best = [min(own[:count], key=lambda one: weight * one[0] + one[1])[2] for own in found]
            made = [Made(targets[k], [check_candidate(k, text)]) for k, text in enumerate(best)]
            figures = measure.model_row("candidates", targets[0].control, made, None).figures
            shown = {key: figures[key] for key in (*WHOLE, "all_at_once", JUDGE, "distinct_4") if key in figures}
            print(json.dumps({"candidates": count, "weight": weight, **shown}), flush=True)
        texts = [[check_candidate(k, text) for *_, text in own[:count]] for k, own in enumerate(found)]
        right = [any(all(one["satisfied"] for one in text.controls) for text in some) for some in texts]
        print(json.dumps({"candidates": count, "any": sum(right) / len(right)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "choose"])
    parser.add_argument("kept", type=Path)
    parser.add_argument("--targets", type=Path, required=True)
    parser.add_argument("--control", default="tree")
    parser.add_argument("--most", type=int, default=300, help="targets")
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--guidance", type=float, default=STANDARD.size)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--counts", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--weights", type=float, nargs="+", default=[10, 30, 100, 1000])
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    targets = choose(read_targets(asked.targets), [asked.control], asked.most, asked.targets)
    if asked.what == "write":
        write_candidates(asked.kept, targets, asked.candidates, asked.guidance, asked.steps, asked.device)
    else:
        repeat_choice(asked.kept, targets, asked.counts, asked.weights)


if __name__ == "__main__":
    main()
