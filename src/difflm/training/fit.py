"""From a recipe to a run: read the texts, build the tokenizer and the model, train."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from difflm.data.batches import AllBut, Batch, Batches, LabelBatch, Permutation, Subset, split
from difflm.data.corpora import NAMES, corpus, corpus_examples, corpus_path, corpus_paths, counted_texts, resolve_data
from difflm.data.e2e import Split as SplitName
from difflm.data.pairs import read_pairs
from difflm.data.texts import MOST_TOKENS, Example
from difflm.data.tokenfile import HELD, Limits, TokenFile, count_lengths, source_fingerprint
from difflm.data.tokenizers import UNK, Bpe, Characters, Tokenizer, Words
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import DiscreteProcess
from difflm.errors import DifflmError, UsageError
from difflm.methods.base import TextSpec
from difflm.models.base import LanguageModel
from difflm.models.diffusion import DiffusionModel
from difflm.runtime.files import locked, read_json, write_atomic
from difflm.runtime.tensors import SkipInit
from difflm.training.budget import Budget
from difflm.training.checkpoints import newest_checkpoint
from difflm.training.recipe import Recipe, check, check_init
from difflm.training.run import FORMAT, bundled_runs, find_run, load_run
from difflm.training.trainer import Figure, Outcome, Trainer, Watcher

VALIDATION_BATCHES = 16
LEAST_LONGEST = 64  # of a canvas whose size is chosen from the texts: batches of short texts are narrower anyway
WARN_SHARE = 0.05  # share of the texts above which leaving them out is a warning

INFO, WARN = 0, -1
Note = Callable[[str, int], None]  # (what is being read, texts so far), (a message, INFO) or (a warning, WARN)
Item = TypeVar("Item")
Origin = tuple[LabelBatch, LabelBatch]  # seeds and sample numbers of the noise that a teacher made the texts of


def train_run(
    recipe: Recipe, out: Path, device: torch.device, watcher: Watcher, note: Note, root: Path | None, resume: bool
) -> Outcome:
    """Train a run in `out`, which is locked meanwhile; with `resume`, continue the one there."""
    recipe = recipe.model_copy(update={"data": resolve_data(recipe.data, root), "init": resolve_init(recipe.init)})
    with locked(out):
        return _train_locked(recipe, out, device, watcher, note, root, resume)


def _train_locked(
    recipe: Recipe, out: Path, device: torch.device, watcher: Watcher, note: Note, root: Path | None, resume: bool
) -> Outcome:
    if resume:
        recipe = check_same_recipe(recipe, out)
    else:
        check_free(out)
    with remove_on_failure(out, keep=resume):
        initial = load_initial(recipe)
        if not resume:
            save_tokenizer(recipe, initial, out, root, note)
        tokenizer = Tokenizer.load(out / "tokenizer.json")
        recipe = choose_sizes(recipe, tokenizer, root, note)
        longest = recipe.longest
        torch.manual_seed(recipe.seed)
        model = recipe.build_method().build(TextSpec(tokenizer.size, longest, recipe.source_longest))
        max_words = min(model.max_words, longest)
        training, held_out = read_splits(recipe, tokenizer, max_words, out, root, note)
        tokens, subset = training
        overlap = count_overlap(training, held_out)
        about = {"texts": len(subset), "held_out": len(held_out[1]), "held_out_seen": overlap, **count_left_out(tokens)}
        if not resume:
            report_left_out(tokens, held_out[1], max_words, note, advise_longest(recipe, longest - max_words, tokens))
            report_overlap(overlap, len(held_out[1]), recipe, note)
        counts = histograms(tokens, subset, longest, tokenizer.size)
        if initial:
            copy_matching_weights(model, initial[0], counts[0])
        else:
            if (
                isinstance(model, DiffusionModel)
                and isinstance(model.process, DiscreteProcess)
                and model.process.reads_pairs
            ):
                model.process.read_pairs(count_neighbours(tokens, subset, longest, tokenizer.size))
            model.observe(*counts)
            if tokens.sources is not None:
                model.observe_pairs(pair_lengths(tokens, subset, longest, recipe.source_longest))
            if not newest_checkpoint(out):  # whose weights would replace these
                recipe.build_method().start(model, tokenizer)
        if recipe.temperature is not None and model.predicts_words:
            model.sampling = replace(model.sampling, temperature=recipe.temperature)
        if initial and not resume:
            report_unknown(counts[1], recipe, note)
        origin: Origin | None = None
        if isinstance(model, DiffusionModel) and model.reflow:
            if not initial:
                raise UsageError("a coupled model begins with its teacher: give init=MODEL, which wrote the texts.")
            origin = read_origin(recipe, tokens, root)
            if not resume:
                report_odd_pairs(origin, tokens, initial[0], recipe, note)
        widths = recipe.widths or default_widths(longest, device)
        source_widths = default_widths(recipe.source_longest, device)
        batches = Batches(
            tokens, recipe.batch_size, recipe.seed, widths, subset, origin=origin, source_widths=source_widths
        )
        validation = validation_batches(*held_out, recipe, widths, origin=origin, source_widths=source_widths)
        write_atomic(out / "recipe.json", json.dumps(recipe.model_dump(), indent=1) + "\n")
        write_config(out, recipe, tokenizer, model, about)
    figure: Figure = "nats_per_token" if model.likelihood else "pair_nats" if origin else "masked_nats"
    trainer = Trainer(model, budget_of(recipe, device), out, device, figure)
    if resume and not trainer.resume():
        note("no checkpoint yet, starting anew", INFO)
    outcome = trainer.fit(batches, validation, watcher)
    write_config(out, recipe, tokenizer, model, {**about, **outcome.summary()})
    return outcome


def write_config(run: Path, recipe: Recipe, tokenizer: Tokenizer, model: LanguageModel, extra: dict[str, Any]) -> None:
    config = {
        "format": FORMAT,
        "method": recipe.method,
        "model": recipe.build_method().model_dump(),
        "vocabulary": tokenizer.size,
        "tokenizer": tokenizer.fingerprint(),
        "longest": recipe.longest,
        "parameters": sum(p.numel() for p in model.parameters()),
        "sampling": asdict(model.sampling),
        "recipe": recipe.model_dump(),
        **extra,
    }
    write_atomic(run / "config.json", json.dumps(config, indent=1, ensure_ascii=False) + "\n")


def check_free(out: Path) -> None:
    if (out / "config.json").exists() or newest_checkpoint(out):
        raise UsageError(f"{out} already holds a run. Continue it with --resume or choose another --out.")


def resolve_init(init: str | None) -> str | None:
    """A name for the same run from any folder."""
    return init if init is None or init in bundled_runs() else str(find_run(init).resolve())


def read_origin(recipe: Recipe, tokens: TokenFile, root: Path | None) -> Origin:
    """Read the seed and the sample number of the noise that each text was made of."""
    numbers = tokens.numbers()
    seeds, samples = (column[numbers] for column in read_pairs(corpus_path(recipe.data, root), recipe.column or "text"))
    return lambda chosen, _: seeds[chosen], lambda chosen, _: samples[chosen]


def report_odd_pairs(origin: Origin, tokens: TokenFile, teacher: LanguageModel, recipe: Recipe, note: Note) -> None:
    """Report texts whose length differs from what their noise gives: they are of another teacher, or are tokenized
    differently from how they were generated."""
    seeds, samples = (torch.from_numpy(column(np.arange(len(tokens)), 0)) for column in origin)
    lengths = torch.from_numpy(tokens.lengths.astype(np.int64))
    if odd := int((teacher.draw_lengths(Noise(seeds, samples)) != lengths).sum()):
        name = Path(str(recipe.init)).name
        note(f"{odd:,} of {len(tokens):,} texts are not as long as {name} makes them of their noise", INFO)


Initial = tuple[LanguageModel, Tokenizer]


def load_initial(recipe: Recipe) -> Initial | None:
    """Load the model and tokenizer of the run that a recipe begins with."""
    if recipe.init is None:
        return None
    check_init(recipe)
    model, tokenizer, _ = load_run(recipe.init)
    return model, tokenizer


def copy_matching_weights(model: LanguageModel, initial: LanguageModel, lengths: torch.Tensor) -> None:
    """Copy weights and sampling defaults of another model. Only the lengths are counted anew: the heads' biases are
    trained already."""
    model.load_state_dict(initial.state_dict())
    if isinstance(model, DiffusionModel):
        model.lengths.observe(lengths)
        if model.reflow:  # which has sampling defaults of its own
            return
    model.sampling = initial.sampling


def report_unknown(tokens: torch.Tensor, recipe: Recipe, note: Note) -> None:
    unknown, total = int(tokens[UNK]), int(tokens.sum())
    if unknown == total:
        raise DifflmError(f"{recipe.init} knows no word of {recipe.data}. Train without init=.")
    if unknown:
        name = Path(str(recipe.init)).name
        note(f"{unknown:,} of {total:,} words are unknown to {name} and are read as such", INFO)


@contextmanager
def remove_on_failure(out: Path, keep: bool = False) -> Iterator[None]:
    """Remove what was written to `out` when preparing a run fails, unless there was something to `keep`."""
    before = set(out.iterdir())
    try:
        yield
    except BaseException:
        for path in set() if keep else set(out.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise


def count_left_out(tokens: TokenFile) -> dict[str, int]:
    """How many texts are not trained on, for the config; `repeated` where a recipe asks for each text once."""
    return {"left_out": tokens.too_long, **({"repeated": tokens.repeated} if tokens.distinct else {})}


def report_left_out(tokens: TokenFile, held_out: Subset, max_words: int, note: Note, advice: str = "") -> None:
    """Report which texts are left out; as a warning, with advice, where they are many."""
    long = tokens.too_long - tokens.source_too_long
    share = f"{tokens.too_long / tokens.read:.0%} of the data. {advice or 'Split them into shorter texts.'}"
    many = tokens.too_long > WARN_SHARE * tokens.read
    for count, what, limit in ((long, "texts", max_words), (tokens.source_too_long, "sources", tokens.source_limit)):
        if count:
            said = f"{count:,} of {tokens.read:,} {what} have more than {limit} tokens and are left out"
            note(f"{said}: {share}" if many else said, WARN if many else INFO)
    if tokens.repeated:
        note(f"{tokens.repeated:,} of {tokens.read:,} texts were there before and are left out", INFO)
    if not len(held_out):
        note("no held-out text is left: the run goes without validation", INFO)


def advise_longest(recipe: Recipe, extra: int, tokens: TokenFile) -> str:
    """The change by which nearly all texts fit, with the `extra` positions that some models need; "" where no change
    is possible."""
    needed = {"longest": round_up(tokens.enough + extra), "source_longest": round_up(tokens.source_enough)}
    raised = {key: value for key, value in needed.items() if value > getattr(recipe, key)}
    if recipe.init or not raised or sum(needed.values()) > MOST_TOKENS:
        return ""
    widths = " widths=[]" if recipe.widths and max(recipe.widths) < needed["longest"] else ""
    changes = " ".join(f"{key}={value}" for key, value in raised.items())
    return f"Train with {changes}{widths}, which holds {HELD:.0%} of them, or split them into shorter texts."


def choose_sizes(recipe: Recipe, tokenizer: Tokenizer, root: Path | None, note: Note) -> Recipe:
    """The recipe with canvas sizes that hold 99 % of the texts and of their sources, where it leaves them open."""
    if recipe.longest and (recipe.source_longest or not recipe.has_sources):
        return recipe
    texts, sources = count_lengths(read_corpus(recipe, root, "train", "measuring texts", note), tokenizer)
    longest, source_longest = recipe.longest, recipe.source_longest
    most = MOST_TOKENS - (source_longest or MOST_TOKENS // 2) if recipe.has_sources else MOST_TOKENS
    if not longest:
        with SkipInit():
            smallest = TextSpec(tokenizer.size, LEAST_LONGEST, LEAST_LONGEST)
            extra = max(0, LEAST_LONGEST - recipe.build_method().build(smallest).max_words)
        longest = min(max(round_up(texts.enough + extra), LEAST_LONGEST), most)
        if longest > LEAST_LONGEST:
            note(f"longest={longest}, since {HELD:.0%} of the texts have at most {texts.enough:,} tokens", INFO)
    if recipe.has_sources and not source_longest:
        source_longest = min(round_up(sources.enough), MOST_TOKENS - longest)
        note(f"source_longest={source_longest}, since {HELD:.0%} of the sources have at most {sources.enough:,}", INFO)
    return recipe.model_copy(update={"longest": longest, "source_longest": source_longest})


def round_up(tokens: int) -> int:
    """To a multiple of eight, as the widths of batches are."""
    return -(-tokens // 8) * 8


def count_overlap(training: "Split", held_out: "Split") -> int:
    """How many held-out texts also occur, token for token, among the training texts."""
    (tokens, subset), (others, few) = training, held_out
    unseen = Counter(others.key(i) for i in few(np.arange(len(few))))
    seen = {key for i in subset(np.arange(len(subset))) if (key := tokens.key(i)) in unseen}
    return sum(unseen[key] for key in seen)


def report_overlap(overlap: int, held_out: int, recipe: Recipe, note: Note) -> None:
    if overlap:
        advice = "" if recipe.distinct or recipe.data in NAMES else "; distinct=true trains on each text once"
        note(f"{overlap:,} of {held_out:,} held-out texts also occur in training{advice}", INFO)


def check_same_recipe(recipe: Recipe, out: Path) -> Recipe:
    """The recipe that a run is resumed with: the one it began with, and the sizes that were chosen from its texts."""
    path = out / "recipe.json"
    if not path.exists():
        raise UsageError(f"{out} holds no run to resume. Start it without --resume.")
    before = check(read_json(path))
    sizes = {key: getattr(recipe, key) or getattr(before, key) for key in ("longest", "source_longest")}
    recipe = recipe.model_copy(update=sizes)
    changed = [k for k in Recipe.model_fields if getattr(before, k) != getattr(recipe, k)]
    if changed:
        raise UsageError(
            f"{out} was begun with {changed[0]}={getattr(before, changed[0])}, not {getattr(recipe, changed[0])}. "
            "Resume with the same recipe."
        )
    return recipe


def budget_of(recipe: Recipe, device: torch.device) -> Budget:
    precision = recipe.precision if recipe.precision != "auto" else ("bf16" if device.type == "cuda" else "fp32")
    shared = {k: v for k, v in recipe.model_dump().items() if k in Budget.__dataclass_fields__}
    if recipe.has_sources:  # samples are drawn from noise alone
        shared["sample_every"] = 0
    on_gpu = device.type == "cuda"
    return Budget(**{**shared, "precision": precision, "graphs": on_gpu, "compile": on_gpu and recipe.compile})


def default_widths(longest: int, device: torch.device) -> tuple[int, ...]:
    # Every width is compiled by itself on a GPU, which costs more than short batches save in a short run.
    return (longest,) if device.type == "cuda" else (*range(8, longest, 8), longest)


def save_tokenizer(recipe: Recipe, initial: Initial | None, out: Path, root: Path | None, note: Note) -> None:
    """Save the run's tokenizer: that of the run it begins with, or one of its own."""
    tokenizer = initial[1] if initial else build_tokenizer(recipe, root, note)
    tokenizer.save(out / "tokenizer.json")


