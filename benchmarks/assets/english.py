"""The bundled model of everyday English, from texts to the package.

  python -m benchmarks.assets.english prepare --data DIR --tokens tokens         one file, tokens/tokens.tar.xz, travels
  python -m benchmarks.assets.english train --tokens tokens --out runs/english --minutes 8
  python -m benchmarks.assets.english train --tokens tokens --out twin method=autoregressive model.dropout=0.2
  python -m benchmarks.assets.export_run runs/english runs/small --bits 8
  difflm train e2e-guide data=tokens/registers.jsonl.gz model.guides=runs/small widths=[32,64,128] --out runs/guide
  python -m benchmarks.assets.english measure runs/english runs/small runs/twin --tokens tokens --out measured.jsonl
  python -m benchmarks.assets.english fill runs/small --out fills.jsonl
  python -m benchmarks.assets.english page fills.jsonl --judge DIR --measured measured.jsonl --out docs/english.md
  python -m benchmarks.assets.english install runs/small --tokens tokens --measured measured.jsonl

`train` continues what an earlier command began, within `--seconds`. `measure` tells nats per token of held-out passages
of each source and what texts copy from training. `fill` fills the gaps of
tests/support/english_gaps.jsonl, and `page` scores them: a language model that had no part in training reads each
sentence from its first gap on, and a sentence counts where its nats per token lie below the 90th percentile of the
original sentences. `install` puts a run into the package.
"""

import argparse
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.assets.english_texts import LONGEST, SOURCES, prepare, read_sources, unpack
from benchmarks.tables.timed import UNTIMED, read_results, train_for_minutes

if TYPE_CHECKING:
    from difflm.data.tokenfile import Ints, TokenFile
    from difflm.training.texts import Prepared, Setup
    from difflm.training.trainer import Outcome, Watcher

GAPS = Path(__file__).parents[2] / "tests" / "support" / "english_gaps.jsonl"
PACKAGE = Path(__file__).parents[2] / "models" / "english" / "difflm_english" / "english"
LICENCE = "CC BY-SA 4.0"  # of the weights: the strictest of their sources' licences that is compatible with the others
GAP_SAMPLING = {"sampler": "confidence", "temperature": 0.5}  # chosen on held-out sentences: docs/log
STARTS = {
    "smollm2-135m-instruct": "They also derive from SmolLM2-135M-Instruct by Hugging Face, under the Apache License "
    "2.0 (LICENSE-APACHE), and were changed: of its 49,152 tokens about half are left, every position sees all others, "
    "and all weights were trained on."
}
WINDOW = 12  # tokens in a row that count as copied

# -- training ----------------------------------------------------------------------------------------------------------


def train(tokens: Path, out: Path, minutes: float, seconds: float, changes: Sequence[str], device: str) -> bool:
    """Train the recipe `english` on tokens that were prepared, for so many minutes in all."""
    from difflm.runtime.files import read_checked, write_checked
    from difflm.training.fit import train_prepared
    from difflm.training.model_card import finish_run
    from difflm.training.recipe import load_recipe

    unpack(tokens)
    own = [f"data={tokens}", f"licence={LICENCE}", *UNTIMED]
    recipe = load_recipe("english", [*own, *changes])

    def make(setup: "Setup", watcher: "Watcher") -> "Outcome":
        return train_prepared(setup, partial(prepare_run, tokens), watcher)

    done = train_for_minutes(recipe, out, minutes, time.time() + seconds if seconds else 0.0, device, None, make)
    if done:
        config = read_checked(out / "config.json")
        config["trained"]["stopped"] = "done"  # time was up, as it should
        write_checked(out / "config.json", config)
        finish_run(out, f"python -m benchmarks.assets.english train --minutes {minutes:g} {' '.join(changes)}".strip())
    return done


