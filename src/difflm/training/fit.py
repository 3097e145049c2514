"""From a recipe to a run: read the texts, learn the words, build the model, train it."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from difflm.data.batches import AllBut, Batch, Batches, LabelBatch, Permutation, Subset, split
from difflm.data.corpora import NAMES, corpus, corpus_path, counted_texts, located
from difflm.data.pairs import read_pairs
from difflm.data.texts import MOST_TOKENS
from difflm.data.tokenfile import HELD, TokenFile, count_lengths, source_fingerprint
from difflm.data.tokenizers import UNK, Bpe, Characters, Tokenizer, Words
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import DiscreteProcess
from difflm.errors import DifflmError, UsageError
from difflm.models.base import LanguageModel
from difflm.models.diffusion import DiffusionModel
from difflm.runtime.files import locked, read_json, write_atomic
from difflm.runtime.tensors import SkipInit
from difflm.training.budget import Budget
from difflm.training.checkpoints import newest_checkpoint
from difflm.training.recipe import Recipe, check, check_init
from difflm.training.run import bundled_runs, find_run, load_run, write_config
from difflm.training.trainer import Figure, Outcome, Trainer, Watcher

VALIDATION_BATCHES = 16
LEAST_LONGEST = 64  # of a canvas whose size the texts decide: short batches are cut to their own width anyway
LOUD = 0.05  # share of the texts above which leaving them out is a warning

KNOW, WARN = 0, -1
Note = Callable[[str, int], None]  # what is being read, and how many texts so far; or a thing to know, or a warning
Origin = tuple[LabelBatch, LabelBatch]  # seeds and sample numbers of the noise that texts were made of


def train_run(
    recipe: Recipe, out: Path, device: torch.device, watcher: Watcher, note: Note, root: Path | None, resume: bool
) -> Outcome:
    """Train a run in `out`, which no other process may write meanwhile; with `resume`, continue the one there."""
    recipe = recipe.model_copy(update={"data": located(recipe.data, root), "init": locate_data(recipe.init)})
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
        begin = initialise_from(recipe)
        tokenizer = Tokenizer.load(out / "tokenizer.json") if resume else vocabulary_of(recipe, begin, out, root, note)
        longest = recipe.longest or choose_longest(recipe, tokenizer, root, note)
        recipe = recipe.model_copy(update={"longest": longest})
        torch.manual_seed(recipe.seed)
        model = recipe.build_method().build(tokenizer.size, longest)
        room = min(model.max_words, longest)
        training, held_out = read_splits(recipe, tokenizer, room, out, root, note)
        tokens, subset = training
        seen = count_seen(training, held_out)
        about = {"texts": len(subset), "held_out": len(held_out[1]), "held_out_seen": seen, **count_left_out(tokens)}
        if not resume:
            report_left_out(tokens, held_out[1], room, note, raise_longest(recipe, longest - room, tokens))
            tell_seen(seen, len(held_out[1]), recipe, note)
        counts = histograms(tokens, subset, longest, tokenizer.size)
        if begin:
            copy_matching_weights(model, begin[0], counts[0])
        else:
            if (
                isinstance(model, DiffusionModel)
                and isinstance(model.process, DiscreteProcess)
                and model.process.reads_pairs
            ):
                model.process.read_pairs(count_neighbours(tokens, subset, longest, tokenizer.size))
            model.observe(*counts)
            if not newest_checkpoint(out):  # which would bring weights of its own
                recipe.build_method().start(model, tokenizer)
        if recipe.temperature is not None and model.predicts_words:
            model.sampling = replace(model.sampling, temperature=recipe.temperature)
        if begin and not resume:
            report_unknown(counts[1], recipe, note)
        origin: Origin | None = None
        if isinstance(model, DiffusionModel) and model.reflow:
            if not begin:
                raise UsageError("a coupled model begins with its teacher: give init=MODEL, which wrote the texts.")
            origin = read_origin(recipe, tokens, root)
            if not resume:
                report_odd_pairs(origin, tokens, begin[0], recipe, note)
        widths = recipe.widths or default_widths(longest, device)
        batches = Batches(tokens, recipe.batch_size, recipe.seed, widths, subset, origin=origin)
        write_atomic(out / "recipe.json", json.dumps(recipe.model_dump(), indent=1) + "\n")
        write_config(out, recipe, tokenizer, model, about)
    figure: Figure = "nats_per_token" if model.likelihood else "pair_nats" if origin else "masked_nats"
    trainer = Trainer(model, budget_of(recipe, device), out, device, figure)
    if resume and not trainer.resume():
        note("no checkpoint yet, starting anew", 0)
    outcome = trainer.fit(batches, validation_batches(*held_out, recipe, widths, origin=origin), watcher)
    write_config(out, recipe, tokenizer, model, {**about, **run_trainer(outcome)})
    return outcome


def check_free(out: Path) -> None:
    if (out / "config.json").exists() or newest_checkpoint(out):
        raise UsageError(f"{out} already holds a run. Continue it with --resume or choose another --out.")


def locate_data(init: str | None) -> str | None:
    """A name for the same run from any folder."""
    return init if init is None or init in bundled_runs() else str(find_run(init).resolve())


def read_origin(recipe: Recipe, tokens: TokenFile, root: Path | None) -> Origin:
    """Seed and sample number of the noise that each text was made of."""
    numbers = tokens.numbers()
    seeds, samples = (column[numbers] for column in read_pairs(corpus_path(recipe.data, root), recipe.column or "text"))
    return lambda chosen, _: seeds[chosen], lambda chosen, _: samples[chosen]


def report_odd_pairs(origin: Origin, tokens: TokenFile, teacher: LanguageModel, recipe: Recipe, note: Note) -> None:
    """The noise of a text also says how long it is: others are of another model, or are not read as they were made."""
    seeds, samples = (torch.from_numpy(column(np.arange(len(tokens)), 0)) for column in origin)
    lengths = torch.from_numpy(tokens.lengths.astype(np.int64))
    if odd := int((teacher.draw_lengths(Noise(seeds, samples)) != lengths).sum()):
        name = Path(str(recipe.init)).name
        note(f"{odd:,} of {len(tokens):,} texts are not as long as {name} makes them of their noise", 0)


Begin = tuple[LanguageModel, Tokenizer]


def initialise_from(recipe: Recipe) -> Begin | None:
    """The model and words of the run that a recipe begins with."""
    if recipe.init is None:
        return None
    check_init(recipe)
    model, tokenizer, _ = load_run(recipe.init)
    return model, tokenizer


def copy_matching_weights(model: LanguageModel, begin: LanguageModel, lengths: torch.Tensor) -> None:
    """Weights and settings of another model. Of what `observe` would learn only the lengths: the heads know their words
    already."""
    model.load_state_dict(begin.state_dict())
    if isinstance(model, DiffusionModel):
        model.lengths.observe(lengths)
        if model.reflow:  # it writes in its own way
            return
    model.sampling = begin.sampling


def report_unknown(tokens: torch.Tensor, recipe: Recipe, note: Note) -> None:
    unknown, total = int(tokens[UNK]), int(tokens.sum())
    if unknown == total:
        raise DifflmError(f"{recipe.init} knows no word of {recipe.data}. Train without init=.")
    if unknown:
        name = Path(str(recipe.init)).name
        note(f"{unknown:,} of {total:,} words are unknown to {name} and are read as such", 0)


@contextmanager
def remove_on_failure(out: Path, keep: bool = False) -> Iterator[None]:
    """Take back what was begun in `out` when the texts turn out unusable, unless there was something to `keep`."""
    before = set(out.iterdir())
    try:
        yield
    except BaseException:
        for path in set() if keep else set(out.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise


def count_left_out(tokens: TokenFile) -> dict[str, int]:
    """How many texts are not learned from, for the config; `repeated` where a recipe asks for each text once."""
    return {"left_out": tokens.too_long, **({"repeated": tokens.repeated} if tokens.distinct else {})}


def report_left_out(tokens: TokenFile, held_out: Subset, room: int, note: Note, advice: str = "") -> None:
    """Say which texts are left out; loudly, with advice, where they are many."""
    if tokens.too_long:
        said = f"{tokens.too_long:,} of {tokens.read:,} texts have more than {room} tokens and are left out"
        if tokens.too_long > LOUD * tokens.read:
            share = f"{tokens.too_long / tokens.read:.0%} of the data"
            note(f"{said}: {share}. {advice or 'Split them into shorter texts.'}", WARN)
        else:
            note(said, KNOW)
    if tokens.repeated:
        note(f"{tokens.repeated:,} of {tokens.read:,} texts were there before and are left out", KNOW)
    if not len(held_out):
        note("no held-out text is left: the run goes without validation", KNOW)


def raise_longest(recipe: Recipe, extra: int, tokens: TokenFile) -> str:
    """The change that makes room for nearly all texts and for the `extra` places that some models need; "" where none
    is possible."""
    needed = round_up(tokens.enough + extra)
    if recipe.init or needed > MOST_TOKENS:
        return ""
    widths = " widths=[]" if recipe.widths and max(recipe.widths) < needed else ""
    return f"Train with longest={needed}{widths}, which holds {HELD:.0%} of them, or split them into shorter texts."


def choose_longest(recipe: Recipe, tokenizer: Tokenizer, root: Path | None, note: Note) -> int:
    """Tokens of a canvas that holds 99 % of the texts, from 64 to the most that is possible."""
    texts = count_tokens(corpus(recipe.data, root, "train", recipe.column, recipe.chunk), "measuring texts", note)
    enough = count_lengths(texts, tokenizer).enough
    with SkipInit():
        room = recipe.build_method().build(tokenizer.size, LEAST_LONGEST).max_words
    longest = min(max(round_up(enough + max(0, LEAST_LONGEST - room)), LEAST_LONGEST), MOST_TOKENS)
    if longest > LEAST_LONGEST:
        note(f"longest={longest}, since {HELD:.0%} of the texts have at most {enough:,} tokens", KNOW)
    return longest


def round_up(tokens: int) -> int:
    """To whole eights, as the widths of batches are."""
    return -(-tokens // 8) * 8


def count_seen(training: "Split", held_out: "Split") -> int:
    """How many held-out texts also occur, token for token, among the training texts."""
    (tokens, subset), (others, few) = training, held_out
    unseen = Counter(others.key(i) for i in few(np.arange(len(few))))
    seen = {key for i in subset(np.arange(len(subset))) if (key := tokens.key(i)) in unseen}
    return sum(unseen[key] for key in seen)


def tell_seen(seen: int, held_out: int, recipe: Recipe, note: Note) -> None:
    if seen:
        advice = "" if recipe.distinct or recipe.data in NAMES else "; distinct=true trains on each text once"
        note(f"{seen:,} of {held_out:,} held-out texts also occur in training{advice}", KNOW)


def run_trainer(outcome: Outcome) -> dict[str, object]:
    return {
        "trained": {
            "steps": outcome.step,
            "stopped": outcome.stopped,
            "minutes": round(outcome.seconds / 60, 2),
            "validation": outcome.validation,
        }
    }


def check_same_recipe(recipe: Recipe, out: Path) -> Recipe:
    """A run is resumed with the recipe it began with, and with the `longest` that its texts decided then."""
    path = out / "recipe.json"
    if not path.exists():
        raise UsageError(f"{out} holds no run to resume. Start it without --resume.")
    before = check(read_json(path))
    if not recipe.longest:
        recipe = recipe.model_copy(update={"longest": before.longest})
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
    on_gpu = device.type == "cuda"
    return Budget(**{**shared, "precision": precision, "graphs": on_gpu, "compile": on_gpu and recipe.compile})


def default_widths(longest: int, device: torch.device) -> tuple[int, ...]:
    # Every width is compiled by itself on a GPU, which costs more than short batches save in a short run.
    return (longest,) if device.type == "cuda" else (*range(8, longest, 8), longest)


def vocabulary_of(recipe: Recipe, begin: Begin | None, out: Path, root: Path | None, note: Note) -> Tokenizer:
    """The run's tokenizer: that of the run it begins with, or its own."""
    tokenizer = begin[1] if begin else learn_tokenizer(recipe, root, note)
    tokenizer.save(out / "tokenizer.json")
    return tokenizer