def build_tokenizer(recipe: Recipe, root: Path | None, note: Note) -> Tokenizer:
    """Build a tokenizer from the training texts and their sources."""
    found: Iterator[str]
    if recipe.has_sources:
        pairs = corpus_examples(recipe.data, root, "train", recipe.column)
        found = (text for pair in pairs for text in (pair.source, pair.target) if text)
    else:
        found = counted_texts(recipe.data, root, recipe.column, recipe.chunk)
    texts = report_reading(found, "learning words", note)
    tokenizer: Tokenizer
    if recipe.tokenizer == "bpe":
        tokenizer = Bpe.build(texts, recipe.vocabulary)
    else:
        tokenizer = (Words if recipe.tokenizer == "words" else Characters).build(texts, recipe.more_than)
    if tokenizer.size <= 5:
        raise DifflmError(f"{recipe.data} gives no vocabulary. Give more text, or a lower more_than.")
    return tokenizer


Split = tuple[TokenFile, Subset]


def read_splits(
    recipe: Recipe, tokenizer: Tokenizer, longest: int, out: Path, root: Path | None, note: Note
) -> tuple[Split, Split]:
    """Training and held-out texts: the corpus's own split, or a hundredth of a file that has none."""
    training = read_tokens(recipe, tokenizer, longest, out, "train", root, note)
    if recipe.data in NAMES:
        valid = read_tokens(recipe, tokenizer, longest, out, "valid", root, note)
        return (training, read_whole(training)), (valid, read_whole(valid))
    kept, held = split(training, recipe.seed)
    return (training, kept), (training, held)


