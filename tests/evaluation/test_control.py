"""The control task: success and intervals worked by hand, targets that can be asked again, and the whole on a tiny
model of a corpus in the layout of E2E that is written here."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from difflm.annotators.e2e_fields import FIELDS, expresses
from difflm.annotators.parser import own_parser, parse_texts
from difflm.annotators.tagger import own_tagger
from difflm.annotators.trees import phrases, shapes
from difflm.app.cli import main
from difflm.controls import Infill
from difflm.controls.learned import checking_tagger
from difflm.controls.plan import check_text
from difflm.data.corpora import E2EPair
from difflm.data.tokenizers import UNK
from difflm.data.words import split_words
from difflm.errors import UsageError
from difflm.evaluation.checkers import Checkers, equal_tags
from difflm.evaluation.control import (
    Made,
    Measure,
    System,
    evaluate_control,
    human_self_bleu,
    interval,
    outcomes,
    read_texts,
    target_means,
    wilson,
)
from difflm.evaluation.options import Options
from difflm.evaluation.reports import SENTENCES
from difflm.evaluation.targets import (
    CONTROLS,
    Target,
    draw_targets,
    fit_for,
    parse_target,
    read_targets,
    write_lines,
)
from difflm.generation.jobs import Generation
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import Request
from difflm.training.fit import train_run
from difflm.training.recipe import check
from difflm.training.texts import Setup
from tests.support.corpora import write_e2e
from tests.support.tiny import Silent, tiny_run

pytestmark = pytest.mark.long  # a few seconds of setup


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("control")


@pytest.fixture(scope="module")
def pairs(home):
    return write_e2e(home)


@pytest.fixture(scope="module")
def runs(home, pairs):
    """A model, its guide for the fields and tags, and a judge of the same words."""
    known = pairs[2:]
    (home / "texts.txt").write_text("".join(f"{p.text}\n" for p in known), encoding="utf-8")
    changes = {"data": str(home / "texts.txt"), "longest": 48, "steps": 10, "batch_size": 8}
    for method in ("difflm", "autoregressive"):
        tiny_run(home, method, **changes)
    words = [split_words(p.text) for p in known]
    found = zip(known, checking_tagger().tags(words), parse_texts(own_parser(), words), strict=True)
    rows = [
        {"text": p.text, **p.fields, "pos": own, "tree": [list(s) for s in phrases(tree)], "shape": shapes(tree)}
        for p, own, tree in found
    ]
    (home / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    model = {"guides": str(home / "difflm"), "hidden": 16, "layers": 1, "heads": 2, "dropout": 0.0}
    recipe = {"method": "classifier", "model": model, "data": str(home / "labels.jsonl"), "column": "text"}
    recipe = check({**recipe, "steps": 5, "batch_size": 8, "warmup": 0, "sample_every": 0})
    where = home / "difflm" / "guide"
    train_run(Setup(recipe, where, torch.device("cpu"), lambda *_: None), Silent())
    return {"model": home / "difflm", "judge": home / "autoregressive"}


@pytest.fixture(scope="module")
def lm(runs):
    return TextDiffusion.from_pretrained(runs["model"])


@pytest.fixture(scope="module")
def judge(runs):
    return TextDiffusion.from_pretrained(runs["judge"])


def said(target, *texts):
    """Texts as if the model had written them, checked as it checks them."""
    made = []
    for text in texts:
        words = split_words(text)
        checks = [control.check(words) for control in target.asked.controls()]
        found = [{"satisfied": c.satisfied, "score": c.score, "checker": c.checker} for c in checks]
        made.append(Generation(text, words, 5, 5, 0.1, 0, found))
    return Made(target, made)


# -- success ----------------------------------------------------------------------------------------------------------


def test_an_interval_worked_by_hand():
    """8 of 10: centre (0.8 + z²/20) / (1 + z²/10), z² = 3.8415; all of 200: from 200 / (200 + z²) to 1."""
    assert wilson(0.8, 10) == pytest.approx((0.49016, 0.94332), abs=1e-5)
    assert wilson(1.0, 200) == pytest.approx((200 / 203.8415, 1.0), abs=1e-6)
    assert wilson(0.0, 200) == pytest.approx((0.0, 3.8415 / 203.8415), abs=1e-6)
    # Shares of places: mean 0.9, standard deviation √(0.02 / 3), half 1.96 / 2 of it.
    assert interval("tags_equal", [0.8, 1.0, 0.9, 0.9]) == pytest.approx((0.82, 0.98), abs=1e-4)
    assert interval("tags_equal", [1.0] * 200) == wilson(1.0, 200)  # no spread is not certainty
    assert interval("length_exact", [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]) == wilson(0.8, 10)


@given(share=st.floats(0, 1), trials=st.integers(1, 10_000))
def test_an_interval_holds_its_share(share, trials):
    low, high = wilson(share, trials)
    assert 0 <= low <= share + 1e-9 and share - 1e-9 <= high <= 1
    assert high - low > wilson(share, 2 * trials)[1] - wilson(share, 2 * trials)[0]


def test_an_interval_covers_the_truth():
    """Of 2,000 experiments with 200 targets of success 0.97, 95 % hold it, to four standard errors."""
    shares = np.random.default_rng(0).binomial(200, 0.97, 2000) / 200
    inside = np.mean([low <= 0.97 <= high for low, high in (wilson(float(s), 200) for s in shares)])
    assert abs(inside - 0.95) < 4 * (0.95 * 0.05 / 2000) ** 0.5 + 0.015  # shares are steps of 1/200


def test_success_of_lengths_and_fields_by_hand():
    four = said(Target("length", Request(length=4)), "A pub near here", "A pub near here, too", "A pub, a pub, a pub")
    assert target_means(four) == pytest.approx({"length_exact": 1 / 3, "length_within_2": 2 / 3})
    cheap = said(
        Target("field", Request(field={"price": "cheap"})), "It is cheap.", "It is inexpensive.", "It is pricey."
    )
    assert target_means(cheap) == pytest.approx({"field_rule": 2 / 3, "field_verbatim": 1 / 3})


def test_success_of_tags_and_of_both_at_once():
    tagger = checking_tagger()
    sentence = "The pub is cheap."
    tags = tagger.tags([split_words(sentence)])[0]
    target = Target("field+pos", Request(field={"price": "cheap"}, pos=" ".join(tags)), sentence)
    obeys, no_field, no_tags = (
        outcomes(target, one) for one in said(target, sentence, "The pub is old.", "cheap").texts
    )
    assert set(obeys.values()) == {1.0}
    assert (no_field["field_rule"], no_field["all_at_once"]) == (0.0, 0.0)
    assert no_field["tags_equal"] == equal_tags(tagger.tags([split_words("The pub is old.")])[0], tags)
    assert (no_tags["field_rule"], no_tags["tags_whole"], no_tags["all_at_once"]) == (1.0, 0.0, 0.0)
    assert no_tags["tags_equal"] <= 1 / 5  # of the longer of both


def test_a_row_is_the_mean_over_targets_and_its_interval_counts_targets():
    one = said(Target("length", Request(length=2)), "A pub", "A pub", "A pub")
    other = said(Target("length", Request(length=2)), "A pub", "A big pub", "A big old cheap pub")
    row = Measure(None, Checkers.load(None)).model_row("m", "length", [one, other], 1.5)
    assert row.figures["length_exact"] == pytest.approx(2 / 3)
    assert row.intervals["length_exact"] == pytest.approx(wilson(2 / 3, 2))
    assert row.figures["length_within_2"] == pytest.approx(5 / 6)
    assert (row.count, row.texts["length_exact"], row.texts["distinct_4"]) == (2, 6, 2)
    assert 0.5 < row.figures["self_bleu"] < 1 and row.figures["seconds"] == 1.5


def test_without_spacy_the_bundled_tagger_is_alone(monkeypatch):
    monkeypatch.setattr("difflm.evaluation.checkers.checking_tagger", own_tagger)
    alone = Checkers.load(None)
    assert alone.tagger is own_tagger() and alone.second_tagger is None
    target = Target("pos", Request(pos="DET NOUN"), "A pub")
    row = Measure(None, alone).model_row("m", "pos", [said(target, "A pub", "A pub")], 1.0)
    assert row.about["checkers"] == [own_tagger().name] and "tagger_agreement" not in row.figures


def test_a_second_tagger_compares_its_own_tags_of_both():
    """One tells capitals apart, the other calls everything PROPN: they agree on capital words. By the second's lights
    one text has the sentence's tags, the other three of four."""

    class Capitals:
        name = "capitals 1"

        def tags(self, sentences):
            return [["PROPN" if word[0].isupper() else "X" for word in words] for words in sentences]

    class Capital(Capitals):
        name = "capital 1"

        def tags(self, sentences):
            return [["PROPN"] * len(words) for words in sentences]

    target = Target("pos", Request(pos="PROPN PROPN PROPN PROPN"), "Cotto is a pub")
    checkers = Checkers(Capital(), own_parser(), Capitals())
    made = said(target, "Ranch has no pub", "Ranch has no Pub")
    row = Measure(None, checkers).model_row("m", "pos", [made], 1.0)
    assert row.figures["tags_equal_second"] == pytest.approx((1 + 3 / 4) / 2)
    assert row.figures["tagger_agreement"] == pytest.approx(3 / 8)  # the capital words of both


