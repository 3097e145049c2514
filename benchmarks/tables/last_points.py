"""Ways to obey learned controls more often and more fluently: numbers of candidates, strengths and temperatures. Each
is tried on some targets and measured on others, which nobody has looked at.

  python -m benchmarks.tables.last_points draw --data DIR --out runs/last-points --exclude targets.jsonl
  python -m benchmarks.tables.last_points write --out runs/last-points --device cuda --jobs 4 --seconds 240
  python -m benchmarks.tables.last_points check --out runs/last-points
  python -m benchmarks.tables.last_points table --out runs/last-points

`draw` draws targets for choosing and for reporting from E2E's validation sentences, disjoint, and none with a sentence
of the excluded files; tags are spaCy's, so run it where spaCy is. `write` generates the texts of every setting, of
each control and set of targets a file in OUT/texts, with their nats under the judge: no checker is asked. What is not
finished after `--seconds` is continued by the next command. `check` asks the checkers of this machine, a line each in
OUT/checked.jsonl; where spaCy is missing, tags are left for a machine that has it. `table` chooses the setting of each
control on the choosing targets, and shows all settings on those, and those that were measured on the others.
A file of texts can also be measured by `difflm evaluate e2e --task control --targets OUT/held.jsonl --texts FILE`.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.tables.timed import read_results, run_side_by_side

if TYPE_CHECKING:
    from difflm.evaluation.targets import Target

CONTROLS = ("length", "field", "pos", "tree", "span", "field+pos", "field+tree", "infill")
SETS = {"choose": 0.25, "held": 0.75}  # shares of the sentences
SEED = 22  # of the targets, and of the texts
LAST = 20  # seconds before the end after which no texts are begun
JUDGE = "judge_nats_per_token"
WHOLE = ("tags_whole", "tree_exact", "span_found", "field_rule", "length_exact")  # what says that a text obeys


# -- targets ----------------------------------------------------------------------------------------------------------


def draw_sets(data: Path, out: Path, excluded: Sequence[Path], counts: Mapping[str, int]) -> None:
    """Draw the targets of both sets from sentences that are in none of the excluded files, nor in the training texts,
    each sentence in one set alone."""
    from difflm.controls.learned import checking_tagger
    from difflm.data.corpora import e2e_path, read_e2e
    from difflm.evaluation.targets import draw, keep_fitting, read_targets, write_lines
    from difflm.generation.pipeline import TextDiffusion

    tagger = checking_tagger()
    if "spacy" not in tagger.name:
        raise SystemExit("tags of targets are spaCy's: draw them where it is installed.")
    used = {target.sentence for path in excluded for target in read_targets(path)}
    used |= {pair.text for pair in read_e2e(e2e_path(data, "train"))}
    valid = {pair.text: pair for pair in read_e2e(e2e_path(data, "valid")) if pair.text not in used}
    known = keep_fitting([*valid.values()], [TextDiffusion.from_pretrained("e2e")])
    order, start = random.Random(SEED).sample(known, len(known)), 0
    for name, share in SETS.items():
        end = start + round(share * len(order))
        found = [one for control in CONTROLS for one in draw(control, order[start:end], tagger, counts[name], SEED)]
        write_lines(out / f"{name}.jsonl", (target.to_json() for target in found))
        print(f"{name}: {len(found)} targets of {end - start} sentences", flush=True)
        start = end


# -- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A way to ask for the texts of targets."""

    candidates: int = 4
    size: float = 10.0  # of guidance
    temperature: float = 1.0
    controls: Sequence[str] = CONTROLS[1:-1]


GAPS = CONTROLS[-1:]
SETTINGS = {
    "one": Setting(1, controls=CONTROLS),
    "best-4": Setting(),
    "best-8": Setting(8),
    "best-16": Setting(16),
    "best-32": Setting(32, controls=("tree",)),
    "strong-64": Setting(64, size=20.0, controls=("tree",)),
    "weak-4": Setting(size=3.0),
    "cool-4": Setting(temperature=0.8),
    "gap-4": Setting(controls=GAPS),
    "gap-16": Setting(16, controls=GAPS),
}


