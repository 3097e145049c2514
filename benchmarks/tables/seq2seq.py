"""Train every method that writes from a source for equal minutes, side by side, and measure all of them.

  python -m benchmarks.tables.seq2seq multi30k,e2e --data DIR --out runs/pairs --minutes 3 --jobs 12 --seconds 560
  python -m benchmarks.tables.seq2seq table --out runs/pairs
  python -m benchmarks.tables.seq2seq plot --out runs/pairs
  python -m benchmarks.tables.seq2seq speed --out runs/pairs --only encoder-decoder,begun-both --compiled
  python -m benchmarks.tables.seq2seq multi30k --data DIR --out runs/pairs --only smollm2 --pretrained SMOLLM2

All runs have about the same parameters and train on the same pairs, which lack 1,000: on those, settings of sampling
are chosen. What the validation set says is written to OUT/TASK/results.jsonl, once for each run. A run that is not
finished after `--seconds` is continued by the next command. `--jobs` runs train at a time: minutes are equal only at
equal jobs. Rows that learn from the twin's answers wait for them. `--pretrained` is the directory of a left-to-right
model, such as SmolLM2-135M, for the row `smollm2`; without it there is no such row.
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.tables.timed import UNTIMED, read_results, run_side_by_side, train_for_minutes

if TYPE_CHECKING:
    from difflm.evaluation.corpora import PairSet
    from difflm.evaluation.seq2seq import Outputs
    from difflm.generation.pipeline import TextDiffusion

HELD_BACK = 1000  # training sources on which settings are chosen, of a small corpus a tenth
MOST_SOURCES = 1000  # of the validation set
MOST_PAIRS = 120_000  # of training, in a seeded order: short runs see no more
MOST_DISTILLED = 30_000  # sources that the twin answers for those that learn from it
TWIN, AGAIN = "encoder-decoder", "twin-again"
CALLS = 20  # of the network for a text, all candidates counted
RANKING = ("mbr", "rank", "repairs", "doubt")  # what chooses among candidates
MEASURING = 120  # seconds that it takes to choose settings and measure them
UNTIMED_PASSES = 3  # over the sources, before speed is measured: sizes are captured at their third use


@dataclass(frozen=True)
class Row:
    """A run of the table: its recipe and what is changed in it. One that is `distilled` trains on what the twin's beam
    search answers to the sources (Kim & Rush, 2016), alone or beside the pairs, and may have its candidates ranked and
    repaired by the twin, or by the twin that was trained again so; it may also begin with the twin's network."""

    recipe: str
    changes: Sequence[str] = ()
    distilled: Literal["", "answers", "both"] = ""
    begun: bool = False


def row(recipe: str, *changes: str, layers: int = 4, hidden: int = 256, batch_size: int = 256, **learned: Any) -> Row:
    """A recipe in the size of the table, for batches of equal size."""
    sizes = [f"model.hidden={hidden}", "model.heads=4", f"model.layers={layers}", f"batch_size={batch_size}"]
    return Row(recipe, [*changes, *sizes], **learned)