def prepare_run(tokens: Path, setup: "Setup") -> "Prepared":
    """A model and its batches, from tokens that were prepared. Passages of some sources stand in an epoch often."""
    import torch

    from difflm.data.tokenizers import Tokenizer
    from difflm.methods import TextSpec
    from difflm.training.fit import start_weights
    from difflm.training.run import load_run
    from difflm.training.texts import Prepared, describe_run, histograms, make_batches

    recipe, tokenizer = setup.recipe, Tokenizer.load(tokens / "tokenizer.json")
    tokenizer.save(setup.out / "tokenizer.json")
    training, numbers = join_sources(tokens / "train")
    held_out, held = join_sources(tokens / "valid")
    chosen = np.concatenate([np.tile(own, SOURCES[name].repeat) for name, own in numbers.items()])
    torch.manual_seed(recipe.seed)
    model = recipe.build_method().build(TextSpec(tokenizer.size, recipe.longest))
    able = model.capabilities
    if "first-hitting" in able.step_rules and able.whole_canvas:  # a gap of three pieces then takes three steps
        model.sampling = replace(model.sampling, sampler="first-hitting", steps=64, temperature=0.7)
    begun = Path(recipe.init or "") / "metrics.jsonl"  # of a run, from which training goes on
    initial = load_run(begun.parent)[:2] if begun.exists() else None
    start_weights(setup, model, tokenizer, *histograms(training, chosen, recipe.longest, tokenizer.size), initial)
    splits = (training, chosen), (held_out, np.concatenate([*held.values()]))
    batches, validation = make_batches(setup, recipe.longest, *splits)
    counts = {"texts": sum(map(len, numbers.values())), "held_out": len(splits[1][1]), "left_out": 0}
    config = describe_run(recipe, model, tokenizer, counts)
    return Prepared(recipe, model, batches, validation, "nats_per_token", config)


def join_sources(folder: Path) -> tuple["TokenFile", dict[str, "Ints"]]:
    """All sources as one token file, and the numbers of each one's passages that fit."""
    from difflm.data.tokenfile import TokenFile

    files = {name: TokenFile.open(folder / name) for name in SOURCES if (folder / name).exists()}
    counts, sizes = ([0, *np.cumsum([of(file) for file in files.values()])] for of in (len, lambda file: len(file.ids)))
    ids = np.concatenate([file.ids for file in files.values()])
    begins = [file.offsets[:-1] + np.uint64(size) for file, size in zip(files.values(), sizes[:-1], strict=True)]
    whole = TokenFile(ids, np.concatenate([*begins, np.array([len(ids)], np.uint64)]))
    numbers = {name: np.arange(counts[k], counts[k + 1]) for k, name in enumerate(files)}
    return whole, {name: own[whole.lengths[own] <= LONGEST] for name, own in numbers.items()}


# -- figures -----------------------------------------------------------------------------------------------------------


def measure(runs: Sequence[Path], tokens: Path, texts: int, samples: int, device: str) -> Iterable[dict[str, Any]]:
    """Nats per token, ends included, of held-out passages of each source, and what samples copy; a record a figure."""
    from difflm.generation.pipeline import TextDiffusion

    unpack(tokens)
    training, _ = join_sources(tokens / "train")
    held_out, numbers = join_sources(tokens / "valid")
    known, keys = np.unique(hash_windows(training.ids)), {training.key(number) for number in range(len(training))}
    for run in runs:
        model, begun = TextDiffusion.from_pretrained(run, device), time.perf_counter()
        about = {
            "run": run.name,
            "likelihood": model.model.capabilities.likelihood,
            "parameters": model.config["parameters"],
        }
        for name, own in numbers.items():
            rows = [read_row(held_out, number) for number in own[:texts]]
            nats, errors = model.score_ids_with_errors(rows, draws=16, batch_size=256)
            total = sum(len(row) + 1 for row in rows)
            error = float(errors.square().sum().sqrt()) / total
            figures = {"nats_per_token": float(nats.sum()) / total, "of_draws": error, "texts": len(rows)}
            yield {**about, "kind": "nats", "source": name, **figures}
        written = model.tokenizer.encode_batch([one.text for one in model.generate(samples, seed=0)])
        whole = sum(np.array(row, training.ids.dtype).tobytes() in keys for row in written) / len(written)
        copied = {"texts": whole, "windows": share_copied(known, written)}
        real = share_copied(known, [read_row(held_out, n) for own in numbers.values() for n in own[:texts]])
        yield {**about, "kind": "copies", **copied, "held_out_windows": real, "samples": samples}
        yield {**about, "kind": "seconds", "seconds": time.perf_counter() - begun}