@dataclass(frozen=True)
class Plan:
    what: str
    out: Path
    data: Path | None
    exclude: Sequence[Path]
    targets: int
    choose: int
    settings: Sequence[str]
    controls: Sequence[str]
    sets: Sequence[str]
    run: str
    guide: Sequence[Path]
    sampling_steps: int
    jobs: int
    seconds: float
    device: str
    one: str
    until: float

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    def pieces(self, name: str) -> list[tuple[str, str]]:
        """Sets and controls whose texts a setting has not written; those for choosing first."""
        wanted = [control for control in SETTINGS[name].controls if control in self.controls]
        return [(of, control) for of in self.sets for control in wanted if not self.texts(of, name, control).exists()]

    def texts(self, of: str, name: str, control: str) -> Path:
        return self.out / "texts" / f"{of}-{self.count(of)}-{name}-{control}.jsonl"

    def count(self, of: str) -> int:
        return self.choose if of == "choose" else self.targets

    def read(self, of: str, control: str) -> "list[Target]":
        from difflm.evaluation.targets import choose, read_targets

        path = self.out / f"{of}.jsonl"
        return choose(read_targets(path), [control], self.count(of), path)


# -- texts ------------------------------------------------------------------------------------------------------------


def write_setting(name: str, plan: Plan) -> None:
    """Write the texts of a setting that are missing, with what they cost and how likely the judge finds them."""
    from difflm.app.commands.options import load_model
    from difflm.controls.guidance import STANDARD
    from difflm.evaluation.checkers import Checkers
    from difflm.evaluation.control import Measure, System, write_texts
    from difflm.generation import jobs, pipeline
    from difflm.runtime.files import append_line

    for module in (jobs, pipeline):
        module.check_text = lambda *_: []  # type: ignore[attr-defined]  # who checks has no part in this
    lm = load_model(plan.run, plan.device)
    for folder in plan.guide:
        lm.guided_by(folder)
    measure, setting = Measure(load_model("judge", plan.device), Checkers.load(None)), SETTINGS[name]
    settings = {"steps": plan.sampling_steps, "temperature": setting.temperature}
    (plan.out / "texts").mkdir(exist_ok=True)
    for of, control in plan.pieces(name):
        if plan.until and time.time() > plan.until - LAST:
            return
        targets = plan.read(of, control)
        system = System(lm, 1, SEED, setting.candidates, replace(STANDARD, size=setting.size), settings)
        begun = time.perf_counter()
        made = system.write(targets)
        seconds = time.perf_counter() - begun
        row = measure.compare(name, control, len(made), [[text.text for text in one.texts] for one in made])
        about = {"set": of, "setting": name, "control": control, "targets": len(made), "seconds": round(seconds, 2)}
        calls = sum(text.denoiser_calls for one in made for text in one.texts) / len(made)
        found = {key: row.figures[key] for key in (JUDGE, "distinct_4")} | {"denoiser_calls": calls}
        about["sentences"] = measure.sentence_row(control, targets).figures[JUDGE]
        append_line(plan.results, json.dumps({**about, "figures": found}, ensure_ascii=False))
        write_texts(plan.texts(of, name, control), made)
        print(json.dumps({**about, **found, "first": made[0].texts[0].text}, ensure_ascii=False), flush=True)


# -- checks -----------------------------------------------------------------------------------------------------------


def check_texts(plan: Plan) -> None:
    """Check all texts that this machine can check and that have no line yet."""
    from difflm.controls.learned import checking_tagger
    from difflm.evaluation.checkers import Checkers
    from difflm.evaluation.control import Measure, read_texts
    from difflm.runtime.files import append_line

    spacy, measure = "spacy" in checking_tagger().name, Measure(None, Checkers.load(None))
    path = plan.out / "checked.jsonl"
    done = {line["texts"] for line in read_results(path)}
    for name in plan.settings:
        for of in plan.sets:
            for control in SETTINGS[name].controls:
                texts = plan.texts(of, name, control)
                if texts.name in done or not texts.exists() or ("pos" in control.split("+") and not spacy):
                    continue
                targets = plan.read(of, control)
                found = read_texts(texts, targets, 1)
                row = measure.model_row(name, control, found, None)
                line = {"texts": texts.name, "set": of, "setting": name, "control": control, "targets": len(targets)}
                figures = {key: value for key, value in row.figures.items() if key in row.intervals}
                line |= {"figures": figures, "intervals": row.intervals, "checkers": row.about["checkers"]}
                append_line(path, json.dumps(line, ensure_ascii=False))
                print(json.dumps(line, ensure_ascii=False), flush=True)


# -- the table --------------------------------------------------------------------------------------------------------


def success(line: Mapping[str, Any]) -> float:
    """How often a text does all that was asked."""
    figures = line["figures"]
    return float(figures.get("all_at_once") or next((figures[key] for key in WHOLE if key in figures), 1.0))


