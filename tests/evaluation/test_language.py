"""The language task: on texts and likelihoods made by hand every figure is known; tiny runs show the whole."""

import json
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from difflm.data.batches import held_out as held_out_numbers
from difflm.data.batches import split
from difflm.data.corpora import corpus
from difflm.data.text_metrics import copied_share
from difflm.data.tokenfile import Limits, TokenFile, select_texts
from difflm.data.tokenizers import UNK, Bpe, Words
from difflm.diffusion.samplers.loop import Frame
from difflm.errors import DifflmError, UsageError
from difflm.evaluation.corpora import Corpus, corpus_for
from difflm.evaluation.language import evaluate_language
from difflm.evaluation.options import TELL, Options
from difflm.evaluation.reports import LANGUAGE
from difflm.evaluation.shared import DividedTextDiffusion, load_judge, ratio, score
from difflm.generation.pipeline import TextDiffusion
from difflm.models.base import Capabilities, LanguageModel, Sampling
from difflm.models.lengths import LengthPolicy
from tests.support.corpora import DATA, needs_e2e
from tests.support.tiny import tiny_run, write_grammar

REAL = "real text (valid)"


class FixedTexts(LanguageModel):
    """Writes given ids, sample k the k-th of them; its likelihood is whatever a test says."""

    def __init__(self, rows, longest=32, likelihood=None, cost=lambda ids, lengths: lengths.float()):
        super().__init__()
        self.rows, self.lengths, self.longest, self.cost = rows, LengthPolicy(longest), longest, cost
        self.capabilities = Capabilities(likelihood=likelihood)
        self.sampling, self.vocabulary = Sampling(steps=7), 100
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def draw_lengths(self, noise, condition=None, ranks=None):
        return torch.tensor([max(1, len(self.rows[k])) for k in noise.samples.tolist()])

    def forbid_tokens(self, ids):
        """It writes what it was given."""

    def write(self, batch, runner):
        tokens = torch.full((len(batch.lengths), batch.width), 3)
        for i, k in enumerate(batch.noise.samples.tolist()):
            tokens[i, : len(self.rows[k])] = torch.tensor(self.rows[k], dtype=torch.int64)
        yield Frame(0, torch.zeros(len(tokens)), tokens, torch.ones(tokens.shape), tokens != 3)

    def nats(self, batch, noise, draws=1):
        return self.cost(batch.ids, batch.lengths)


def recorded(texts, tokenizer, **how):
    rows = [tokenizer.encode(text) if isinstance(text, str) else text for text in texts]
    return TextDiffusion(FixedTexts(rows, **how), tokenizer, {"method": "difflm"})


@pytest.fixture(scope="module")
def grammar(tmp_path_factory):
    """Different sentences: equal ones would tie at a percentile."""
    return list(dict.fromkeys(write_grammar(tmp_path_factory.mktemp("grammar") / "g.txt", 600, seed=5)))[:400]


@pytest.fixture(scope="module")
def judge(tiny_runs):
    return TextDiffusion.from_pretrained(tiny_runs["autoregressive"])


def held_out(texts, training=()):
    return Corpus("grammar", "valid", list(texts), lambda: iter(training))


@pytest.mark.long
def test_the_seconds_of_divided_jobs_do_not_include_what_is_done_with_their_texts():
    lm = DividedTextDiffusion.from_pretrained("e2e", "cpu")
    jobs = [lm.make_job(1, seed, steps=1) for seed in range(3)]
    found = []
    for *_, seconds in lm.finished_rows(jobs):
        found.append(seconds)
        time.sleep(0.01)
    assert len(found) == 3 and len({*found}) == 1


def test_samples_that_are_real_text_measure_as_real_text(grammar, judge):
    texts = grammar[:60]
    model = recorded(random.Random(1).sample(texts, 60), judge.tokenizer)
    report = evaluate_language({"m": model}, held_out(texts, texts[:6]), judge, Options(samples=60))
    real, made = report.row(REAL), report.row("m")
    for figure in LANGUAGE.keys() - {"nats_per_token", "reconstructed", "denoiser_calls", "seconds"}:
        assert made.figures[figure] == pytest.approx(real.figures[figure], rel=1e-5), figure
    assert made.figures["length_distance"] == 0
    assert made.figures["copied"] == pytest.approx(0.1)
    assert made.figures["unique"] == 1
    assert made.figures["denoiser_calls"] == 7


