"""Exact controls hold whatever the model says.

The models here are untrained and spiteful: they favour the end of the text, pads, newlines and words that are to be
avoided, so that a rule that only nudges would fail at once.
"""

import re
import time

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from difflm.controls import Avoid, Contains, Infill, Length
from difflm.controls.base import Canvas, KnownTokens
from difflm.controls.gaps import Edit, cut_gaps, fits_between, matches_parts
from difflm.data.tokenizers import END, PAD, START, UNK, Bpe
from difflm.data.words import join_words, split_words
from difflm.diffusion.condition import FREE
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import METHODS, TextSpec
from difflm.models.batching import Layout, Row, pad_batch
from tests.support.spiteful import DIFFUSION, LONGEST, STEPS_TAKEN, VOCABULARY, WORDS, spiteful

NEWLINE = "\n"  # a word like others, which the print of a text loses at its ends


@pytest.fixture(scope="module")
def models():
    return {method: spiteful(method) for method in DIFFUSION}


def asked(lm, *controls, n=3, **more):
    if METHODS[lm.config["method"]].family != "gaussian":  # tokens are words without being clamped
        more.pop("clamp", None)
    texts = lm.generate(n, controls=list(controls), steps=STEPS_TAKEN, **more)
    for text in texts:
        assert text.tokens == split_words(text.text)  # what is counted is what is printed
        for control, found in zip(controls, text.controls, strict=True):
            assert (found["name"], found["target"]) == (control.name, control.target)
            if text.warnings and isinstance(
                control, Infill
            ):  # unknown words leave it unjudged; they stand all the same
                assert found["satisfied"] is None and control.check(text.text).satisfied, (text.text, found)
            else:
                assert found["satisfied"] is True and found["score"] == 1.0, (text.text, found)
    return texts


def refused(lm, *controls, match, **more):
    with pytest.raises(UsageError, match=match) as told:
        lm.generate(controls=list(controls), steps=STEPS_TAKEN, **more)
    assert len(str(told.value).splitlines()) <= 2


# -- length -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("method", DIFFUSION)
@pytest.mark.parametrize("length", [1, 2, 7, 18])
def test_every_printed_text_has_the_length_that_was_asked(models, method, length, clamp):
    for text in asked(models[method], Length(length), n=5, clamp=clamp):
        assert len(split_words(text.text)) == len(text.tokens) == length


@pytest.mark.parametrize(("method", "room"), [("difflm", 20), ("diffusion-lm", 18)])
@pytest.mark.parametrize("length", [0, -3, 10**6])
def test_a_length_without_room_is_refused(models, method, room, length):
    refused(models[method], Length(length), match=f"between 1 and {room}")
    refused(models[method], Length(room + 1), match=f"between 1 and {room}")
    asked(models[method], Length(room), n=1)


def test_two_lengths_are_one_too_many(models):
    refused(models["difflm"], Length(4), Length(5), match="length asks for 4 words, length for 5")


# -- words that must and must not be there ----------------------------------------------------------------------------


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("method", DIFFUSION)
def test_words_appear_and_others_do_not(models, method, clamp):
    controls = [Contains("coffee shop"), Contains("£30"), Contains("friendly"), Avoid("cheap"), Avoid("ipad")]
    for text in asked(models[method], *controls, n=6, clamp=clamp):
        assert "coffee shop" in text.text and "£30" in text.text and "friendly" in text.tokens
        assert not {"cheap", "ipad"} & {word.lower() for word in text.tokens}


@pytest.mark.parametrize("method", DIFFUSION)
def test_without_the_rule_the_avoided_word_would_be_there(models, method):
    """The test's own premise: these models do write what they are asked to avoid."""
    free = models[method].generate(4, controls=[Length(9)], steps=STEPS_TAKEN, clamp=False)
    assert all({"cheap", "ipad"} & {word.lower() for word in text.tokens} for text in free)


