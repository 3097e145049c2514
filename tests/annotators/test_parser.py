"""The span parser: exact decoding against all trees, a toy treebank learned in seconds, files that are refused."""

import random
from itertools import combinations

import pytest
import torch

from benchmarks.assets.train_parser import count_labels, margin_loss, save_parser, train
from difflm.annotators.parser import (
    HashedShape,
    HashedWords,
    SpanParser,
    SpanScorer,
    best_trees,
    load_parser,
    parse_texts,
)
from difflm.annotators.trees import Agreement, Span, Tree, agreements, parse_tree, tree_of
from difflm.errors import DifflmError, UsageError
from tests.support.pretrained import make_encoder
from tests.support.tiny import change_json

TINY = HashedShape(rows=256, embedding=32, hidden=48, layers=2, heads=4, dropout=0.0, positions=16)


def trees_over(n):
    """All sets of spans of n words that nest and hold the whole: every tree, of any number of parts."""
    spans = [(i, j) for i in range(n) for j in range(i + 1, n + 1) if (i, j) != (0, n)]
    for size in range(len(spans) + 1):
        for chosen in combinations(spans, size):
            if not any(a < c < b < d for a, b in chosen for c, d in chosen):
                yield [(0, n), *chosen]


@pytest.mark.parametrize("words", [1, 2, 3, 4])
def test_cky_finds_the_best_of_all_trees(words):
    scores = torch.randn(20, words + 1, words + 1, 4) + torch.tensor([0.5, 0, 0, 0])
    found = best_trees(scores, torch.full((20,), words))
    gains = scores[..., 1:].max(-1).values - scores[..., 0]
    for chart, gain in zip(found, gains, strict=True):
        best = max(trees_over(words), key=lambda spans: sum(gain[i, j].item() for i, j in spans))
        assert {(i, i + w) for i, w in chart.nonzero().tolist()} == set(best)


def test_labels_are_the_best_of_their_spans():
    scores = torch.randn(8, 7, 7, 5)
    charts = best_trees(scores, torch.full((8,), 6))
    for b, i, width in charts.nonzero().tolist():
        assert charts[b, i, width] == scores[b, i, i + width, 1:].argmax() + 1


def test_shorter_sentences_of_a_batch_are_parsed_as_if_alone():
    scores = torch.randn(5, 10, 10, 3)
    lengths = torch.tensor([9, 1, 4, 7, 2])
    together = best_trees(scores, lengths)
    for b, n in enumerate(lengths.tolist()):
        alone = best_trees(scores[b : b + 1, : n + 1, : n + 1], lengths[b : b + 1])
        assert torch.equal(together[b, : n + 1, : n + 1], alone[0])
        assert together[b].count_nonzero() == alone.count_nonzero()


def test_what_cky_finds_always_is_a_tree():
    """`tree_of` refuses spans that cross or do not hold the whole."""
    scores = 3 * torch.randn(10, 13, 13, 4) + torch.tensor([-3.0, 0, 0, 0])
    for chart in best_trees(scores, torch.full((10,), 12)):
        tree_of(["w"] * 12, [Span(i, i + w - 1, "X") for i, w in chart.nonzero().tolist()])


def test_neither_decoding_nor_training_waits_for_the_device():
    """Tensors without values: whoever asks for one, as a host does that waits, gets an error."""
    scores = torch.empty(3, 8, 8, 4, device="meta", requires_grad=True)
    labels, lengths = (torch.empty(shape, dtype=torch.long, device="meta") for shape in ((3, 8, 8), (3,)))
    assert best_trees(scores, lengths).shape == (3, 8, 8)
    margin_loss(scores, labels, lengths).backward()
    with pytest.raises((RuntimeError, NotImplementedError)):
        lengths.max().item()


def binary_trees(i, j):
    if j == i + 1:
        return [[(i, j)]]
    return [[(i, j), *a, *b] for k in range(i + 1, j) for a in binary_trees(i, k) for b in binary_trees(k, j)]


def test_the_margin_is_that_of_the_best_rival_among_all_trees():
    scores = torch.randn(6, 5, 5, 3)
    targets = torch.zeros(6, 5, 5, dtype=torch.long)
    targets[:, 0, 4], targets[:, 0, 2], targets[:3, 3, 4] = 1, 2, 1
    gains = scores - scores[..., :1]
    expected = 0.0
    for gain, target in zip(gains, targets, strict=True):
        wrong = 1 - torch.nn.functional.one_hot(target, 3)
        rival = max(sum((gain + wrong)[i, j].max() for i, j in tree) for tree in binary_trees(0, 4))
        right = sum(gain[i, j, target[i, j]] for i, j in target.nonzero().tolist())
        expected += max(0.0, (rival - right).item())
    assert margin_loss(scores, targets, torch.full((6,), 4)).item() == pytest.approx(expected / 24, rel=1e-5)


def test_a_tree_that_wins_by_far_costs_nothing_whatever_is_padded():
    targets = torch.zeros(1, 7, 7, dtype=torch.long)
    targets[0, 0, 4], targets[0, 1, 3] = 2, 1
    scores = 20 * torch.nn.functional.one_hot(targets, 3).float().requires_grad_()
    padding = torch.zeros(7, 7, dtype=torch.bool)
    padding[5:], padding[:, 5:] = True, True
    scores = torch.where(padding[None, ..., None], torch.randn(1, 7, 7, 3), scores)
    assert margin_loss(scores, targets, torch.tensor([4])).item() == 0


