"""Settings for the user's own texts, chosen from the texts and the device, each with its reason."""

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from difflm.data import corpora
from difflm.data.remote import is_remote
from difflm.data.texts import LINES, MOST_TOKENS, ROWS, file_kind, is_model, split_long
from difflm.data.tokenizers import Bpe, Tokenizer
from difflm.data.words import split_words
from difflm.errors import UsageError
from difflm.methods import METHODS
from difflm.training import recipe as recipes
from difflm.training.recipe import TOKENIZERS, Changes, Recipe
from difflm.training.run import find_run, find_start, peek_config, read_config

BASE = "own-text"  # the recipe that gives all other settings
MOST_COUNTED = 20_000_000  # characters whose words are counted
MOST_PIECE = 1000  # tokens are counted in pieces of this many characters
CLOSED, RARE = 3000, 0.001  # limits of a whole-word vocabulary: different words, and the share of those that occur once
SAMPLE = 500_000  # characters from which the length of tokens is estimated
BYTES = 3.5  # bytes per token, if that is not estimated
PIECES = ((300_000, 1000), (3_000_000, 2000), (30_000_000, 4000), (float("inf"), 8000))  # most bytes, vocabulary
# Up to this many tokens, these sizes.
NETWORKS: dict[str, Sequence[tuple[float, dict[str, int]]]] = {
    "cpu": ((float("inf"), {"hidden": 128, "layers": 4, "heads": 4}),),
    "cuda": (
        (2e6, {"hidden": 256, "layers": 6, "heads": 4}),
        (2e7, {"hidden": 384, "layers": 9, "heads": 6}),
        (float("inf"), {"hidden": 512, "layers": 12, "heads": 8}),
    ),
}
# Words that make up at least an eighth of English texts, but not of others; "the" is frequent among them.
ENGLISH = {
    *("the", "and", "of", "to", "that", "it", "with", "they", "you", "are", "have", "this", "from"),
    *("but", "what", "there", "which", "is", "she", "were", "their", "would"),
}
LEAST_ENGLISH, LEAST_THE = 0.1, 0.01
# Keys of a recipe that ask for another model than the one that English texts start from.
OTHER_MODEL = {
    *("init", "method", "tokenizer", "vocabulary", "more_than", "longest", "rows", "chunk"),
    *("task", "source_longest", "source_words"),
}
SMALL_STEPS = 3e-4  # learning rate of a model that is already trained
ALL_FIT = 48  # tokens (estimated) that fit on every canvas
TOKENS = {"cpu": 1024, "cuda": 16384}  # per batch, roughly
Choice = tuple[str, Any, str]  # a key of the recipe, its value, and why


