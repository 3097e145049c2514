"""From a recipe to a run: read the texts, learn the words, build the model, train it."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from difflm.data.batches import AllBut, Batch, Batches, LabelBatch, Permutation, Subset, split
from difflm.data.corpora import NAMES, corpus, corpus_path, counted_texts, located
from difflm.data.pairs import read_pairs
from difflm.data.tokenfile import TokenFile, source_fingerprint
from difflm.data.tokenizers import UNK, Bpe, Characters, Tokenizer, Words
from difflm.errors import DifflmError, UsageError
from difflm.files import explain, read_json, write_atomic
from difflm.model import DiffusionModel, LanguageModel
from difflm.noise import Noise
from difflm.recipe import Recipe, check, check_init
from difflm.run import bundled_runs, find_run, load_run, write_config
from difflm.token_model import TokenDiffusion
from difflm.training.budget import Budget
from difflm.training.checkpoints import newest_checkpoint
from difflm.training.loop import Figure, Outcome, Trainer, Watcher

VALIDATION_BATCHES = 16

Note = Callable[[str, int], None]  # what is being read, and how many texts so far; 0: a thing to know


def train_run(
    recipe: Recipe, out: Path, device: torch.device, watcher: Watcher, note: Note, root: Path | None, resume: bool
) -> Outcome:
    """Train a run in `out`; with `resume`, continue the one that is there."""
    recipe = recipe.model_copy(update={"data": located(recipe.data, root), "init": placed(recipe.init)})
    if resume:
        same_recipe(recipe, out)
    elif (out / "config.json").exists() or newest_checkpoint(out):
        raise UsageError(f"{out} already holds a run. Continue it with --resume or choose another --out.")
    with whole_or_nothing(out, keep=resume):
        begin = begin_with(recipe)
        tokenizer = Tokenizer.load(out / "tokenizer.json") if resume else words_of(recipe, begin, out, root, note)
        torch.manual_seed(recipe.seed)
        model = recipe.build_method().build(tokenizer.size, recipe.longest)
        room = min(model.room, recipe.longest)
        training, held_out = read_splits(recipe, tokenizer, room, out, root, note)
        tokens, subset = training
        about = {"texts": len(subset), "held_out": len(held_out[1]), **left_out(tokens)}
        if not resume:
            tell_left_out(tokens, held_out[1], room, note)
        counts = histograms(tokens, subset, recipe.longest, tokenizer.size)
        if begin:
            take_over(model, begin[0], counts[0])
        else:
            if isinstance(model, TokenDiffusion) and model.process.reads_pairs:
                model.process.read_pairs(neighbours(tokens, subset, recipe.longest, tokenizer.size))
            model.observe(*counts)
            if not resume:
                recipe.build_method().start(model, tokenizer)
        if recipe.temperature is not None and model.predicts_words:
            model.sampling = replace(model.sampling, temperature=recipe.temperature)
        if begin and not resume:
            tell_unknown(counts[1], recipe, note)
        pairs: list[LabelBatch] = []
        if isinstance(model, DiffusionModel) and model.coupled:
            if not begin:
                raise UsageError("a coupled model begins with its teacher: give init=MODEL, which wrote the texts.")
            pairs = pairs_of(recipe, tokens, root)
            if not resume:
                tell_odd_pairs(pairs, tokens, begin[0], recipe, note)
        widths = recipe.widths or default_widths(recipe.longest, device)
        batches = Batches(tokens, recipe.batch_size, recipe.seed, widths, subset, pairs)
        write_atomic(out / "recipe.json", json.dumps(recipe.model_dump(), indent=1) + "\n")
        write_config(out, recipe, tokenizer, model, about)
    figure: Figure = "nats_per_token" if model.likelihood else "pair_nats" if pairs else "masked_nats"
    trainer = Trainer(model, budget_of(recipe, device), out, device, figure)
    if resume and not trainer.resume():
        note("no checkpoint yet, starting anew", 0)
    outcome = trainer.fit(batches, validation_batches(*held_out, recipe, widths, pairs), watcher)
    write_config(out, recipe, tokenizer, model, {**about, **trained(outcome)})
    return outcome


def placed(init: str | None) -> str | None:
    """A name for the same run from any folder."""
    return init if init is None or init in bundled_runs() else str(find_run(init).resolve())


def pairs_of(recipe: Recipe, tokens: TokenFile, root: Path | None) -> list[LabelBatch]:
    """Seed and sample number of the noise that each text was made of."""
    numbers = tokens.numbers()
    found = read_pairs(corpus_path(recipe.data, root), recipe.column or "text")
    return [lambda chosen, width, column=column[numbers]: column[chosen] for column in found]  # type: ignore[misc]


def tell_odd_pairs(
    pairs: Sequence[LabelBatch], tokens: TokenFile, teacher: LanguageModel, recipe: Recipe, note: Note
) -> None:
    """The noise of a text also says how long it is: others are of another model, or are not read as they were made."""
    seeds, samples = (torch.from_numpy(column(np.arange(len(tokens)), 0)) for column in pairs)
    lengths = torch.from_numpy(tokens.lengths.astype(np.int64))
    if odd := int((teacher.lengths_for(Noise(seeds, samples)) != lengths).sum()):
        name = Path(str(recipe.init)).name
        note(f"{odd:,} of {len(tokens):,} texts are not as long as {name} makes them of their noise", 0)


Begin = tuple[LanguageModel, Tokenizer]


def begin_with(recipe: Recipe) -> Begin | None:
    """The model and words of the run that a recipe begins with."""
    if recipe.init is None:
        return None
    check_init(recipe)
    model, tokenizer, _ = load_run(recipe.init)
    return model, tokenizer


def take_over(model: LanguageModel, begin: LanguageModel, lengths: torch.Tensor) -> None:
    """Weights and settings of another model. Of what `observe` would learn only the lengths: the heads know their words
    already."""
    model.load_state_dict(begin.state_dict())
    if isinstance(model, DiffusionModel):
        model.lengths.observe(lengths)
        if model.coupled:  # it writes in its own way
            return
    model.sampling = begin.sampling


def tell_unknown(tokens: torch.Tensor, recipe: Recipe, note: Note) -> None:
    unknown, total = int(tokens[UNK]), int(tokens.sum())
    if unknown == total:
        raise DifflmError(f"{recipe.init} knows no word of {recipe.data}. Train without init=.")
    if unknown:
        name = Path(str(recipe.init)).name
        note(f"{unknown:,} of {total:,} words are unknown to {name} and are read as such", 0)


@contextmanager
def whole_or_nothing(out: Path, keep: bool = False) -> Iterator[None]:
    """Say at once that `out` cannot be written; take back what was begun there when the texts turn out unusable,
    unless there was something to `keep`."""
    if keep:
        yield
        return
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        before = set(out.iterdir())
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise explain(error, out) from None
    try:
        yield
    except BaseException:
        for path in set(out.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        with suppress(OSError):  # a folder in which somebody else put something stays
            for folder in made:
                folder.rmdir()
        raise


def left_out(tokens: TokenFile) -> dict[str, int]:
    """How many texts are not learned from, for the config; `repeated` where a recipe asks for each text once."""
    return {"left_out": tokens.too_long, **({"repeated": tokens.repeated} if tokens.distinct else {})}


def tell_left_out(tokens: TokenFile, held_out: Subset, room: int, note: Note) -> None:
    if tokens.too_long:
        note(f"{tokens.too_long:,} of {tokens.read:,} texts have more than {room} tokens and are left out", 0)
    if tokens.repeated:
        note(f"{tokens.repeated:,} of {tokens.read:,} texts were there before and are left out", 0)
    if not len(held_out):
        note("no held-out text is left: the run goes without validation", 0)


def trained(outcome: Outcome) -> dict[str, object]:
    return {
        "trained": {
            "steps": outcome.step,
            "stopped": outcome.stopped,
            "minutes": round(outcome.seconds / 60, 2),
            "validation": outcome.validation,
        }
    }


def same_recipe(recipe: Recipe, out: Path) -> None:
    """A run is resumed with the recipe it began with."""
    path = out / "recipe.json"
    if not path.exists():
        raise UsageError(f"{out} holds no run to resume. Start it without --resume.")
    before = check(read_json(path))
    changed = [k for k in Recipe.model_fields if getattr(before, k) != getattr(recipe, k)]
    if changed:
        raise UsageError(
            f"{out} was begun with {changed[0]}={getattr(before, changed[0])}, not {getattr(recipe, changed[0])}. "
            "Resume with the same recipe."
        )


def budget_of(recipe: Recipe, device: torch.device) -> Budget:
    precision = recipe.precision if recipe.precision != "auto" else ("bf16" if device.type == "cuda" else "fp32")
    shared = {k: v for k, v in recipe.model_dump().items() if k in Budget.__dataclass_fields__}
    on_gpu = device.type == "cuda"
    return Budget(**{**shared, "precision": precision, "graphs": on_gpu, "compile": on_gpu and recipe.compile})


def default_widths(longest: int, device: torch.device) -> tuple[int, ...]:
    # Every width is compiled by itself on a GPU, which costs more than short batches save in a short run.
    return (longest,) if device.type == "cuda" else (*range(8, longest, 8), longest)


def words_of(recipe: Recipe, begin: Begin | None, out: Path, root: Path | None, note: Note) -> Tokenizer:
    """The run's tokenizer: that of the run it begins with, or its own."""
    tokenizer = begin[1] if begin else learn_tokenizer(recipe, root, note)
    tokenizer.save(out / "tokenizer.json")
    return tokenizer


