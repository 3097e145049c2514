"""The models in the package: they fit, they load, they write, and the judge knows text from scrambled text."""

import random
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.assets.english_texts import SOURCES
from benchmarks.assets.export_run import export_run
from benchmarks.assets.quantise import quantise_groups, quantise_rows
from difflm.app.cli import main
from difflm.controls import Field, Tags
from difflm.data.text_metrics import distinct_n
from difflm.data.tokenizers import UNK
from difflm.errors import DifflmError, UsageError
from difflm.evaluation.corpora import corpus_for
from difflm.generation.pipeline import TextDiffusion
from difflm.runtime.tensors import SCALE, dequantise, load_tensors, save_tensors
from difflm.training.run import bundled_runs, find_start, load_run
from tests.support.corpora import needs_e2e
from tests.support.tiny import change_json

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


@pytest.mark.parametrize(("name", "megabytes"), [("e2e", 18), ("judge", 9)])
def test_weights_stay_small_and_have_a_card(name: str, megabytes: int) -> None:
    run = bundled_runs()[name]
    assert (run / "model.safetensors").stat().st_size <= megabytes * 1e6
    card = (run / "README.md").read_text(encoding="utf-8")
    assert "CC BY-SA 4.0" in card and "difflm train" in card


def test_only_classifiers_that_are_asked_are_loaded() -> None:
    """Both know tags; the later one counts, so the other is not read for them."""
    lm = TextDiffusion.from_pretrained("e2e")
    lm.plan_controls([Tags(("PROPN", "AUX", "ADJ", "PUNCT"))])
    assert [folder.name for folder in lm._classifiers] == ["guide-syntax"]
    lm.plan_controls([Field("food", "Japanese")])
    assert {folder.name for folder in lm._classifiers} == {"guide", "guide-syntax"}


@pytest.mark.long
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


@pytest.mark.long
@needs_e2e
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


def test_eight_bits_are_a_half_step_off_at_most() -> None:
    """A row's largest weight is 127 steps; rows of zeros stay zeros. What is no matrix stays as it is."""
    matrix = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 5).unsqueeze(1)
    matrix[2] = 0
    weights = {"matrix": matrix, "vector": matrix[0], "table": torch.arange(6.0, dtype=torch.float64)}
    again = dequantise(quantise_rows(weights))
    step = matrix.abs().amax(1, keepdim=True) / 127
    assert bool(((again["matrix"] - matrix).abs() <= 0.5001 * step).all())
    assert torch.equal(again["vector"], weights["vector"]) and torch.equal(again["table"], weights["table"])


def test_eight_bits_cost_nothing_measurable(tmp_path: Path, judge: TextDiffusion) -> None:
    """A trained model, half as large: nats per token move by less than a hundredth."""
    export_run(bundled_runs()["judge"], tmp_path / "small", bits=8)
    file = tmp_path / "small" / "model.safetensors"
    assert file.stat().st_size < 0.55 * (bundled_runs()["judge"] / "model.safetensors").stat().st_size
    tokens = sum(len(row) + 1 for row in judge.encode(SENTENCES))
    small = TextDiffusion.from_pretrained(tmp_path / "small")
    assert sum(small.score(SENTENCES)) / tokens == pytest.approx(sum(judge.score(SENTENCES)) / tokens, abs=0.01)
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1  # one bit
    file.write_bytes(data)
    with pytest.raises(DifflmError, match="damaged"):
        TextDiffusion.from_pretrained(tmp_path / "small")
    weights = load_file(file)
    scale = next(name for name in weights if name.endswith(SCALE))
    for wrong in ({}, {scale: weights[scale][:-1]}, {scale: weights[scale].T.contiguous()}):
        save_tensors(file, {name: w for name, w in weights.items() if name != scale} | wrong)
        with pytest.raises(DifflmError, match="no scale for each row"):
            TextDiffusion.from_pretrained(tmp_path / "small")


# -- weights that are stored as differences ----------------------------------------------------------------------------


def test_the_student_has_the_vectors_and_classifiers_of_its_base(e2e: TextDiffusion) -> None:
    few = TextDiffusion.from_pretrained("e2e-fast")
    assert few.guides == e2e.guides and few.guides
    own, base = few.model.state_dict(), e2e.model.state_dict()
    assert torch.equal(own["denoiser.codec.raw"], base["denoiser.codec.raw"])
    assert not torch.equal(own["denoiser.network.head.weight"], base["denoiser.network.head.weight"])


def test_few_steps_do_not_tell_how_likely_words_are() -> None:
    few = TextDiffusion.from_pretrained("e2e-fast")
    with pytest.raises(UsageError, match="cannot tell how likely words are"):
        few.alternatives(SENTENCES[0])
    with pytest.raises(UsageError, match="cannot tell how likely words are"):
        few.infill("The ___ is a pub.", candidates=2)


def test_few_steps_are_steered_more_strongly(e2e: TextDiffusion) -> None:
    few = TextDiffusion.from_pretrained("e2e-fast")
    assert few.usual_guidance == replace(e2e.usual_guidance, size=30.0)
    with pytest.raises(UsageError, match="guidance must be a number from 0 to 1,000"):
        TextDiffusion(few.model, few.tokenizer, {**few.config, "guidance": "strong"})


