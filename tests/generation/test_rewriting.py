"""Texts that are said in other words: what is refused, what is chosen, and what is said of it."""

import re

import pytest
import torch

from difflm import Contains, TextDiffusion, UsageError
from difflm.controls.gaps import Edit
from difflm.data.meaning import Lexicon, find_fault
from difflm.data.tokenizers import Bpe
from difflm.generation import ranking
from difflm.generation.pipeline import WHOLE
from difflm.generation.ranking import LOST_WORD, UNCHANGED, UNKNOWN_SPELLING, restate
from difflm.generation.requests import Request, generation_to_json
from difflm.methods import METHODS, TextSpec
from tests.support.open_checkpoints import MODELS
from tests.support.restated import SENTENCES

NEGATION = r"no|not|never|none|nobody|nothing|neither|nor|cannot|without|hardly|nowhere|scarcely|barely|\w+n['’]t"
PHRASE = "In other words:"
TEXTS = ["The old dog was very tired.", "Anna did not buy 3 apples in London.", "Nobody saw him"]


@pytest.fixture(scope="module")
def lm():
    """A model of random weights that reads from left to right as well, and is said to have learned the phrase."""
    torch.manual_seed(0)
    tokenizer = Bpe.build([*TEXTS, PHRASE, "He felt weary."] * 5, 300)
    config = {**MODELS["diffullama"]["config"], "vocab_size": tokenizer.size}
    built = METHODS["mdlm"](decoder=config, hidden=32, in_order=0.5, dropout=0.0).build(TextSpec(tokenizer.size, 128))
    about = {"method": "mdlm", "gaps": {"candidates": 3, "restates": PHRASE, "sampler": "confidence"}}
    return TextDiffusion(built.eval(), tokenizer, about)


def keeps(answer, kept, denied):
    """Whether an answer has these words, and as many negations, told without the code that is tested."""
    figures = {"two": "2", "three": "3", "nine": "9", "ten": "10", "hundred": "100", "first": "1st"}
    words = re.findall(r"\w+(?:['’]\w+)?", answer)
    own = {figures.get(word.lower(), word) for word in words} | {word.removesuffix("'s") for word in words}
    found = sum(bool(re.fullmatch(NEGATION, word, re.IGNORECASE)) for word in words)
    return all({word, figures.get(word, word)} & own for word in kept.split()) and found == denied


def choose(lm, monkeypatch, text, answers, nats, keep=()):
    """What is chosen of these answers, if they have so many nats."""
    monkeypatch.setattr(ranking, "read_in_order", lambda _, rows: [0.0, *nats][: len(rows)])
    made = restate(Edit(text, keep=keep), PHRASE, lm)
    chosen = made.choose([made.encode(answer) for answer in answers])
    return lm.tokenizer.decode(chosen.ids), chosen


@pytest.mark.parametrize("text", TEXTS)
def test_whatever_a_model_writes_negations_numbers_and_names_stay(lm, text):
    for seed in range(3):
        (made,) = lm.edit(text, seed=seed, steps=4)
        assert find_fault(text, made.text, Lexicon()) in (None, "nothing", "content words")
        (check,) = made.controls
        assert check["name"] == "edit" and check["satisfied"] and made.denoiser_calls >= 3
        assert (made.text == text) == (not made.changed) == (UNCHANGED in made.warnings)
        assert generation_to_json(made).get("changed", []) == made.changed


@pytest.mark.parametrize(("text", "kept", "denied"), SENTENCES)
def test_forty_sentences_keep_what_they_must(lm, text, kept, denied):
    assert keeps(text, kept, denied)
    assert keeps(lm.edit(text, steps=1)[0].text, kept, denied)


@pytest.mark.long
def test_english_keeps_what_it_must():
    english = TextDiffusion.from_pretrained("english")
    for text, kept, denied in SENTENCES[2:6]:
        (made,) = english.edit(text, steps=16)
        assert keeps(made.text, kept, denied) and made.controls[0]["satisfied"], made.text
        assert bool(made.changed) == (made.text != text)