@pytest.mark.parametrize("method", DIFFUSION)
@pytest.mark.parametrize("spare", [0, 1, 5])
def test_phrases_share_a_text_that_has_hardly_room(models, method, spare):
    """ "coffee shop" in the middle of four words would leave no room for "the river": they are placed together."""
    phrases = [Contains("The Mill"), Contains("coffee shop"), Contains("cheap"), Contains("near the river")]
    asked(models[method], Length(8 + spare), *phrases, n=6)
    refused(models[method], Length(7), *phrases, match="8 words must appear; the length is 7")


@pytest.mark.parametrize("method", DIFFUSION)
def test_a_text_is_long_enough_for_what_must_appear(models, method):
    """The length is drawn: never one that the phrase does not fit."""
    asked(models[method], Contains("The Mill is a pub near Café Sicilia and the river"), n=8)


def test_a_phrase_within_another_needs_no_place_of_its_own(models):
    (text,) = asked(models["difflm"], Length(2), Contains("coffee shop"), Contains("shop"), Contains("shop"), n=1)
    assert text.text == "coffee shop"


def test_a_word_that_is_known_anyway_needs_no_place(models):
    asked(models["difflm"], Infill("The Mill ___:1 near"), Contains("Mill"), Contains("the"))


def test_unknown_words_are_told_with_their_neighbours(models):
    lm = models["difflm"]
    refused(lm, Contains("frendly"), match=r"does not know the word 'frendly'\. Near: friendly")
    refused(lm, Contains("old french pub"), match=r"'french'\. Near: French")
    refused(lm, Contains("coffee zzzz"), match="'zzzz'")
    refused(lm, Contains("  "), match="give a word")
    refused(lm, Avoid("coffee shop"), match="one word")
    refused(lm, Avoid(""), match="one word")
    asked(lm, Avoid("zebra"))  # nobody writes it: nothing to refuse


def test_contradictions_are_refused(models):
    lm = models["difflm"]
    refused(lm, Contains("Cheap food"), Avoid("cheap"), match="avoid 'cheap' contradicts")
    refused(lm, Infill("The Mill ___"), Avoid("mill"), match="avoid 'mill' contradicts")
    refused(lm, Infill("The ___:1 near"), Contains("coffee shop"), match="does not fit between the words that stay")
    refused(lm, Infill("The ___ near"), Length(3), Contains("coffee shop"), match="has 4 words; there is room for 3")
    refused(lm, Contains("food " * 21), match="longer than a text")
    refused(lm, *(Contains(word) for word in VOCABULARY[8:17]), match="at most 8")
    edit = Edit("The Mill is a pub", keep=("is",))
    refused(lm, Avoid("is"), edit=edit, match="avoid 'is' contradicts")
    refused(lm, Contains("near the river"), edit=edit, match="does not fit between the words that stay")
    refused(lm, Length(4), edit=edit, match="length asks for 4 words, edit for 5")


# -- gaps -------------------------------------------------------------------------------------------------------------

TEMPLATES = [
    "___ near the river.",
    "The Mill ___",
    "The Mill ___ near Café Sicilia.",
    "The Mill ___:4 near Café Sicilia.",
    "___:1 pub ___:2 food ___:3",
    "___ pub ___ food ___ .",
    "___, ___:2, and ___!",
    "Zoë's naïve Bistro-Bar is £20-30 ___ and “odd” ___:2.",
    "family-friendly ___:1 not family-friendly ___:1 £30",
    "5 ___ O'Brien's ___",
]


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("method", DIFFUSION)
@pytest.mark.parametrize("template", TEMPLATES)
def test_known_words_stay_exactly(template, method, clamp):
    lm = spiteful(method, longest=32)
    for text in asked(lm, Infill(template), n=5, clamp=clamp):
        pattern = "".join(
            re.escape(piece) if i % 2 == 0 else rf"((?:\S+ ){{{piece or '1,'}}})"
            for i, piece in enumerate(re.split(r"___(?::(\d+))? ?", join_gaps(template)))
        )
        shown = "".join(f"{'¶' if word == NEWLINE else word} " for word in text.tokens)
        assert re.fullmatch(pattern, shown), (pattern, shown)