def read_row(tokens: "TokenFile", number: int) -> list[int]:
    return [int(i) for i in tokens.ids[tokens.offsets[number] : tokens.offsets[number + 1]]]


def hash_windows(ids: "Ints") -> "np.ndarray[Any, Any]":
    """A number for every WINDOW tokens in a row."""
    found = np.zeros(max(0, len(ids) - WINDOW + 1), np.uint64)
    for k in range(WINDOW):
        found = found * np.uint64(0x9E3779B97F4A7C15) + ids[k : len(ids) - WINDOW + 1 + k].astype(np.uint64)
    return found


def share_copied(known: "np.ndarray[Any, Any]", rows: Sequence[Sequence[int]]) -> float:
    """The share of all windows of some texts that training texts have too."""
    found = np.concatenate([hash_windows(np.array(row)) for row in rows if len(row) >= WINDOW])
    place = np.searchsorted(known, found).clip(max=len(known) - 1)
    return float((known[place] == found).mean())


# -- gaps --------------------------------------------------------------------------------------------------------------


def read_gaps(path: Path = GAPS) -> list[dict[str, Any]]:
    """The sentences with gaps. They are needed, unlike results, of which there may be none yet."""
    if not (rows := read_results(path)):
        raise SystemExit(f"no sentences with gaps in {path}")
    return rows


def fill(
    run: Path, rows: Sequence[dict[str, Any]], n: int, settings: dict[str, Any], device: str
) -> Iterable[dict[str, Any]]:
    """Every sentence with its gaps filled by the likeliest of `n` candidates, and some texts without any."""
    from difflm.controls import Infill, Label
    from difflm.data.labels import NONE
    from difflm.generation.pipeline import TextDiffusion

    model = TextDiffusion.from_pretrained(run, device)
    given = {**settings, **({"candidates": n} if n > 1 else {})}
    holed = [[Infill(row["text"])] for row in rows]
    jobs = [model.make_job(1, seed, controls=own, **given) for seed, own in enumerate(holed)]  # they share batches
    made = {index: texts[0].text for index, texts in model.run_jobs(jobs)}
    for number, row in enumerate(rows):
        yield {**row, "filled": find_fills(row["text"], made[number])}
    registers = [value for value in model.labellings["register"].values if value != NONE] if model.guides else []
    for value in (None, *registers):
        controls = [] if value is None else [Label("register", value)]
        for one in model.generate(8, seed=0, controls=controls, **settings):
            yield {"register": value, "text": one.text}


def find_fills(template: str, text: str) -> list[str]:
    """What stands in the gaps of a text."""
    found = re.fullmatch("(.+?)".join(map(re.escape, template.split("___"))), text)
    assert found is not None, f"{text!r} is not of the form {template!r}"
    return list(found.groups())


def put_fills(template: str, fills: Sequence[str], mark: str = "") -> str:
    parts = template.split("___")
    return parts[0] + "".join(mark + fill + mark + part for fill, part in zip(fills, parts[1:], strict=True))


def make_judge(folder: Path) -> Callable[[str, int], float]:
    """Nats per token of a text from a character on, under a language model of Hugging Face, or a GGUF file of one."""
    import torch
    import transformers

    file = {"gguf_file": folder.name} if folder.suffix == ".gguf" else {}
    where = folder.parent if file else folder
    pieces = transformers.AutoTokenizer.from_pretrained(where, local_files_only=True, **file)
    given = {"local_files_only": True, "dtype": torch.float32, **file}
    model = transformers.AutoModelForCausalLM.from_pretrained(where, **given).eval()
    start = pieces.bos_token_id if pieces.bos_token_id is not None else 0

    @torch.no_grad()
    def judge(text: str, begin: int) -> float:
        encoded = pieces(text, return_offsets_mapping=True, add_special_tokens=False)
        ids = torch.tensor([[start, *encoded["input_ids"]]])
        nats = -model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        counted = torch.tensor([end > begin for _, end in encoded["offset_mapping"]])
        return float(nats[counted].mean())

    return judge