def test_candidates_that_change_the_meaning_are_refused(lm, monkeypatch):
    answers = ["He was not tired.", "He felt weary.", "He was tired.", "He was 3 apples."]
    made, chosen = choose(lm, monkeypatch, "He was tired.", answers, [5.0])
    assert (made, chosen.index, [*chosen.said]) == ("He felt weary.", 1, [])


def test_of_the_others_the_likeliest_that_keeps_its_words_is_chosen(lm, monkeypatch):
    answers = ["The old dog felt weary.", "The old dog was weary. He"]  # of which one sentence is read
    assert choose(lm, monkeypatch, TEXTS[0], answers, [3.0, 2.0])[0] == "The old dog was weary."
    answers[1] = "The old cat was tired."  # one content word is not kept; of the other answer two are new
    assert choose(lm, monkeypatch, TEXTS[0], answers, [3.0, 3.1 + LOST_WORD])[0] == answers[0]
    assert choose(lm, monkeypatch, TEXTS[0], answers, [3.0, 2.9 + LOST_WORD])[0] == answers[1]
    vars(lm)["lexicon"] = Lexicon(frozenset(["the", "old", "dog", "felt", "was", "weary"]))
    answers[1] = "The old dog was glorby."
    try:
        assert choose(lm, monkeypatch, TEXTS[0], answers, [3.0, 3.1 + LOST_WORD - UNKNOWN_SPELLING])[0] == answers[0]
        assert choose(lm, monkeypatch, TEXTS[0], answers, [3.0, 2.9 + LOST_WORD - UNKNOWN_SPELLING])[0] == answers[1]
    finally:
        del vars(lm)["lexicon"]


def test_if_all_are_refused_one_word_is_exchanged_or_none(lm, monkeypatch):
    made, chosen = choose(lm, monkeypatch, TEXTS[0], ["The old dog was not tired."], [5.0, 1.0, 5.0, 5.0, 5.0])
    assert made == "The old dog was truly tired." and "exchanged" in chosen.said[0]
    made, chosen = choose(lm, monkeypatch, TEXTS[0], ["x."], [5.0] * 5, ["The", "very"])
    assert made == TEXTS[0] and [*chosen.said] == [UNCHANGED]


def test_drafts_show_the_answer_alone(lm):
    for drafts in lm.stream(edit=Edit(TEXTS[0]), steps=3):
        assert all(PHRASE not in "".join(draft.tokens) for draft in drafts)


def test_who_asks_for_noise_gets_it_and_is_told(lm):
    for asked in ({"strength": 0.4}, {"controls": [Contains("tired")]}):
        (made,) = lm.edit(TEXTS[0], steps=3, **asked)
        assert any("noised" in one for one in made.warnings)
    assert not lm._restates(Edit("a", 0.5), ()) and lm._restates(Edit("a"), ()) and not lm._restates(Edit("a"), [1])


def test_a_request_has_the_usual_candidates(lm):
    told = lambda **asked: lm.settle(Request(**asked)).candidates  # noqa: E731
    assert told(edit="a dog") == told(edit="a dog", n=2, keep=["dog"]) == WHOLE
    assert told(edit="a dog", strength=0.5) == told(edit="a dog", candidates=1) == told(edit="a", contains=["b"]) == 1
    request = lm.settle(Request(edit=TEXTS[0], n=2, steps=3))
    assert lm.make_job(**request.job()).each == WHOLE and len(lm.edit(TEXTS[0], 2, steps=3)) == 2


def test_texts_that_cannot_be_said_in_other_words_are_refused(lm):
    with pytest.raises(UsageError, match="says texts of at most"):
        lm.edit("The old dog. " * 20)
    with pytest.raises(UsageError, match="fill it with infill"):
        lm.edit("The old ___ was tired.")


def test_unusual_texts_get_a_warning(lm, monkeypatch):
    assert lm.given_nats("The dog") == 0  # too short to tell
    text = "The old dog ___ in London, very tired."
    nats = lm.given_nats(text)
    for more in (-0.1, 0.1):
        monkeypatch.setitem(lm.gaps, "usual_nats", nats + more)
        (made,) = lm.infill(text, steps=1)
        assert any("further from them than 99 %" in one for one in made.warnings) == (more < 0)