def join_gaps(template: str) -> str:
    """The template word by word with a space after each, gaps left as they are: what a person would compare with."""
    parts = re.split(r"(___(?::\d+)?)", template)
    return "".join(
        part + " " if part.startswith("___") else "".join(w + " " for w in split_words(part)) for part in parts
    )


words = st.lists(st.sampled_from([*VOCABULARY[1:], "Zoë", "naïve", "10.50", "x-ray"]), min_size=1, max_size=3)
gap = st.sampled_from(["___", "___:1", "___:3"])


@given(
    parts=st.lists(words, min_size=1, max_size=3),
    gaps=st.lists(gap, min_size=4, max_size=4),
    first=st.booleans(),
    last=st.booleans(),
    method=st.sampled_from(DIFFUSION),
)
def test_any_template_of_words_is_kept(parts, gaps, first, last, method):
    """Words of the vocabulary and others, with gaps between them and perhaps at both ends."""
    template = [gaps[0]] if first else []
    for i, part in enumerate(parts):
        template += [join_words(part), *([gaps[i + 1]] if i + 1 < len(parts) or last else [])]
    assume(any(piece.startswith("___") for piece in template))
    control = Infill(" ".join(template))
    known = [w for piece in template if not piece.startswith("___") for w in split_words(piece)]
    lm = spiteful(method, longest=26)
    for text in asked(lm, control, n=2):
        rest = iter(text.tokens)
        assert all(word in rest for word in known)  # in this order
        if control.length(lm.plan_controls([control]).info) is not None:
            assert len(text.tokens) == len(known) + sum(int(g[4:]) for g in template if g.startswith("___:"))


def test_gaps_length_and_words_at_once(models):
    for method in DIFFUSION:
        controls = [Infill("The Zoo ___ near ___."), Length(14), Contains("coffee shop"), Avoid("cheap")]
        for text in asked(models[method], *controls, n=6):
            assert len(text.tokens) == 14 and text.tokens[:2] == ["The", "Zoo"] and text.text.endswith(".")


@pytest.mark.parametrize("method", DIFFUSION)
def test_a_free_gap_makes_room_for_what_must_appear(models, method):
    for text in asked(models[method], Infill("The ___:1 near ___"), Contains("old coffee shop"), n=6):
        assert text.tokens[0] == "The" and text.tokens[2] == "near"


def test_free_gaps_have_many_lengths(models):
    texts = asked(models["difflm"], Infill("The ___ Mill ___ pub"), n=40)
    assert len({len(text.tokens) for text in texts}) > 5
    assert len({text.tokens.index("Mill") for text in texts}) > 5


