"""SED: fixed word vectors, a read-out that is trained, and guidance without a last estimate."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from difflm import Infill, TextDiffusion
from difflm.app.cli import main
from difflm.data.batches import Batch
from difflm.data.tokenizers import SPECIALS, Words
from difflm.diffusion.condition import FREE, Condition
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import Objective
from difflm.diffusion.samplers.loop import BoundDenoiser
from difflm.errors import UsageError
from difflm.methods import METHODS, TextSpec
from difflm.methods.sed import ReadoutEmbedding, cooccurrence_vectors, main_directions, read_word_vectors
from difflm.training.recipe import check
from difflm.training.run import load_run, read_config
from tests.support.tiny import train_quietly, write_grammar

SIZES = {"embedding_dim": 8, "hidden": 32, "layers": 1, "heads": 2, "dropout": 0.0}


def build(**changes):
    torch.manual_seed(0)
    model = METHODS["sed"](**{**SIZES, **changes}).build(TextSpec(12, 10))
    torch.nn.init.normal_(model.denoiser.network.head.weight)
    return model


def batch() -> Batch:
    ids = torch.randint(4, 12, (16, 8), generator=torch.Generator().manual_seed(0))
    return Batch(ids, torch.full((16,), 8), index=torch.arange(16))


def trained_parts(model) -> set[str]:
    model(batch()).total.backward()
    return {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}


def test_cross_entropy_trains_the_read_out_alone_and_squared_errors_the_network_alone():
    """Strudel et al.: the table is fixed, and R learns from clean vectors; anchors on x̂_0 would train the network."""
    read_out = {"denoiser.codec.head", "denoiser.codec.bias"}
    model = build()
    assert model.objective.weights == {"mse": 1.0, "rounding_ce": 1.0}
    model.objective = Objective({"rounding_ce": 1.0})
    assert trained_parts(model) == read_out
    model = build()
    model.objective = Objective({"mse": 1.0})
    found = trained_parts(model)
    assert found and all(name.startswith("denoiser.network.") for name in found)


def test_vectors_have_length_root_d_and_words_spread_by_a_hundredth():
    codec = build().denoiser.codec
    assert codec.table().norm(dim=-1).tolist() == pytest.approx([8**0.5] * 12) and codec.x0_std == 0.01
    assert torch.equal(codec.head, codec.table()) and "raw" in codec.state_dict() and not codec.raw.requires_grad


def test_the_unconditional_branch_hears_no_last_estimate():
    """x̃ = x̂(∅, ∅) + s (x̂(c, prev) − x̂(∅, ∅)): Strudel et al., with s = 1 + contrast."""
    model = build().eval()
    given = torch.full((2, 10), FREE)
    given[:, 3:5] = 7
    mask, x, previous = torch.ones(2, 10, dtype=torch.bool), torch.randn(2, 10, 8), torch.randn(2, 10, 8)
    level, condition = model.process.at(torch.full((2,), 0.4)), Condition(given=given)
    with torch.no_grad():
        told = model.denoiser(x, level, mask, condition, previous).clean
        free = model.denoiser(x, level, mask, condition.null(), None).clean
        bound = BoundDenoiser(model.denoiser, mask, condition, 1.5, model.drop.self_condition)
        moved = bound(x, level, previous)
    assert torch.allclose(moved.clean, free + 2.5 * (told - free), atol=1e-5)
    assert not torch.allclose(told, free)
    assert torch.equal(moved.tokens, model.denoiser.codec.readout(moved.clean).argmax(-1))


def test_dropped_texts_are_trained_without_a_last_estimate(monkeypatch):
    model, heard = build(drop=0.5), []
    forward = model.denoiser.network.forward
    monkeypatch.setattr(model.denoiser.network, "forward", lambda x, *rest: (heard.append(x), forward(x, *rest))[1])
    model(batch())
    first, second = (inputs[..., 8:16] for inputs in heard)  # what they read of the last estimate
    assert not first.any()
    dropped = Noise(0, torch.arange(16)).uniform(0, stream=25) < 0.5
    assert 0 < int(dropped.sum()) < 16 and torch.equal(~second.flatten(1).any(1), dropped)


def test_words_of_the_same_neighbours_are_near_and_still_two():
    """Six words in two classes, a class after the other: all that counts tell is the class."""
    counts = torch.zeros(10, 10)
    counts[4:7, 7:10], counts[7:10, 4:7] = 20.0, 20.0
    codec = ReadoutEmbedding(torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), "sphere", reads_pairs=True)
    before = codec.table()
    codec.read_pairs(counts)
    cosines = F.normalize(codec.table(), dim=-1) @ F.normalize(codec.table(), dim=-1).T
    same, other = cosines[4:7, 4:7], cosines[4:7, 7:10]
    assert float(same.min()) > float(other.max()) and float((same - torch.eye(3)).max()) < 0.999
    assert torch.allclose(codec.table()[:4], before[:4])  # never counted
    assert torch.equal(codec.head, codec.table())


def test_the_main_directions_keep_most_of_the_vectors():
    """Of a matrix of rank 3 three directions keep all distances; of any matrix no other two keep as much."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(40, 3, generator=generator) @ torch.randn(3, 30, generator=generator)
    found = main_directions(vectors, 5)
    assert found.shape == (40, 5) and torch.allclose(found @ found.T, vectors @ vectors.T, atol=1e-2)
    kept, values = main_directions(vectors, 2).square().sum(), torch.linalg.svdvals(vectors)
    assert float(kept) == pytest.approx(float(values[:2].square().sum()), rel=1e-4)
    root = main_directions(vectors, 3, power=0.5).square().sum()
    assert float(root) == pytest.approx(float(values[:3].sum()), rel=1e-4)
    assert not cooccurrence_vectors(torch.zeros(6, 6), 4).any()