def learn_tokenizer(recipe: Recipe, root: Path | None, note: Note) -> Tokenizer:
    """Learned from the training texts."""
    texts = count_tokens(counted_texts(recipe.data, root, recipe.column, recipe.chunk), "learning words", note)
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
    texts = count_tokens(corpus(recipe.data, root, split, recipe.column, recipe.chunk), f"reading {split} texts", note)  # type: ignore[arg-type]
    return TokenFile.build(directory, texts, tokenizer, longest, source, distinct)


def count_tokens(texts: Iterable[str], what: str, note: Note) -> Iterator[str]:
    for number, text in enumerate(texts, start=1):
        if number % 10_000 == 0:
            note(what, number)
        yield text


def sample_rows(tokens: TokenFile, subset: Subset, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Training texts, 100,000 at most."""
    chosen = subset(Permutation(len(subset), 0)(np.arange(min(len(subset), 100_000))))
    return tokens.rows(chosen, longest)


def count_neighbours(tokens: TokenFile, subset: Subset, longest: int, vocabulary: int) -> torch.Tensor:
    """How often each token stands before each other one, [V, V]."""
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
) -> list[Batch]:
    """A fixed set of held-out batches."""
    if not len(subset):
        return []
    size = min(recipe.batch_size, len(subset))
    batches = Batches(tokens, size, recipe.seed, widths, subset, labels, origin)
    return [batches.batch(step) for step in range(min(VALIDATION_BATCHES, max(1, len(subset) // size)))]