def test_people_are_as_alike_as_their_sentences_of_one_meaning():
    same = [E2EPair({"name": "Cotto"}, "Cotto is a pub .")] * 3
    other = [E2EPair({"name": "Ranch"}, text) for text in ("one two three", "four five six", "seven")]
    assert human_self_bleu(same, 3, 0) == pytest.approx((1, 3))
    assert human_self_bleu([*same, *other], 3, 0) == pytest.approx((0.5, 6))
    assert human_self_bleu(same, 4, 0) is None and human_self_bleu(same, 1, 0) is None


# -- targets ----------------------------------------------------------------------------------------------------------


def drawn(pairs, lm, count=9, seed=0, names=CONTROLS):
    return draw_targets(names, pairs, [lm], checking_tagger(), count, seed)


def test_every_target_is_obeyed_by_its_own_sentence(pairs, lm):
    targets = drawn(pairs, lm, 20)
    assert {t.control for t in targets} == set(CONTROLS) and len(targets) == len(CONTROLS) * 20
    for target in targets:
        words = split_words(target.sentence)
        for control in target.asked.controls():
            if isinstance(control, Infill):  # its words, however they are spaced
                kept = " ___ ".join(" ".join(split_words(part)) for part in control.parts)
                assert Infill(kept.strip()).check(" ".join(words)).satisfied, target
            else:
                assert control.check(target.sentence if control.reads_text else words).satisfied, target
        assert len(target.asked.controls()) == len(target.control.split("+"))
        assert UNK not in lm.tokenizer.encode(target.sentence) and len(words) <= lm.model.max_words
        assert target.asked.model_fields_set >= set(target.control.split("+"))