def score_fills(rows: Sequence[dict[str, Any]], judge: Callable[[str, int], float]) -> list[dict[str, Any]]:
    """Each sentence with what the judge says of it, of the original, and of one with the words of other sentences."""
    found = []
    for number, row in enumerate(rows):
        begin = row["text"].index("___")
        others = [word for k in range(1, 4) for word in rows[(number + 31 * k) % len(rows)]["words"]]
        wordings: dict[str, list[str]] = {name: row[name] for name in ("words", "filled", "left") if name in row}
        wordings["others"] = others[: len(row["words"])]
        scores = {name: judge(put_fills(row["text"], words), begin) for name, words in wordings.items()}
        found.append({**row, "nats": scores})
    return found


def page(
    rows: Sequence[dict[str, Any]], free: Sequence[dict[str, Any]], judge: str, measured: Sequence[dict[str, Any]]
) -> str:
    """The page of docs/ with all sentences, good and bad."""
    limit = float(np.quantile([row["nats"]["words"] for row in rows], 0.9))
    domains = [*dict.fromkeys(row["domain"] for row in rows)]

    def share(name: str, domain: str | None = None) -> str:
        own = [row["nats"][name] <= limit for row in rows if domain in (None, row["domain"])]
        return f"{100 * np.mean(own):.0f} %"

    lines = [
        "# Everyday English",
        "",
        "```",
        'difflm generate english --infill "My dog ___ in the garden."',
        "difflm generate english --label register=dialogue",
        "```",
        "",
        "The bundled model `english` is made for filling gaps in ordinary sentences. It also writes texts from",
        "nothing, but those ramble. A register (`--label`) influences them only a little, unless `--guidance` is so",
        "strong that the words get worse.",
        "",
        f"Below are {len(rows)} sentences, written before the model was trained, with their gaps filled by the model",
        "(`--candidates 8`): all of them, good and bad. A judge that took no part in training,",
        f"{judge}, reads each sentence from its first gap on. A sentence is accepted if its nats per token",
        f"are at most {limit:.2f}, the 90th percentile of the original sentences; ✗ marks the others. The judge",
        "favours common phrases: what it accepts need not make sense.",
        "",
        f"| words in the gaps | all | {' | '.join(domains)} | nats/token |",
        f"|---|---|{'---|' * len(domains)}---|",
    ]
    for name, said in (("words", "the original ones"), ("filled", "the model's"), ("others", "of other sentences")):
        mean = np.mean([row["nats"][name] for row in rows])
        shares = " | ".join(share(name, domain) for domain in domains)
        lines.append(f"| {said} | {share(name)} | {shares} | {mean:.2f} |")
    if measured:
        said = "Nats per token of held-out passages, ends included (≤: a bound), and copies; `small`: the bundled form"
        lines += ["", said, ""]
        lines += table_of_figures(measured)
    for domain in domains:
        lines += ["", f"## {domain.capitalize()}", ""]
        for row in (row for row in rows if row["domain"] == domain):
            missed = "" if row["nats"]["filled"] <= limit else " ✗"
            nats = f"{row['nats']['filled']:.2f}, the original {row['nats']['words']:.2f}"
            lines.append(f"- {put_fills(row['text'], row['filled'], '**')} ({nats}){missed}")
    for value in dict.fromkeys(row["register"] for row in free):
        lines += ["", f"## Register: {value}" if value else "## Without any words given", ""]
        lines += [f"- {row['text']}" for row in free if row["register"] == value]
    return "\n".join(lines) + "\n"


def table_of_figures(measured: Sequence[dict[str, Any]]) -> list[str]:
    runs = [*dict.fromkeys(record["run"] for record in measured)]
    rows = {(r["run"], r.get("source", r["kind"])): r for r in measured}
    lines = [f"| | {' | '.join(runs)} |", f"|---|{'---|' * len(runs)}"]
    for name in SOURCES:
        cells = [rows[run, name] for run in runs]
        shown = [f"{'≤ ' if c['likelihood'] == 'bound' else ''}{c['nats_per_token']:.3f}" for c in cells]
        lines.append(f"| {name}: {SOURCES[name].about} | {' | '.join(shown)} |")
    copies = [rows[run, "copies"] for run in runs]
    whole = [f"{100 * c['texts']:.1f} %" for c in copies]
    lines.append(f"| texts copied from training | {' | '.join(whole)} |")
    windows = [f"{100 * c['windows']:.1f} % (held-out texts: {100 * c['held_out_windows']:.1f} %)" for c in copies]
    return [*lines, f"| runs of {WINDOW} tokens that are | {' | '.join(windows)} |"]


