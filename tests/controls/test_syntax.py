"""Trees and phrases as controls: what is asked, what is refused, and what the parser finds."""

from types import SimpleNamespace

import pytest
import torch

from difflm.annotators.parser import own_parser, parse_texts
from difflm.annotators.trees import Span as Phrase
from difflm.annotators.trees import parse_tree, phrases, shapes
from difflm.controls import Length, ModelInfo, Span, Tree
from difflm.controls.base import Canvas
from difflm.controls.guidance import (
    Classifier,
    ClassifierOutput,
    Guidance,
    GuidanceSettings,
    GuidanceTarget,
    span_chart,
)
from difflm.controls.learned import span_has_label
from difflm.controls.rules import WordPrior
from difflm.data.labels import NOTHING, Labelling
from difflm.data.tokenizers import Words
from difflm.data.words import split_words
from difflm.errors import UsageError
from difflm.generation.requests import Request
from difflm.networks import Sizes

LABELS = ("-", "ADJP", "NP", "S", "S::VP", "VP")
SHAPES = ("-", "ADJP-only", "NP-first", "NP-last", "S-last", "VP-first")
TREE = "(S (NP * *) (VP * (ADJP *)) *)"
COUNTS = torch.ones(12, len(SHAPES))


def setting(room: int = 10, **changes) -> ModelInfo:
    labels = {"tree": Labelling("tree", "spans", LABELS), "shape": Labelling("shape", "tags", SHAPES)}
    return ModelInfo(Words.build(["a b c"] * 20), room, 0, changes.get("labels", labels), {"shape": COUNTS})


def test_phrases_are_one_a_stretch_and_shapes_one_a_word():
    tree = parse_tree("(TEXT (S (NP It) (VP is (S (VP (ADJP cheap)))) .) (FRAG Good))")
    assert phrases(tree) == [
        Phrase(0, 3, "S"),
        Phrase(0, 0, "NP"),
        Phrase(1, 2, "VP"),
        Phrase(2, 2, "S::VP::ADJP"),
        Phrase(4, 4, "FRAG"),
    ]
    assert shapes(tree) == ["NP-only", "VP-first", "S::VP::ADJP-only", "S-last", "FRAG-only"]


def test_a_tree_asks_for_its_length_its_phrases_and_how_words_stand():
    tree = Tree(TREE)
    tree.prepare(setting())
    assert tree.length(setting()) == 5 and tree.target == TREE
    assert tree.wanted(setting()) == [[0, 4, 3], [0, 1, 2], [2, 3, 5], [3, 3, 1]]
    place = Canvas(torch.ones(2, 6, dtype=torch.bool), 0)
    prior = tree.prior(setting())
    assert prior is not None and list(prior[1]) == [2, 3, 5, 1, 4]
    assert WordPrior.count(*prior, place).log_shares.shape == (6, 12)
    shapeless = setting(labels={"tree": Labelling("tree", "spans", LABELS)})
    assert tree.prior(shapeless) is None


def test_a_span_asks_for_any_chain_that_holds_it_and_for_room():
    span = Span.parse("1, 3, VP")
    span.prepare(setting())
    assert span == Span(1, 3, "VP") and span.target == "1,3,VP"
    assert span.wanted(setting()) == [[1, 3, 4, 5]] and span.min_length(setting()) == 4
    assert Span(1, 3, "S::VP").wanted(setting()) == [[1, 3, 4]]
    assert span_has_label("S::VP", "S") and span_has_label("S::VP", "S::VP") and not span_has_label("VP", "S::VP")


@pytest.mark.parametrize(
    ("control", "said"),
    [
        (Tree("(S (NP * *)"), "missing"),
        (Tree("(S (NP the *) (VP *))"), "Contains asks for words"),
        (Tree("(S (NX * *))"), "never saw S::NX"),
        (Tree(f"(S {'* ' * 11})"), "needs 11 words"),
        (Span(3, 1, "NP"), "must not come after"),
        (Span(3, 10, "NP"), "needs 11 words"),
        (Span(1, 2, "WHNP"), "never saw WHNP"),
    ],
)
def test_what_cannot_be_is_refused(control, said):
    with pytest.raises(UsageError, match=said):
        control.prepare(setting())