@pytest.mark.long
def test_a_hundredth_of_real_text_lies_above_its_99th_percentile(grammar, judge):
    """Of 300 different texts three do."""
    texts = grammar[:300]
    made = recorded(texts, judge.tokenizer)
    report = evaluate_language({"m": made}, held_out(texts), judge, Options(samples=300, seed=2, score_texts=1))
    assert report.row(REAL).figures["above_p99"] == report.row("m").figures["above_p99"] == 3 / 300


def test_judge_nats_are_summed_over_texts_and_divided_by_words_and_end(grammar, judge):
    texts = grammar[:30]
    report = evaluate_language({"m": recorded(texts, judge.tokenizer)}, held_out(texts), judge, Options(samples=30))
    nats, tokens = judge.score(texts), [len(judge.tokenizer.encode(text)) + 1 for text in texts]
    assert report.row("m").figures["judge_nats_per_token"] == pytest.approx(sum(nats) / sum(tokens), rel=1e-5)
    each = np.array(nats) / np.array(tokens)
    assert report.about["judge_p99"] == pytest.approx(np.quantile(each, 0.99), rel=1e-5)


def test_nats_per_token_of_a_known_likelihood(grammar):
    """A text of n words costs 3n + 5 nats here; over 40 texts that is (3 Σn + 200) / (Σn + 40)."""
    tokenizer = Words.build(grammar, more_than=0)
    texts = grammar[:40]
    model = recorded(texts, tokenizer, likelihood="bound", cost=lambda ids, lengths: 3.0 * lengths + 5)
    report = evaluate_language({"m": model}, held_out(texts), None, Options(samples=40, draws=3))
    n = sum(len(tokenizer.encode(text)) for text in texts)
    row = report.row("m")
    assert row.figures["nats_per_token"] == pytest.approx((3 * n + 200) / (n + 40))
    assert row.notes["likelihood"] == "bound"
    record = next(r for r in report.records("m") if r["name"] == "nats_per_token")
    assert (record["likelihood"], record["draws"], record["samples"]) == ("bound", 3, 40)


def test_what_is_no_likelihood_is_not_printed(grammar, judge):
    report = evaluate_language(
        {"m": recorded(grammar, judge.tokenizer)}, held_out(grammar[:20]), judge, Options(samples=20)
    )
    row = report.row("m")
    assert row.figures["nats_per_token"] is None and "no likelihood" in row.notes["nats_per_token"]
    assert "likelihood" not in row.notes
    assert "nats_per_token" not in {record["name"] for record in report.records("m")}
    assert "perplexity" not in json.dumps([report.records(row.name) for row in report.rows])


def test_all_models_score_the_same_texts_and_too_long_ones_are_counted(grammar):
    """Of twenty texts, fifteen fit the shorter model; the longer one is scored on the same fifteen."""
    tokenizer = Words.build([*grammar, "more"], more_than=0)
    texts = [*grammar[:15], *(f"{text} {text}" for text in grammar[15:20])]
    seen: dict[str, set[int]] = {"short": set(), "long": set()}

    def counting(name):
        def cost(ids, lengths):
            seen[name].update(lengths.tolist())
            return lengths.float() + 1

        return cost

    rooms = {"short": 20, "long": 64}
    models = {k: recorded(texts, tokenizer, longest=v, likelihood="exact", cost=counting(k)) for k, v in rooms.items()}
    report = evaluate_language(models, held_out(texts), None, Options(samples=20))
    for name in models:
        row = report.row(name)
        assert row.texts["nats_per_token"] == 15 and row.figures["nats_per_token"] == 1
        assert "5 of 20" in row.notes["nats_per_token"]
    assert seen["short"] == seen["long"] and max(seen["long"]) <= 20


