"""Controls of models that write pieces of words: what is asked holds of every printed text, wherever pieces are cut.

The models are untrained and spiteful: they favour pieces that lengthen words and pieces of the avoided ones."""

import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from difflm import Avoid, Contains, Infill, Length, Pattern, TextDiffusion, WordCount
from difflm.controls.exact import (
    avoid_words,
    hold_phrase,
    let_end,
    printed_pieces,
    sort_followers,
)
from difflm.controls.gaps import Edit, find_kept, matches_parts
from difflm.controls.patterns.regular import compile_characters
from difflm.data.tokenizers import END, Bpe, Characters, PretrainedTokenizer
from difflm.data.words import split_words
from difflm.errors import UsageError
from difflm.fast.inference import Inference
from difflm.methods import METHODS, TextSpec
from tests.support.pretrained import train_encoder

TEXTS = [
    "The Mill is a cheap pub near Café Sicilia, 5pm, food for £30.",
    "Cheaper food (at 10.50) isn't a café's; we cannot eat it.",
    "a chea p on the river-side. The cheapest Mills.",
] * 4
BPE, CHARACTERS = Bpe.build(TEXTS, 330), Characters.build([*TEXTS, "xX"])
METHODS_TRIED = ["difflm", "diffusion-lm", "mdlm", "udlm"]
SPITE = ["che", "cheap", "Che", "ap", "s", ".", "e", "a", "-", "'", "\n", " "]


def make_model(method, tokenizer=BPE, longest=40, seed=1):
    torch.manual_seed(seed)
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "dropout": 0.0}
    if METHODS[method].family == "gaussian":
        sizes["embedding_dim"] = 16
    model = METHODS[method](**sizes).build(TextSpec(tokenizer.size, longest))
    spellings = tokenizer.spellings()
    with torch.no_grad():
        model.denoiser.codec.raw.normal_()
        diffuses = method == "diffusion-lm"
        bias = model.denoiser.codec.bias if diffuses else model.denoiser.network.get_parameter("head.bias")
        bias.normal_(0, 2)
        bias[[4 + k for k, piece in enumerate(spellings) if piece.strip() in SPITE]] += 6
    return TextDiffusion(model.eval(), tokenizer, {"method": method})


@pytest.fixture(scope="module")
def models():
    return {method: make_model(method) for method in METHODS_TRIED}


def hold(lm, controls, n=4, **more):
    texts = lm.generate(n, controls=controls, steps=3, **more)
    for text in texts:
        assert [one["satisfied"] for one in text.controls] == [True] * len(controls), (controls, text.text)
    return texts


ASKED = {
    "avoid": [Avoid("cheap"), Avoid("café"), Avoid("a"), Avoid("."), Avoid("'s")],
    "contains": [Contains("Mill"), Contains("10"), Contains("a café")],
    "both": [Contains("food"), Contains("river"), Avoid("cheap"), Avoid("s")],
    "gaps": [Infill("The ___ pub near ___."), Contains("Mill"), Avoid("a")],
    "counted gaps": [Infill("The ___:2 pub ___:1."), Avoid("cheap")],
    "glued gaps": [Infill("Mill___.com (___) Café ___"), Contains("food")],
    "counted gaps behind bytes": [Infill("Zoë – ___:2 naïve ___."), Contains("food")],
    "words": [WordCount(4, 6), Contains("pub"), Avoid("cheap")],
    "length": [Length(5), Contains("food"), Contains("Mill"), Infill("The ___ pub")],
    "pattern": [Pattern(r"[A-Z][a-z ]*\."), Avoid("s"), Contains("eat")],
}


@pytest.mark.long
@pytest.mark.parametrize("method", ["difflm", "mdlm"])
def test_every_text_obeys(models, method):
    for asked in ASKED.values():
        hold(models[method], asked, 1)


def test_every_text_obeys_in_bfloat16(models):
    made = models["mdlm"]
    lm = TextDiffusion(made.model, BPE, made.config, Inference(made.model, dtype=torch.bfloat16))
    for name in ("both", "counted gaps", "length"):
        hold(lm, ASKED[name], 1)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS_TRIED)