def learn_tokenizer(recipe: Recipe, root: Path | None, note: Note) -> Tokenizer:
    """Learned from the training texts."""
    texts = counted(counted_texts(recipe.data, root, recipe.column, recipe.chunk), "learning words", note)
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
        return (training, whole(training)), (valid, whole(valid))
    kept, held = split(training, recipe.seed)
    return (training, kept), (training, held)


def whole(tokens: TokenFile) -> Subset:
    return AllBut(len(tokens), np.zeros(0, np.int64))


def read_tokens(
    recipe: Recipe, tokenizer: Tokenizer, longest: int, out: Path, split: str, root: Path | None, note: Note
) -> TokenFile:
    """Tokens on disk, made once; remade when the file, the words or the limit changed."""
    directory = out / "data" / split
    source = source_fingerprint(corpus_path(recipe.data, root, split))  # type: ignore[arg-type]
    source["column"] = recipe.column
    if recipe.chunk:
        source["chunk"] = recipe.chunk
    distinct = recipe.distinct and split == "train"
    if directory.exists():
        tokens = TokenFile.open(directory)
        if tokens.matches(tokenizer, longest, source, distinct):
            return tokens
        if newest_checkpoint(out):
            raise DifflmError(f"{recipe.data} changed since {out} was begun: resuming would not repeat the run.")
    texts = counted(corpus(recipe.data, root, split, recipe.column, recipe.chunk), f"reading {split} texts", note)  # type: ignore[arg-type]
    return TokenFile.build(directory, texts, tokenizer, longest, source, distinct)