def choose_setting(lines: Sequence[Mapping[str, Any]]) -> str:
    """Of the settings that obey as often as the best, but for one text, the one that the judge likes best; to read more
    plainly than the target sentences is no merit, and of equal ones the one of fewest calls is taken."""
    least = max(map(success, lines)) - 1.01 / lines[0]["targets"]
    able = [line for line in lines if success(line) >= least]
    worth = lambda line: (max(line["figures"][JUDGE], line["sentences"]), line["figures"]["denoiser_calls"])  # noqa: E731
    return str(min(able, key=worth)["setting"])


def table(plan: Plan) -> Iterator[str]:
    """For each control all settings, on the choosing targets and on the others."""
    lines: dict[tuple[str, str, str, int], dict[str, Any]] = {}
    for line in [*read_results(plan.results), *read_results(plan.out / "checked.jsonl")]:
        key = line["control"], line["set"], line["setting"], line["targets"]
        known = lines.setdefault(key, {"figures": {}, "intervals": {}})
        lines[key] = {**known, **line, "figures": known["figures"] | line["figures"]}
        lines[key]["intervals"] = known["intervals"] | line.get("intervals", {})
    for control in plan.controls:
        own = {key[1:]: line for key, line in lines.items() if key[0] == control and "texts" in line}
        tried = [line for (of, _, _), line in own.items() if of == "choose"]
        if not tried:
            continue
        chosen = choose_setting(tried)
        held = [line for (of, name, _), line in own.items() if of == "held"]
        columns = [*dict.fromkeys(key for line in [*tried, *held] for key in line["figures"])]
        for title, some in (("to choose by", tried), (f"others; chosen: {chosen}", held)):
            if not some:
                continue
            real = ", ".join({f"{line['sentences']:.3f}" for line in some})
            yield f"\n**{control}**, {title}; judge of the target sentences {real}\n"
            yield f"| setting | targets | {' | '.join(columns)} | seconds |"
            yield "|---" * (len(columns) + 3) + "|"
            for line in some:
                cells = " | ".join(cell(line, key) for key in columns)
                name = f"**{line['setting']}**" if line["setting"] == chosen else line["setting"]
                yield f"| {name} | {line['targets']} | {cells} | {line['seconds']} |"


def cell(line: Mapping[str, Any], key: str) -> str:
    if (value := line["figures"].get(key)) is None:
        return "–"
    if key not in line["intervals"]:
        return f"{value:.4g}"
    low, high = line["intervals"][key]
    return f"{100 * value:.1f} [{100 * low:.1f}–{100 * high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comma = lambda names: names.split(",")  # noqa: E731
    parser.add_argument("what", choices=["draw", "write", "check", "table"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=os.environ.get("DIFFLM_DATA"))
    parser.add_argument("--exclude", type=Path, nargs="*", default=[], help="targets whose sentences are left out")
    parser.add_argument("--targets", type=int, default=200, help="targets a control that are reported")
    parser.add_argument("--choose", type=int, default=60, help="others, by which settings are chosen")
    parser.add_argument("--settings", type=comma, default=list(SETTINGS))
    parser.add_argument("--controls", type=comma, default=list(CONTROLS))
    parser.add_argument("--sets", type=comma, default=list(SETS))
    parser.add_argument("--run", default="e2e", help="the model, with its classifiers in guide*/")
    parser.add_argument("--guide", type=Path, action="append", default=[], help="a classifier instead of a bundled one")
    parser.add_argument("--sampling-steps", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=240.0, help="of the whole command")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    plan = Plan(**vars(parser.parse_args()))
    plan.out.mkdir(parents=True, exist_ok=True)
    if plan.one:
        write_setting(plan.one, plan)
    elif plan.what == "draw":
        assert plan.data is not None, "give --data"
        draw_sets(Path(plan.data), plan.out, plan.exclude, {"choose": plan.choose, "held": plan.targets})
    elif plan.what == "write":
        left = [name for name in plan.settings if plan.pieces(name)]
        run_side_by_side(left, plan.out, plan.jobs, plan.seconds, words=sys.argv[1:])
        print("left:", ", ".join(name for name in plan.settings if plan.pieces(name)) or "nothing", flush=True)
    elif plan.what == "check":
        check_texts(plan)
    else:
        print(*table(plan), sep="\n")


if __name__ == "__main__":
    main()
