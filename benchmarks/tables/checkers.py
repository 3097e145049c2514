"""Measure the field rules and the taggers on real pairs: `python -m benchmarks.tables.checkers --data DIR`.

Fields: on validation pairs; for values that validation lacks, on the tenth of the training pairs that was not used to
write the rules (`held_out`). A false alarm is `wrong` if the pair has another value of the field, `unasked` if it has
none, and `sister` if it has the same level in other words (cheap for less than £ 20). Tags: the two taggers against
each other on 1,000 validation texts, and against UD English EWT's dev split.
"""

import argparse
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from benchmarks.assets.train_tagger import accuracy, read_conllu, treebank_path
from difflm.annotators.e2e_fields import FIELDS, expresses, verbatim
from difflm.annotators.tagger import Tagger, own_tagger, spacy_tagger
from difflm.data.corpora import E2EPair, e2e_path, read_e2e
from difflm.data.words import split_words
from difflm.errors import UsageError

LEVELS = {
    "price": (("cheap", "less than £ 20"), ("moderate", "£ 20 - 25"), ("high", "more than £ 30")),
    "customer rating": (("low", "1 out of 5"), ("average", "3 out of 5"), ("high", "5 out of 5")),
}
Read = tuple[E2EPair, list[str]]


def held_out(pairs: Iterator[E2EPair]) -> list[E2EPair]:
    """Keep a tenth of the meanings: all texts of one meaning are on the same side."""

    def meaning(pair: E2EPair) -> str:
        return " | ".join(f"{field} : {value}" for field, value in pair.fields.items())

    return [pair for pair in pairs if zlib.crc32(meaning(pair).encode()) % 10 == 0]


def sister_values(field: str, value: str) -> set[str]:
    return {other for level in LEVELS.get(field, ()) if value in level for other in level} - {value}


def count_outcomes(pairs: Sequence[Read], field: str, value: str) -> Counter[str]:
    """Count the outcomes of a rule by the value of the pair."""
    found: Counter[str] = Counter()
    for pair, words in pairs:
        fires, held = expresses(words, field, value), pair.fields.get(field)
        if held == value:
            said_otherwise = not fires and any(expresses(words, field, other) for other in sister_values(field, value))
            found["hit" if fires else "said as sister" if said_otherwise else "missed"] += 1
            found["verbatim"] += verbatim(words, field, value)
        elif fires:
            found["unasked" if held is None else "sister" if held in sister_values(field, value) else "wrong"] += 1
    return found


def format_row(field: str, value: str, found: Counter[str], split: str) -> str:
    held = found["hit"] + found["missed"] + found["said as sister"]
    fired = found["hit"] + found["sister"] + found["unasked"] + found["wrong"]
    figures = [found["hit"] / held, (found["hit"] + found["said as sister"]) / held, found["verbatim"] / held]
    figures += [found["hit"] / max(1, fired), 1 - found["wrong"] / max(1, fired)]
    cells = [f"{figure:.3f}" for figure in figures] + [str(found[kind]) for kind in ("sister", "unasked", "wrong")]
    return f"| {field} | {value} | {split} | {held} | {' | '.join(cells)} |"


def print_fields(data: Path) -> None:
    valid: list[Read] = [(pair, split_words(pair.text)) for pair in read_e2e(e2e_path(data, "valid"))]
    spare: list[Read] = [(pair, split_words(pair.text)) for pair in held_out(read_e2e(e2e_path(data, "train")))]
    heads = ["field", "value", "pairs", "held", "recall", "or sister", "verbatim", "precision", "not wrong"]
    heads += ["sister", "unasked", "wrong"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for field, values in FIELDS.items():
        total: Counter[str] = Counter()
        for value in values:
            in_valid = any(pair.fields.get(field) == value for pair, _ in valid)
            found = count_outcomes(valid if in_valid else spare, field, value)
            if field not in ("name", "near"):
                print(format_row(field, value, found, "valid" if in_valid else "held out"))
            total += found
        print(format_row(field, "all", total, "both"))


def measure_agreement(one: Tagger, other: Tagger, texts: Sequence[list[str]]) -> tuple[float, float]:
    """Return the shares of words and of whole texts with equal tags."""
    pairs = list(zip(one.tags(texts), other.tags(texts), strict=True))
    same = Counter(a == b for left, right in pairs for a, b in zip(left, right, strict=True))
    return same[True] / same.total(), sum(left == right for left, right in pairs) / len(pairs)


def print_tags(data: Path) -> None:
    own, dev = own_tagger(), read_conllu(treebank_path(data, "dev"))
    print(f"{own.name}: {accuracy(own, dev):.4f} of the words of EWT dev")
    try:
        theirs = spacy_tagger()
    except UsageError as error:
        print(error)
        return
    print(f"{theirs.name}: {accuracy(theirs, dev):.4f} of the words of EWT dev")
    texts = [split_words(pair.text) for pair in islice(read_e2e(e2e_path(data, "valid")), 0, None, 4)][:1000]
    words, whole = measure_agreement(own, theirs, texts)
    print(f"agreement on {len(texts)} E2E validation texts: {words:.4f} of the words, {whole:.4f} of whole texts")
    pairs = Counter(
        (ours, other, word.lower())
        for text, a, b in zip(texts, own.tags(texts), theirs.tags(texts), strict=True)
        for word, ours, other in zip(text, a, b, strict=True)
        if ours != other
    )
    for (ours, other, word), number in pairs.most_common(8):
        print(f"  {word}: {ours} here, {other} there, {number} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    print_fields(data)
    print_tags(data)


if __name__ == "__main__":
    main()