@pytest.mark.parametrize("tokenizer", [BPE, CHARACTERS], ids=lambda one: one.kind)
def test_every_one_of_many_texts_obeys(method, tokenizer):
    lm = make_model(method, tokenizer, 60, seed=2)
    for name, asked in ASKED.items():
        if tokenizer is CHARACTERS and name == "length":  # of characters there
            asked = [Length(40), *asked[1:]]
        if tokenizer is CHARACTERS and "bytes" in name:
            continue
        hold(lm, asked, 8, seed=1)


# -- words that are spelt by pieces -----------------------------------------------------------------------------------

LETTERS = "aA.&-'5p m,:é日s)\n"
words = st.text(LETTERS, min_size=1, max_size=5).map(lambda text: split_words(text.strip())).filter(bool)
words = words.map(lambda found: found[-1])
words |= st.sampled_from(["a", "am", "pm", "s", "that", "not", "5", "é", "a.m.", "A.", "日", "'s", "can"])


@given(words, st.lists(st.text(LETTERS, max_size=6) | st.sampled_from(["cannot", "thats", "5pm", "a.m."]), max_size=3))
@settings(max_examples=60, deadline=None)
def test_texts_that_hold_a_word_are_found(word, parts):
    """All of them; a word that touches a sign may be found as well where `split_words` keeps both together."""
    for text in (" ".join(parts), word.join(parts), f" {word}".join(parts)):
        if word.lower() in (one.lower() for one in split_words(text)):
            assert compile_characters(hold_phrase(word, parted=True), text).accepts(text), (word, text)


def test_words_inside_of_others_are_not_found():
    for word, text in [
        ("cheap", "cheaper"),
        ("a", "at eat"),
        ("not", "knot note"),
        ("s", "as so"),
        ("é", "café"),
        ("5", "55"),
    ]:
        assert not compile_characters(hold_phrase(word, parted=True), text).accepts(text), (word, text)
        assert avoid_words([word], BPE).accepts(BPE.encode(text))


@given(st.lists(st.integers(4, 60) | st.integers(4, BPE.size - 1), max_size=8), st.sampled_from(["cheap", "café", "a"]))
@settings(max_examples=50, deadline=None)
def test_pieces_that_spell_no_avoided_word_are_accepted(ids, word):
    """Any pieces, bytes of characters among them."""
    automaton = avoid_words([word], BPE)
    for some in (ids, [*ids, *BPE.encode(f" {word.upper()}"), *ids[:1]]):
        if automaton.accepts(some):
            assert word not in [one.lower() for one in split_words(BPE.decode(some))]


@pytest.mark.parametrize("phrase", ["food", "10", "St", "U", "Mill", "e", "20-", "a café", "日本"])
def test_words_stay_whole_before_what_may_follow_them(phrase):
    """Whatever comes behind a piece that is neither glued nor closing, and behind a closing one and a space."""
    pieces, (glued, closing) = BPE.spellings(), sort_followers(phrase, BPE)
    asked = split_words(phrase)
    assert {4 + pieces.index("s")} <= {*glued} or phrase[-1] in "本-"
    for i, piece in enumerate(pieces, 4):
        for more in ("", *pieces[::7]) if i not in glued else ():
            text = phrase + piece + (" " if i in closing else "") + more
            assert split_words(text)[: len(asked)] == asked, text


@given(st.lists(st.sampled_from(["a", "b", " ", "a b", "."]), max_size=8).map("".join))
@settings(max_examples=50, deadline=None)
def test_parts_are_found_as_a_regular_expression_finds_them(text):
    cases = [
        (["a", "."], [None], r"a[\s\S]*\S[\s\S]*\."),
        (["", " b", ""], [None, None], r"[\s\S]*\S[\s\S]* b[\s\S]*\S[\s\S]*"),
        (["", "b"], [2], r"\s*\S+\s+\S+\s*b"),
    ]
    for parts, gaps, pattern in cases:
        expected = re.fullmatch(pattern, text) is not None
        if gaps == [2]:
            expected = text.endswith("b") and len(text[:-1].split()) == 2
        starts = [word.start() for word in re.finditer(r"\S+", text)]
        assert matches_parts(parts, gaps, text, starts) == expected, (parts, text)


