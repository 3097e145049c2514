"""A left-to-right model of others as a diffusion model of English: from its files to a page of results.

  python -m benchmarks.assets.adapt convert MODEL.gguf --teacher teacher         float16 safetensors of a quantised file
  python -m benchmarks.assets.adapt trim --data DIR --teacher teacher --size 24560    the tokens that English texts need
  python -m benchmarks.assets.adapt split teacher --out pieces                   files in pieces of 16 MiB, which travel
  python -m benchmarks.assets.adapt join pieces --out teacher                      where they arrived
  python -m benchmarks.assets.adapt prepare --data DIR --teacher teacher --tokens tokens --megabytes 20
  python -m benchmarks.assets.adapt write --teacher teacher --tokens tokens --texts 30000
  python -m benchmarks.assets.adapt make --data DIR --tokens tokens       forms, and pairs of sentences
  python -m benchmarks.assets.adapt train --teacher teacher --tokens tokens --out runs/adapted --minutes 8
  python -m benchmarks.assets.adapt train --teacher teacher --tokens tokens --out runs/blocks method=block-diffusion
  python -m benchmarks.assets.adapt measure runs/adapted runs/blocks --teacher teacher --tokens tokens --out rows.jsonl
  python -m benchmarks.assets.adapt read runs/adapted --teacher teacher --tokens tokens --texts 40 --out read.jsonl
  python -m benchmarks.assets.adapt fill runs/adapted --teacher teacher --out fills.jsonl
  python -m benchmarks.assets.adapt page fills.jsonl --measured rows.jsonl --out adapted.md

The teacher is a directory with `config.json`, safetensors and `tokenizer.json` of a model of Llama's, Qwen's or GPT-2's
shape. `convert` needs the packages transformers, accelerate and gguf; all else reads the directory without them. Texts
are those of `benchmarks.assets.english`, in the teacher's tokens. `train` continues what an earlier command began,
within `--seconds`. `measure` tells bounds of held-out passages beside the teacher's nats of the same tokens, what the
teacher says of samples, and what these cost. `fill` fills the gaps of
tests/support/english_gaps.jsonl, and lets the teacher continue the words before each gap by as many words as were
there.
"""

import argparse
import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.nn import functional as F

from benchmarks.assets import english
from benchmarks.assets.english import (
    GAPS,
    find_fills,
    join_sources,
    put_fills,
    read_gaps,
    read_row,
    score_fills,
    write_lines,
)
from benchmarks.assets.english_texts import LONGEST, MADE, SOURCES, WRITTEN, pack, prepare, read_passages, unpack
from benchmarks.assets.everyday_made import make_texts
from benchmarks.tables.timed import read_results
from difflm.controls import Infill
from difflm.data.open_tokenizer import ENDS, TokenizerFiles
from difflm.data.text_metrics import distinct_n
from difflm.data.texts import Example, read_lines
from difflm.data.tokenfile import TokenFile
from difflm.data.tokenizers import END, SPECIALS, PretrainedTokenizer, Tokenizer, make_encoder
from difflm.data.words import split_words
from difflm.generation.checks import check_device
from difflm.generation.pipeline import TextDiffusion
from difflm.models.batching import pad_token_rows
from difflm.models.open_families import EMBEDDING
from difflm.models.open_models import find_special
from difflm.models.open_start import read_causal, shape_of
from difflm.models.word_nats import nats_in_order
from difflm.networks.cache import Growing
from difflm.networks.open_transformer import OpenTransformer
from difflm.runtime.files import read_json, write_json

COUNTED = 0.3  # share of the lines of a source that are counted
PIECE = 16 * 2**20  # bytes of a file that travel together
TEACHER, REAL = "teacher", "held-out passages"
BATCH = 64  # texts that the teacher reads together
TOGETHER = 3072  # texts that it writes together
TEMPERATURE, LEAST = 0.7, 0.06  # of its texts
PROMPTS = Path(__file__).with_name("teacher_prompts.yaml")
UNFIT = re.compile(r"\[|\bAI\b|SmolLM|language model|Here(?:'s| is| are)|\*\*|#|```", re.IGNORECASE)
SENTENCES, RECORDS, PAIRS = "tatoeba", 24_000, 50_000  # of whose sentences pairs are made; how many of each
SHOWN = 8  # texts of each kind that are shown
# What differs from the recipe `english`: a larger model, which is trained already. Passages are learned whole, by masks
# with up to three gaps, and one in four from left to right, as the teacher was: by this the model judges its own texts.
CHANGES = (
    "batch_size=1024",
    "lr=6e-4",
    "warmup=300",
    "ema=0.999",
    "widths=[16,24,32,40,56,80,104,128]",
)
OF_MASKS = ("model.gaps=3", "model.in_order=0.25")  # which blocks do not know

