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
from difflm.data.encoders import is_pretrained
from difflm.data.known_corpora import Split as SplitName
from difflm.data.prompts import prompt_words
from difflm.data.texts import LONGEST, MOST_TOKENS, cut_text, split_long
from difflm.data.tokenfile import HELD, Ints, Selection, TokenFile, tokens_that_hold_most
from difflm.data.tokenizers import Bpe, Characters, PretrainedTokenizer, Tokenizer, Words
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
    adapted: Json = {}
    if recipe.lora:
        base = recipe.init or str(Path(recipe.model["pretrained"]).resolve())
        adapted = {"adapter": {"base": base, "fingerprint": fingerprint_weights(find_run(base))}}
    return {
        "format": FORMAT,
        "method": recipe.method,
        "model": recipe.build_method().model_dump(),
        "vocabulary": tokenizer.size,
        **({"source_vocabulary": tokenizer.for_sources.size} if recipe.source_words == "own" else {}),
        "tokenizer": tokenizer.fingerprint(),
        "longest": recipe.longest,
        "parameters": sum(p.numel() for p in model.parameters()),
        "sampling": asdict(model.sampling),
        "recipe": recipe.model_dump(),
        **adapted,
        **counts,
    }


# -- texts that do not fit ---------------------------------------------------------------------------------------------


def report_left_out(setup: Setup, selection: Selection, held_out: Ints, advice: str = "") -> None:
    """Report which texts are left out; as a warning, with advice, if there are many."""
    limits, _, total, too_long, source_too_long, repeated = selection
    split_them = f"Split them into shorter texts.{'' if setup.recipe.has_sources else tokenfile.PACK}"
    share = f"{too_long / total:.0%} of the data. {advice or split_them}"
    many, text_too_long = too_long > WARN_SHARE * total, too_long - source_too_long
    wide = " or are wider than a picture" if limits.room else ""
    for count, what, limit in (
        (text_too_long, "texts", f"{limits.target} tokens{wide}"),
        (source_too_long, "sources", f"{limits.source} tokens"),
    ):
        if count:
            said = f"{count:,} of {total:,} {what} have more than {limit} and are left out"
            setup.report(f"{said}: {share}" if many else said, WARN if many else INFO)
    if repeated:
        setup.report(f"{repeated:,} of {total:,} texts are repeated and are left out")
    if not len(held_out):
        setup.report("no held-out text is left: the run goes without validation")