@pytest.mark.parametrize("kind", ["hashed", "pretrained"])
@pytest.mark.long
def test_padding_does_not_change_scores(kind, tmp_path):
    if kind == "pretrained":
        encoders = pytest.importorskip("benchmarks.assets.encoders", reason="needs transformers")
        encoder = encoders.PretrainedWords(make_encoder(tmp_path, "bert", masked_lm=False))
    network = SpanScorer(encoder if kind == "pretrained" else HashedWords(TINY), 4).eval()
    short, long = ["the", "food"], ["the", "restaurant", "food", "\x00", ".", "é"]  # \x00 has no pieces, é no letters
    alone = network(network.encoder.read([short]))
    together = network(network.encoder.read([short, long]))
    assert alone.shape == (1, 3, 3, 4) and together.shape == (2, 7, 7, 4)
    torch.testing.assert_close(together[:1, :3, :3], alone, atol=1e-5, rtol=1e-4)


def toy_tree(draw):
    """A sentence whose prepositional phrase belongs to the noun after `near` and to the verb after `with`."""

    def noun():
        return Tree("NP", (draw.choice(["the", "a"]), draw.choice(["pub", "mill", "cafe", "inn", "bar"])))

    verb, preposition = draw.choice(["serves", "sells"]), draw.choice(["near", "with"])
    phrase = Tree("PP", (preposition, noun()))
    inner = (verb, Tree("NP", (noun(), phrase))) if preposition == "near" else (verb, noun(), phrase)
    subject = (
        Tree("NP", (noun(), Tree("SBAR", (Tree("S", (Tree("VP", ("open",)),)),)))) if draw.random() < 0.4 else noun()
    )
    return Tree("S", (subject, Tree("VP", inner), "."))


@pytest.fixture(scope="module")
def toy():
    draw = random.Random(0)
    trees = [toy_tree(draw) for _ in range(180)]
    return trees[:120], trees[120:]


@pytest.fixture(scope="module")
def trained(toy):
    torch.manual_seed(0)
    parser = SpanParser("toy", HashedWords(TINY), count_labels(toy[0]))
    train(parser, toy[0], epochs=8, lr=5e-3, encoder_lr=5e-3, batch_size=12)
    return parser


@pytest.mark.long
def test_a_toy_treebank_is_learned(trained, toy):
    """Held-out sentences: both attachments and the chain of three labels over one word."""
    assert "SBAR::S::VP" in trained.labels
    found = trained.parse([tree.words() for tree in toy[1]])
    assert agreements(toy[1], found).f1 > 0.98
    assert [tree.words() for tree in found] == [tree.words() for tree in toy[1]]


def test_training_is_repeatable(toy):
    def weights():
        torch.manual_seed(1)
        parser = SpanParser("toy", HashedWords(TINY), count_labels(toy[0]))
        train(parser, toy[0][:40], epochs=2)
        return parser.network.state_dict()

    first, second = weights(), weights()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.long
def test_an_unknown_word_is_read_by_its_letters(trained):
    tree = parse_tree("(S (NP the pub) (VP serves (NP (NP a bar) (PP near (NP the inns)))) .)")
    assert agreements([tree], trained.parse([tree.words()])).f1 == 1


def test_texts_of_several_sentences_stand_under_one_node(trained):
    one = ["the", "pub", "serves", "a", "bar", "."]
    found = parse_texts(trained, [one, one + one, []])
    assert found[0].label == "S"
    assert found[1] == Tree("TEXT", (found[0], found[0]))
    assert found[2] == Tree("TEXT", ())
    with pytest.raises(UsageError, match="without words"):
        trained.parse([[]])


def test_a_saved_parser_parses_the_same(trained, toy, tmp_path):
    sentences = [tree.words() for tree in toy[1]]
    save_parser(trained, tmp_path, {"trained_on": "a toy"})
    loaded = load_parser(tmp_path)
    assert loaded.name == "toy" and loaded.labels == trained.labels
    same = agreements(trained.parse(sentences), loaded.parse(sentences))  # half precision may move a close call
    assert same.f1 > 0.99
    save_parser(loaded, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "change", [{"format": 9}, {"encoder": {"kind": "other"}}, {"labels": 3}, {"encoder": {"kind": "hashed", "x": 1}}]
)
def test_a_foreign_parser_file_is_refused(change, tmp_path):
    save_parser(SpanParser("a", HashedWords(TINY), ["S"]), tmp_path)
    change_json(tmp_path / "parser.json", **change)
    with pytest.raises(DifflmError, match=r"parser\.json"):
        load_parser(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path):
    save_parser(SpanParser("a", HashedWords(TINY), ["S"]), tmp_path)
    save_parser(SpanParser("a", HashedWords(TINY), ["S", "NP"]), tmp_path / "b")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "b/model.safetensors").read_bytes())
    with pytest.raises(DifflmError, match="another shape"):
        load_parser(tmp_path)


def test_rare_chains_are_learned_as_their_outermost_label():
    trees = [parse_tree("(S (VP a))")] * 3 + [parse_tree("(NP (QP (X b)))"), parse_tree("(NP c)")]
    assert count_labels(trees) == ["NP", "S::VP"]
    assert agreements([], []) == Agreement()