# -- files -------------------------------------------------------------------------------------------------------------


def convert(file: Path, out: Path, mark: int) -> None:
    """Write a GGUF file of a Llama as a directory of float16 safetensors; `mark` is the token between its texts."""
    import transformers
    from safetensors.torch import save_file

    given: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    pieces = transformers.AutoTokenizer.from_pretrained(file.parent, **given)
    if hasattr(transformers, "GgufConfig"):  # later versions leave weights packed unless they are told to
        given["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    pieces.save_pretrained(out)
    tied = ("lm_head.weight",) if model.config.tie_word_embeddings else ()
    weights = {key: weight.half().contiguous() for key, weight in model.state_dict().items() if key not in tied}
    save_file(weights, out / "model.safetensors")
    told = {key: value for key, value in model.config.to_dict().items() if "name_or_path" not in key}
    told.pop("quantization_config", None)
    write_json(out / "config.json", {**told, "bos_token_id": mark, "eos_token_id": mark, "dtype": "float16"})


def trim(folder: Path, texts: Iterable[str], size: int) -> None:
    """Leave the tokens that texts use most, about `size` of them, with all that these are merged from; in place. The
    network's other rows go. What the left-out tokens spelt is spelt by their parts."""
    from safetensors.torch import load_file, save_file

    words, definition = PretrainedTokenizer.read(folder), read_json(folder / "tokenizer.json")
    weights, config = load_file(folder / "model.safetensors"), read_json(folder / "config.json")
    counts = Counter(number for row in words.encode_batch(list(texts)) for number in row)
    vocabulary, merges = definition["model"]["vocab"], definition["model"]["merges"]
    parts = {left + right: (left, right) for left, right in reversed(merges)}
    places = vocabulary | {token["content"]: token["id"] for token in definition["added_tokens"]}
    pieces = {number: piece for piece, number in places.items()}
    marks = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) in pieces}
    special = [*(token["content"] for token in definition["added_tokens"]), *map(pieces.__getitem__, marks.values())]
    kept = {*special, *(piece for piece in vocabulary if len(piece) == 1)}
    for number, _ in counts.most_common():
        if len(kept) >= size:
            break
        left = [pieces[words.theirs[number - len(SPECIALS)]]]
        while left:  # a token and what it is merged from
            piece = left.pop()
            if piece not in kept:
                kept.add(piece)
                left += parts[piece]
    old = sorted(places[piece] for piece in kept)
    new = {number: place for place, number in enumerate(old)}
    definition["model"]["vocab"] = {piece: new[number] for piece, number in vocabulary.items() if piece in kept}
    definition["model"]["merges"] = [pair for pair in merges if {*pair, "".join(pair)} <= kept]
    for token in definition["added_tokens"]:
        token["id"] = new[token["id"]]
    rows = {key: weight for key, weight in weights.items() if len(weight) == config["vocab_size"]}
    weights |= {key: weight[torch.tensor(old)].clone() for key, weight in rows.items()}
    save_file(weights, folder / "model.safetensors")
    write_json(folder / "tokenizer.json", definition)
    own = {key: new[number] for key, number in marks.items()}
    write_json(folder / "config.json", {**config, "vocab_size": len(old), **own})


def read_some(root: Path) -> Iterator[str]:
    """A sample of the lines of all sources, by which tokens are counted."""
    chance = random.Random(0)
    for source in (source for source in SOURCES.values() if source.file):
        lines = (line.strip() for _, line in read_lines(root / source.file))
        yield from (line for line in lines if line and chance.random() < COUNTED * source.keep)