def test_the_frozen_codec_reads_as_the_trained_one_does():
    codec = build().denoiser.codec
    torch.nn.init.normal_(codec.head)
    torch.nn.init.normal_(codec.bias)
    frozen, x = codec.frozen(), torch.randn(2, 3, 8)
    for mine, new in zip(frozen.frozen_tensors(), codec.frozen_tensors(), strict=True):
        mine.data.copy_(new)
    assert torch.allclose(frozen.readout(x), codec.readout(x)) and torch.equal(frozen.table(), codec.table())


# -- sources ----------------------------------------------------------------------------------------------------------


def cipher_pairs(count: int, seed: int) -> Batch:
    """Six letters of eight; the text has the letter after each, and `a` after `h`."""
    source = torch.randint(4, 12, (count, 6), generator=torch.Generator().manual_seed(seed))
    lengths = torch.full((count,), 6)
    return Batch((source - 3) % 8 + 4, lengths, source, lengths, index=torch.arange(count) + count * seed)


@pytest.mark.long
def test_texts_follow_sources_that_were_never_learned():
    """Of 8^6 sources 3,840 are learned. Texts are right for their own source, and not for the next one."""
    torch.manual_seed(0)
    model = METHODS["sed"](**{**SIZES, "embedding_dim": 16, "hidden": 64, "layers": 2}).build(TextSpec(12, 8, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(120):
        optimizer.zero_grad()
        model(cipher_pairs(32, step + 1)).means()["loss"].backward()
        optimizer.step()
    lm, pairs = TextDiffusion(model.eval(), Words([*SPECIALS, *"abcdefgh"]), {"method": "sed"}), cipher_pairs(48, 0)
    sources, right = ([lm.tokenizer.decode(row) for row in side.tolist()] for side in (pairs.source, pairs.ids))
    made = [text.text for text in lm.generate(source=sources, steps=5)]
    assert sum(text == one for text, one in zip(made, right, strict=True)) >= 45
    assert not any(text == one for text, one in zip(made, right[1:], strict=False))


def test_a_source_shares_the_canvas_and_one_embedding_with_its_text():
    """The network reads a noisy vector and the last estimate; given words and where they are have no place then."""
    model, pairs = METHODS["sed"](**SIZES).build(TextSpec(12, 10, 6)), cipher_pairs(4, 0)
    torch.nn.init.normal_(model.denoiser.network.head.weight)
    own, other = (model(replace(pairs, source=told)).terms["mse"] for told in (pairs.source, pairs.ids))
    assert not torch.allclose(own, other)
    assert model.denoiser.network.input.in_features == 2 * 8 and model.capabilities.source_limit == 6
    assert build().denoiser.network.input.in_features == 3 * 8 + 1
    assert not model.can_hide_known and build().can_hide_known
    with pytest.raises(UsageError, match="source_words: sed has one embedding for both sides"):
        check({"method": "sed", "data": "pairs.jsonl", "steps": 1, "source_words": "own"})


# -- vectors of a file ------------------------------------------------------------------------------------------------

TINY = ["model.hidden=16", "model.layers=1", "model.heads=2", "model.embedding_dim=8", "steps=2", "batch_size=4"]
TINY += ["warmup=0", "validate_every=99", "more_than=0", "save_every=99", "longest=32", "sample_every=0"]


def train(tmp_path: Path, *changes: str) -> int:
    write_grammar(tmp_path / "my.txt", 40)
    return main(["train", "e2e-sed", *TINY, f"data={tmp_path}/my.txt", *changes, "--out", str(tmp_path / "run")])


def test_a_run_keeps_the_vectors_of_a_file(tmp_path):
    rows = {"pub": [3.0, 0, 0], "inn": [2.9, 0.1, 0], "red": [0, 0, 2.0], "nobody": [9.0, 9, 9]}
    path = tmp_path / "vectors.txt"
    path.write_text("4 3\n" + "".join(f"{word} {' '.join(map(str, row))}\n" for word, row in rows.items()))
    assert train(tmp_path, f"model.vectors_file={path}") == 0
    path.unlink()  # a run needs the file no more
    model, tokenizer, _ = load_run(tmp_path / "run")
    table = F.normalize(model.denoiser.codec.table(), dim=-1)
    (pub,), (inn,), (red,) = (tokenizer.encode(word) for word in ("pub", "inn", "red"))
    assert float(table[pub] @ table[inn]) > 0.99 and abs(float(table[pub] @ table[red])) < 0.2
    assert read_config(tmp_path / "run")["trained"]["validation"].get("likelihood", "bound") == "bound"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pub 1 2\ninn 1\n", "line 2 of vectors.txt: 2 finite numbers are expected after 'inn'."),
        ("pub 1 nan\n", "line 1 of vectors.txt: 2 finite numbers are expected after 'pub'."),
        ("pub one two\n", "line 1 of vectors.txt is not a word and its numbers."),
        ("zebra 1 2\n\n", "vectors.txt has vectors of none of the"),
        (None, "vectors.txt does not exist."),
    ],
)
def test_wrong_vectors_get_one_line(text, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "vectors.txt").write_text(text)
    assert train(tmp_path, "model.vectors_file=vectors.txt") in (1, 2)
    assert said in capsys.readouterr().err and not (tmp_path / "run" / "config.json").exists()


