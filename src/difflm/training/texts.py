"""The texts of a run: its tokenizer, and texts that are read, chosen by their sizes, counted, held out, in batches."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from difflm.data import tokenfile
from difflm.data.batches import Batch, Batches, Permutation, Stream, split
from difflm.data.corpora import NAMES, corpus_examples, corpus_path, corpus_paths, counted_texts, plain_texts
from difflm.data.corpora import Split as SplitName
from difflm.data.prompts import prompt_words
from difflm.data.texts import LONGEST, MOST_TOKENS, cut_text, split_long
from difflm.data.tokenfile import HELD, Ints, Limits, TokenFile, digest_key, select_texts, tokens_that_hold_most
from difflm.data.tokenizers import Bpe, Characters, PretrainedTokenizer, Tokenizer, Words, is_pretrained
from difflm.errors import DifflmError
from difflm.methods import METHODS, TextSpec
from difflm.models.adapters import fingerprint_weights
from difflm.models.base import LanguageModel, Trainable
from difflm.runtime.files import FORMAT, Json
from difflm.runtime.tensors import SkipInit
from difflm.training.recipe import TOKENIZERS, Recipe
from difflm.training.run import find_run
from difflm.training.validation import Figure

VALIDATION_BATCHES = 16
LEAST_LONGEST = 64  # if the canvas size is chosen from the texts: batches of short texts are narrower anyway
WARN_SHARE = 0.05  # share of the texts above which leaving them out is a warning
LEARNED = 200_000_000  # characters from which byte pairs are learned: more would only take memory
RELEASE = 1 << 14  # texts that are compared before memory is freed

Item = TypeVar("Item")
# (What is being read, texts so far), (a message, INFO), (a warning, WARN) or (what is being done, DOING).
Note = Callable[[str, int], None]
INFO, WARN, DOING = 0, -1, -2
Split = tuple[TokenFile, Ints]  # texts, and the indices of those that belong to the split


@dataclass(frozen=True)
class Setup:
    """The arguments of a training run."""

    recipe: Recipe
    out: Path  # the directory of the run
    device: torch.device
    note: Note
    root: Path | None = None  # of the corpora; None: $DIFFLM_DATA
    resume: bool = False  # continue the run that the directory holds
    begun: float = field(default_factory=time.perf_counter)  # when the clock of its minutes began

    def report(self, message: str, level: int = INFO) -> None:
        """Report something about the texts; a resumed run has already reported it."""
        if not self.resume:
            self.note(message, level)


@dataclass(frozen=True)
class Prepared:
    """A model and its batches, ready for training, and what the run's config says about them."""

    recipe: Recipe  # with the sizes that were chosen from the texts
    model: Trainable
    batches: Stream
    held_out: list[Batch]
    figure: Figure
    config: Json
    tokenizer: Tokenizer | None = None  # that it holds itself


def describe_run(recipe: Recipe, model: LanguageModel, tokenizer: Tokenizer, counts: Json) -> Json:
    """The config of a run. The model gets the sampling defaults of its recipe."""
    if recipe.temperature is not None and model.capabilities.predicts_words:
        model.sampling = replace(model.sampling, temperature=recipe.temperature)
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
    }
    if recipe.source_words == "own":
        config["source_vocabulary"] = tokenizer.for_sources.size
    if recipe.lora:
        base = recipe.init or str(Path(recipe.model["pretrained"]).resolve())
        config["adapter"] = {"base": base, "fingerprint": fingerprint_weights(find_run(base))}
    return config | counts


# -- texts that fit ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    """The texts of a run that fit its model, those that are held out, and their numbers for the config."""

    training: Split
    held_out: Split
    counts: Json