def test_the_fields_and_their_values_are_asked_in_turn(pairs, lm):
    for name in ("field", "field+length", "field+pos"):
        targets = drawn(pairs, lm, 16, names=[name])
        assert [name for t in targets for name in t.asked.field] == 2 * list(FIELDS)
        assert len({t.sentence for t in targets}) == 16
        assert {t.asked.field["price"] for t in targets if "price" in t.asked.field} == {"cheap", "high"}


def test_a_field_that_the_sentence_leaves_out_is_not_asked(lm):
    silent = [E2EPair({"name": "Cotto", "price": "cheap"}, "Cotto is a pub .")]
    assert [t.asked.field for t in drawn(silent, lm, 5, names=["field"])] == [{"name": "Cotto"}]


def test_targets_depend_on_the_seed_alone(pairs, lm):
    many = drawn(pairs, lm, 12)
    assert drawn(pairs, lm, 12) == many
    assert drawn(pairs, lm, 5, names=["pos"]) == [t for t in many if t.control == "pos"][:5]
    assert drawn(pairs, lm, 12, seed=1) != many
    assert len(drawn(pairs, lm, 10**6, names=["length"])) == len(pairs) - 2


def test_targets_survive_their_file(pairs, lm, tmp_path):
    targets = drawn(pairs, lm)
    write_lines(tmp_path / "targets.jsonl", (target.to_json() for target in targets))
    assert read_targets(tmp_path / "targets.jsonl") == targets
    assert fit_for(targets, [lm], checking_tagger()) == (targets, [])
    first = json.loads((tmp_path / "targets.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first.keys() == {"control", "asked", "sentence"} and first["asked"].keys() == {"length"}


def test_released_targets_are_read():
    field = parse_target('["customer", "rating", ":", "5", "out", "of", "5"]', "here")
    assert field == Target("field", Request(field={"customer rating": "5 out of 5"}))
    line = {
        "pos": ["START", "PROPN", "AUX", "ADJ", "PROPN", "END"],
        "words_": ["START", "Cotto", "is", "cheap", "\n", "END"],
    }
    assert parse_target(json.dumps(line), "here") == Target("pos", Request(pos="PROPN AUX ADJ"), "Cotto is cheap")


def test_targets_of_a_file_are_made_fit(lm):
    """Tags become those of the tagger that checks; a sentence with an unknown word goes; no sentence is no fault."""

    class Installed:
        name = "spacy 1"

        def tags(self, sentences):
            return own_tagger().tags(sentences)

    sentence = "Cotto is a cheap pub ."
    tags = " ".join(own_tagger().tags([split_words(sentence)])[0])
    given = [
        Target("pos", Request(pos="X X X X X X"), sentence),
        Target("length", Request(length=3), "zyzzyva is cheap"),
        Target("field", Request(field={"area": "riverside"})),
    ]
    kept, notes = fit_for(given, [lm], Installed())
    assert kept == [Target("pos", Request(pos=tags), sentence), given[2]]
    assert len(notes) == 2 and "spacy 1" in notes[1]
    with pytest.raises(UsageError, match="sentence of every target has words"):
        fit_for(given[1:2], [lm], checking_tagger())


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 1 is not JSON"),
        ("3", "is not a target such as"),
        ('{"spans": [[3, 5, "PP"]], "words_": []}', "has no words"),
        ('{"words_": ["a", "pub"]}', "is not a target such as"),
        ('{"control": "rhyme", "asked": {}}', "unknown control 'rhyme'. Known: length"),
        ('{"control": "length", "asked": {"pos": "NOUN"}}', "a target of length and asks for pos"),
        ('{"control": "length", "asked": {}}', "asks for nothing"),
        ('{"control": "length", "asked": {"length": "long"}}', "length: input should be"),
        ('{"control": "length", "asked": {"lenght": 3}}', "unknown key 'lenght'. Did you mean 'length'"),
        ('{"control": "length", "asked": {"length": 3}, "sentence": 5}', "not a text"),
        ('{"control": "field", "asked": {"field": ["food"]}}', "field: input should be"),
        ('{"control": "field", "asked": {"field": {"food": "Indian", "price": "high"}}}', "one field, not for 2"),
        ('{"control": "field", "asked": {"field": {"food": "Martian"}}}', "unknown value 'Martian' for food"),
        ('["food", ":", "Martian"]', "unknown value 'Martian' for food"),
        ('{"pos": ["NOUN"], "words_": ["a", "pub"]}', "1 tags for 2 words"),
        ('{"pos": 3, "words_": ["a", "pub"]}', "lists of words"),
        ("\n", "has no target"),
    ],
)
def test_a_line_that_is_no_target_is_told_by_its_number(tmp_path, line, told):
    (tmp_path / "targets.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        read_targets(tmp_path / "targets.jsonl")
    assert told in str(refused.value) and "\n" not in str(refused.value)


# -- the whole --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(pairs, lm, judge):
    targets = drawn(pairs, lm, 2)
    return evaluate_control([System(lm, 2, 3, 2, settings={"steps": 3}, name="tiny")], targets, judge, pairs)


def rows_of(report):
    return {(row.group, row.name): row for row in report.rows}


def test_every_control_is_measured_beside_its_sentences(report, pairs, judge):
    rows = rows_of(report)
    assert set(rows) == {(control, name) for control in CONTROLS for name in ("tiny", SENTENCES)}
    people = human_self_bleu(pairs, 2, 3)
    for control in CONTROLS:
        made, real = rows[control, "tiny"], rows[control, SENTENCES]
        assert made.texts["seconds"] == 4 and real.texts["judge_nats_per_token"] == 2
        assert made.figures["judge_nats_per_token"] > 0 and made.figures["seconds"] > 0
        assert (real.figures["self_bleu"], real.texts["self_bleu"]) == people
        assert set(made.intervals) == {
            "length": {"length_exact", "length_within_2"},
            "field": {"field_rule", "field_verbatim"},
            "infill": {"infill_kept"},
        }.get(control, set(made.intervals))
    assert rows["length", "tiny"].figures["length_exact"] == 1.0
    assert rows["field+length", "tiny"].figures["length_exact"] == 1.0
    assert rows["infill", "tiny"].figures["infill_kept"] == 1.0
    for control in ("pos", "field+pos"):
        figures = rows[control, "tiny"].figures
        assert 0 <= figures["tags_whole"] <= figures["tags_equal"] <= 1
    both = rows["field+pos", "tiny"].figures
    assert both["all_at_once"] <= min(both["field_rule"], both["tags_whole"])


def test_the_judges_figure_of_the_sentences_is_their_likelihood(pairs, lm, judge):
    targets = drawn(pairs, lm, 3, names=["length"])
    made = evaluate_control([System(lm, 1, settings={"steps": 2}, name="tiny")], targets, judge, pairs)
    sentences = [t.sentence for t in targets]
    tokens = sum(len(judge.tokenizer.encode(s)) + 1 for s in sentences)
    expected = sum(judge.score(sentences)) / tokens
    assert rows_of(made)["length", SENTENCES].figures["judge_nats_per_token"] == pytest.approx(expected, rel=1e-5)
    assert rows_of(made)["length", "tiny"].figures["self_bleu"] is None  # of one sample


def test_all_candidates_are_counted_where_there_is_something_to_choose_by(report):
    calls = {row.group: row.figures["denoiser_calls"] for row in report.rows if row.name == "tiny"}
    chosen = {control: 6 for control in CONTROLS}  # two candidates of three steps
    read = {control: 8 for control in CONTROLS if {"pos", "tree"} & {*control.split("+")}}  # each by the model as well
    assert calls == chosen | read | {"length": 3, "infill": 8}


def test_records_name_what_they_were_made_with(report):
    records = report.records("tiny") + report.records(SENTENCES)
    assert len({(r["model"], r["name"]) for r in records}) == len(records)
    for record in records:
        assert (record["kind"], record["task"], record["seed"]) == ("metric", "control", 3)
        assert record["unit"] and record["checkers"] and record["judge"] and record["target_set"]
        assert all(any(sign.isdigit() for sign in checker) for checker in record["checkers"])  # a version
    tags = next(r for r in records if r["name"] == "pos.tags_equal")
    assert checking_tagger().name in tags["checkers"]
    assert tags["interval_95"][0] <= tags["value"] <= tags["interval_95"][1]
    assert "guidance=10 candidates=2" in tags["sampling"] and "steps=3" in tags["sampling"]


def test_the_command_draws_targets_keeps_them_and_asks_for_the_same_again(home, runs, tmp_path, capsys):
    argv = ["evaluate", runs["model"], "--task", "control", "--data", home, "--samples", 2, "--each", 2, "--steps", 3]
    argv += ["--controls", "length,field", "--targets", tmp_path / "targets.jsonl", "--judge", runs["judge"]]
    assert main([str(word) for word in argv]) == 0
    table = capsys.readouterr()
    assert "length exact" in table.out and "of people, one meaning" in table.out and "100.0%" in table.out
    assert "4 targets" in table.err
    before = (tmp_path / "targets.jsonl").read_bytes()

    assert main([str(word) for word in [*argv, "--json", "--out", tmp_path / "records.jsonl"]]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["control"], row["name"]) for row in rows][:2] == [("length", "difflm"), ("length", SENTENCES)]
    assert (tmp_path / "targets.jsonl").read_bytes() == before

    kept = [json.loads(line) for line in (runs["model"] / "metrics.jsonl").read_text().splitlines()]
    first = {r["name"]: r["value"] for r in kept if r.get("task") == "control" and r["model"] == "difflm"}
    again = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    second = {r["name"]: r["value"] for r in again if r["model"] == "difflm"}
    clock = {f"{control}.{clock}" for control in ("length", "field") for clock in ("seconds", "seconds_50")}
    assert {k: v for k, v in first.items() if k not in clock} == {k: v for k, v in second.items() if k not in clock}
    assert "length.length_exact" in (runs["model"] / "README.md").read_text()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--controls", "length,rhyme"], "unknown control 'rhyme'. Known: length, field"),
        (["--samples", "0"], "must be between 1 and 1,000,000, not 0"),
        (["--each", "0"], "between 1 and"),
        (["--candidates", "0"], "--candidates must be"),
        (["--guidance", "-1"], "--guidance must be"),
        (["--guidance", "nan"], "--guidance must be"),
        (["--steps", "0"], "--steps must be"),
        (["--draws", "3"], "--draws is for --task language"),
        (["--targets", "HOME"], "is a directory"),
        (["--targets", "HOME/labels.jsonl"], "is not a target such as"),
        (["--data", "HOME/nowhere"], "no E2E in"),
        (["--judge", "MODEL"], "exact likelihood"),
        (["--guide", "HOME/nowhere"], "does not exist"),
    ],
)
def test_what_cannot_be_measured_is_told_in_a_line(home, runs, capsys, more, told):
    more = [word.replace("HOME", str(home)).replace("MODEL", str(runs["model"])) for word in more]
    argv = ["evaluate", str(runs["model"]), "--task", "control", "--data", str(home), *more]
    assert main(argv) in (1, 2)
    complaint = [line for line in capsys.readouterr().err.splitlines() if line.startswith("difflm: ")]
    assert len(complaint) == 1 and told in complaint[0]