def test_vectors_are_found_by_their_words(tmp_path):
    (tmp_path / "v.txt").write_text("b 1 2\nz 0 0\na 3 4\n")
    rows, vectors = read_word_vectors(str(tmp_path / "v.txt"), ["", "a", "b", "c"])
    assert rows.tolist() == [2, 1] and np.array_equal(vectors, [[1, 2], [3, 4]])
    with pytest.raises(UsageError, match="none of the 1 words"):
        read_word_vectors(str(tmp_path / "v.txt"), ["", "q"])


@pytest.mark.long
def test_given_words_are_continued(tmp_path):
    """Three words and the same three again. Guidance of 2 helps a model that has learned little, as in the paper."""
    draw = random.Random(0)
    halves = [" ".join(draw.choice("abcdefgh") for _ in range(3)) for _ in range(4000)]
    (tmp_path / "my.txt").write_text("".join(f"{half} {half}\n" for half in halves))
    sizes = {**SIZES, "embedding_dim": 16, "hidden": 64, "layers": 2}
    training = {"steps": 240, "batch_size": 32, "warmup": 20, "lr": 4e-3, "ema": 0.9, "sample_every": 0}
    words = {"tokenizer": "words", "more_than": 0, "longest": 8, "data": str(tmp_path / "my.txt")}
    train_quietly({"method": "sed", "model": sizes, **words, **training}, tmp_path / "run")
    lm = TextDiffusion.from_pretrained(tmp_path / "run")
    for half in ("___:3 c a f", "c a f ___:3", "___:1 a ___:1 c ___:1 f"):
        made = lm.generate(16, controls=[Infill(half)], steps=20, contrast=1.0)
        assert [text.text for text in made].count("c a f c a f") >= 14