def test_a_judge_with_other_tokens_judges_nobody_but_its_own(grammar, judge):
    other = recorded(grammar, Bpe.build(grammar, 300), longest=200)
    same = recorded(grammar, judge.tokenizer)
    report = evaluate_language({"other": other, "same": same}, held_out(grammar[:20]), judge, Options(samples=20))
    assert report.row("other").figures["judge_nats_per_token"] is None
    assert report.row("other").figures["above_p99"] is None
    assert "other tokens" in report.row("other").notes["judge_nats_per_token"]
    assert report.row("other").figures["distinct_4"] == report.row("same").figures["distinct_4"]
    assert all(report.row(name).figures["above_p99"] is not None for name in ("same", REAL, "judge's own samples"))


def test_without_judge_and_twin_there_is_real_text_and_the_model(grammar):
    model = recorded(grammar, Words.build(grammar, more_than=0))
    report = evaluate_language({"m": model}, held_out(grammar[:20]), None, Options(samples=20))
    assert [row.name for row in report.rows] == [REAL, "m"]
    assert report.about["judge"] is report.about["judge_p99"] is None
    assert report.row("m").figures["judge_nats_per_token"] is None and "judge" in str(report.row("m").notes)


def test_copies_are_found_however_they_are_spaced(grammar, judge):
    """Two of four samples stand in the training texts, one of them written with its words apart."""
    training = [grammar[0], grammar[1].replace(".", " ."), grammar[2]]
    model = recorded([grammar[0], grammar[1], grammar[8], grammar[9]], judge.tokenizer)
    report = evaluate_language({"m": model}, held_out(grammar[2:6], training), judge, Options(samples=4))
    assert report.row("m").figures["copied"] == 2 / 4
    assert report.row(REAL).figures["copied"] == 1 / 4


def test_unknown_words_and_empty_texts_do_not_hide(grammar, judge):
    """An UNK does not show in the printed text, an empty text cannot be judged: both are counted."""
    ids = judge.tokenizer.encode(grammar[0])
    model = recorded([[*ids, UNK], ids, [], []], judge.tokenizer)
    report = evaluate_language({"m": model}, held_out(grammar[:50]), judge, Options(samples=4))
    row = report.row("m")
    assert row.figures["unknown"] == 1 / (2 * len(ids) + 1)
    assert row.figures["above_p99"] >= 2 / 4
    assert row.texts["judge_nats_per_token"] == 2 and "2 empty" in row.notes["judge_nats_per_token"]


@pytest.mark.long
def test_variety_is_compared_on_equally_many_texts(grammar, judge):
    """Sixty samples beside twenty held-out texts: distinct-n falls with the number, so twenty of each are counted."""
    report = evaluate_language(
        {"m": recorded(grammar, judge.tokenizer)}, held_out(grammar[:20]), judge, Options(samples=60)
    )
    first = evaluate_language(
        {"m": recorded(grammar, judge.tokenizer)}, held_out(grammar[:20]), judge, Options(samples=20)
    )
    for figure in ("distinct_1", "distinct_4", "self_bleu"):
        assert report.row("m").figures[figure] == first.row("m").figures[figure]
        assert report.row("m").texts[figure] == 20
    assert report.row("m").texts["copied"] == 60 and report.row(REAL).texts["copied"] == 20


@pytest.mark.long
def test_records_say_what_was_measured(grammar, judge):
    report = evaluate_language(
        {"m": recorded(grammar, judge.tokenizer)}, held_out(grammar), judge, Options(samples=50, seed=3)
    )
    records = report.records("m")
    for record in records:
        assert record["kind"] == "metric" and record["task"] == "language"
        assert record["unit"] == LANGUAGE[record["name"]].unit
        assert judge.tokenizer.fingerprint() in record["tokenizer"]
        assert (record["corpus"], record["split"], record["samples"], record["seed"]) == ("grammar", "valid", 50, 3)
        assert (record["model"], record["judge"]) == ("m", report.about["judge"])
        assert record["sampling"] == "sampler=ancestral steps=7"
    assert {r["name"] for r in records} == {k for k, v in report.row("m").figures.items() if v is not None}
    assert json.loads(json.dumps(records)) == records