# -- the package -------------------------------------------------------------------------------------------------------


def install(run: Path, tokens: Path, measured: Sequence[dict[str, Any]], target: Path) -> None:
    """Put an exported run into the package: its files, its guide, and a card that names sources and licences."""
    from difflm.runtime.files import read_checked, write_checked
    from difflm.training.model_card import write_card

    shutil.copytree(run, target, dirs_exist_ok=True)
    own = {"language": "en", "gaps": GAP_SAMPLING}  # English texts begin with its weights
    write_checked(target / "config.json", {**read_checked(target / "config.json"), **own})
    for path in target.glob("guide*/config.json"):
        config = read_checked(path)
        write_checked(path, {**config, "model": {**config["model"], "guides": target.name}})  # not where it was trained
    about = {"kind": "metric", "task": "language", "model": target.name, "split": "held out", "unit": "nats/token"}
    with (target / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for record in (one for one in measured if (one["run"], one["kind"]) == (run.name, "nats")):
            value = {"value": round(record["nats_per_token"], 4), "likelihood": record["likelihood"]}
            name = {"name": f"nats_per_token of {record['source']}", "samples": record["texts"]}
            file.write(json.dumps({**about, **name, **value}) + "\n")
    write_card(target)
    lines = [
        "",
        "## Data",
        "",
        "| source | by | texts | licence | passages | tokens | in an epoch |",
        "|---|---|---|---|---|---|---|",
    ]
    for corpus, counts in read_sources(tokens).items():
        train, source = counts["train"], SOURCES[corpus]
        cells = [
            corpus,
            source.origin,
            source.about,
            source.licence,
            f"{train['texts']:,}",
            f"{train['tokens']:,}",
            f"{source.repeat} ×",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"The weights derive from all of them: {LICENCE}. Matrices are stored in four bits, words in eight."]
    if about_start := STARTS.get(str(read_checked(target / "config.json")["recipe"]["init"])):
        lines += ["", about_start]
    with (target / "README.md").open("a", encoding="utf-8") as card:
        card.write("\n".join(lines) + "\n")


# -- the command -------------------------------------------------------------------------------------------------------


def write_lines(records: Iterable[dict[str, Any]], out: Path) -> None:
    with out.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            print(json.dumps(record, ensure_ascii=False), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "train", "measure", "fill", "page", "install"))
    parser.add_argument("given", nargs="*", help="runs, a file of filled gaps, or changes to the recipe")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--vocabulary", type=int, default=12288)
    parser.add_argument("--most", type=int, default=0, help="passages of each source; 0: all")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--judge", type=Path)
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_intermixed_args()
    measured = read_results(asked.measured) if asked.measured else []
    if asked.what == "prepare":
        prepare(asked.data, asked.tokens, asked.vocabulary, asked.most)
    elif asked.what == "train":
        done = train(asked.tokens, asked.out, asked.minutes, asked.seconds, asked.given, asked.device)
        print("done" if done else "not finished: the same command continues")
    elif asked.what == "measure":
        found = measure([*map(Path, asked.given)], asked.tokens, asked.texts, asked.samples, asked.device)
        write_lines(found, asked.out)
    elif asked.what == "fill":
        settings = {"temperature": asked.temperature, "steps": asked.steps}
        found = fill(Path(asked.given[0]), read_gaps(), asked.candidates, settings, asked.device)
        write_lines(found, asked.out)
    elif asked.what == "page":
        rows = read_results(Path(asked.given[0]))
        scored = score_fills([row for row in rows if "words" in row], make_judge(asked.judge))
        free = [row for row in rows if "words" not in row]
        asked.out.write_text(page(scored, free, asked.judge.stem, measured), encoding="utf-8")
    else:
        install(Path(asked.given[0]), asked.tokens, measured, asked.out or PACKAGE)


if __name__ == "__main__":
    main()