def counted(texts: Iterable[str], what: str, note: Note) -> Iterator[str]:
    for number, text in enumerate(texts, start=1):
        if number % 10_000 == 0:
            note(what, number)
        yield text


def some_rows(tokens: TokenFile, subset: Subset, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Training texts, 100,000 at most."""
    chosen = subset(Permutation(len(subset), 0)(np.arange(min(len(subset), 100_000))))
    return tokens.rows(chosen, longest)


def neighbours(tokens: TokenFile, subset: Subset, longest: int, vocabulary: int) -> torch.Tensor:
    """How often each token stands before each other one, [V, V]."""
    ids, lengths = some_rows(tokens, subset, longest)
    inside = np.arange(1, longest) < lengths[:, None]
    before, after = ids[:, :-1][inside].astype(np.int64), ids[:, 1:][inside]
    counts = np.bincount(before * vocabulary + after, minlength=vocabulary**2)
    return torch.from_numpy(counts).view(vocabulary, vocabulary)


def histograms(tokens: TokenFile, subset: Subset, longest: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many training texts have each length, and how often each token occurs."""
    ids, lengths = some_rows(tokens, subset, longest)
    words = ids[np.arange(longest) < lengths[:, None]]
    counts = np.bincount(lengths, minlength=longest + 1), np.bincount(words, minlength=vocabulary)
    return torch.from_numpy(counts[0]), torch.from_numpy(counts[1])


def validation_batches(
    tokens: TokenFile, subset: Subset, recipe: Recipe, widths: tuple[int, ...], labels: Sequence[LabelBatch] = ()
) -> list[Batch]:
    """A fixed set of held-out batches."""
    if not len(subset):
        return []
    size = min(recipe.batch_size, len(subset))
    batches = Batches(tokens, size, recipe.seed, widths, subset, labels)
    return [batches.batch(step) for step in range(min(VALIDATION_BATCHES, max(1, len(subset) // size)))]
