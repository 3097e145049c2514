"""The models in the package: they fit, they load, they write, and the judge knows text from scrambled text."""

import os
import random
from pathlib import Path

import pytest

from benchmarks.export_run import export_run
from difflm.data.text_metrics import distinct_n
from difflm.data.tokenizers import UNK
from difflm.generation.pipeline import TextDiffusion
from difflm.training.run import bundled_runs

SENTENCES = [
    "The Vaults is a pub near Café Adriatic with a 5 star rating.",
    "Alimentum is not family-friendly and is located in the city centre.",
    "There is a cheap coffee shop by the riverside called The Eagle, which serves Japanese food.",
]


@pytest.fixture(scope="module")
def e2e() -> TextDiffusion:
    return TextDiffusion.from_pretrained("e2e")


@pytest.fixture(scope="module")
def judge() -> TextDiffusion:
    return TextDiffusion.from_pretrained("judge")


@pytest.mark.parametrize(("name", "megabytes"), [("e2e", 35), ("judge", 9)])
def test_weights_stay_small_and_have_a_card(name: str, megabytes: int) -> None:
    run = bundled_runs()[name]
    assert (run / "model.safetensors").stat().st_size <= megabytes * 1e6
    card = (run / "README.md").read_text(encoding="utf-8")
    assert "CC BY-SA 4.0" in card and "difflm train" in card


def test_a_text_is_the_same_alone_and_among_others(e2e: TextDiffusion) -> None:
    alone, among = e2e.generate(1, seed=3, steps=6), e2e.generate(6, seed=3, steps=6)
    assert [g.text for g in alone] == [g.text for g in among][:1]


@pytest.mark.long
def test_it_writes_text_that_the_judge_takes_for_real(e2e: TextDiffusion, judge: TextDiffusion) -> None:
    """Real validation text has 1.6 nats/token; eight samples of 20 steps vary by 0.4, scrambled words have over 5."""
    written = e2e.generate(8, seed=0, steps=20)
    rows = judge.encode([g.text for g in written])
    assert not any(UNK in row for row in rows)
    assert float(judge.score_ids(rows).sum()) / sum(len(row) + 1 for row in rows) < 3
    assert len({g.text for g in written}) == 8 and distinct_n([g.tokens for g in written], 4) > 0.5


def test_the_judge_prefers_word_order(judge: TextDiffusion) -> None:
    scrambled = [" ".join(random.Random(i).sample(s[:-1].split(), len(s.split()))) for i, s in enumerate(SENTENCES)]
    for real, mixed in zip(judge.score(SENTENCES), judge.score(scrambled), strict=True):
        assert real < mixed - 10


@pytest.mark.long
def test_the_bound_prefers_word_order(e2e: TextDiffusion) -> None:
    """A bound of 4 draws varies by a few nats a text; scrambling costs tens."""
    scrambled = [" ".join(random.Random(i).sample(s[:-1].split(), len(s.split()))) for i, s in enumerate(SENTENCES)]
    assert sum(e2e.score(SENTENCES, draws=4)) < sum(e2e.score(scrambled, draws=4)) - 30


@pytest.mark.skipif(not Path(os.environ.get("DIFFLM_DATA", "-"), "e2e").is_dir(), reason="needs $DIFFLM_DATA with E2E")
def test_the_judge_reads_validation_text_as_its_card_says(judge: TextDiffusion) -> None:
    """1.633 nats/token on all of it; nats/token of a text vary by 0.6, so 390 texts give it within 0.1."""
    from difflm.data.corpora import corpus

    rows = judge.encode([text for text in list(corpus("e2e", None, "valid"))[::12] if len(text.split()) <= 60])
    assert float(judge.score_ids(rows).sum()) / sum(len(row) + 1 for row in rows) == pytest.approx(1.63, abs=0.1)


def test_shipping_halves_the_weights_and_keeps_the_texts(tmp_path: Path, judge: TextDiffusion) -> None:
    """Shipped weights are half-precision already, so shipping them once more changes nothing."""
    export_run(bundled_runs()["judge"], tmp_path / "again")
    again = TextDiffusion.from_pretrained(tmp_path / "again")
    assert again.score(SENTENCES) == judge.score(SENTENCES)
    assert (tmp_path / "again" / "tokenizer.json").exists()
