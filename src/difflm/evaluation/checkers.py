"""The taggers and parsers that check texts: a first one, and a second one trained on other data.

A classifier learns from the labels of some tagger or parser and may learn its errors: the second checker shows this by
agreeing less with the target than the first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from difflm.annotators.parser import SpanParser, load_parser, own_parser, parse_texts
from difflm.annotators.tagger import Tagger, own_tagger
from difflm.annotators.trees import Tree, agreement, agreements
from difflm.controls import Span
from difflm.controls.learned import POS, checking_tagger, span_in_tree
from difflm.data.words import split_words
from difflm.evaluation.targets import Target
from difflm.version import __version__

Words = list[str]
Found = TypeVar("Found")  # what a tagger or a parser finds in a text
Texts = Sequence[tuple[Target, Sequence[Words]]]  # targets with their generated texts


@dataclass(frozen=True)
class Checkers:
    tagger: Tagger
    parser: SpanParser
    second_tagger: Tagger | None = None
    second_parser: SpanParser | None = None

    @classmethod
    def load(cls, second_parser: Path | None) -> "Checkers":
        """Load the checking tagger, the bundled one as a second if it is another, and the parsers."""
        tagger, own = checking_tagger(), own_tagger()
        second = load_parser(second_parser) if second_parser else None
        return cls(tagger, own_parser(), None if tagger.name == own.name else own, second)

    def names(self, control: str) -> list[str]:
        """Return names with versions: figures of different checkers cannot be compared."""
        tree, tags = [f"difflm parser {self.parser.name}"], [self.tagger.name]
        tree += [f"second: difflm parser {self.second_parser.name}"] if self.second_parser else []
        tags += [f"second: {self.second_tagger.name}"] if self.second_tagger else []
        words, rules = [f"difflm words {__version__}"], [f"difflm field rules {__version__}"]
        names = {"field": rules, "tree": tree, "span": tree, POS: tags}
        return [checker for part in control.split("+") for checker in names.get(part, words)]

    def agreements(self, control: str, texts: Sequence[Words]) -> dict[str, float]:
        """Measure how far first and second checker agree on the same texts."""
        parts, found = control.split("+"), {}
        if POS in parts and self.second_tagger and texts:
            both = zip(self.tagger.tags(texts), self.second_tagger.tags(texts), strict=True)
            equal = [a == b for one, other in both for a, b in zip(one, other, strict=True)]
            found["tagger_agreement"] = float(np.mean(equal))
        if {"tree", "span"} & {*parts} and self.second_parser and texts:
            trees = (parse_texts(parser, texts) for parser in (self.parser, self.second_parser))
            found["parser_agreement"] = agreements(*trees).f1
        return found

    def second_opinions(self, control: str, made: Texts) -> dict[str, list[float]]:
        """Return successes according to the second checkers, averaged for each target that has a sentence."""
        known, parts, found = [one for one in made if one[0].sentence], control.split("+"), {}
        if POS in parts and self.second_tagger:
            found["tags_equal_second"] = compare(known, self.second_tagger.tags, lambda _, a, b: equal_tags(a, b))
        if parse := partial(parse_texts, self.second_parser) if self.second_parser else None:
            if "tree" in parts:
                found["tree_f1_second"] = compare(known, parse, lambda _, a, b: agreement(a, b).f1)
            if "span" in parts:
                found["span_found_second"] = compare(known, parse, holds_spans)
        return {figure: values for figure, values in found.items() if values}


def compare(
    made: Texts, annotate: Callable[[Sequence[Words]], list[Found]], success: Callable[[Target, Found, Found], float]
) -> list[float]:
    """Return the mean success of each target's texts by the annotations of its sentence and of each text; a text
    without words counts 0. Targets whose own sentence fails by these annotations are left out."""
    means = []
    sentences = annotate([split_words(str(target.sentence)) for target, _ in made])
    for sentence, (target, texts) in zip(sentences, made, strict=True):
        if success(target, sentence, sentence):
            found = annotate([words for words in texts if words])
            means.append(sum(success(target, sentence, one) for one in found) / len(texts))
    return means


def equal_tags(found: Sequence[str], wanted: Sequence[str]) -> float:
    same = sum(a == b for a, b in zip(found, wanted, strict=False))
    return same / max(len(found), len(wanted), 1)


def holds_spans(target: Target, sentence: Tree, tree: Tree) -> float:
    """Return 1 if the tree of a text contains all phrases of the target."""
    return float(all(span_in_tree(tree, Span.parse(span)) for span in target.asked.span))