# A pretrained model has its own size, which is not that of the table, and its own pieces, which cut German finely.
FINE_TUNED = "smollm2"
TUNED = ["longest=96", "source_longest=72", "widths=[16,24,32,40,48,64,96]"]
# 256 pairs an update, 64 at a time: its 30 layers keep about 0.9 MiB a token, sources included, in bfloat16.
TUNED += ["batch_size=64", "accumulate=4", "lr=3e-4", "warmup=50", "ema=0.99"]
LATENT = ["lr=1e-3", "model.autoencoder_layers=2"]
ROWS = {
    TWIN: row("multi30k-encoder-decoder", "model.encoder_layers=4"),
    AGAIN: row("multi30k-encoder-decoder", "model.encoder_layers=4", distilled="both", begun=True),
    "difflm": row("multi30k", "method=difflm"),
    "mdlm": row("multi30k", "method=mdlm"),
    "diff-glat": row("multi30k-diff-glat", "model.settled_at=4000", layers=6),
    "diffusion-nat": row("multi30k-diffusion-nat"),
    "block-diffusion": row("multi30k", "method=block-diffusion"),
    "ssd-lm": row("multi30k", "method=ssd-lm"),
    "cmlm": row("multi30k", "method=cmlm"),
    "levt": row("multi30k-levt"),
    "diffuser": row("multi30k-diffuser", "lr=1e-3", "model.encoder_layers=3", layers=3),
    "ld4lg": row("multi30k-laptop", "method=ld4lg", "model.encoder_layers=3", *LATENT, hidden=192),
    "gpvae": row("multi30k-laptop", "method=gpvae", "lr=1e-3", layers=2),
    "glyph-diffusion": row("multi30k-glyph-diffusion", "lr=1e-3", layers=6, batch_size=128),
    "difformer": row("multi30k-difformer", layers=6),
    "dinoiser": row("multi30k-dinoiser", layers=6),
    "cdcd": row("multi30k-cdcd"),
    "seqdiffuseq": row("multi30k-seqdiffuseq", layers=6),
    "genie": row("multi30k-genie", layers=6),
    "ar-diffusion": row("multi30k-ar-diffusion", layers=6),
    "diffuseq": row("multi30k-diffuseq-v2", "method=diffuseq", layers=14),
    "diffuseq-v2": row("multi30k-diffuseq-v2", layers=14),
    "sed": row("multi30k-diffuseq-v2", "method=sed", "model.embedding_dim=32", "lr=5e-4", layers=14),
    "distilled": row("multi30k", "method=cmlm", distilled="answers"),
    "distilled-both": row("multi30k", "method=cmlm", distilled="both"),
    "begun": row("multi30k", "method=cmlm", "model.encoder_layers=4", "lr=7e-4", distilled="answers", begun=True),
    "begun-both": row("multi30k", "method=cmlm", "model.encoder_layers=4", "lr=7e-4", distilled="both", begun=True),
    FINE_TUNED: Row("multi30k", ["method=decoder-only", "model.pretrained=DIR", "tokenizer=DIR", *TUNED]),
}
BLOCK_STEPS = {"block-diffusion": 3, "ssd-lm": 6}  # of each block, with few of which a text has about `CALLS` calls
# The most tokens of a text and of a source, and widths of batches: nearly all pairs fit.
TASKS = {
    "multi30k": ["longest=40", "source_longest=40", "widths=[16,24,40]", "vocabulary=6000"],
    "multi30k-captions": ["longest=40", "source_longest=40", "widths=[16,24,40]", "vocabulary=6000"],
    "sgd": ["longest=48", "source_longest=48", "widths=[16,32,48]", "vocabulary=6000"],
    "e2e": ["longest=64", "source_longest=64", "widths=[32,64]", "tokenizer=words", "more_than=10"],
    "simplification": ["longest=64", "source_longest=64", "widths=[32,64]", "vocabulary=6000"],
}
# Where words are few, rows without vectors of words are larger than the others, and those with many of them smaller.
SIZES = {"e2e": {"glyph-diffusion": ["model.layers=4"], "gpvae": ["model.layers=3"]}}
SHORT = ["warmup=400", "ema=0.998"]  # for runs of a few thousand steps


@dataclass(frozen=True)
class Asked:
    task: str
    out: Path  # of the task
    minutes: float
    seconds: float
    jobs: int
    data: Path | None
    only: Sequence[str]
    seeds: Sequence[int]
    device: str
    one: str
    until: float
    pretrained: Path | None
    compiled: bool
    more: Sequence[str]

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    def names(self) -> list[str]:
        done = {record["run"] for record in read_results(self.results)}
        asked = [name for name in self.only or ROWS if name != FINE_TUNED or self.pretrained]
        return [run for seed in self.seeds for name in asked if (run := f"{name}-{seed}") not in done]

    def of_task(self, task: str) -> "Asked":
        return replace(self, task=task, out=self.out / task)