@pytest.mark.parametrize("text", ["1,2", "1,2,", "a,2,NP", "1,2,NP,4", "-1,2,NP", ""])
def test_a_span_has_three_parts(text):
    with pytest.raises(UsageError, match="FIRST,LAST,LABEL"):
        Span.parse(text)


def test_requests_hold_trees_and_spans():
    asked = Request(tree=TREE, span=["0,1,NP", "2,3,VP"], length=5).controls()
    assert asked == [Length(5), Tree(TREE), Span(0, 1, "NP"), Span(2, 3, "VP")]


def test_the_bundled_parser_checks():
    words = split_words("The Mill is a cheap pub near the river.")
    tree = parse_texts(own_parser(), [words])[0]
    whole = Tree(str(tree.bare())).check(words)
    assert (whole.satisfied, whole.score, whole.checker) == (True, 1.0, own_parser().name)
    other = Tree("(S (NP * * * * * * * * *) *)").check(words)
    assert other.satisfied is False and other.score < 1
    first, last, label = next(s for s in phrases(tree) if s.last > s.first)
    assert Span(first, last, label).check(words).satisfied
    assert Span(first, last, "INTJ").check(words).satisfied is False
    assert Tree(TREE).check([]).satisfied is False and Span(0, 0, "NP").check([]).satisfied is False


def opinion(length: int = 4) -> ClassifierOutput:
    torch.manual_seed(0)
    classifier = Classifier([Labelling("tree", "spans", LABELS)], 2, length, 12, Sizes(8, 1, 2))
    return ClassifierOutput(classifier, torch.randn(2, length, 8), torch.ones(2, length, dtype=torch.bool))


def test_any_of_several_labels_is_the_sum_of_their_chances():
    """−log Σ p over the labels of a span, added over the spans; a text without any asks for nothing."""
    seen = opinion()
    asked = torch.tensor([[[0, 2, 3, 5], [1, 1, 2, NOTHING]], [[NOTHING] * 4] * 2])
    chances = seen.spans("tree").exp()
    expected = -(chances[0, 0, 2, 3] + chances[0, 0, 2, 5]).log() - chances[0, 1, 1, 2].log()
    assert torch.allclose(seen.nats("tree", asked, whole=False), torch.stack([expected, torch.tensor(0.0)]))


def test_a_whole_tree_is_the_chart_of_its_phrases():
    seen = opinion()
    asked = torch.tensor([[[0, 3, 3], [1, 2, 5]]] * 2)
    chart, chances = span_chart(asked, seen.mask), seen.spans("tree")
    expected = [sum(-chances[b, i, j, chart[b, i, j]] for i in range(4) for j in range(i, 4)) for b in range(2)]
    assert torch.allclose(seen.nats("tree", asked, whole=True), torch.stack(expected))


def test_a_tree_of_one_text_asks_nothing_of_the_texts_beside_it():
    """Not even that they have no phrases."""
    seen = opinion()
    labels = torch.tensor([[[0, 3, 3], [1, 2, 5]], [[NOTHING] * 3] * 2])
    wish = GuidanceTarget(lambda *_: seen, "tree", labels, whole=True)  # type: ignore[arg-type]
    seeing = SimpleNamespace(view=lambda x, t: x)
    guidance = Guidance([wish], seeing, seen.mask, GuidanceSettings())  # type: ignore[arg-type]
    nats = guidance.nats(torch.zeros(2, 4, 8), torch.zeros(2))
    assert nats[1] == 0 and torch.equal(nats[0], seen.nats("tree", labels, whole=True)[0])