@pytest.mark.long
def test_a_model_without_a_guide_is_told_so(home, runs, pairs, capsys):
    bare = tiny_run(home / "bare", "difflm", data=str(home / "texts.txt"), longest=48, steps=1)
    argv = ["evaluate", bare, "--task", "control", "--data", home, "--controls", "field", "--samples", 1]
    assert main([str(word) for word in argv]) == 2
    assert "none of this model's classifiers knows the label 'name'" in capsys.readouterr().err
    assert main([str(word) for word in [*argv, "--guide", runs["model"] / "guide"]]) == 2
    assert "made for another model" in capsys.readouterr().err
    twin = ["evaluate", runs["judge"], "--task", "control", "--data", home, "--controls", "length", "--samples", 1]
    assert main([str(word) for word in twin]) == 2
    assert "controls are for diffusion models" in capsys.readouterr().err


def test_options_of_one_task_are_refused_by_the_other(runs, capsys):
    assert main(["evaluate", str(runs["model"]), "--each", "3"]) == 2
    assert "--each is for --task control" in capsys.readouterr().err


def test_the_rules_of_the_fields_hold_in_this_corpus(pairs):
    """The premise of these tests: every sentence says all that its meaning holds."""
    for pair in pairs[2:]:
        assert all(expresses(split_words(pair.text), field, value) for field, value in pair.fields.items()), pair


