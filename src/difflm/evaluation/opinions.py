"""Who checks tags and trees, and what a second tagger and a second parser, trained on other data, say of the texts.

A classifier learns from the labels of some tagger and some parser, and may have learned their errors: where those of
the second kind agree less with the target than the first, this is what to look for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from difflm import __version__
from difflm.annotators.parser import Parser, load_parser, own_parser, parse_texts
from difflm.annotators.tagger import Tagger, own_tagger
from difflm.annotators.trees import agreement, agreements
from difflm.controls import Span
from difflm.controls.learned import POS, checking_tagger
from difflm.controls.syntax import span_in_tree
from difflm.data.words import split_words
from difflm.evaluation.targets import Target

Words = list[str]
Texts = Sequence[tuple[Target, Sequence[Words]]]  # targets, and the texts that were written for each


@dataclass(frozen=True)
class Checkers:
    tagger: Tagger
    parser: Parser
    second_tagger: Tagger | None = None
    second_parser: Parser | None = None

    @classmethod
    def there(cls, second_parser: Path | None) -> "Checkers":
        """The tagger that checks, and the bundled one beside it where that is another; the bundled parser, and another
        one where it is given."""
        tagger, own = checking_tagger(), own_tagger()
        second = load_parser(second_parser) if second_parser else None
        return cls(tagger, own_parser(), None if tagger.name == own.name else own, second)

    def names(self, control: str) -> list[str]:
        """With their versions: figures of different checkers do not compare."""
        tree = [f"difflm parser {self.parser.name}", *said(self.second_parser, "difflm parser ")]
        names = {
            "length": [f"difflm words {__version__}"],
            "infill": [f"difflm words {__version__}"],
            "field": [f"difflm field rules {__version__}"],
            "tree": tree,
            "span": tree,
            POS: [self.tagger.name, *said(self.second_tagger)],
        }
        return [checker for part in control.split("+") for checker in names[part]]

    def agreements(self, control: str, texts: Sequence[Words]) -> dict[str, float]:
        """How far the two agree on the same texts."""
        parts, found = control.split("+"), {}
        if POS in parts and self.second_tagger and texts:
            found["tagger_agreement"] = same_tags(self.tagger.tags(texts), self.second_tagger.tags(texts))
        if {"tree", "span"} & {*parts} and self.second_parser and texts:
            trees = (parse_texts(parser, texts) for parser in (self.parser, self.second_parser))
            found["parser_agreement"] = agreements(*trees).f1
        return found

    def second_opinions(self, control: str, made: Texts) -> dict[str, list[float]]:
        """Successes as the second ones see them, a mean for each target that has a sentence."""
        known = [(target, texts) for target, texts in made if target.sentence]
        parts, found = control.split("+"), {}
        if POS in parts and self.second_tagger and known:
            found["tags_equal_second"] = tag_opinions(known, self.second_tagger)
        if "tree" in parts and self.second_parser and known:
            found["tree_f1_second"] = tree_opinions(known, self.second_parser)
        if "span" in parts and self.second_parser and known:
            found["span_found_second"] = span_opinions(known, self.second_parser)
        return {figure: values for figure, values in found.items() if values}


def said(second: Tagger | Parser | None, kind: str = "") -> list[str]:
    return [f"second: {kind}{second.name}"] if second else []


def sentences_of(made: Texts) -> list[Words]:
    return [split_words(str(target.sentence)) for target, _ in made]


def same_tags(first: Sequence[Sequence[str]], second: Sequence[Sequence[str]]) -> float:
    same = [a == b for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)]
    return float(np.mean(same))


def tag_opinions(made: Texts, tagger: Tagger) -> list[float]:
    """The share of equal tags, target and texts tagged by this tagger."""
    wanted = tagger.tags(sentences_of(made))
    return [
        float(np.mean([equal_tags(found, tags) for found in tagger.tags(list(texts))]))
        for tags, (_, texts) in zip(wanted, made, strict=True)
    ]


def equal_tags(found: Sequence[str], wanted: Sequence[str]) -> float:
    same = sum(a == b for a, b in zip(found, wanted, strict=False))
    return same / max(len(found), len(wanted), 1)


def tree_opinions(made: Texts, parser: Parser) -> list[float]:
    """F1 of the texts' trees and the sentence's, all by this parser; a text without words has none."""
    wanted = parse_texts(parser, sentences_of(made))
    means = []
    for tree, (_, texts) in zip(wanted, made, strict=True):
        found = parse_texts(parser, [words for words in texts if words])
        means.append(sum(agreement(tree, one).f1 for one in found) / len(texts))
    return means


def span_opinions(made: Texts, parser: Parser) -> list[float]:
    """Whether this parser finds the phrase, where it finds it in the sentence."""
    means = []
    for sentence, (target, texts) in zip(parse_texts(parser, sentences_of(made)), made, strict=True):
        spans = [control for control in target.asked.controls() if isinstance(control, Span)]
        if all(span_in_tree(sentence, span) for span in spans):
            found = parse_texts(parser, [words for words in texts if words])
            means.append(sum(all(span_in_tree(tree, span) for span in spans) for tree in found) / len(texts))
    return means