def split(folder: Path, out: Path, size: int = PIECE) -> list[Path]:
    """Every file of a directory, or one file, in pieces of `size` bytes, and a list of them."""
    out.mkdir(parents=True, exist_ok=True)
    files = [folder] if folder.is_file() else sorted(path for path in folder.iterdir() if path.is_file())
    written, counts = list[Path](), dict[str, int]()
    for path in files:
        with path.open("rb") as file:
            while part := file.read(size):
                counts[path.name] = counts.get(path.name, 0) + 1
                written.append(out / f"{path.name}.{counts[path.name]:03}")
                written[-1].write_bytes(part)
    write_json(out / "pieces.json", counts)
    return written


def join(pieces: Path, out: Path) -> list[str]:
    """The files of pieces; which are missing, where some are: then nothing is written."""
    counts: dict[str, int] = read_json(pieces / "pieces.json")
    names = {name: [f"{name}.{k + 1:03}" for k in range(count)] for name, count in counts.items()}
    missing = [part for parts in names.values() for part in parts if not (pieces / part).exists()]
    if not missing:
        out.mkdir(parents=True, exist_ok=True)
        for name, parts in names.items():
            with (out / name).open("wb") as file:
                for part in parts:
                    file.write((pieces / part).read_bytes())
    return missing


# -- the teacher -------------------------------------------------------------------------------------------------------


class Teacher:
    """The left-to-right model itself: what it finds likely, and how it goes on. Ids are those of our tokenizer."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype = torch.float32) -> None:
        where = check_device(device)
        config, weights = read_causal(folder)
        found = {name: weight.to(where, dtype) for name, weight in weights.items()}
        self.embedding, self.tokenizer = found.pop(EMBEDDING), PretrainedTokenizer.read(folder)
        with torch.device("meta"):
            self.network = OpenTransformer(shape_of(config), len(self.embedding))
        self.network.load_state_dict(found, assign=True)
        self.network.requires_grad_(False).eval()
        files = TokenizerFiles(folder)
        ends = find_special("eos", config, files), *files.find_among(ENDS)
        self.end = next(number for number in ends if number is not None)
        start = find_special("bos", config, files)
        self.start = self.end if start is None else start

    def their_ids(self, row: Sequence[int]) -> list[int]:
        return [self.end if i == END else self.tokenizer.theirs[i - len(SPECIALS)] for i in row]

    @torch.no_grad()
    def read(self, rows: Sequence[Sequence[int]], last: bool = False) -> Tensor:
        """Log-shares of their tokens behind START and behind each token of some texts, [B, L + 1, tokens], in float32;
        or behind the `last` alone."""
        theirs = [[self.start, *self.their_ids(row)] for row in rows]
        width = max(map(len, theirs))
        ids = torch.tensor([row + [self.end] * (width - len(row)) for row in theirs], device=self.embedding.device)
        causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril().unsqueeze(0)
        states = self.network.run(F.embedding(ids, self.embedding), causal, None)
        return self.network.answer(states[:, -1:] if last else states).float().log_softmax(-1)

    def nats(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Nats of every token of some texts."""
        found: dict[int, Tensor] = {}
        order = sorted(range(len(rows)), key=lambda k: len(rows[k]))
        for first in range(0, len(order), BATCH):
            chosen = order[first : first + BATCH]
            logs = self.read([rows[k] for k in chosen])
            for row, k in enumerate(chosen):
                theirs = torch.tensor(self.their_ids(rows[k]), device=logs.device).unsqueeze(1)
                found[k] = -logs[row, : len(theirs)].gather(1, theirs).squeeze(1).cpu()
        return [found[k] for k in range(len(rows))]

    def judge(self, text: str, begin: int) -> float:
        """Nats per token of a text from a character on."""
        (ids,), spans = self.tokenizer.encode_batch([text]), self.tokenizer.spans(text)
        return float(self.nats([ids])[0][torch.tensor([end > begin for _, end in spans])].mean())

    @torch.no_grad()
    def write(
        self, prompts: Sequence[Sequence[int]], tokens: int, seed: int = 0, temperature: float = 1.0, least: float = 0.0
    ) -> list[list[int]]:
        """A text of its own behind each prompt, in its ids: drawn token by token, at most so many, among tokens that
        have `least` of the likeliest one's chance. Texts end before the first special token. Keys and values of earlier
        tokens are kept."""
        device = self.embedding.device
        words = torch.tensor(self.tokenizer.theirs, device=device)
        allowed = torch.zeros(len(self.embedding), dtype=torch.bool, device=device)
        allowed[words] = True
        chance, found = torch.Generator(device=device).manual_seed(seed), dict[int, list[int]]()
        same = sorted(range(len(prompts)), key=lambda k: len(prompts[k]))
        for _, group in groupby(same, key=lambda k: len(prompts[k])):  # of equal length, so that nothing is padded
            rows = [*group]
            for own in (rows[first : first + TOGETHER] for first in range(0, len(rows), TOGETHER)):
                last, drawn = torch.tensor([prompts[k] for k in own], device=device), list[Tensor]()
                kept = [Growing() for _ in self.network.layers]
                for _ in range(tokens):
                    width = last.shape[1]
                    causal = torch.ones(1, width, width, dtype=torch.bool, device=device).tril() if width > 1 else None
                    states = self.network.run(F.embedding(last, self.embedding), causal, kept)
                    logits = self.network.answer(states[:, -1:])[:, 0].float() / temperature
                    shares = logits.softmax(-1)
                    shares = shares.masked_fill(shares < least * shares.amax(-1, keepdim=True), 0.0)
                    last = torch.multinomial(shares, 1, generator=chance)
                    drawn.append(torch.where(allowed[last], last, -1))
                for k, row in zip(own, torch.cat(drawn, 1).tolist(), strict=True):
                    found[k] = [self.tokenizer.our_id(number) for number in takewhile(lambda n: n >= 0, row)]
        return [found[k] for k in range(len(prompts))]

    def continue_words(self, text: str, words: int) -> str:
        """The likeliest next words, token by token, so many of them."""
        ours = torch.tensor(self.tokenizer.theirs, device=self.embedding.device)
        (ids,) = self.tokenizer.encode_batch([text.rstrip()])
        begun = len(ids)
        for _ in range(8 * words):
            ids.append(int(self.read([ids], last=True)[0, -1][ours].argmax()) + len(SPECIALS))
            if len(self.tokenizer.decode(ids[begun:]).split()) > words:
                break
        found = " ".join(self.tokenizer.decode(ids[begun:]).split()[:words])
        return found.strip(" .,;:!?") or found  # the sentence has its own signs

    def continue_gaps(self, template: str, words: Sequence[str]) -> list[str]:
        """For each gap as many words as stood there, of one who reads what is before it alone."""
        text, found = "", list[str]()
        for part, original in zip(template.split("___"), words, strict=False):
            text += part
            found.append(self.continue_words(text, len(original.split())))
            text += found[-1]
        return found