# -- pairs ------------------------------------------------------------------------------------------------------------


def write_pairs(asked: Asked) -> None:
    """Write the pairs to train on, those to choose on and those to report, once."""
    from difflm.data.corpora import corpus_examples
    from difflm.evaluation.corpora import PairSet
    from difflm.runtime.files import write_atomic

    def lines(pairs: "PairSet") -> str:
        both = zip(pairs.sources, pairs.references, strict=True)
        return "".join(json.dumps({"src": s, "trg": r}, ensure_ascii=False) + "\n" for s, r in both)

    if (asked.out / "report.jsonl").exists():
        return
    everything = list(corpus_examples(asked.task, asked.data, "train", None))
    pairs = PairSet.group(asked.task, "train", everything)
    back = pairs.sample(HELD_BACK if len(pairs.sources) > 3 * HELD_BACK else len(pairs.sources) // 10, 0, 0)
    chosen = set(back.sources)
    rest = [example for example in everything if example.source not in chosen]
    if len(rest) > MOST_PAIRS:
        rest = random.Random(0).sample(rest, MOST_PAIRS)
    text = "".join(json.dumps({"src": e.source, "trg": e.target}, ensure_ascii=False) + "\n" for e in rest)
    write_atomic(asked.out / "train.jsonl", text)
    write_atomic(asked.out / "choose.jsonl", lines(back))
    valid = PairSet.group(asked.task, "valid", corpus_examples(asked.task, asked.data, "valid", None))
    seen = {example.source for example in everything}
    valid = valid.keep(source not in seen for source in valid.sources)  # SGD repeats its turns
    count = min(MOST_SOURCES, len(valid.sources)) if len(valid.sources) > 1.1 * MOST_SOURCES else None
    write_atomic(asked.out / "report.jsonl", lines(valid.sample(count, 0, 0)))


def distil(seed: str, asked: Asked) -> None:
    """Write what the twin's beam search answers to the training sources, and these pairs behind the others."""
    from difflm.app.commands.options import load_model
    from difflm.runtime.files import write_atomic

    path = answers(asked, "answers", seed)
    if not path.exists():
        sources = sorted({json.loads(line)["src"] for line in (asked.out / "train.jsonl").open()})
        random.Random(0).shuffle(sources)
        lm = load_model(str(asked.out / f"{TWIN}-{seed}"), asked.device)
        sources = [s for s, fit in zip(sources, fits(lm, sources), strict=True) if fit][:MOST_DISTILLED]
        texts = lm.generate(1, source=sources, beams=5, length_penalty=1.0)
        pairs = ({"src": s, "trg": t.text} for s, t in zip(sources, texts, strict=True) if t.text.strip())
        made = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
        write_atomic(answers(asked, "both", seed), (asked.out / "train.jsonl").read_text() + made)
        write_atomic(path, made)


def answers(asked: Asked, kind: str, seed: str) -> Path:
    return asked.out / f"{kind}-{seed}.jsonl"


# -- one run, in a process of its own ---------------------------------------------------------------------------------


def train(run: str, asked: Asked) -> bool:
    """Train a run for its minutes, or continue it; False where time was up before."""
    from difflm.training.recipe import load_recipe

    (name, seed), out = run.rsplit("-", 1), asked.out / run
    if (out / "done").exists():
        return True
    fixed = [f"data={asked.out / 'train.jsonl'}", "task=auto", f"seed={seed}"]
    if ROWS[name].distilled:
        twin = "init" if ROWS[name].begun else "tokenizer"
        fixed += [f"data={answers(asked, ROWS[name].distilled, seed)}", f"{twin}={asked.out / f'{TWIN}-{seed}'}"]
    own = [change.replace("DIR", str(asked.pretrained)) for change in ROWS[name].changes]
    own += SIZES.get(asked.task, {}).get(name, [])
    changes = ["compile=false", *SHORT, *TASKS[asked.task], *own, *fixed, *UNTIMED, *asked.more]
    recipe = load_recipe(ROWS[name].recipe, changes)
    return train_for_minutes(recipe, out, asked.minutes, asked.until, asked.device, asked.data)


def settings_to_try(lm: "TextDiffusion", rankers: Collection[str]) -> Iterator[list[dict[str, Any]]]:
    """Rounds of settings; the best of each round is the base of the next. `mbr` is the number of candidates, of which
    the most central one is chosen, or by `rank` the one that this run finds likeliest."""
    model, own, method = lm.model, lm.model.sampling, lm.config["method"]
    beams = [{"beams": 5, "length_penalty": penalty} for penalty in (0.6, 1.0, 1.4)]
    if "edits" in model.capabilities.settings:
        yield [{"temperature": 0.0, "start": start, "steps": 3} for start in model.capabilities.starts]
        yield [{}, {"steps": 1}, {"steps": 12}]
        yield [{}, {"steps": 3, "beams": 5}, {"steps": 3, "beams": 5, "revisions": 3}]
        return
    if "left-to-right" in model.capabilities.settings:
        if "diffusion" in model.capabilities.settings:  # of latents
            yield [{"temperature": 0.0, "steps": steps} for steps in (20, 50, own.steps)]
            yield [{}, {"contrast": 0.0}, {"contrast": 0.5}, {"contrast": 2.0}, {"sampler": "ddim"}]
        yield [{"temperature": 0.0}, *beams]
        return
    blocks = method in BLOCK_STEPS
    most = CALLS * CALLS // model.calls(own.change({"steps": CALLS}), CALLS)  # steps, of which each may take several
    begin: dict[str, Any] = {"steps": BLOCK_STEPS.get(method, most)}
    if "confidence" in model.capabilities.step_rules:
        begin |= {"sampler": "confidence"}
    beam = {"length_beam": 1} if model.capabilities.length_beam else {}
    knob = "temperature" if model.capabilities.predicts_words else "noise_temperature"
    yield [{**begin, **beam, knob: value} for value in (*[0.0] * model.capabilities.greedy, 0.2, 0.5, 0.8, 1.0)]
    if "simplex" in model.capabilities.settings:
        yield [{}, {"steps": 3}, {"projection": "greedy"}, {"sampler": "ancestral", "projection": "mean"}]
    elif blocks:
        yield [{}, {"steps": 2}, {"steps": 2, "sampler": own.sampler}, {"sampler": own.sampler}]
    else:
        few = [{"steps": most // n, "mbr": n} for n in (2, 5)]
        spread = [{**one, "length_beam": one["mbr"]} for one in few if beam]
        fewer = [{"steps": steps} for steps in (10, 5, own.steps) if steps < most]
        yield [{}, *fewer, *few, *spread]
    if own.contrast:
        yield [{}, {"contrast": 0.0, "steps": CALLS}, {"contrast": 0.5}, {"contrast": 2.0}, {"sampler": "ddim"}]
    for ranker in rankers:
        # Steps, candidates and lengths, and how often each is repaired.
        sizes = [(4, 4, 0), (3, 2, 6), (4, 1, 8), (4, 1, 15), (6, 1, 15)]
        yield [{}, *({"steps": s, "mbr": n, "length_beam": n, "rank": ranker, "repairs": r} for s, n, r in sizes)]
    if rankers:
        yield [{}, *({"doubt": doubt} for doubt in (0.2, 0.05))]


def write(
    lm: "TextDiffusion",
    pairs: "PairSet",
    how: Mapping[str, Any],
    each: int = 1,
    rankers: "Mapping[str, TextDiffusion]" = MappingProxyType({}),
) -> "Outputs":
    """What the model writes for all sources with these settings."""
    from difflm.data.text_metrics import most_central
    from difflm.data.words import split_words
    from difflm.evaluation.seq2seq import Outputs, put_repairs, write_candidates
    from difflm.generation.ranking import make_ranking

    settings = {key: value for key, value in how.items() if key not in RANKING}
    count, sources, chosen = max(each, how.get("mbr", 1)), pairs.sources, list[int]()
    ids, texts, calls, seconds = write_candidates(lm, sources, count, 0, settings)
    if how.get("rank"):
        twin = rankers[how["rank"]]
        begun = time.perf_counter()
        ranking = make_ranking(lm, twin, count, lm.encode_sources(sources), len(sources), 0, how.get("repairs", 0))
        ranking = replace(ranking, doubt=how.get("doubt", ranking.doubt))
        best = ranking(range(len(ids)), ids)
        texts = put_repairs(lm, texts, best)
        chosen, seconds = [one.index for one in best], seconds + time.perf_counter() - begun
        calls += sum(one.calls for one in best) / len(best)
    elif how.get("mbr", 1) > 1:
        chosen = [most_central([split_words(text) for text in group]) for group in texts]
    words = ", ".join(f"{key}={value}" for key, value in how.items())
    return Outputs(texts, calls, seconds, words, chosen)


def write_repaired(
    lm: "TextDiffusion", pairs: "PairSet", how: Mapping[str, Any], each: int, twin: "TextDiffusion"
) -> "Outputs":
    """What the model writes for all sources, every sample repaired by the twin; none is preferred to another."""
    from difflm.evaluation.seq2seq import Outputs, write_candidates
    from difflm.generation.ranking import make_ranking

    settings = {key: value for key, value in how.items() if key not in RANKING}
    ids, _, calls, seconds = write_candidates(lm, pairs.sources, each, 0, settings)
    begun = time.perf_counter()
    ranking = make_ranking(lm, twin, each, lm.encode_sources(pairs.sources), len(ids), 0, how["repairs"])
    ranking = replace(ranking, doubt=how.get("doubt", ranking.doubt))
    versions = ranking.read_versions(range(len(ids)), ids)
    texts = [[lm.tokenizer.decode(one.ids) for one in group] for group in versions]
    calls += sum(one.readings for group in versions for one in group) / len(ids)
    words = ", ".join(f"{key}={value}" for key, value in how.items())
    return Outputs(texts, calls, seconds + time.perf_counter() - begun, words)


def measure(run: str, asked: Asked) -> dict[str, Any]:
    """Choose settings on the pairs that were held back, and measure them once on those to report."""
    from difflm.app.commands.options import load_model
    from difflm.data.text_metrics import corpus_sacrebleu
    from difflm.evaluation.corpora import read_pair_set
    from difflm.evaluation.seq2seq import measure_outputs
    from difflm.models import batching

    batching.GPU_BYTES = 2**34  # so that a pretrained model, whose words are many, has batches as large as the others
    lm = load_model(str(asked.out / run), asked.device)
    choose, report = (read_pair_set(str(asked.out / f"{k}.jsonl"), None, None, "valid") for k in ("choose", "report"))
    choose, report = choose.keep(fits(lm, choose.sources)), report.keep(fits(lm, report.sources))
    name, seed = run.rsplit("-", 1)
    ranked = ROWS[name].distilled and "left-to-right" not in lm.model.capabilities.settings
    names = find_rankers(seed, asked) if ranked else []
    rankers = {name: load_model(str(asked.out / f"{name}-{seed}"), asked.device) for name in names}
    best: tuple[float, dict[str, Any]] = (-1.0, {})
    tried: list[tuple[dict[str, Any], float, float]] = []
    for settings in settings_to_try(lm, rankers):
        base = best[1]
        for some in settings:
            how = {**base, **some}
            if how in (one for one, _, _ in tried):
                continue
            made = write(lm, choose, how, rankers=rankers)
            bleu, _ = corpus_sacrebleu(made.texts, choose.references)
            tried.append((how, bleu, made.calls))
            if bleu > best[0] and (made.calls <= CALLS or "left-to-right" in lm.model.capabilities.settings):
                best = (bleu, how)
    ways = {"chosen": write(lm, report, best[1], rankers=rankers)}
    fewest = find_fewest_calls(tried, run, asked) if rankers else {}
    if fewest:
        ways["fewest calls"] = write(lm, report, fewest, rankers=rankers)
    candidates = (*RANKING, "length_beam", "beams", "length_penalty", "revisions")
    sample = {k: v for k, v in best[1].items() if k not in candidates}
    drawn = [{"temperature": value} for value in (0.3, 0.5, 0.7, 1.0)] if lm.model.capabilities.predicts_words else [{}]
    if rankers:  # its few steps were chosen for the sake of several candidates
        sample["steps"] = CALLS
    for some in drawn:  # variety, and what it costs
        ways[f"three samples, {some.get('temperature', 'as chosen')}"] = write(lm, report, {**sample, **some}, 3)
    for (ranker, twin), drawn_at in itertools.product(rankers.items(), (0.5, 1.0)):
        doubt = {key: best[1][key] for key in ("doubt",) if key in best[1]}
        how = {**sample, "temperature": drawn_at, "steps": 10, "repairs": 8, **doubt}
        ways[f"three samples, {drawn_at}, repaired by {ranker}"] = write_repaired(lm, report, how, 3, twin)
    (asked.out / f"{run}.texts.json").write_text(json.dumps(ways["chosen"].candidates, ensure_ascii=False))
    rows = measure_outputs(report.sources, report.references, {name: [way] for name, way in ways.items()}).rows
    parameters = sum(p.numel() for p in lm.model.parameters())
    trained = json.loads((asked.out / run / "done").read_text())
    found = {row.name: {"how": row.about["how"], **row.figures} for row in rows}
    chosen = {"settings": best[1], "fewest calls": fewest}
    return {"run": run, "parameters": parameters, **trained, **chosen, "rows": found, "tried": tried}


def find_fewest_calls(tried: Sequence[tuple[dict[str, Any], float, float]], run: str, asked: Asked) -> dict[str, Any]:
    """The settings with the fewest calls among those at least as good as the twin on the pairs that were held back.
    None if there are none, or if the twin has not been measured."""
    twin = f"{TWIN}-{run.rsplit('-', 1)[1]}"
    found = [bleu for record in read_results(asked.results) if record["run"] == twin for _, bleu, _ in record["tried"]]
    enough = [(calls, how) for how, bleu, calls in tried if found and bleu >= max(found)]
    return min(enough, key=lambda one: one[0])[1] if enough else {}


def find_rankers(seed: str, asked: Asked) -> list[str]:
    """The runs that rank: the twin, and the one that was trained again if it is asked for and done before time is
    nearly up."""
    again = asked.out / f"{AGAIN}-{seed}" / "done"
    while AGAIN in (asked.only or ROWS) and not again.exists() and time.time() < asked.until - MEASURING:
        time.sleep(0.5)
    return [TWIN, *([AGAIN] if again.exists() else [])]


def fits(lm: "TextDiffusion", sources: Sequence[str]) -> Iterable[bool]:
    from difflm.evaluation.seq2seq import reads

    return reads(lm, sources)


def make(run: str, asked: Asked) -> None:
    from difflm.runtime.files import append_line

    if train(run, asked):
        if run.startswith(f"{TWIN}-"):
            distil(run.rsplit("-", 1)[1], asked)
        append_line(asked.results, json.dumps(measure(run, asked), ensure_ascii=False))


# -- all of them ------------------------------------------------------------------------------------------------------


COLUMNS = {
    "bleu_sacre": "sacreBLEU",
    "bleu_sentence_nltk4": "BLEU",
    "rouge_l": "ROUGE-L",
    "sari": "SARI",
    "calls": "calls",
    "seconds": "seconds",
}


def put_table(asked: Asked) -> None:
    head = f"| run | parameters | steps | {' | '.join(COLUMNS.values())} | samples: BLEU, div-4 | chosen |"
    print(f"\n## {asked.task}\n\n{head}\n|{'---|' * (5 + len(COLUMNS))}")
    for record in sorted(read_results(asked.results), key=lambda r: -r["rows"]["chosen"]["bleu_sacre"]):
        rows, chosen = record["rows"], record["rows"]["chosen"]
        cells = [f"{chosen[key]:.3g}" if chosen.get(key) is not None else "–" for key in COLUMNS]
        drawn = [row for name, row in rows.items() if name.startswith("three samples")]
        cells += [", ".join(f"{row['bleu_sacre']:.1f} {row['div_4']:.2f}" for row in drawn), chosen["how"]]
        print(f"| {record['run']} | {record['parameters'] / 1e6:.1f}M | {record['steps']:,} | {' | '.join(cells)} |")
    if read_results(asked.results):
        copied = record["rows"]["copy of the source"]
        cells = [f"{copied[key]:.3g}" if copied.get(key) is not None else "–" for key in COLUMNS]
        print(f"| copy of the source | 0 | 0 | {' | '.join(cells)} | – | – |")


def draw_plot(asked: Asked) -> None:
    """What was tried on the held-back pairs: for each row the best quality up to each number of network calls."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 6))
    records = [record for record in read_results(asked.results) if record["run"].endswith("-0")]
    for colour, record in zip(plt.get_cmap("tab20").colors, records, strict=False):  # type: ignore[attr-defined]
        tried = sorted((calls, bleu) for _, bleu, calls in record["tried"])
        best = [(calls, max(b for c, b in tried if c <= calls)) for calls, _ in tried]
        axes.plot(*zip(*best, strict=True), marker="o", markersize=3, color=colour)
        axes.annotate(f" {record['run'].rsplit('-', 1)[0]}", best[-1], color=colour, fontsize=8, va="center")
    axes.set(xscale="log", xlim=(4, 250), xticks=[5, 10, 20, 40, 80, 160], xticklabels=[5, 10, 20, 40, 80, 160])
    axes.set(xlabel="network calls of a text, all candidates counted", ylabel="sacreBLEU, held-back pairs")
    axes.minorticks_off()
    figure.tight_layout()
    figure.savefig(asked.out / "calls.png", dpi=110)
    print(asked.out / "calls.png")


def put_speed(asked: Asked) -> None:
    """Milliseconds from a request to its texts, one source and 64 at a time, with the settings that were chosen, and
    with those of the fewest calls that are as good as the twin. Compiled, all sources have about the same length, since
    every width is compiled for itself."""
    from difflm.app.commands.options import load_model

    for record in read_results(asked.results):
        name, seed = record["run"].rsplit("-", 1)
        if name not in (asked.only or ROWS) or int(seed) not in asked.seeds:
            continue
        lm = load_model(str(asked.out / record["run"]), asked.device)
        for settings in (record["settings"], record.get("fewest calls")):
            if settings:
                time_settings(lm, record["run"], settings, asked)


def time_settings(lm: "TextDiffusion", run: str, settings: Mapping[str, Any], asked: Asked) -> None:
    from difflm.app.commands.options import load_model
    from difflm.evaluation.corpora import read_pair_set
    from difflm.generation import ranking

    how, given, usual = dict(settings), dict[str, Any](), ranking.DOUBT
    count, ranked, doubt = how.pop("mbr", 1), how.pop("rank", ""), how.pop("doubt", usual)
    if ranked:
        twin = load_model(str(asked.out / f"{ranked}-{run.rsplit('-', 1)[1]}"), asked.device)
        given = {"candidates": count, "rank": twin, "repairs": how.pop("repairs", 0)}
    elif count > 1:
        given = {"mbr": count}
    pairs = read_pair_set(str(asked.out / "report.jsonl"), None, None, "valid")
    sources = [s for s, fit in zip(pairs.sources, fits(lm, pairs.sources), strict=True) if fit]
    if asked.compiled:
        lengths = [len(row) for row in lm.encode_sources(sources)]
        usual_length = sorted(lengths)[len(lengths) // 2]
        sources = [s for s, length in zip(sources, lengths, strict=True) if abs(length - usual_length) < 2]
        for one in (lm, *([given["rank"]] if ranked else [])):
            one.inference.compiled = True
    ranking.DOUBT = doubt
    for size, times in ((1, 24), (64, 6)):
        asked_for = [[sources[i % len(sources)] for i in range(k * size, (k + 1) * size)] for k in range(times)]
        for _ in range(UNTIMED_PASSES + 1):
            took = []
            for some in asked_for:
                begun = time.perf_counter()
                lm.generate(1, source=some, **given, **how)
                took.append(1000 * (time.perf_counter() - begun))
        least, middle, most = min(took), sorted(took)[times // 2], max(took)
        how_run = "compiled" if asked.compiled else "captured"
        print(
            f"{run}: {size} at a time, {middle:.1f} ms ({least:.1f} to {most:.1f}; {how_run}; {settings})", flush=True
        )
    ranking.DOUBT = usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help=f"some of {', '.join(TASKS)}, with commas; or table, plot, speed")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.0, help="of training, for each run")
    parser.add_argument("--seconds", type=float, default=560.0, help="of the whole command")
    parser.add_argument("--jobs", type=int, default=7, help="runs at a time")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", type=lambda names: names.split(","), default=[])
    parser.add_argument("--seeds", type=lambda seeds: [int(s) for s in seeds.split(",")], default=[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pretrained", type=Path, help=f"directory of the pretrained model of the row {FINE_TUNED}")
    parser.add_argument(
        "--compiled", action="store_true", help="of speed: compile what is captured, for a minute or two"
    )
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("more", nargs="*", help="key=value changes to every recipe")
    asked = Asked(**vars(parser.parse_intermixed_args()))
    asked = replace(asked, out=asked.out.resolve())
    if FINE_TUNED in asked.only and asked.task in TASKS and not asked.pretrained:
        parser.error(f"the row {FINE_TUNED} needs --pretrained DIR")
    show = {"table": put_table, "plot": draw_plot, "speed": put_speed}.get(asked.task)
    tasks = [path.parent.name for path in asked.out.glob("*/results.jsonl")] if show else asked.task.split(",")
    if unknown := [task for task in tasks if task not in TASKS]:
        parser.error(f"unknown: {', '.join(unknown)}")
    if asked.one:
        task, run = asked.one.split(":")
        return make(run, asked.of_task(task))
    every = [asked.of_task(task) for task in tasks]
    for one in every if not show else ():
        one.out.mkdir(parents=True, exist_ok=True)
        write_pairs(one)

    def ready(name: str) -> bool:
        task, run = name.split(":")
        row, seed = run.rsplit("-", 1)
        return not ROWS[row].distilled or answers(asked.of_task(task), ROWS[row].distilled, seed).exists()

    if not show:
        names = [f"{one.task}:{name}" for one in every for name in one.names()]
        order = [TWIN, AGAIN, *(asked.only or ROWS)]  # others wait for the twin's answers, some for the second
        names.sort(key=lambda name: order.index(name.split(":")[1].rsplit("-", 1)[0]))
        run_side_by_side(names, asked.out, asked.jobs, asked.seconds, ready, sys.argv[1:])
    for one in every:
        (show or put_table)(one)


if __name__ == "__main__":
    main()