def test_the_judge_is_named_by_its_weights(grammar, judge, tmp_path):
    other = TextDiffusion.from_pretrained(tiny_run(tmp_path, "autoregressive", steps=2))
    made = recorded(grammar, judge.tokenizer)
    names = [
        evaluate_language({"m": made}, held_out(grammar[:5]), j, Options(samples=5)).about["judge"]
        for j in (judge, judge, other)
    ]
    assert names[0] == names[1] != names[2]


def test_the_standard_error_is_the_spread_over_draws_of_texts():
    """Against the bootstrap with 2,000 draws, whose own spread is 1/√4000 = 1.6 %; linearisation costs about 1/n."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(8, 40, 200).astype(float)
    nats = tokens * draw.normal(1.7, 0.4, 200) + draw.normal(0, 3, 200)
    again = draw.integers(0, 200, (2000, 200))
    spread = (nats[again].sum(1) / tokens[again].sum(1)).std()
    assert ratio(nats, tokens)[1] == pytest.approx(spread, rel=0.08)


@pytest.mark.long
def test_three_methods_in_one_report(tiny_runs):
    methods = ("diffusion-lm", "difflm", "autoregressive")
    lms = {method: TextDiffusion.from_pretrained(tiny_runs[method]) for method in methods}
    models = {name: lms[name] for name in ("diffusion-lm", "difflm")}
    texts = corpus_for(models["difflm"], None, "valid")
    told: list[tuple[str, int, int]] = []
    TELL.set(lambda *now: told.append(now))
    reports = [
        evaluate_language(
            {**models, "again": lms["autoregressive"]},
            texts,
            lms["autoregressive"],
            Options(samples=6, seed=1, draws=2, settings={"steps": 5, "sampler": "ddim"}),
            twin=lms["autoregressive"],
        )
        for _ in range(2)
    ]
    report = reports[0]
    assert [row.name for row in report.rows] == [REAL, "twin samples", "diffusion-lm", "difflm", "again"]
    assert [row.notes.get("likelihood") for row in report.rows] == [None, "exact", "bound", "bound", "exact"]
    left_to_right = sum(g.denoiser_calls for g in lms["autoregressive"].generate(6, seed=1)) / 6
    assert [row.figures["denoiser_calls"] for row in report.rows] == [None, left_to_right, 5, 5, left_to_right]
    for row, same in zip(report.rows, reports[1].rows, strict=True):
        assert {**row.figures, "seconds": 0} == {**same.figures, "seconds": 0}
        for figure, value in row.figures.items():
            about_writing = figure in ("nats_per_token", "denoiser_calls", "seconds")
            assert (value is None) == (about_writing and row.name == REAL), (row.name, figure)
    made = {g.text for g in models["difflm"].generate(6, seed=1, steps=5, sampler="ddim")}
    assert report.row("difflm").figures["unique"] == len(made) / 6
    assert all(0 <= done <= total for _, done, total in told)
    chosen = random.Random(1).sample(texts.texts, len(texts.texts))
    bounds = models["difflm"].score(chosen, seed=1, draws=2)
    tokens = sum(len(models["difflm"].tokenizer.encode(text)) + 1 for text in texts.texts)
    assert report.row("difflm").figures["nats_per_token"] == pytest.approx(sum(bounds) / tokens, rel=1e-5)

    console = Console(width=160)
    with console.capture() as printed:
        console.print(report.table())
    lines = printed.get().splitlines()
    nats = next(line for line in lines if "held-out text" in line)
    assert nats.count("≤") == 2 and nats.count("–") == 1
    assert any("self-BLEU" in line for line in lines) and any("2 draws" in line for line in lines)


def test_a_files_held_out_texts_are_those_that_training_held_out(tmp_path):
    """Texts too long for the model are not trained on; the split must survive that."""
    data = tmp_path / "grammar.txt"
    texts = write_grammar(data, 400)
    for number in (0, 3, 4, 50, 399):
        texts[number] = " ".join([texts[number]] * 3)
    data.write_text("\n\n".join(texts), encoding="utf-8")
    run = tiny_run(tmp_path, "diffusion-lm", steps=1, longest=20)
    lm = TextDiffusion.from_pretrained(run)
    tokens = TokenFile.open(run / "data" / "train")
    selection = select_texts(tokens, Limits(lm.model.max_words))
    assert selection.too_long >= 5
    for name, subset in zip(("train", "valid"), split(selection.kept, len(tokens), 0), strict=True):
        ids, lengths = tokens.rows(subset, 20)
        expected = sorted(row[:n].tolist() for row, n in zip(ids, lengths, strict=True))
        assert sorted(lm.tokenizer.encode_batch(corpus_for(lm, None, name).texts)) == expected
    found = corpus_for(lm, None, "valid")
    assert sorted([*found.training(), *found.texts]) == sorted(texts)
    assert (found.name, found.split) == ("grammar.txt", "valid")

    wider = TextDiffusion.from_pretrained(tiny_run(tmp_path, "autoregressive", steps=1, longest=80))
    assert set(found.texts) <= set(corpus_for(wider, None, "valid").texts)  # none that the other one learned
    assert set(corpus_for(wider, None, "valid").texts) == {texts[i] for i in held_out_numbers(400, 0)}

    data.write_text("\n".join(texts[:300]), encoding="utf-8")
    with pytest.raises(DifflmError, match="changed since"):
        corpus_for(lm, None, "valid")
    with pytest.raises(UsageError, match="no split 'test'"):
        corpus_for(lm, None, "test")


@pytest.mark.long
def test_a_text_has_the_figure_that_scoring_all_of_them_gives(grammar, tiny_runs):
    """Scoring goes in pieces of 256; text 300 must not be taken for text 44 of another seed."""
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    rows = lm.encode(grammar[:300])
    pieces = score(lm, rows, 0, 1)
    assert pieces == pytest.approx(np.array(lm.score(grammar[:300], draws=1)), rel=1e-3)


def test_seconds_do_not_count_the_first_call(grammar, judge, monkeypatch):
    """A model whose first call takes nine seconds of the clock, compiling, allocating; each later one a second."""
    model = recorded(grammar, judge.tokenizer)
    write, calls = model.model.write, []

    def slow_at_first(*request):
        calls.append(request)
        return write(*request)

    clock = SimpleNamespace(perf_counter=lambda: len(calls) + 8.0 * bool(calls))
    monkeypatch.setattr("difflm.evaluation.shared.time", clock)
    model.model.write = slow_at_first
    report = evaluate_language({"m": model}, held_out(grammar[:4]), None, Options(samples=4, score_texts=1))
    assert report.row("m").figures["seconds"] == len(calls) - 1 > 0


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"draws": 0}, {"score_texts": 0}, {"seed": -1}])
def test_numbers_out_of_range_are_refused(grammar, judge, wrong):
    with pytest.raises(UsageError, match="must be between"):
        evaluate_language({"m": recorded(grammar, judge.tokenizer)}, held_out(grammar), judge, Options(**wrong))


def test_a_bound_cannot_judge_and_nothing_cannot_be_compared_with(grammar, judge, tiny_runs):
    with pytest.raises(UsageError, match="exact likelihood"):
        load_judge(str(tiny_runs["difflm"]), [judge], "cpu", print)
    bound = recorded(grammar, judge.tokenizer, likelihood="bound")
    with pytest.raises(DifflmError, match="no held-out text"):
        evaluate_language({"m": bound}, held_out([]), judge, Options(samples=5))


@pytest.mark.long
@needs_e2e
def test_real_e2e_text_holds_a_few_training_sentences():
    """11 of the 4,672 validation references also stand in training; natural spacing must not hide them."""
    config = {"recipe": {"data": "e2e", "column": None}}
    printed = Words.build(corpus("e2e", DATA, "train"))
    found = corpus_for(TextDiffusion(FixedTexts([]), printed, config), DATA, "valid")
    assert (found.name, len(found.texts)) == ("e2e", 4672)
    natural = [printed.decode(ids) for ids in printed.encode_batch(found.texts)]
    assert copied_share(natural, found.training()) == pytest.approx(11 / 4672)
