"""The tokenizer of a run: learned from its texts, or that of another run."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from difflm.data.corpora import corpus_path, counted_texts, plain_texts
from difflm.data.encoders import is_pretrained
from difflm.data.prompts import prompt_words
from difflm.data.texts import cut_text
from difflm.data.tokenizers import Bpe, Characters, PretrainedTokenizer, Tokenizer, Words
from difflm.errors import DifflmError
from difflm.training.recipe import TOKENIZERS, Recipe
from difflm.training.run import find_run

Item = TypeVar("Item")
# (What is being read, texts so far), (a message, INFO), (a warning, WARN) or (what is being done, DOING).
Note = Callable[[str, int], None]
INFO, WARN, DOING = 0, -1, -2

LEARNED = 200_000_000  # characters from which byte pairs are learned: more would only take memory


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
    if recipe.cuts_spans:
        found = plain_texts(recipe.data, root, "train", recipe.column, recipe.chunk)
    elif recipe.tells_labels:
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
