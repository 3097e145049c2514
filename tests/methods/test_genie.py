"""GENIE and its pre-training: a span that was cut out of a text is written from the rest of it."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from difflm import TextDiffusion
from difflm.app.cli import main
from difflm.data.batches import Batch
from difflm.data.prompts import HIDDEN, cut_span
from difflm.data.texts import Example
from difflm.data.tokenfile import Limits, TokenFile, select_texts
from difflm.data.tokenizers import Words
from difflm.diffusion.noise import Noise
from difflm.errors import UsageError
from difflm.methods import METHODS, TextSpec
from difflm.models.batching import source_condition
from difflm.training.recipe import check
from difflm.training.run import load_run
from tests.support.tiny import train_quietly, write_grammar

SMALL = {"embedding_dim": 16, "hidden": 48, "layers": 1, "encoder_layers": 1, "heads": 2, "dropout": 0.0}
RECIPE = {"method": "genie", "model": SMALL, "tokenizer": "words", "more_than": 0, "batch_size": 32, "warmup": 0}


def fill_span(source: list[int], span: list[int]) -> list[int]:
    """The text that `cut_span` was given."""
    place = source.index(HIDDEN)
    return [*source[:place], *span, *source[place + 1 :]]


def train(out: Path, **changes: object) -> Path:
    return train_quietly({**RECIPE, **changes}, out)


# -- spans ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(4, 99), min_size=1, max_size=60), st.integers(0, 2**40))
def test_a_source_with_its_mask_filled_is_the_text(ids, number):
    source, span = cut_span(ids, number)
    assert fill_span(source, span) == ids and source.count(HIDDEN) == 1
    assert len(span) == max(1, round(0.3 * len(ids)))
    assert cut_span(ids, number) == (source, span)  # a function of the text and its number


def test_spans_begin_everywhere():
    places = [cut_span([9] * 10, number)[0].index(HIDDEN) for number in range(800)]
    counts = np.bincount(places, minlength=8)
    assert len(counts) == 8 and counts.min() > 60  # four standard errors below 100


def test_all_texts_of_a_run_are_whole_again(tmp_path):
    texts = write_grammar(tmp_path / "my.txt", 60)
    run = train(tmp_path / "run", task="span-denoising", data=str(tmp_path / "my.txt"), steps=2)
    tokens, (model, tokenizer, config) = TokenFile.open(run / "data" / "train"), load_run(run)
    every = np.arange(len(tokens))
    targets, sources = tokens.rows(every, 99), tokens.sources.rows(every, 99)
    for i, text in enumerate(texts):
        source, span = (ids[i, : lengths[i]].tolist() for ids, lengths in (sources, targets))
        assert fill_span(source, span) == tokenizer.encode(text)
    assert model.capabilities.source_limit == config["recipe"]["source_longest"] == 16
    assert config["held_out_seen"] == 0 and config["recipe"]["task"] == "span-denoising"


def test_a_text_that_is_there_twice_is_known_wherever_it_was_cut(tmp_path):
    tokenizer = Words.build(["a b c d e f g h"], 0)
    examples = [Example("a b c d e f g h", cut=number) for number in range(9)]
    tokens = TokenFile.build(tmp_path / "all", examples, tokenizer, {})
    assert len(tokens) == 9 and len({tokens.key(i) for i in range(9)}) == 1
    assert len({tokens.sources.key(i) for i in range(9)}) > 1
    assert select_texts(tokens, Limits(8, 8), distinct=True).kept.tolist() == [0]


def test_both_sides_of_parallel_files_are_plain_texts(tmp_path):
    (tmp_path / "a.en").write_text("one two three\nfour five six\n" * 9)
    (tmp_path / "a.de").write_text("eins zwei drei\nvier sechs\n" * 9)
    data = f"{tmp_path}/a.en,{tmp_path}/a.de"
    run = train(tmp_path / "run", task="span-denoising", data=data, steps=1, batch_size=4)
    tokens, tokenizer = TokenFile.open(run / "data" / "train"), load_run(run)[1]
    texts = {bytes(np.array(tokenizer.encode(t), "<u2")) for t in ("one two three", "eins zwei drei", "vier sechs")}
    assert len(tokens) == 36 and texts < {tokens.key(i) for i in range(36)}
    tuned = train(tmp_path / "tuned", init=str(run), data=data, longest=64, source_longest=8, steps=1, batch_size=4)
    assert TokenFile.open(tuned / "data" / "train").sources.lengths.tolist() == [3] * 18


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["method=diffusion-lm"], "diffusion-lm reads no sources, which span-denoising needs"),
        (["data=a.en,a.de", "column=x"], "a.en,a.de have one text per line: leave column and chunk out"),
        (["task=spans"], "task: input should be 'auto', 'seq2seq', 'span-denoising', 'prompts' or 'conversations'"),
    ],
)
def test_wrong_tasks_get_one_line(changes, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a.en", "a.de", "a.txt"):
        (tmp_path / name).write_text("one two\nthree four\n")
    sizes = ["model.hidden=16", "model.heads=2", "licence=none"]
    given = ["data=a.txt", "task=span-denoising", *sizes, *changes]
    assert main(["train", "multi30k-genie", *given, "--out", "run"]) == 2
    assert said in (err := capsys.readouterr().err) and len(err.splitlines()) == 1 and not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("lengths", ["predicted", pytest.param("drawn", marks=pytest.mark.long)])
def test_any_method_with_sources_learns_from_spans_and_its_lengths_from_what_follows(lengths, tmp_path):
    """A flagship that was pre-trained on spans of three words writes pairs as long as the pairs are."""
    write_grammar(tmp_path / "my.txt", 40)
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"src": "The old pub", "trg": "A red inn near."}) + "\n")
    (tmp_path / "pairs.jsonl").write_text((tmp_path / "pairs.jsonl").read_text() * 8)
    sizes = {"longest": 16, "source_longest": 16, "steps": 1, "batch_size": 4, "method": "difflm"}
    sizes["model"] = {**SMALL, "lengths": lengths}
    run = train(tmp_path / "run", task="span-denoising", data=str(tmp_path / "my.txt"), **sizes)
    tuned = train(tmp_path / "tuned", init=str(run), task="seq2seq", data=str(tmp_path / "pairs.jsonl"), **sizes)
    before, after = (load_run(path)[0] for path in (run, tuned))
    told, rank = source_condition([[5, 6, 7]]), torch.tensor([0])
    likeliest = [int(model.draw_lengths(Noise(0, rank), told, rank)) for model in (before, after)]
    assert likeliest[0] < 5 == likeliest[1]  # words and a full stop
    if lengths == "drawn":
        counts, pairs = before.lengths.by_source, after.lengths.by_source
        assert int(counts.sum()) == 40 - 1 and counts[:, 4].sum() < counts.sum()
        assert torch.equal(pairs.nonzero(), torch.tensor([[3, 4]]))
    with pytest.raises(UsageError, match="reads no sources"):
        check({**RECIPE, "method": "diffusion-lm", "model": {}, "data": "my.txt", "task": "span-denoising", "steps": 1})


# -- the method -------------------------------------------------------------------------------------------------------


def test_padding_of_sources_is_not_read():
    torch.manual_seed(0)
    model = METHODS["genie"](**SMALL).build(TextSpec(12, 8, 8)).eval()
    model.denoiser.network.head.weight.data.normal_()
    ids, lengths = torch.randint(4, 12, (4, 5)), torch.full((4,), 5)
    batch = Batch(ids, lengths, ids.flip(1), torch.full((4,), 3), index=torch.arange(4))
    padded = replace(batch, source=torch.cat([batch.source[:, :3], ids[:, :4]], 1))
    found = model(batch)
    assert set(found.terms) == {"mse", "rounding_ce", "terminal_norm"} and int(found.count) == 4 * 8
    torch.testing.assert_close(found.total, model(padded).total)
    assert model.sampling.clamp and model.capabilities.likelihood == "bound"


@pytest.mark.long
def test_pre_training_on_spans_beats_none_at_equal_fine_tuning(tmp_path):
    """Every word has a partner that follows it. Few pairs ask for the partners of three words, the test for those of
    three others, which only plain texts tell."""
    draw = random.Random(0)

    def text(last: str) -> list[str]:
        return [part for word in (*draw.choices("abcdef", k=2), draw.choice(last)) for part in (word, word.upper())]

    (tmp_path / "plain.txt").write_text("".join(" ".join(text("abcdef")) + "\n" for _ in range(2000)))
    rows = [{"src": " ".join(words[:-1]), "trg": words[-1]} for words in (text("abc") for _ in range(100))]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {"longest": 8, "source_longest": 8, "ema": 0.9}
    plain = {"task": "span-denoising", "data": str(tmp_path / "plain.txt"), "steps": 250, "lr": 4e-3}
    pairs = {"data": str(tmp_path / "pairs.jsonl"), "steps": 60, "lr": 2e-3, "decay": "none"}
    start = train(tmp_path / "start", **shared, **plain)
    tuned = train(tmp_path / "tuned", init=str(start), **shared, **pairs)
    scratch = train(tmp_path / "scratch", **shared, **pairs)

    def right(run: Path, last: str) -> float:
        asked = [text(last) for _ in range(64)]
        made = TextDiffusion.from_pretrained(run).generate(
            source=[" ".join(words[:-1]) for words in asked], steps=10, sampler="ddim"
        )
        return sum(one.text == words[-1] for one, words in zip(made, asked, strict=True)) / len(asked)

    assert right(scratch, "abc") > 0.9  # it has learned its pairs
    assert right(scratch, "def") < 0.1 and right(tuned, "def") > 0.2