class Survey:
    """Statistics of texts; lengths are in characters."""

    def __init__(self, texts: Iterable[str]) -> None:
        lengths, counts = list[int](), Counter[str]()
        self.bytes, self.sample = 0, list[str]()
        for text in texts:
            if self.bytes < SAMPLE:
                self.sample += split_long(text[:SAMPLE], MOST_PIECE)
            if self.bytes < MOST_COUNTED:
                counts.update(split_words(text))
            lengths.append(len(text))
            self.bytes += len(text.encode())
        self.texts, self.characters, self.lengths = len(lengths), sum(lengths), sorted(lengths)
        self.longest, self.most = self.lengths[-1], self.lengths[-(-99 * self.texts // 100) - 1]  # all, and 99 %
        self.words, self.once = len(counts), sum(count == 1 for count in counts.values())
        running, common = counts.total(), sum(count for word, count in counts.items() if word.lower() in ENGLISH)
        # Whether the texts have few different words, all of them common.
        self.closed = self.words <= CLOSED and self.once <= RARE * running
        self.english = common >= LEAST_ENGLISH * running and counts["the"] + counts["The"] >= LEAST_THE * running


def token_lengths(survey: Survey, kind: str, vocabulary: int, init: str | None) -> tuple[float, float]:
    """Characters per token, on average and in the piece of text with the shortest tokens."""
    if kind not in TOKENIZERS and init is None:
        average = BYTES * survey.characters / survey.bytes
        return average, 0.6 * average
    counts = [len(split_words(text)) if kind == "words" else len(text) for text in survey.sample]
    if init is not None:
        counts = [*map(len, Tokenizer.load(find_run(init) / "tokenizer.json").encode_batch(survey.sample))]
    elif kind == "bpe":
        counts = [*map(len, Bpe.build(survey.sample, vocabulary).encode_batch(survey.sample))]
    rates = [(len(text), count) for text, count in zip(survey.sample, counts, strict=True) if count]
    average = sum(size for size, _ in rates) / sum(count for _, count in rates)
    return average, min([average, *(size / count for size, count in rates if size >= MOST_PIECE // 4)])


def is_own_text(name: str) -> bool:
    """Whether a recipe's name is data instead: files of texts or patterns of their names, or an address to download."""
    kind = file_kind(Path(name))
    if name in recipes.known_recipes() or (kind in (".yaml", ".yml") and not corpora.is_pattern(name)):
        return False
    there = os.path.isfile(name) or os.path.isdir(name) or corpora.is_several(name)
    return there or is_remote(name) or kind in ({*LINES} - {""} | {*ROWS})


def split_arguments(words: Sequence[str]) -> tuple[str, list[str]]:
    """The recipe or the texts of a command, joined if there are several, and the `key=value` changes behind them."""
    changes = [word for word in words if "=" in word and not os.path.exists(word) and not is_remote(word)]
    names = [word for word in words if word not in changes]
    if len(names) > 1 and all(map(is_own_text, names)):
        return corpora.ALSO.join(names), changes
    return names[0] if names else "", [*names[1:], *changes]


def own_recipe(data: str, changes: Changes, root: Path | None, device: str, note: Callable[[str], None]) -> Recipe:
    """Return a recipe for these texts and a kind of device ("cuda", "cpu"): settings that are not given are chosen and
    reported."""
    given = recipes.read_changes(changes)
    if "data" in given:
        raise UsageError(f"the texts are given twice: {data} and data={given['data']}.")
    if given.get("lora") and given.get("init") and (config := peek_config(str(given["init"]))):
        given = {"method": config["method"], **given}  # adapters are of the model's own method
    wanted = {"data": data, **given}
    plain = recipes.load_recipe(BASE, wanted)  # rejects errors before anything is read
    if is_model(Path(data)):
        raise UsageError(f"{data} holds a model, not texts: train it on yours with init={data}, or --resume its run.")
    corpora.corpus_paths(data, root)
    if pairs := find_pairs(plain, given, root):
        note(
            f"task=seq2seq: {corpora.file_names(data)} holds pairs; column {pairs[1]} is written from column {pairs[0]}"
            ". Give column=SOURCE,TARGET for others, or column=NAME to train on the texts of one alone"
        )
        wanted = {"data": data, "column": ",".join(pairs), **given, "task": "seq2seq"}
        plain = recipes.load_recipe(BASE, wanted)
    sides = ("source", "target") if plain.has_sources else ()
    survey = Survey(corpora.counted_texts(corpora.resolve_data(data, root), root, plain.column, plain.chunk, sides))
    count, what = (survey.texts // 2, "pair") if sides else (survey.texts, "text")
    note(f"{corpora.file_names(data)}: {count:,} {what}{'s'[: count != 1]} of {survey.characters:,} characters")
    start = choose_start(survey, given) if not plain.has_sources else []
    if start:
        wanted = {key: value for key, value, _ in start} | wanted
        plain = recipes.load_recipe(BASE, wanted)
    chosen = [one for one in [*start, *choose_settings(survey, plain, device)] if one[0] not in given]
    for why in dict.fromkeys(why for *_, why in chosen if why):
        note(f"{' '.join(f'{key}={value}' for key, value, reason in chosen if reason == why)}: {why}")
    ignored = (lambda _: None) if start else note  # do not report unused lines if the method was chosen here
    return recipes.load_recipe(BASE, {key: value for key, value, _ in chosen} | wanted, ignored)


def find_pairs(plain: Recipe, given: Mapping[str, Any], root: Path | None) -> tuple[str, str] | None:
    """The columns of source and target, if the data hold pairs, the method can read them, and no other task or column
    is given."""
    if plain.has_sources or METHODS[plain.method].task != "either" or {"task", "chunk", "rows"} & {*given}:
        return None
    source, comma, target = (plain.column or "").partition(",")
    if plain.column:
        return (source.strip(), target.strip()) if comma else None
    return corpora.find_pair_columns(plain.data, root)


def choose_start(survey: Survey, given: Mapping[str, Any]) -> list[Choice]:
    """Choose the bundled model that training on English texts starts from, if there is one and none is given. For a
    file with few different words, a small network of whole words learns faster (docs/log)."""
    other = any(key in OTHER_MODEL or key.startswith("model.") for key in given)
    if other or not survey.english or survey.closed or (name := find_start("en")) is None:
        return []
    why = "the texts are English, like those of this bundled model; init=none starts from scratch"
    found: list[Choice] = [("init", name, why), ("method", read_config(find_run(name))["method"], why)]
    return [*found, ("lr", SMALL_STEPS, "small steps, since the model is already trained")]


def choose_settings(survey: Survey, plain: Recipe, device: str) -> list[Choice]:
    """Settings that follow from the texts and the device; `plain` is the recipe without them. One that starts from a
    run has that run's tokens and sizes."""
    found, begun = list[Choice](), plain.init or plain.model.get("pretrained")
    kind = "" if plain.init else "words" if plain.tokenizer == "bpe" and survey.closed else plain.tokenizer
    if kind == "words":
        why = f"{survey.words:,} different words, all of them common"
        found += [("tokenizer", "words", why), ("more_than", 0, why)]
    elif kind == "bpe":
        size = next(size for most, size in PIECES if survey.bytes <= most)
        why = f"{survey.words:,} different words, {survey.once:,} of them only once: subwords can spell them all"
        found += [("tokenizer", "bpe", why), ("vocabulary", size, why)]
    size = next((value for key, value, _ in found if key == "vocabulary"), plain.vocabulary)
    (rate, shortest), method = token_lengths(survey, kind, size, plain.init), METHODS[plain.method]
    typical, limit = survey.most / rate, plain.longest if plain.init else MOST_TOKENS
    if typical > MOST_TOKENS and method.packs and not plain.has_sources and not begun:
        why = f"texts of up to {survey.longest:,} characters, packed one after another: none is left out"
        found += [("rows", "packed", why), ("longest", MOST_TOKENS, why)]
        typical = MOST_TOKENS
    elif survey.longest / rate > ALL_FIT and not plain.has_sources and not plain.chunk:
        room = int(0.8 * limit * shortest)
        most = min(max(survey.most, int(ALL_FIT * rate)), room)
        if survey.longest <= min(1.5 * most, room):
            found.append(("split", survey.longest, "the longest text: none is cut or left out"))
        else:
            cut = survey.texts - bisect_right(survey.lengths, most)
            why = f"{cut:,} longer texts, of up to {survey.longest:,} characters, are cut where sentences end"
            found.append(("split", most, f"{why}; none is left out"))
    if not begun:
        tokens = survey.characters / rate
        sizes = next(sizes for most, sizes in NETWORKS[device] if tokens <= most)
        why = f"a network for about {tokens:,.0f} tokens on this device ({device})"
        found += [(f"model.{key}", value, why) for key, value in sizes.items() if key in method.model_fields]
    rows = max(8, min(256, 8 * round(TOKENS[device] / max(8, min(typical, limit)) / 8)))
    found.append(("batch_size", rows, f"about {rows * min(typical, limit):,.0f} tokens per step"))
    found.append(("patience", 5, "training stops after so many validations without improvement"))
    return [*found, ("steps", 0, "")]  # reported when they are counted


def default_run(texts: str, method: str) -> Path:
    """The directory of an unnamed run, from the names of its texts, the first of several, and its method."""
    first = corpora.list_parts(texts)[0]
    path = Path(first.rstrip("/")) if is_remote(first) else Path(os.path.abspath(first))
    while corpora.is_pattern(str(path)):
        path = path.parent
    return Path(f"{path.name.split('.')[0] or 'run'}-{method}")


def resolve_own(
    texts: str,
    changes: Changes,
    out: Path | None,
    root: Path | None,
    device: str,
    resume: bool,
    note: Callable[[str], None],
) -> Recipe:
    """The recipe for the user's own texts: chosen from them; or that of the run which is resumed, with the settings
    chosen for it and these changes. Without `out` this is the unnamed run of the given method, or of one of the
    usual."""
    if not resume:
        return own_recipe(texts, changes, root, "cuda" if device == "cuda" else "cpu", note)
    given = recipes.read_changes(changes)
    usual = [default_run(texts, method) for method in ([given["method"]] if "method" in given else ["difflm", "mdlm"])]
    values = recipes.read_recipe(out or next(filter(Path.exists, usual), usual[0]))
    return recipes.check({**recipes.flatten(values), "data": texts, **given})