def test_a_continued_text_begins_as_it_was_given(models):
    for method in DIFFUSION:
        made = models[method].infill("The Mill is a ___", 3, steps=2)
        assert all(text.tokens[:4] == ["The", "Mill", "is", "a"] and len(text.tokens) > 4 for text in made)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("The Mill.", "mark at least one gap"),
        ("The __ Mill", "mark at least one gap"),
        ("The ___ is [MASK]", "all gaps in the same way"),
        ("The [MASK] [MASK] Mill", "two gaps are adjacent"),
        ("", "mark at least one gap"),
        ("The ___ ___ Mill", "two gaps are adjacent"),
        ("The ___:2___ Mill", "two gaps are adjacent"),
        ("The ___:0 Mill", "at least one word"),
        ("The ___:19 Mill", "at least 21 tokens; this model takes 20 at most"),
        ("The ___:" + "9" * 5000, "this model takes 20 at most"),
        ("old " * 20 + "___", "at least 21 tokens; this model takes 20 at most"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused(models, template, said):
    refused(models["difflm"], Infill(template), match=said)


def test_gaps_and_lengths_that_contradict_are_refused(models):
    lm = models["difflm"]
    refused(lm, Infill("The ___:2 Mill"), Length(5), match="infill asks for 4 words, length for 5")
    refused(lm, Infill("The ___ Mill ___"), Length(3), match="needs 4 words; a length of 3 is too short")
    refused(lm, Infill("a ___"), Infill("___ b"), match="given only once")
    refused(lm, Infill("a ___"), edit=Edit("a pub"), match="cannot be combined")


@given(rest=st.integers(0, 30), shares=st.lists(st.floats(0, 1, exclude_max=True), min_size=3, max_size=3))
def test_what_is_left_is_shared_out_over_the_gaps(rest, shares):
    for gaps in (1, 2, 4):
        known = KnownTokens([[]] * (gaps + 1), [0] * gaps, [True] * gaps, 99, [{}] * (gaps + 1))
        sizes = cut_gaps(known, rest, shares)
        assert len(sizes) == gaps and sum(sizes) == rest and min(sizes) >= 0
    assert cut_gaps(KnownTokens([[]], [], [], 99, [{}]), 0, shares) == []


def find_words(text):
    return [word.start() for word in re.finditer(r"\S+", text)]


def test_the_check_of_a_filled_text_sees_what_is_wrong():
    parts, gaps = ["a ", " b ", ""], [None, 2]
    assert matches_parts(parts, gaps, "a x b y z", find_words("a x b y z"))
    assert matches_parts(parts, gaps, "a b b y z", find_words("a b b y z"))  # the gap may hold the known word
    for wrong in ("a b y z", "a x b y", "x a b y z", "a x b y z w", "a x c y z", "a x  b y z w", ""):
        assert not matches_parts(parts, gaps, wrong, find_words(wrong)), wrong


def test_a_gap_may_begin_with_a_mark_that_is_written_without_a_space():
    for text in ("He said, no.", "He said: nothing at all.", "He said no."):
        assert Infill("He said ___.").check(text).satisfied and Infill("He ___.").check(text).satisfied
    assert Infill("He ___ said ___ no.").check("He, too, said… well, no.").satisfied
    for text in ("He said,no.", "He saidno.", "He said.", "He says, no."):
        assert not Infill("He said ___ no.").check(text).satisfied


def matches_by_trying(parts: list[str], gaps: list[int | None], text: str) -> bool:
    """The same by trying every size of every gap."""
    head, rest = parts[0], text[len(parts[0]) :]
    if not gaps:
        return text == head
    fits = [k for k in range(1, len(rest) + 1) if gaps[0] in (None, len(rest[:k].split())) and rest[:k].strip()]
    return text.startswith(head) and any(matches_by_trying(parts[1:], gaps[1:], rest[k:]) for k in fits)


letters = st.text("ab ", max_size=3)


@settings(max_examples=100)
@given(letters, st.lists(st.tuples(st.sampled_from([None, None, 1, 2]), letters), max_size=4), st.data())
def test_templates_match_where_some_sizes_of_their_gaps_do(first, others, data):
    gaps, parts = [gap for gap, _ in others], [first, *(part for _, part in others)]
    fill = st.text("ab ", min_size=1, max_size=3)
    filled = first + "".join(data.draw(fill) + part for _, part in others)
    for text in (filled, data.draw(st.text("ab ", max_size=9))):
        assert matches_parts(parts, gaps, text, find_words(text)) == matches_by_trying(parts, gaps, text)


MANY_GAPS = "the" + " ___ the" * 24


@pytest.mark.parametrize("words", [49, 400, 4000])
def test_many_gaps_are_matched_at_once(words):
    """The one text fits, the other misses its last word: trying all sizes would take longer than anybody lives."""
    check = Infill(MANY_GAPS).check
    begun = time.perf_counter()
    text = " ".join(["the"] * words)
    assert check(text).satisfied and not check(f"{text} end").satisfied
    assert time.perf_counter() - begun < 10


def fits_by_trying(sizes: list[int], runs: list[int]) -> bool:
    if not sizes:
        return True
    first, *rest = sizes
    return any(
        run >= first and fits_by_trying(rest, [*runs[:i], run - first, *runs[i + 1 :]]) for i, run in enumerate(runs)
    )


@settings(max_examples=60)
@given(st.lists(st.integers(1, 5), max_size=4), st.lists(st.integers(1, 7), max_size=5))
def test_phrases_fit_where_some_order_of_them_does(sizes, runs):
    assert fits_between(sizes, runs) == fits_by_trying(sizes, runs)


def test_many_phrases_and_many_runs_are_judged_at_once():
    begun = time.perf_counter()
    assert not fits_between([3] * 8, [5] * 7 + [2] * 60) and fits_between([3] * 8, [5] * 8 + [2] * 60)
    assert time.perf_counter() - begun < 10


# -- editing ----------------------------------------------------------------------------------------------------------

TEXT = "The Zoë is a cheap pub near the river, for £30."


@pytest.mark.parametrize("method", DIFFUSION)
@pytest.mark.parametrize("strength", [0.05, 0.5, 1.0])
def test_kept_words_of_an_edited_text_stay_where_they_were(models, method, strength):
    keep = ("Zoë", "near the river", "£", ".")
    before = split_words(TEXT)
    for text in asked(models[method], Avoid("cheap"), n=4, edit=Edit(TEXT, strength, keep)):
        assert len(text.tokens) == len(before)
        for phrase in keep:
            start = before.index(split_words(phrase)[0])
            assert text.tokens[start : start + len(split_words(phrase))] == split_words(phrase)


def test_a_light_edit_changes_less_than_a_strong_one():
    lm = spiteful("difflm", spite=())
    before = [word for word in split_words(TEXT) if word != "Zoë"]
    text = join_words(before)

    def changed(strength):
        edited = lm.generate(8, edit=Edit(text, strength), steps=8)
        return sum(a != b for g in edited for a, b in zip(g.tokens, before, strict=True))

    assert changed(1e-4) == 0 < changed(0.5) < changed(1.0)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (Edit(TEXT, 0), "greater than 0 and at most 1"),
        (Edit(TEXT, 2), "greater than 0 and at most 1"),
        (Edit(TEXT, float("nan")), "greater than 0 and at most 1"),
        (Edit(" "), "empty"),
        (Edit(TEXT, keep=("zebra",)), "'zebra' is not in the text"),
        (Edit(TEXT, keep=("pub the",)), "'pub the' is not in the text"),
        (Edit(TEXT, keep=("",)), "is not in the text"),
        (Edit("food " * 21), "21 words are requested; this model takes at most 20"),
    ],
)
def test_an_edit_that_cannot_be_made_is_refused(models, edit, said):
    refused(models["difflm"], edit=edit, match=said)