# -- edits ------------------------------------------------------------------------------------------------------------

EDITED = "The Mill is a cheap pub (food) near Café Sicilia, 10.50."


@pytest.mark.parametrize("method", ["difflm", "mdlm"])
def test_words_that_stay_are_whole_words_of_an_edited_text(models, method):
    keep = ("Mill", "food", "Café Sicilia", "10.50")
    for text in models[method].generate(4, edit=Edit(EDITED, 1.0, keep), controls=[Avoid("cheap")], steps=3):
        assert text.controls[0]["satisfied"]
        places = [" ".join(text.tokens).find(" ".join(split_words(one))) for one in keep]
        assert all(k >= 0 for k in places) and places == sorted(places), text.text
        assert {"Mill", "food", "Sicilia", "10.50"} <= {*text.tokens}


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_words_that_stay_are_whole_words_of_pieces_that_are_not_spelt(kind):
    """A model that likes nothing better than to lengthen words."""
    pieces = PretrainedTokenizer(json.loads(train_encoder(kind).to_str()))
    text, keep = "The old pub near the river sells Italian wine for food.", ("old", "near the river", "Italian", "food")
    lm = make_model("mdlm", pieces, longest=60)
    glued = [k for k, piece in enumerate(printed_pieces(pieces), 4) if piece.isalpha()]
    assert 10 < len(glued) < pieces.size - 10
    with torch.no_grad():
        lm.model.denoiser.network.head.bias[glued] += 9
    for made in lm.generate(6, edit=Edit(text, 1.0, keep), steps=3):
        places = [" ".join(split_words(made.text)).find(f"{one}") for one in keep]
        assert all(k >= 0 for k in places) and places == sorted(places), made.text
        assert {"old", "near", "the", "river", "Italian", "food"} <= {*split_words(made.text)}, made.text
    assert any(made.text != text for made in lm.generate(2, edit=Edit(text, 0.5), steps=3))


def test_places_of_kept_words_are_those_of_their_pieces():
    for phrase in ("Mill", "food", "Café", "10.50", "The"):
        (place,) = find_kept(phrase, EDITED, BPE)
        ids = BPE.encode(EDITED)
        assert BPE.decode([ids[k] for k in place]).strip(" (") == phrase
    (place,) = find_kept("Mill", EDITED, CHARACTERS)  # with the space before it, which else may become a letter
    assert EDITED[place.start : place.stop] == " Mill"
    with pytest.raises(UsageError, match="is not in the text to edit"):
        find_kept("Mills", EDITED, BPE)


def test_what_cannot_be_is_refused(models):
    for controls, edit, match in [
        ([Infill("The cheap ___"), Avoid("cheap")], None, "contradicts"),
        ([Contains("cheap food"), Avoid("food")], None, "contradicts"),
        ([Avoid("is")], Edit("It is-that ___", 0.5, ("is",)), "contradicts"),
        ([Infill("The ___:90 pub")], None, "at least 92 tokens"),
        ([Avoid("cheap")], Edit(EDITED, 0.5, ("Mills",)), "is not in the text to edit"),
    ]:
        with pytest.raises(UsageError, match=match) as told:
            models["mdlm"].generate(1, controls=controls, edit=edit)
        assert "\n" not in str(told.value)


def test_a_phrase_at_the_beginning_has_no_space_before_it():
    """A model that writes little else."""
    lm = make_model("mdlm", longest=8)
    for text in hold(lm, [Contains("Mill"), Contains("food"), Contains("a café")], 8):
        assert not text.text.startswith((" Mill", " food", " a café"))


@given(st.lists(st.integers(0, BPE.size - 1), max_size=8))
@settings(max_examples=50, deadline=None)
def test_anything_may_stand_behind_the_end_that_a_model_writes(ids):
    plain = avoid_words(["cheap"], BPE)
    ended, asked = let_end(plain, (END,)), [*BPE.encode("The cheap"), *ids]
    for some in (ids, asked):
        text = some[: some.index(END)] if END in some else some
        assert ended.accepts(some) == plain.accepts(text)