def read_whole(tokens: TokenFile) -> Subset:
    return AllBut(len(tokens), np.zeros(0, np.int64))


def read_tokens(
    recipe: Recipe, tokenizer: Tokenizer, longest: int, out: Path, split: SplitName, root: Path | None, note: Note
) -> TokenFile:
    """Open the token file of a split; it is built first where it does not exist or its origin changed."""
    directory = out / "data" / split
    first, *others = (source_fingerprint(path) for path in corpus_paths(recipe.data, root, split))
    origin = {**first, "column": recipe.column, **({"parallel": others} if others else {})}
    if recipe.chunk:
        origin["chunk"] = recipe.chunk
    limits = Limits(longest, recipe.source_longest if recipe.has_sources else None)
    distinct = recipe.distinct and split == "train"
    if directory.exists():
        tokens = TokenFile.open(directory)
        if tokens.matches(tokenizer, limits, origin, distinct):
            return tokens
        if newest_checkpoint(out):
            raise DifflmError(f"{recipe.data} changed since {out} was begun: resuming would not repeat the run.")
    examples = read_corpus(recipe, root, split, f"reading {split} texts", note)
    return TokenFile.build(directory, examples, tokenizer, limits, origin, distinct)


def read_corpus(recipe: Recipe, root: Path | None, split: SplitName, what: str, note: Note) -> Iterator[Example]:
    """Yield the examples of a split, and report how many were read."""
    if recipe.has_sources:
        return report_reading(corpus_examples(recipe.data, root, split, recipe.column), what, note)
    texts = corpus(recipe.data, root, split, recipe.column, recipe.chunk)
    return report_reading(map(Example, texts), what, note)