def choose_texts(setup: Setup, tokenizer: Tokenizer, tokens: TokenFile, limits: Limits, advice: str = "") -> Texts:
    """Choose the texts that fit. Held-out ones are those of the corpus's own split, or a hundredth of a file, which has
    none. Report what is left out; as a warning, with advice, if it is much."""
    recipe, selection = setup.recipe, select_texts(tokens, limits, setup.recipe.distinct)
    if recipe.data in NAMES:
        valid = read_tokens(setup, tokenizer, "valid")
        kept, held_out = selection.kept, (valid, select_texts(valid, limits).kept)
    else:
        kept, held = split(selection.kept, len(tokens), recipe.seed, tokens.texts)
        held_out = tokens, held
        if tokens.holds_pieces and tokens.texts is not None and len(held) > WARN_SHARE * len(tokens):
            whole = f"{len(np.unique(tokens.texts[held])):,} of {tokens.texts[-1] + 1:,} texts"
            setup.report(f"{len(held) / len(tokens):.0%} of the pieces are held out: all of {whole}")
    _, _, total, too_long, source_too_long, repeated = selection
    advice = advice or f"Split them into shorter texts.{'' if recipe.has_sources else tokenfile.PACK}"
    many, wide = too_long > WARN_SHARE * total, " or are wider than a picture" if limits.room else ""
    for count, what, limit in (
        (too_long - source_too_long, "texts", f"{limits.target} tokens{wide}"),
        (source_too_long, "sources", f"{limits.source} tokens"),
    ):
        if count:
            said = f"{count:,} of {total:,} {what} have more than {limit} and are left out"
            said += f": {too_long / total:.0%} of the data. {advice}" * many
            setup.report(said, WARN if many else INFO)
    if repeated:
        setup.report(f"{repeated:,} of {total:,} texts are repeated and are left out")
    if not len(held_out[1]):
        setup.report("no held-out text is left: the run goes without validation")
    counts = {"texts": len(kept), "held_out": len(held_out[1]), "left_out": too_long}
    return Texts((tokens, kept), held_out, counts | ({"repeated": repeated} if recipe.distinct else {}))


def advise_longest(recipe: Recipe, extra: int, tokens: TokenFile) -> str:
    """The change with which nearly all texts fit, plus the `extra` positions that some models need; "" if none is
    possible."""
    needed = {"longest": round_up(tokens_that_hold_most(tokens.lengths) + extra)}
    needed["source_longest"] = round_up(tokens_that_hold_most(tokens.sources.lengths)) if tokens.sources else 0
    raised = {key: value for key, value in needed.items() if value > getattr(recipe, key)}
    if recipe.init or not raised or sum(needed.values()) > (MOST_TOKENS if tokens.sources else LONGEST):
        return ""
    widths = " widths=[]" if recipe.widths and max(recipe.widths) < needed["longest"] else ""
    changes = " ".join(f"{key}={value}" for key, value in raised.items())
    return f"Train with {changes}{widths}, which fits {HELD:.0%} of them, or split them into shorter texts."