def test_released_spans_and_compositions_are_read():
    words = ["START", "It", "is", "cheap", ".", "\n", "END"]
    span = parse_target(json.dumps({"words_": words, "spans": [[1, 2, "VP"]]}), "x")
    assert (span.control, span.asked.span, span.sentence) == ("span", ["1,2,VP"], "It is cheap.")
    both = {"words_": words, "pos": ["START", "PRON", "AUX", "ADJ", "PUNCT", "SPACE", "END"]}
    both["attr"] = ["price", ":", "cheap"]
    target = parse_target(json.dumps(both), "x")
    assert target.control == "field+pos" and target.asked.field == {"price": "cheap"}
    assert target.asked.pos == "PRON AUX ADJ PUNCT"
    for wrong in (
        {"words_": words, "spans": [[2, 1, "VP"]]},
        {"words_": words, "spans": 3},
        {**both, "attr": ["price"]},
    ):
        with pytest.raises(UsageError, match=r"^x"):
            parse_target(json.dumps(wrong), "x")


def test_targets_that_ask_the_same_have_texts_of_their_own(tmp_path):
    twice = [Target("length", Request(length=2), "A pub"), Target("length", Request(length=2), "An inn")]
    lines = [
        {"control": "length", "asked": {"length": 2}, "text": text} for text in ("A pub", "No", "An inn", "Here I go")
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = read_texts(tmp_path / "texts.jsonl", twice, 2)
    assert [[text.text for text in one.texts] for one in found] == [
        ["A pub", "No"],
        ["An inn", "Here I go"],
    ]


def test_trees_of_a_file_are_parsed_at_once(tmp_path, monkeypatch):
    """Not text by text; and what is found is what a text by itself has."""
    asked = {"tree": "(S (NP * *) (VP * (NP * *)) *)"}
    texts = ["The Mill serves cheap food.", "The pub has no name.", "Cotto is cheap.", ""]
    target = Target("tree", Request(**asked), texts[1])
    lines = [{"control": "tree", "asked": asked, "text": text} for text in texts]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    alone = [check_text(target.asked.controls(), text) for text in texts]
    calls, parser = [], own_parser()
    parse = parser.parse
    monkeypatch.setattr(parser, "parse", lambda sentences: calls.append(len(sentences)) or parse(sentences))
    found = read_texts(tmp_path / "texts.jsonl", [target], 4)
    assert [text.controls for text in found[0].texts] == alone and calls == [3]
    assert [one[0]["satisfied"] for one in alone][2:] == [False, False]


@pytest.mark.long
def test_texts_made_elsewhere_are_checked_anew(pairs, lm, tmp_path):
    """What is read from a file has the figures of what was just written, and a file that lacks some is refused."""
    targets, kept = drawn(pairs, lm, 2), tmp_path / "texts.jsonl"
    system = System(lm, 2, 3, settings={"steps": 2}, name="tiny")
    made = evaluate_control([system], targets, None, pairs, options=Options(texts=kept))
    again = evaluate_control([system], targets, None, pairs, options=Options(texts=kept))
    for one, other in zip(made.rows, again.rows, strict=True):
        assert {k: v for k, v in one.figures.items() if not k.startswith("seconds")} == pytest.approx(
            {k: v for k, v in other.figures.items() if not k.startswith("seconds")}
        )
    assert again.rows[0].figures["seconds"] is None and "made before" in again.notes[0]
    with pytest.raises(UsageError, match="Lower each"):
        evaluate_control([System(lm, 3)], targets, None, pairs, options=Options(texts=kept))
    kept.write_text("{}\n", encoding="utf-8")
    with pytest.raises(UsageError, match="line 1"):
        evaluate_control([system], targets, None, pairs, options=Options(texts=kept))


def test_words_around_a_gap_that_the_model_does_not_know_are_counted_as_printed(lm):
    """They stand as they were given, though an answer to a user leaves such a gap unjudged."""
    target = Target("infill", Request(infill="Zebulon ___:2 ."))
    report = evaluate_control([System(lm, 2, settings={"steps": 2}, name="tiny")], [target], None)
    assert report.rows[0].figures["infill_kept"] == 1.0


def test_tags_of_another_tagger_are_refused_where_only_the_bundled_one_checks(lm, tmp_path):
    """The figures would rest on targets that were made anew: a line says what to do instead."""
    sentence = "Cotto is a cheap pub ."
    other = Target("pos", Request(pos="X X X X X X"), sentence)
    same = Target("pos", Request(pos=" ".join(own_tagger().tags([split_words(sentence)])[0])), sentence)
    assert fit_for([same], [lm], own_tagger()) == ([same], [])
    with pytest.raises(UsageError, match="1 of 2 targets") as refused:
        fit_for([same, other], [lm], own_tagger())
    assert "\n" not in str(refused.value)
    assert ".[parse]" in str(refused.value) and "name controls" in str(refused.value)