def report_reading(items: Iterable[Item], what: str, note: Note) -> Iterator[Item]:
    for number, item in enumerate(items, start=1):
        if number % 10_000 == 0:
            note(what, number)
        yield item


def sample_rows(tokens: TokenFile, subset: Subset, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Some training texts, 100,000 at most."""
    chosen = subset(Permutation(len(subset), 0)(np.arange(min(len(subset), 100_000))))
    return tokens.rows(chosen, longest)


def pair_lengths(tokens: TokenFile, subset: Subset, longest: int, source_longest: int) -> torch.Tensor:
    """How many pairs have each length of source and text, [source_longest + 1, longest + 1]."""
    assert tokens.sources is not None
    chosen = subset(np.arange(len(subset)))
    lengths = tokens.sources.lengths[chosen] * (longest + 1) + tokens.lengths[chosen]
    counts = np.bincount(lengths, minlength=(source_longest + 1) * (longest + 1))
    return torch.from_numpy(counts).view(source_longest + 1, longest + 1)


def count_neighbours(tokens: TokenFile, subset: Subset, longest: int, vocabulary: int) -> torch.Tensor:
    """How often each token precedes each other one, [V, V]."""
    ids, lengths = sample_rows(tokens, subset, longest)
    inside = np.arange(1, longest) < lengths[:, None]
    before, after = ids[:, :-1][inside].astype(np.int64), ids[:, 1:][inside]
    counts = np.bincount(before * vocabulary + after, minlength=vocabulary**2)
    return torch.from_numpy(counts).view(vocabulary, vocabulary)


def histograms(tokens: TokenFile, subset: Subset, longest: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many training texts have each length, and how often each token occurs."""
    ids, lengths = sample_rows(tokens, subset, longest)
    words = ids[np.arange(longest) < lengths[:, None]]
    counts = np.bincount(lengths, minlength=longest + 1), np.bincount(words, minlength=vocabulary)
    return torch.from_numpy(counts[0]), torch.from_numpy(counts[1])


def validation_batches(
    tokens: TokenFile,
    subset: Subset,
    recipe: Recipe,
    widths: tuple[int, ...],
    labels: Mapping[str, LabelBatch] | None = None,
    origin: Origin | None = None,
    source_widths: tuple[int, ...] = (),
) -> list[Batch]:
    """A fixed set of held-out batches."""
    if not len(subset):
        return []
    size = min(recipe.batch_size, len(subset))
    batches = Batches(tokens, size, recipe.seed, widths, subset, labels, origin, source_widths)
    return [batches.batch(step) for step in range(min(VALIDATION_BATCHES, max(1, len(subset) // size)))]