def count_left_out(recipe: Recipe, selection: Selection) -> dict[str, int]:
    """The number of texts that are not trained on, for the config; `repeated` if a recipe asks for each text once."""
    return {"left_out": selection.too_long, **({"repeated": selection.repeated} if recipe.distinct else {})}


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
    recipe, note = setup.recipe, setup.note
    if recipe.rows == "packed":
        return recipe.model_copy(update={"longest": recipe.longest or MOST_TOKENS})
    if recipe.longest and (recipe.source_longest or not recipe.has_sources):
        return recipe
    longest, source_longest = recipe.longest, recipe.source_longest
    most = MOST_TOKENS - (source_longest or MOST_TOKENS // 2) if recipe.has_sources else MOST_TOKENS
    if not longest:
        with SkipInit():
            smallest = TextSpec(tokenizer.size, LEAST_LONGEST, LEAST_LONGEST if recipe.has_sources else 0)
            extra = max(0, LEAST_LONGEST - recipe.build_method().build(smallest).max_words)
        texts = int(tokens.lengths.max()) if recipe.split else tokens_that_hold_most(tokens.lengths)
        longest = min(max(round_up(texts + extra), LEAST_LONGEST), most)
        if longest > LEAST_LONGEST:
            held = "all" if recipe.split else f"{HELD:.0%} of the"
            note(f"longest={longest}, since {held} texts have at most {texts:,} tokens", INFO)
    if tokens.sources and not source_longest:
        sources = tokens_that_hold_most(tokens.sources.lengths)
        source_longest = min(round_up(sources), MOST_TOKENS - longest)
        note(f"source_longest={source_longest}, since {HELD:.0%} of the sources have at most {sources:,}", INFO)
    return recipe.model_copy(update={"longest": longest, "source_longest": source_longest})


def read_splits(setup: Setup, tokenizer: Tokenizer, tokens: TokenFile, selection: Selection) -> tuple[Split, Split]:
    """Training and held-out texts: the corpus's own split, or a hundredth of a file, which has none."""
    if setup.recipe.data in NAMES:
        valid = read_tokens(setup, tokenizer, "valid")
        return (tokens, selection.kept), (valid, tokenfile.select_texts(valid, selection.limits).kept)
    kept, held = split(selection.kept, len(tokens), setup.recipe.seed, tokens.texts)
    if tokens.holds_pieces and tokens.texts is not None and len(held) > WARN_SHARE * len(tokens):
        whole = f"{len(np.unique(tokens.texts[held])):,} of {tokens.texts[-1] + 1:,} texts"
        setup.report(f"{len(held) / len(tokens):.0%} of the pieces are held out: all of {whole}")
    return (tokens, kept), (tokens, held)


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
        examples = (
            replace(one, target=piece, continues=number > 0)
            for one in examples
            for number, piece in enumerate(split_long(one.target, recipe.split))
        )
    return TokenFile.build(directory, report_reading(examples, f"reading {split} texts", setup.note), tokenizer, origin)


def make_batches(
    setup: Setup, longest: int, training: Split, held_out: Split, **columns: Any
) -> tuple[Batches, list[Batch]]:
    """The batches of training, and a fixed set of held-out batches. `columns` are labels or an origin."""
    recipe = setup.recipe
    widths = recipe.widths or default_widths(longest, setup.device)
    narrower = tuple(width for width in recipe.widths if width < recipe.source_longest)
    columns["source_widths"] = (
        (*narrower, recipe.source_longest) if recipe.widths else default_widths(recipe.source_longest, setup.device)
    )
    batches = Batches(training[0], recipe.batch_size, recipe.seed, widths, training[1], **columns)
    if not (held := len(held_out[1])):
        return batches, []
    size = min(recipe.batch_size, held)
    fixed = Batches(held_out[0], size, recipe.seed, widths, held_out[1], **columns)
    return batches, [fixed.batch(step) for step in range(min(VALIDATION_BATCHES, max(1, held // size)))]


def default_widths(longest: int, device: torch.device) -> tuple[int, ...]:
    # On a GPU every width is compiled separately, which costs more than narrow batches save in a short run.
    return (longest,) if device.type == "cuda" else (*range(8, longest, 8), longest)


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def build_tokenizer(recipe: Recipe, root: Path | None, note: Note) -> Tokenizer:
    """Build one tokenizer from the training texts and their sources, or one for each; or load the one that is named."""
    if (named := load_tokenizer(recipe.tokenizer)) is not None:
        if is_pretrained(Path(recipe.tokenizer)):
            note(f"{named.size:,} ids: the pieces of {Path(recipe.tokenizer).name}, and START, END, UNK and PAD", 0)
        return named
    if recipe.source_words == "shared":
        return learn_words(recipe, root, note, ("source", "target") if recipe.has_sources else ())
    tokenizer = learn_words(recipe, root, note, ("target",))
    tokenizer.for_sources = learn_words(recipe, root, note, ("source",))
    return tokenizer


def load_tokenizer(name: str) -> Tokenizer | None:
    """The tokenizer of a run, or of Hugging Face in a directory; None if it is a kind that is learned from texts."""
    if name in TOKENIZERS:
        return None
    if is_pretrained(Path(name)):
        return PretrainedTokenizer.read(Path(name))
    return Tokenizer.load(find_run(name) / "tokenizer.json")


def learn_words(recipe: Recipe, root: Path | None, note: Note, sides: tuple[str, ...]) -> Tokenizer:
    """Build one tokenizer from the training texts; for pairs, from the given sides."""
    if recipe.task == "span-denoising":
        found = plain_texts(recipe.data, root, "train", recipe.column, recipe.chunk)
    elif recipe.task == "prompts":
        found = prompt_words(corpus_path(recipe.data, root), recipe.column)
    else:
        found = counted_texts(recipe.data, root, recipe.column, recipe.chunk, sides)
    texts = (piece for text in report_reading(found, "learning words", note) for piece in cut_text(text))
    tokenizer: Tokenizer
    if recipe.tokenizer == "bpe":
        tokenizer = Bpe.build(first_characters(texts, LEARNED), recipe.vocabulary)
    else:
        tokenizer = (Words if recipe.tokenizer == "words" else Characters).build(texts, recipe.more_than)
    if tokenizer.size <= 5:
        raise DifflmError(f"{recipe.data} gives no vocabulary. Give more text, or a lower more_than.")
    return tokenizer


def first_characters(texts: Iterable[str], most: int) -> Iterator[str]:
    """The first texts, up to about this many characters."""
    for text in texts:
        yield text
        most -= len(text)
        if most <= 0:
            return


def report_reading(items: Iterable[Item], what: str, note: Note) -> Iterator[Item]:
    for number, item in enumerate(items, start=1):
        if number % 10_000 == 0:
            note(what, number)
        yield item


# -- what a model begins with ------------------------------------------------------------------------------------------


def count_overlap(tokens: TokenFile, subset: Iterable[int], others: TokenFile, few: Iterable[int]) -> int:
    """How many of `few` held-out texts also occur, token for token, in a subset of the training texts."""
    unseen, seen = Counter(tokenfile.digest_key(others.key(i)) for i in few), set()
    for i in subset:
        if (key := tokenfile.digest_key(tokens.key(i))) in unseen:
            seen.add(key)
        if i % RELEASE == 0:
            tokens.release_pages()
    return sum(unseen[key] for key in seen)


def sample_rows(tokens: TokenFile, subset: Ints, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Some training texts, 100,000 at most."""
    chosen = subset[Permutation(len(subset), 0)(np.arange(min(len(subset), 100_000)))]
    return tokens.rows(chosen, longest)


def pair_lengths(tokens: TokenFile, subset: Ints, longest: int, source_longest: int) -> torch.Tensor:
    """How many pairs have each length of source and text, [source_longest + 1, longest + 1]."""
    assert tokens.sources is not None
    lengths = tokens.sources.lengths[subset] * (longest + 1) + tokens.lengths[subset]
    counts = np.bincount(lengths, minlength=(source_longest + 1) * (longest + 1))
    return torch.from_numpy(counts).view(source_longest + 1, longest + 1)


def count_neighbours(tokens: TokenFile, subset: Ints, longest: int, vocabulary: int) -> torch.Tensor:
    """How often each token precedes each other one, [V, V]."""
    ids, lengths = sample_rows(tokens, subset, longest)
    inside = np.arange(1, longest) < lengths[:, None]
    before, after = ids[:, :-1][inside].astype(np.int64), ids[:, 1:][inside]
    counts = np.bincount(before * vocabulary + after, minlength=vocabulary**2)
    return torch.from_numpy(counts).view(vocabulary, vocabulary)


def histograms(tokens: TokenFile, subset: Ints, longest: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many training texts have each length, and how often each token occurs."""
    ids, lengths = sample_rows(tokens, subset, longest)
    words = ids[np.arange(longest) < lengths[:, None]]
    counts = np.bincount(lengths, minlength=longest + 1), np.bincount(words, minlength=vocabulary)
    return torch.from_numpy(counts[0]), torch.from_numpy(counts[1])