def round_up(tokens: int) -> int:
    """Round up to a multiple of eight, like the widths of batches."""
    return -(-tokens // 8) * 8


def choose_sizes(setup: Setup, tokenizer: Tokenizer, tokens: TokenFile) -> Recipe:
    """The recipe with canvas sizes that hold 99 % of the texts and of their sources, if it does not give them."""
    recipe, longest, source_longest = setup.recipe, setup.recipe.longest, setup.recipe.source_longest
    if recipe.rows == "packed":
        return recipe.model_copy(update={"longest": longest or MOST_TOKENS})
    if not longest:
        with SkipInit():
            smallest = TextSpec(tokenizer.size, LEAST_LONGEST, LEAST_LONGEST if recipe.has_sources else 0)
            extra = max(0, LEAST_LONGEST - recipe.build_method().build(smallest).max_words)
        most = MOST_TOKENS - (source_longest or MOST_TOKENS // 2) if recipe.has_sources else MOST_TOKENS
        needed = int(tokens.lengths.max()) if recipe.split else tokens_that_hold_most(tokens.lengths)
        longest = min(max(round_up(needed + extra), LEAST_LONGEST), most)
        if longest > LEAST_LONGEST:
            held = "all" if recipe.split else f"{HELD:.0%} of the"
            setup.note(f"longest={longest}, since {held} texts have at most {needed:,} tokens", INFO)
    if tokens.sources and not source_longest:
        needed = tokens_that_hold_most(tokens.sources.lengths)
        source_longest = min(round_up(needed), MOST_TOKENS - longest)
        said = f"source_longest={source_longest}, since {HELD:.0%} of the sources have at most {needed:,}"
        setup.note(said, INFO)
    return recipe.model_copy(update={"longest": longest, "source_longest": source_longest})


def read_tokens(setup: Setup, tokenizer: Tokenizer, split: SplitName) -> TokenFile:
    """Open the token file of a split; it is built first if it does not exist or its source changed."""
    recipe, out = setup.recipe, setup.out
    directory = out / "data" / split
    TokenFile.remove_leftovers(directory)
    first, *others = (tokenfile.source_fingerprint(path) for path in corpus_paths(recipe.data, setup.root, split))
    special = "" if recipe.task in ("auto", "seq2seq") else recipe.task
    ended = recipe.rows == "packed" and METHODS[recipe.method].family == "autoregressive"
    more = dict(parallel=others, chunk=recipe.chunk, split=recipe.split, task=special, ended=ended)
    origin = {**first, "column": recipe.column, **{key: value for key, value in more.items() if value}}
    if directory.exists():
        tokens = TokenFile.open(directory)
        same = tokens.matches(tokenizer, origin)
        if same and tokens.complete:
            return tokens
        if setup.resume and not same:
            raise DifflmError(f"{recipe.data} changed since {out} was started: resuming would not repeat the run.")
        del tokens  # Windows cannot move a directory while one of its files is mapped
    setup.note(f"encoding {split} texts", DOING)
    made = special or ("seq2seq" if recipe.has_sources else "language")
    examples = corpus_examples(recipe.data, setup.root, split, recipe.column, recipe.chunk, made)
    if recipe.split:
        cut = ((example, split_long(example.target, recipe.split)) for example in examples)
        examples = (
            replace(one, target=piece, continues=n > 0) for one, pieces in cut for n, piece in enumerate(pieces)
        )
    return TokenFile.build(directory, report_reading(examples, f"reading {split} texts", setup.note), tokenizer, origin)


def make_batches(
    setup: Setup, longest: int, training: Split, held_out: Split, **columns: Any
) -> tuple[Batches, list[Batch]]:
    """The batches of training, and a fixed set of held-out batches. `columns` are labels or an origin."""
    recipe, source = setup.recipe, setup.recipe.source_longest
    widths, source_widths = recipe.widths, (*(width for width in recipe.widths if width < source), source)
    if not widths and setup.device.type == "cuda":  # each is compiled, which costs more than narrow batches save
        widths = (longest,)
    elif not widths:
        widths, source_widths = (*range(8, longest, 8), longest), (*range(8, source, 8), source)
    columns["source_widths"] = source_widths
    batches = Batches(training[0], recipe.batch_size, recipe.seed, widths, training[1], **columns)
    if not (held := len(held_out[1])):
        return batches, []
    size = min(recipe.batch_size, held)
    fixed = Batches(held_out[0], size, recipe.seed, widths, held_out[1], **columns)
    return batches, [fixed.batch(step) for step in range(min(VALIDATION_BATCHES, max(1, held // size)))]


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def build_tokenizer(setup: Setup) -> Tokenizer:
    """Build one tokenizer from the training texts and their sources, or one for each; or load the one that is named."""
    recipe = setup.recipe
    if (named := load_tokenizer(recipe.tokenizer)) is not None:
        if is_pretrained(Path(recipe.tokenizer)):
            pieces = f"the pieces of {Path(recipe.tokenizer).name}, and START, END, UNK and PAD"
            setup.note(f"{named.size:,} ids: {pieces}", INFO)
        return named
    if recipe.source_words == "shared":
        return learn_words(setup, ("source", "target") if recipe.has_sources else ())
    tokenizer = learn_words(setup, ("target",))
    tokenizer.for_sources = learn_words(setup, ("source",))
    return tokenizer


def load_tokenizer(name: str) -> Tokenizer | None:
    """The tokenizer of a run, or of Hugging Face in a directory; None if it is a kind that is learned from texts."""
    if name in TOKENIZERS:
        return None
    if is_pretrained(Path(name)):
        return PretrainedTokenizer.read(Path(name))
    return Tokenizer.load(find_run(name) / "tokenizer.json")


def learn_words(setup: Setup, sides: tuple[str, ...]) -> Tokenizer:
    """Build one tokenizer from the training texts; for pairs, from the given sides."""
    recipe, root = setup.recipe, setup.root
    if recipe.task == "span-denoising":
        found = plain_texts(recipe.data, root, "train", recipe.column, recipe.chunk)
    elif recipe.task == "prompts":
        found = prompt_words(corpus_path(recipe.data, root), recipe.column)
    else:
        found = counted_texts(recipe.data, root, recipe.column, recipe.chunk, sides)
    texts = (piece for text in report_reading(found, "learning words", setup.note) for piece in cut_text(text))
    tokenizer: Tokenizer
    if recipe.tokenizer == "bpe":
        tokenizer = Bpe.build(first_characters(texts, LEARNED), recipe.vocabulary)
    else:
        tokenizer = (Words if recipe.tokenizer == "words" else Characters).build(texts, recipe.more_than)
    if tokenizer.size <= 5:
        raise DifflmError(f"{recipe.data} gives no vocabulary. Give more text, or a lower more_than.")
    return tokenizer


def first_characters(texts: Iterator[str], most: int) -> Iterator[str]:
    """The first texts, up to about this many characters."""
    while most > 0 and (text := next(texts, None)) is not None:
        yield text
        most -= len(text)


def report_reading(items: Iterable[Item], what: str, note: Note) -> Iterator[Item]:
    for number, item in enumerate(items, start=1):
        if number % 10_000 == 0:
            note(what, number)
        yield item


# -- what a model begins with ------------------------------------------------------------------------------------------


def count_overlap(setup: Setup, tokens: TokenFile, subset: Iterable[int], others: TokenFile, few: Ints) -> int:
    """How many of `few` held-out texts also occur, token for token, in a subset of the training texts; it is
    reported."""
    unseen, seen = Counter(digest_key(others.key(i)) for i in few.tolist()), set()
    for i in subset:
        if (key := digest_key(tokens.key(i))) in unseen:
            seen.add(key)
        if i % RELEASE == 0:
            tokens.release_pages()
    if count := sum(unseen[key] for key in seen):
        free = not setup.recipe.distinct and setup.recipe.data not in NAMES and setup.recipe.rows != "packed"
        advice = "; distinct=true trains on each text once" * free
        setup.report(f"{count:,} of {len(few):,} held-out texts also occur in training{advice}")
    return count


def sample_rows(tokens: TokenFile, subset: Ints, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Some training texts, 100,000 at most."""
    chosen = subset[Permutation(len(subset), 0)(np.arange(min(len(subset), 100_000)))]
    return tokens.rows(chosen, longest)


def count_pairs(first: np.ndarray, second: np.ndarray, rows: int, columns: int) -> torch.Tensor:
    """How often two numbers stand together, [rows, columns]."""
    counts = np.bincount(first.astype(np.int64) * columns + second, minlength=rows * columns)
    return torch.from_numpy(counts).view(rows, columns)


def count_neighbours(tokens: TokenFile, subset: Ints, longest: int, vocabulary: int) -> torch.Tensor:
    """How often each token precedes each other one, [V, V]."""
    ids, lengths = sample_rows(tokens, subset, longest)
    inside = np.arange(1, longest) < lengths[:, None]
    return count_pairs(ids[:, :-1][inside], ids[:, 1:][inside], vocabulary, vocabulary)


def histograms(tokens: TokenFile, subset: Ints, longest: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many training texts have each length, and how often each token occurs."""
    ids, lengths = sample_rows(tokens, subset, longest)
    words = ids[np.arange(longest) < lengths[:, None]]
    counts = np.bincount(lengths, minlength=longest + 1), np.bincount(words, minlength=vocabulary)
    return torch.from_numpy(counts[0]), torch.from_numpy(counts[1])