# -- the same text whoever asks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", DIFFUSION)
@pytest.mark.parametrize(
    "request_",
    [
        {"controls": [Length(7), Contains("coffee shop"), Avoid("the")]},
        {"controls": [Infill("The ___ near ___:2."), Contains("old"), Contains("pub")]},
        {"controls": [Contains("French food")], "edit": Edit(TEXT, 0.4, ("Zoë",))},
    ],
)
def test_the_first_text_is_the_same_however_many_are_asked_for(models, method, request_):
    one = models[method].generate(1, seed=5, steps=STEPS_TAKEN, **request_)
    five = models[method].generate(5, seed=5, steps=STEPS_TAKEN, **request_)
    assert one[0].tokens == five[0].tokens
    assert len({text.text for text in five}) > 1
    *_, last = models[method].stream(1, seed=5, steps=STEPS_TAKEN, **request_)
    drafted = [word for word in last[0].tokens if word]
    assert drafted == [word for word in one[0].tokens if word != NEWLINE]


def test_candidates_obey_too(models):
    (text,) = asked(models["difflm"], Infill("Zoë ___ pub"), Contains("old"), n=1, mbr=5)
    assert text.denoiser_calls == 5 * STEPS_TAKEN


def test_controls_are_for_diffusion_models():
    model = METHODS["autoregressive"](hidden=16, layers=1, heads=2).build(TextSpec(WORDS.size, LONGEST))
    twin = TextDiffusion(model, WORDS, {"method": "autoregressive"})
    refused(twin, Length(3), match="controls are for diffusion models")