def test_a_student_is_measured_on_the_texts_of_its_base(tmp_path: Path) -> None:
    few = TextDiffusion.from_pretrained("e2e-fast")
    with pytest.raises(UsageError, match="e2e"):  # as with `e2e`: its corpus is not in this directory
        corpus_for(few, tmp_path)
    english = TextDiffusion(few.model, few.tokenizer, {"recipe": {"data": "english", "column": None}})
    with pytest.raises(UsageError, match="trained on texts that are not in the package"):
        corpus_for(english, tmp_path)


def test_a_student_is_saved_whole(tmp_path: Path) -> None:
    few = TextDiffusion.from_pretrained("e2e-fast")
    again = TextDiffusion.from_pretrained(few.save_pretrained(tmp_path / "whole"))
    assert "base" not in again.config and [path.name for path in again.guides] == ["guide", "guide-syntax"]
    assert [text.text for text in again.generate(2, seed=3)] == [text.text for text in few.generate(2, seed=3)]


def test_differences_are_a_half_step_off_at_most_and_none_where_nothing_changed(
    tmp_path: Path, e2e: TextDiffusion
) -> None:
    run, name = e2e.save_pretrained(tmp_path / "run"), "denoiser.network.head.weight"
    weights = load_file(run / "model.safetensors")
    weights[name] += 0.1 * torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(0))
    change_json(run / "config.json", sha256=save_tensors(run / "model.safetensors", weights))
    export_run(run, tmp_path / "small", base="e2e")
    assert load_file(tmp_path / "small" / "model.safetensors").keys() == {name, name + SCALE}
    found, base = load_run(tmp_path / "small")[0].state_dict(), e2e.model.state_dict()
    step = (weights[name] - base[name]).abs().amax(1, keepdim=True) / 7
    assert bool(((found[name] - weights[name]).abs() <= 0.51 * step).all())
    assert all(torch.equal(found[key], base[key]) for key in base if key != name)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("e2e", "'base' does not name a bundled model and its checksum"),
        ({"run": "../e2e", "sha256": "0"}, "'base' does not name a bundled model and its checksum"),
        ({"run": "e2e", "sha256": "0"}, "its checksum is not the one that was saved with it. Install difflm again."),
        ({"run": "judge", "sha256": None}, "'base' does not name a bundled model and its checksum"),
    ],
)
def test_a_wrong_base_is_refused(tmp_path: Path, base: object, message: str) -> None:
    shutil.copytree(bundled_runs()["e2e-fast"], tmp_path / "few")
    change_json(tmp_path / "few" / "config.json", base=base)
    with pytest.raises(DifflmError) as error:
        TextDiffusion.from_pretrained(tmp_path / "few")
    assert message in str(error.value)


# -- everyday English, where it is installed ---------------------------------------------------------------------------

needs_english = pytest.mark.skipif("english" not in bundled_runs(), reason="needs: pip install ./models/english")


@needs_english
def test_the_english_model_names_its_sources() -> None:
    run = bundled_runs()["english"]
    assert (run / "model.safetensors").stat().st_size <= 95e6
    card = (run / "README.md").read_text(encoding="utf-8")
    read = {name: source for name, source in SOURCES.items() if source.file}
    assert all(f"| {name} |" in card and source.licence in card for name, source in read.items())
    assert "SmolLM2-135M-Instruct" in card and (run / "LICENSE-APACHE").is_file()


def test_without_its_package_english_is_refused_with_the_command_that_brings_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr("difflm.training.run.installed_runs", dict)
    assert main(["generate", "--infill", "The dog ___."]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install ./models/english" in said
    assert find_start("en") == "english-small"


@pytest.mark.long
@needs_english
def test_an_ordinary_sentence_keeps_its_words() -> None:
    (made,) = TextDiffusion.from_pretrained("english").infill("My dog ___ in the garden.")
    assert made.text.startswith("My dog ") and made.text.endswith(" in the garden.") and len(made.text) < 80


@pytest.mark.long
def test_the_package_stays_below_95_megabytes() -> None:
    """As a wheel, which is compressed like this, 0.08 megabytes larger."""
    package = bundled_runs()["e2e"].parents[1]
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(len(zlib.compress(path.read_bytes())) for path in files) < 94.9e6


def test_weights_of_four_bits_are_near_and_whole_groups_exact() -> None:
    torch.manual_seed(0)
    weights = {
        "a": torch.randn(8, 64),
        "b": torch.arange(16.0).repeat(3, 4),
        "c": torch.randn(5),
        "d": torch.randn(2, 9),
    }
    again = dequantise(quantise_groups(weights))
    assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in "bcd")
    assert float((again["a"] - weights["a"]).norm() / weights["a"].norm()) < 0.085
    assert sum(t.numel() * t.element_size() for t in quantise_groups({"a": weights["a"]}).values()) == 8 * 64 * 5 // 8


def test_four_bits_without_scales_are_refused(tmp_path) -> None:
    stored = quantise_groups({"a": torch.randn(8, 64)})
    for damaged in ({**stored, "a.scale": stored["a.scale"][:, :1]}, {**stored, "a": stored["a"][:, :8].contiguous()}):
        save_tensors(tmp_path / "model.safetensors", damaged)
        with pytest.raises(DifflmError, match="four bits"):
            load_tensors(tmp_path / "model.safetensors")