def draw_prompts(count: int) -> list[tuple[str, str]]:
    """What the teacher is asked for, and how its answer begins."""
    told, chance = yaml.safe_load(PROMPTS.read_text(encoding="utf-8")), random.Random(0)
    kinds = chance.choices(told["kinds"], [kind["weight"] for kind in told["kinds"]], k=count)
    drawn = [(kind, chance.choice(told["names"])) for kind in kinds]
    return [
        (
            chance.choice(kind["ask"]).format(topic=chance.choice(kind["topics"])),
            chance.choice(kind["begin"]).replace("{name}", name),
        )
        for kind, name in drawn
    ]


def write_texts(teacher: Teacher, tokens: Path, count: int) -> None:
    """Add texts of the teacher itself to prepared tokens. Each is cut behind its last whole sentence; what speaks of
    itself or leaves blanks to fill in is left out, and nothing stands twice. Prompts of the commonest lengths are
    answered, since those of one length are read together."""
    drawn = draw_prompts(3 * count)
    starts = [f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n{begin.rstrip()}" for ask, begin in drawn]
    encoder = make_encoder(teacher.tokenizer.definition)
    read = [one.ids for one in encoder.encode_batch(starts, add_special_tokens=False)]
    common = Counter(map(len, read)).most_common()
    lengths = {
        length
        for (length, _), before in zip(common, accumulate((n for _, n in common), initial=0), strict=False)
        if before < count
    }
    asked, prompts = zip(
        *[pair for pair in zip(drawn, read, strict=True) if len(pair[1]) in lengths][:count], strict=True
    )
    begun = time.perf_counter()
    made = teacher.write(prompts, LONGEST - 8, 0, TEMPERATURE, LEAST)
    wrote = sum(map(len, made)), time.perf_counter() - begun
    ends = re.compile(r"[.!?}][\"”’')]*(?=\s|$)")
    texts = dict[str, None]()
    for (_, begin), row in zip(asked, made, strict=True):
        text = begin.rstrip() + teacher.tokenizer.decode(row)
        stops = [found.end() for found in ends.finditer(text)]
        if stops and not UNFIT.search(text):
            texts[text[: stops[-1]]] = None
    print(f"{wrote[0]:,} tokens in {wrote[1]:.1f} s; {len(texts):,} of {count:,} texts are kept", flush=True)
    add_texts(WRITTEN, [*texts], teacher.tokenizer, tokens)


def add_texts(source: str, texts: Sequence[str], words: Tokenizer, tokens: Path) -> None:
    """Add a source without a file to prepared tokens; one text in a hundred is held out."""
    rows, held = [Example(text) for text in texts], max(1, len(texts) // 100)
    for split, own in (("valid", rows[:held]), ("train", rows[held:])):
        TokenFile.build(tokens / split / source, own, words, {"corpus": source})


def make_some(root: Path, words: Tokenizer, tokens: Path) -> None:
    """Add what is made from lists and rules, and from sentences of training."""
    sentences, _ = read_passages(SENTENCES, root, set())
    texts = [*dict.fromkeys(make_texts(sentences, RECORDS, PAIRS))]
    random.Random(0).shuffle(texts)
    add_texts(MADE, texts, words, tokens)
    print(f"{len(texts):,} texts are made", flush=True)


# -- figures -----------------------------------------------------------------------------------------------------------


def measure(
    runs: Sequence[Path],
    teacher: Teacher,
    tokens: Path,
    texts: int,
    samples: int,
    settings: dict[str, Any],
    device: str,
) -> Iterable[dict[str, Any]]:
    """A record a figure: nats per token of held-out passages of each source, and what the teacher says of samples, of
    real passages and of its own texts, with what they cost."""
    yield from english.measure(runs, tokens, texts, samples, device)
    held_out, numbers = join_sources(tokens / "valid")
    passages = list[list[int]]()
    for name, own in numbers.items():
        rows = [read_row(held_out, number) for number in own[:texts]]
        passages += rows
        figures = {"nats_per_token": float(torch.cat(teacher.nats(rows)).mean()), "texts": len(rows)}
        yield {"run": TEACHER, "likelihood": "exact", "kind": "nats", "source": name, **figures}
    words = teacher.tokenizer
    chosen = [passages[int(k)] for k in np.linspace(0, len(passages) - 1, min(samples, len(passages)))]
    yield judge_texts(REAL, [words.decode(row) for row in chosen], teacher)
    begun = time.perf_counter()
    own_texts = [words.decode(row) for row in teacher.write([[teacher.start]] * samples, LONGEST)]
    cost = {"seconds": (time.perf_counter() - begun) / samples}
    yield {**judge_texts(TEACHER, own_texts, teacher), **cost, "calls": LONGEST}
    for run in runs:
        model = TextDiffusion.from_pretrained(run, device)
        model.generate(2, seed=1, **settings)  # so that nothing is prepared within the time
        begun = time.perf_counter()
        made = model.generate(samples, seed=0, **settings)
        cost = {"seconds": (time.perf_counter() - begun) / samples}
        calls = float(np.mean([one.denoiser_calls for one in made]))
        yield {**judge_texts(run.name, [one.text for one in made], teacher), **cost, "calls": calls}


def read_both(run: Path, teacher: Teacher, tokens: Path, texts: int, device: str) -> Iterable[dict[str, Any]]:
    """A record a source: nats a token of held-out passages, all but their first, read from left to right by the teacher
    and by a run that was trained to do so too."""
    held_out, numbers = join_sources(tokens / "valid")
    lm = TextDiffusion.from_pretrained(run, device)
    for name, own in numbers.items():
        rows = [row for row in (read_row(held_out, int(number)) for number in own[:texts]) if len(row) > 1]
        count, nats = sum(len(row) - 1 for row in rows), 0.0
        for row in rows:
            ids, mask = lm.model.lengths.canvas(*(part.to(lm.device) for part in pad_token_rows([row])))
            nats += float(nats_in_order(lm.inference.denoiser, ids, mask)[0, 1 : len(row)].sum())
        theirs = sum(float(one[1:].sum()) for one in teacher.nats(rows))
        yield {"source": name, "texts": len(rows), "tokens": count, "teacher": theirs / count, "run": nats / count}


def judge_texts(name: str, texts: Sequence[str], teacher: Teacher) -> dict[str, Any]:
    """The teacher's nats per token of texts, each token counted once, how diverse these are, and the first of them."""
    rows = [row for row in teacher.tokenizer.encode_batch(list(texts)) if row]
    nats = torch.cat(teacher.nats(rows))
    words = [split_words(text) for text in texts]
    length = float(np.mean([*map(len, words)]))
    figures = {"nats_per_token": float(nats.mean()), "distinct_4": distinct_n(words, 4), "words": length}
    return {"run": name, "kind": "judged", **figures, "texts": len(texts), "first": [*texts[:SHOWN]]}


def fill(
    run: Path, teacher: Teacher, rows: Sequence[dict[str, Any]], n: int, settings: dict[str, Any], device: str
) -> Iterable[dict[str, Any]]:
    """Every sentence with its gaps filled by the likeliest of `n` candidates, and by the teacher, who continues the
    words before each; with the teacher's nats of all wordings."""
    model = TextDiffusion.from_pretrained(run, device)
    ranked: dict[str, Any] = {"candidates": n, "rank": "bound"} if n > 1 and model.model.capabilities.likelihood else {}
    jobs = [
        model.make_job(1, number, controls=[Infill(row["text"])], **ranked, **settings)
        for number, row in enumerate(rows)
    ]
    begun = time.perf_counter()
    made = {index: texts[0] for index, texts in model.run_jobs(jobs)}
    seconds = (time.perf_counter() - begun) / len(rows)
    filled = [
        {
            **row,
            "run": run.name,
            "filled": find_fills(row["text"], made[number].text),
            "left": teacher.continue_gaps(row["text"], row["words"]),
            "calls": made[number].denoiser_calls,
            "seconds": seconds,
        }
        for number, row in enumerate(rows)
    ]
    yield from score_fills(filled, teacher.judge)


def page(rows: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> str:
    """Tables of all figures, and all sentences, good and bad."""
    lines = ["# A left-to-right model as a diffusion model", ""]
    bounds = {(r["run"], r["source"]): r for r in measured if r["kind"] == "nats"}
    runs = [*dict.fromkeys(run for run, _ in bounds)]
    if runs:
        lines += [
            "Nats per token of held-out passages, in the same tokens. A bound (≤) counts the end of a passage too.",
            "",
        ]
        lines += [f"| | {' | '.join(runs)} |", f"|---|{'---|' * len(runs)}"]
        for source in dict.fromkeys(source for _, source in bounds):
            cells = [bounds[run, source] for run in runs]
            shown = [f"{'≤ ' if c['likelihood'] == 'bound' else ''}{c['nats_per_token']:.3f}" for c in cells]
            lines.append(f"| {source} | {' | '.join(shown)} |")
    judged = [r for r in measured if r["kind"] == "judged"]
    if judged:
        lines += ["", "Texts without any words given, as the teacher reads them:", ""]
        lines += ["| texts of | nats/token | distinct-4 | words | calls | seconds |", "|---|---|---|---|---|---|"]
        for r in judged:
            cost = f"{r['calls']:.0f} | {r['seconds']:.3f}" if "calls" in r else " | "
            lines.append(
                f"| {r['run']} | {r['nats_per_token']:.2f} | {r['distinct_4']:.3f} | {r['words']:.0f} | {cost} |"
            )
        for r in judged:
            lines += [
                "",
                f"The first texts of {r['run']}:",
                "",
                *(f"- {' '.join(text.split())}" for text in r["first"]),
            ]
    names = [*dict.fromkeys(row["run"] for row in rows)]
    for run in names:
        own = [row for row in rows if row["run"] == run]
        lines += ["", *page_of_gaps(run, own)]
    return "\n".join(lines) + "\n"


def page_of_gaps(run: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """How a run and the teacher filled the gaps of sentences."""
    limit = float(np.quantile([row["nats"]["words"] for row in rows], 0.9))
    calls, seconds = (float(np.mean([row[name] for row in rows])) for name in ("calls", "seconds"))
    lines = [
        f"## Gaps: {run}",
        "",
        f"{len(rows)} sentences, {calls:.0f} calls and {seconds:.2f} seconds each. The teacher reads each from its",
        f"first gap on; a sentence counts where its nats per token are at most {limit:.2f}, the 90th percentile of the",
        "original ones.",
        "",
        "| words in the gaps | count | nats/token |",
        "|---|---|---|",
    ]
    said = {"words": "the original ones", "filled": run, "left": "the teacher's, who sees what is before"}
    for name, what in (*said.items(), ("others", "of other sentences")):
        nats = np.array([row["nats"][name] for row in rows])
        lines.append(f"| {what} | {100 * (nats <= limit).mean():.0f} % | {nats.mean():.2f} |")
    for row in rows:
        nats = row["nats"]
        left = put_fills(row["text"], row["left"], "**")
        lines += [
            "",
            f"- {put_fills(row['text'], row['filled'], '**')} ({nats['filled']:.2f}) ",
            f"  {left} ({nats['left']:.2f})",
        ]
    return lines


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        choices=(
            "convert",
            "split",
            "join",
            "trim",
            "prepare",
            "write",
            "make",
            "train",
            "measure",
            "read",
            "fill",
            "page",
        ),
    )
    parser.add_argument("given", nargs="*", help="a file, a directory, runs, filled gaps, or changes to the recipe")
    for name in ("--teacher", "--data", "--tokens", "--out", "--measured"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--gaps", type=Path, default=GAPS)
    parser.add_argument("--mark", type=int, default=0, help="the token that stands between the teacher's texts")
    parser.add_argument("--size", type=int, default=24560, help="tokens that are left")
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--most", type=int, default=0, help="passages of each source; 0: all")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_intermixed_args()
    settings = {"temperature": asked.temperature, "steps": asked.steps}
    if asked.what == "convert":
        convert(Path(asked.given[0]), asked.teacher, asked.mark)
    elif asked.what == "split":
        print(f"{len(split(Path(asked.given[0]), asked.out))} pieces in {asked.out}")
    elif asked.what == "join":
        missing = join(Path(asked.given[0]), asked.out)
        print(f"not joined: {', '.join(missing)} did not arrive" if missing else f"{asked.out} is whole")
    elif asked.what == "trim":
        trim(asked.teacher, read_some(asked.data), asked.size)
    elif asked.what == "prepare":
        words = PretrainedTokenizer.read(asked.teacher)
        prepare(asked.data, asked.tokens, 0, asked.most, words, asked.megabytes)
    elif asked.what == "write":
        unpack(asked.tokens)
        write_texts(Teacher(asked.teacher, asked.device, torch.bfloat16), asked.tokens, asked.texts)
    elif asked.what == "make":
        make_some(asked.data, Tokenizer.load(asked.tokens / "tokenizer.json"), asked.tokens)
        pack(asked.tokens)
    elif asked.what == "train":
        own = () if "method=block-diffusion" in asked.given else OF_MASKS
        changes = [f"init={asked.teacher}", *CHANGES, *own, *asked.given]
        done = english.train(asked.tokens, asked.out, asked.minutes, asked.seconds, changes, asked.device)
        print("done" if done else "not finished: the same command continues")
    elif asked.what == "measure":
        runs, teacher = [*map(Path, asked.given)], Teacher(asked.teacher, asked.device)
        found = measure(runs, teacher, asked.tokens, asked.texts, asked.samples, settings, asked.device)
        write_lines(found, asked.out)
    elif asked.what == "read":
        teacher = Teacher(asked.teacher, asked.device)
        write_lines(read_both(Path(asked.given[0]), teacher, asked.tokens, asked.texts, asked.device), asked.out)
    elif asked.what == "fill":
        gaps, teacher = read_gaps(asked.gaps), Teacher(asked.teacher, asked.device)
        runs = [*map(Path, asked.given)]
        every = (r for run in runs for r in fill(run, teacher, gaps, asked.candidates, settings, asked.device))
        write_lines(every, asked.out)
    else:
        measured = read_results(asked.measured) if asked.measured else []
        rows = [row for path in asked.given for row in read_results(Path(path))]
        asked.out.write_text(page(rows, measured), encoding="utf-8")


if __name__ == "__main__":
    main()