def test_layouts_become_tiles():
    layouts = [Layout(5, {0: 9}), Layout(17), Layout(6, {}, [4, 5, 6, 7, 8, 9])]
    rows = [Row(7, sample, layout) for sample, layout in zip((10, 11, 12), layouts, strict=True)]
    found = [pad_batch(own, own[0].layout.width, torch.device("cpu")) for own in ([rows[0], rows[2]], [rows[1]])]
    assert [tile.width for tile in found] == [16, 32]
    assert [tile.samples.tolist() for tile in found] == [[10, 12, 12, 12], [11] * 4]
    assert all(tile.seeds.tolist() == [7] * 4 for tile in found)
    first, second = found
    assert first.known[0].tolist() == [9, *[FREE] * 15] and (first.known[1] == FREE).all()
    assert first.begin[1].tolist() == [4, 5, 6, 7, 8, 9, *[PAD] * 10]
    assert second.known is None and second.begin is None


# -- byte pairs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces():
    texts = [f"The Mill is a {w} pub near Café Sicilia, cheap food for £30." for w in VOCABULARY[8:]] * 3
    return spiteful("difflm", Bpe.build(texts, 340), longest=80, spite=(START, END, UNK, PAD, 70))


@pytest.mark.parametrize(
    "template",
    ["___ near the river.", "The Zoë ___", "£30 – ___ naïve\n___.", "The Mill___, and ___ pub", "x-ray ___ family-"],
)
def test_byte_pairs_keep_the_known_text_to_the_letter(pieces, template):
    """Spaces as well. What a gap begins or ends with may still read as one word with a sign beside it ("St" before
    "."), which is why the text is compared here and not its words."""
    pattern = re.compile(".+".join(re.escape(part) for part in template.split("___")), re.DOTALL)
    for text in pieces.generate(6, controls=[Infill(template)], steps=STEPS_TAKEN):
        assert pattern.fullmatch(text.text), (template, text.text)


def test_byte_pairs_fill_many_gaps_in_time(pieces):
    """A word in a gap may be the known one: there are far too many ways to read such a text."""
    begun = time.perf_counter()
    texts = pieces.generate(4, controls=[Infill(MANY_GAPS)], steps=2)
    assert len(texts) == 4 and time.perf_counter() - begun < 20


def test_byte_pairs_contain_the_phrase_whole(pieces):
    """Nothing grows onto the phrase: the pieces around it are other words or signs."""
    for text in pieces.generate(8, controls=[Contains("Mill"), Contains("Café Sicilia")], steps=STEPS_TAKEN):
        assert " Mill" in text.text and " Café Sicilia" in text.text
        assert all(found["satisfied"] for found in text.controls), text.text


def test_places_say_what_is_free():
    """Phrases keep off START, END and pads of a canvas that holds them."""
    lm = spiteful("diffusion-lm")
    brief = lm.plan_controls([Length(3), Contains("pub")])
    layouts, _ = brief.layouts(torch.arange(1), 0)
    tile = pad_batch([Row(0, 0, layouts[0])], layouts[0].width, torch.device("cpu"))
    place = Canvas(torch.arange(tile.width) < tile.lengths.unsqueeze(1), 1, tile.known)
    (rule,) = brief.word_rules(place)
    assert rule.free[0].nonzero().flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize("nothing", ["", " ", "\n", " \n "])
def test_a_phrase_of_nothing_is_refused(nothing):
    """A newline is a word here, but the ends of a phrase are not looked at."""
    for method in DIFFUSION:
        with pytest.raises(UsageError, match="give a word"):
            spiteful(method).generate(1, controls=[Contains(nothing), Contains("pub")])


@pytest.mark.long
@given(st.integers(1, 6), st.sampled_from(["___", "The ___", "___ is old .", "The ___ is ___ ."]), st.integers(0, 9))
def test_gaps_have_no_more_words_than_asked_together(most, template, seed):
    gaps = template.count("___")
    assume(gaps <= most)
    for method in DIFFUSION:
        controls = [Infill(template, most)]
        for made in spiteful(method).generate(3, seed=seed, steps=1, controls=controls):
            assert gaps <= len(made.tokens) - len(split_words(template.replace("___", ""))) <= most
            assert made.controls[0]["satisfied"]


def test_gaps_that_need_more_words_than_asked_are_refused():
    with pytest.raises(UsageError, match="more than 2 words"):
        spiteful("difflm").generate(1, controls=[Infill("The ___:3 is old .", 2)])
