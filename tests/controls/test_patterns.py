"""Patterns: automata against Python's `re`, forward–backward against enumeration, finished texts against both."""

import os
import random
import re
import time
import warnings
from collections import Counter
from importlib.util import find_spec
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from difflm import Avoid, Contains, Edit, Infill, Length, Pattern, TextDiffusion, WordCount
from difflm.controls.base import Canvas
from difflm.controls.patterns.regular import compile_characters, count_paths, parse_pattern
from difflm.controls.patterns.token_automata import (
    ANY,
    GAP,
    NEVER,
    Columns,
    Template,
    TokenAutomaton,
    avoid_phrases,
    chain_of,
    compile_pattern,
    hold_tokens,
    intersect,
    learn_spacing,
    plain_chain,
)
from difflm.data.tokenizers import Bpe, Characters
from difflm.data.words import join_words
from difflm.diffusion.base import Belief
from difflm.errors import UsageError
from difflm.fast.cuda_graphs import capture_key, clone_tensors
from difflm.fast.kernel_chain import join_transitions, kernel_chain, list_columns
from tests.support.tiny import tiny_run

LETTERS = "abA1 .\n-é"

# Patterns whose own texts are few and small, so that `re` does not backtrack for long.
atoms = st.sampled_from(
    ["a", "b", "A", ".", " ", r"\.", "-", "é", r"\d", r"\w", r"\S", r"\n", "[ab]", "[^a]", r"[\d-]", "[A-b]"]
)
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: f"({'|'.join(some)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)


@given(patterns, st.lists(st.text(LETTERS, max_size=5), min_size=5, max_size=20))
@settings(max_examples=100, deadline=None)
def test_automata_accept_what_re_matches(pattern, texts):
    automaton = compile_characters(pattern, LETTERS)
    for text in [*texts, pattern, "", *LETTERS]:
        expected = re.fullmatch(pattern, text) is not None and {*text} <= {*LETTERS}
        assert automaton.accepts(text) == expected, (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "states"),
    [("(a|b)*abb", 4), ("a*", 1), ("(a|aa)+", 2), ("a{3,5}", 6), ("(a*)*b", 2), ("(?:a|b)(?:a|b)", 3), ("", 1)],
)
def test_automata_are_minimal(pattern, states):
    """Sizes by hand, beside the one state that accepts nothing."""
    assert len(compile_characters(pattern, "ab").table) == states + 1


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a|b)*a(a|b){12}", "more than 1000 states"),
        ("((a?){1000}){1000}", "too large"),
        ("((((){1000}){1000}){1000}){1000}", "too large"),
        ("(a?){1000}a{1000}", "too large"),
        ("(" * 200 + "a" + ")" * 200, "groups are nested"),
        ("a" * 5000, "at most 2000"),
        ("a{1001}", "at most 1000"),
        ("a{99999999999999999999}", "at most 1000"),
        ("a**", "repeated"),
        ("a{3,2}", "larger number first"),
        ("*a", "repeats nothing"),
        ("^a$", "whole text"),
        ("(a", "missing"),
        ("a)", "no opening"),
        ("[a", "too early"),
        ("[b-a]", "smaller end first"),
        (r"(a)\1", "not supported"),
        ("(?=a)b", "only"),
        ("a\\", "too early"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(pattern, reason):
    begun = time.process_time()
    with pytest.raises(UsageError, match=reason) as refused:
        compile_characters(pattern, map(chr, range(32, 1000)))
    assert time.process_time() - begun < 10  # a fraction of a second on an idle core
    assert "\n" not in str(refused.value)


def test_sets_that_re_warns_of_are_refused():
    for pattern in ("[[a]", "[a--b]", "[a&&b]", "[a||b]", "[]a]"):
        with pytest.raises(UsageError):
            compile_characters(pattern, "ab")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        re.compile(r"[\[a\-b&|]")
    assert compile_characters(r"[\[a\-b&|]", "[-&").accepts("-")


# -- tokens ----------------------------------------------------------------------------------------------------------

E2E = TextDiffusion.from_pretrained("e2e").tokenizer
SPACING = learn_spacing((*E2E.readable_pieces(),))
SIGNS = [w for w in E2E.pieces if not w.isalpha()]


@given(st.lists(st.one_of(st.sampled_from(SIGNS), st.sampled_from(E2E.pieces[:150])), min_size=1, max_size=9))
@settings(max_examples=200, deadline=None)
def test_spacing_is_that_of_the_printed_text(words):
    """What the transducer lets through is printed as it says."""
    spacing = SPACING
    state, text = 0, ""
    for word in words:
        shape = spacing.shapes[E2E.pieces.index(word)]
        if shape < 0 or spacing.before[state, shape] == NEVER:
            return
        text += " " * int(spacing.before[state, shape]) + word
        state = spacing.table[state, shape]
    if spacing.ends[state]:
        assert text == join_words(words)


def test_real_texts_are_spaced_as_they_are():
    texts = [
        "The Eagle is a cheap, family-friendly pub near Burger King.",
        "Cotto's price range is £20-25.",
        "Loch Fyne: French food, 5 out of 5, less than £20; no kids.",
    ]
    for text in texts:
        pattern = re.sub(r"([.?*+{}()|\[\]\\^$])", r"\\\1", text)
        automaton = compile_pattern(pattern, E2E)
        assert automaton.accepts(E2E.encode(text)), text
        assert not automaton.accepts(E2E.encode(text)[:-1])


@pytest.mark.parametrize("pattern", ["The .* is .*near.*", r"[^,]*\.", r"\w+( \w+){3}\.", ".*£[0-9]+.*"])
def test_words_are_accepted_if_their_print_matches(pattern):
    """Random texts, and one token more or fewer than the pattern wants."""
    rng = np.random.default_rng(0)
    automaton = compile_pattern(pattern, E2E)
    some = E2E.encode("The Eagle is near a cheap £ 20 - 25 , pub . restaurant")
    accepted = 0
    for _ in range(400):
        ids = (
            automaton_walk(automaton, rng, some)
            if rng.random() < 0.5
            else rng.choice(some, rng.integers(1, 7)).tolist()
        )
        text, spaced = E2E.decode(ids), SPACING
        state, ok = 0, True
        for token in ids:
            shape = spaced.shapes[token - 4]
            ok &= bool(spaced.before[state, shape] != NEVER)
            state = spaced.table[state, shape]
        if ok and spaced.ends[state]:
            accepted += automaton.accepts(ids)
            assert automaton.accepts(ids) == (re.fullmatch(pattern, text) is not None), text
    assert accepted > 20


def automaton_walk(automaton, rng, some):
    """A random accepted sequence of some tokens, or what came of it."""
    ids, state = [], 0
    for _ in range(12):
        if automaton.accepting[state] and rng.random() < 0.3:
            break
        able = [t for t in some if automaton.table[state, automaton.classes[t]] < len(automaton.table) - 1]
        if not able:
            break
        ids.append(int(rng.choice(able)))
        state = automaton.table[state, automaton.classes[ids[-1]]]
    return ids or [int(some[0])]


TEXTS = ["the river is near 2026-11-16 and the riverside", "a café: the rivers' banks, 1999-01-02."] * 20
PIECES = [Bpe.build(TEXTS, 320), Characters.build(TEXTS)]


@pytest.mark.parametrize("tokenizer", PIECES, ids=lambda one: one.kind)
@pytest.mark.parametrize("pattern", [r"\d{4}-\d{2}-\d{2}", ".*river.*", "[a-z]+( [a-z]+)*", "(the|a) .{3,9}"])
def test_pieces_are_accepted_if_their_text_matches(tokenizer, pattern):
    rng = np.random.default_rng(1)
    automaton = compile_pattern(pattern, tokenizer)
    for text in ["2026-11-16", "the river", "the riverside", "a café", "river", "the rivers banks", "2026-1-16"]:
        assert automaton.accepts(tokenizer.encode(text)) == (re.fullmatch(pattern, text) is not None), text
    for _ in range(100):
        ids = automaton_walk(automaton, rng, range(4, tokenizer.size))
        assert automaton.accepts(ids) == (re.fullmatch(pattern, tokenizer.decode(ids)) is not None)


def accepted_lengths(automaton: TokenAutomaton, most: int) -> list[int]:
    """The numbers of tokens, up to `most`, for which there is an accepted sequence."""
    template = Template(automaton, (GAP,), np.ones(len(automaton.classes)), most)
    return [*template.lengths]


def test_lengths_are_those_of_accepted_texts():
    letters = Characters(["a", "b"])
    assert accepted_lengths(compile_pattern("(aab)+|b{4}", letters), 10) == [3, 4, 6, 9]
    both = intersect(compile_pattern("(aab)+|b{4}", letters), compile_pattern("a.{5}|b*", letters))
    assert accepted_lengths(both, 10) == [4, 6]
    assert both.accepts(letters.encode("aabaab")) and not both.accepts(letters.encode("aab"))


@pytest.mark.parametrize("pattern", ["x+", "[^ab]", "a[^\\w\\W]"])
def test_an_empty_language_is_refused(pattern):
    with pytest.raises(UsageError, match="no text"):
        compile_pattern(pattern, Characters(["a", "b"]))


# -- forward and backward ----------------------------------------------------------------------------------------------


def random_case(seed, length=4, states=4, tokens=5):
    """A random automaton that accepts something of this length, a belief, and every text with its log probability."""
    rng = np.random.default_rng(seed)
    while True:
        table = np.where(rng.random((states, tokens)) < 0.4, states, rng.integers(0, states, (states, tokens)))
        accepting = np.append(rng.random(states) < 0.5, False)
        automaton = Columns(range(tokens), [*np.vstack([table, np.full(tokens, states)]).T]).smallest(accepting)
        if length in accepted_lengths(automaton, length):
            break
    logits = torch.tensor(rng.normal(0, 3, (2, length, tokens)), dtype=torch.float32)
    texts = torch.tensor([*product(range(tokens), repeat=length)])
    accepted = torch.tensor([automaton.accepts(text) for text in texts.tolist()])
    log_p = logits.double().log_softmax(-1)
    nats = torch.stack([log_p[:, i, texts[:, i]] for i in range(length)]).sum(0)
    return automaton, logits, texts[accepted], nats[:, accepted]


@pytest.mark.parametrize("seed", range(12))
def test_forward_backward_is_enumeration(seed):
    automaton, logits, texts, nats = random_case(seed)
    chain, inside = chain_of(automaton, torch.device("cpu")), torch.ones(2, 4, dtype=torch.bool)
    log_z = nats.logsumexp(-1)
    torch.testing.assert_close(chain.pass_messages(logits, inside).log_evidence().double(), log_z, rtol=1e-5, atol=1e-5)
    shares = (nats - log_z[:, None]).exp()
    expected = torch.zeros(2, 4, 5, dtype=torch.double)
    for i in range(4):
        expected[:, i].index_add_(1, texts[:, i], shares)
    found = chain.pass_messages(logits, inside).posterior_logits(logits).softmax(-1).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(chain.pass_messages(logits, inside).likeliest(), texts[nats.argmax(-1)])


def test_joint_draws_have_the_law_of_rejection():
    """Frequencies of whole texts; 20,000 draws are off by less than 4 standard deviations, 0.014."""
    automaton, logits, texts, nats = random_case(3)
    chain, draws = chain_of(automaton, torch.device("cpu")), 20_000
    many, u = logits[:1].expand(draws, -1, -1), torch.rand(draws, 4, generator=torch.Generator().manual_seed(0))
    drawn = chain.pass_messages(many, torch.ones(draws, 4, dtype=torch.bool)).draw(u)
    keys = lambda ids: (ids * 5 ** torch.arange(4)).sum(-1)  # noqa: E731
    counts = (keys(drawn)[:, None] == keys(texts)).double().mean(0)
    assert counts.sum() == 1
    torch.testing.assert_close(counts, nats[0].softmax(-1), rtol=0, atol=0.014)


def test_a_pattern_that_tells_nothing_changes_no_bit():
    letters = Characters(["a", "b", "c"])
    chain = chain_of(compile_pattern(".*", letters), torch.device("cpu"))
    logits = torch.randn(2, 6, 7, generator=torch.Generator().manual_seed(0))
    logits[..., :4] = float("-inf")
    assert len(chain.accepting) == 2
    assert torch.equal(chain.pass_messages(logits, torch.ones(2, 6, dtype=torch.bool)).posterior_logits(logits), logits)


def test_texts_of_different_lengths_stand_side_by_side():
    """Positions outside of a text change nothing, wherever they are."""
    automaton, logits, _, _ = random_case(5)
    chain, inside = chain_of(automaton, torch.device("cpu")), torch.ones(2, 4, dtype=torch.bool)
    wide, there = torch.randn(2, 7, 5), torch.tensor([False, True, True, False, True, True, False]).expand(2, 7)
    wide[there] = logits.flatten(0, 1)
    found = chain.pass_messages(wide, there).posterior_logits(wide)
    torch.testing.assert_close(found[there].view(2, 4, 5), chain.pass_messages(logits, inside).posterior_logits(logits))
    assert torch.equal(found[~there], wide[~there])
    assert torch.equal(
        chain.pass_messages(wide, there).likeliest()[there].view(2, 4), chain.pass_messages(logits, inside).likeliest()
    )


def test_extreme_beliefs_stay_numbers():
    """Certain words, forbidden ones, bfloat16, and a belief that contradicts the pattern: the text still matches."""
    letters = Characters(["a", "b"])
    automaton = compile_pattern("(ab)+", letters)
    chain, inside = chain_of(automaton, torch.device("cpu")), torch.ones(1, 200, dtype=torch.bool)
    for sure, logits in product((True, False), (torch.full((1, 200, 6), -1e4), torch.full((1, 200, 6), float("-inf")))):
        logits[..., 4] = 0 if sure else logits[..., 5]  # of a, everywhere, or of nothing
        for dtype in (torch.float32, torch.bfloat16):
            assert automaton.accepts(chain.pass_messages(logits.to(dtype), inside).likeliest()[0].tolist())
            assert automaton.accepts(chain.pass_messages(logits.to(dtype), inside).draw(torch.rand(1, 200))[0].tolist())
            found = chain.pass_messages(logits.to(dtype), inside).posterior_logits(logits.to(dtype))
            assert not found.isnan().any() and found.isfinite().any(-1).all()


# -- finished texts ----------------------------------------------------------------------------------------------------

FAMILIES = ["difflm", "diffusion-lm", "mdlm", "udlm"]


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("patterns")
    made = {}
    for method in FAMILIES:
        run = tiny_run(folder, method, steps=1, validate_every=1, save_every=1)
        made[method] = TextDiffusion.from_pretrained(run)
    return made


ASKED = [
    r"The \w+ (pub|inn) .*\.",
    r"[^,]*, and is cheap\.?",
    r".*£30.*£30.*",
    r"(\w+ ){3,5}\w+",
    r"[A-Z]\w*( [a-z]+)+( [A-Z]\w*)?\.",
    r"(red |old )+inn",
    r"(\w{3} ){2,}\w{4}",
]


@pytest.mark.parametrize("method", FAMILIES)
def test_finished_texts_match(untrained, method):
    """Untrained models know nothing of the pattern, and obey it."""
    for pattern in ASKED:
        for text in untrained[method].generate(2, controls=[Pattern(pattern)], steps=3):
            assert re.fullmatch(pattern, text.text), (pattern, text.text)
            assert text.controls[0]["satisfied"]


@pytest.mark.parametrize("sampler", ["ancestral", "confidence", "first-hitting", "threshold", "remask", "gibbs"])
def test_no_order_of_writing_ends_nowhere(untrained, sampler):
    """Words must fit each other from end to end, however many are written at once."""
    pattern = r"(The red inn |A small pub )+(the river )*near"
    for steps in (1, 4):
        for text in untrained["mdlm"].generate(2, controls=[Pattern(pattern)], steps=steps, sampler=sampler):
            assert re.fullmatch(pattern, text.text), text.text


def test_no_order_of_revealing_ends_nowhere():
    """1,000 texts, each in an order of its own, under beliefs that are new at every step: what stands is certain."""
    automaton, rows, chance = compile_pattern("(ab|ba)*c(a|bb)+", Characters(["a", "b", "c"])), 1000, torch.Generator()
    chain, inside = chain_of(automaton, torch.device("cpu")), torch.ones(rows, 9, dtype=torch.bool)
    order, written = torch.rand(rows, 9, generator=chance).argsort(-1), torch.full((rows, 9), -1)
    for step in range(5):
        logits = 20 * torch.randn(rows, 9, 7, generator=chance)
        known = torch.full_like(logits, float("-inf")).scatter(-1, written.clamp(min=0).unsqueeze(-1), 0.0)
        logits = torch.where(written.unsqueeze(-1) >= 0, known, logits)
        drawn = chain.pass_messages(logits, inside).draw(torch.rand(rows, 9, generator=chance))
        assert torch.equal(drawn[written >= 0], written[written >= 0])
        written = torch.where(order < 2 * (step + 1), drawn, written)
    assert all(automaton.accepts(row) for row in written.tolist())


WORDS = ["The", "A", "old", "small", "pub", "inn", "near", "beside", "the river", "serves", "French", "food", "£30"]


def make_pattern(chance: random.Random, depth: int = 0) -> str:
    """A pattern of words: some alternatives, repetitions and gaps, one in the other."""
    made = []
    for _ in range(chance.randint(1, 3)):
        kind = chance.randrange(6 if depth < 2 else 3)
        if kind == 0:
            made.append(re.escape(chance.choice(WORDS)))
        elif kind == 1:
            made.append(chance.choice([r"\w+", r"[A-Z]\w*", r"[^aeiou ]+[aeiou]\w*", r"\S{3,6}", r"\w+,?"]))
        elif kind == 2:
            made.append(f"({'|'.join(re.escape(word) for word in chance.sample(WORDS, 3))})")
        elif kind == 3:
            made.append(f"({make_pattern(chance, depth + 1)}|{make_pattern(chance, depth + 1)})")
        elif kind == 4:
            again = chance.choice(["*", "+", "{1,3}", "{2}", "?"])
            made.append(f"({make_pattern(chance, depth + 1)} ){again}{re.escape(chance.choice(WORDS))}")
        else:
            made.append(".*")
    return " ".join(made) + ("" if depth else chance.choice(["", r"\.", ".*", r"( \w+)*"]))


def write_matching(lm: TextDiffusion, patterns: int, texts: int) -> int:
    """How many texts were written, all of which match; patterns that no text matches, or `re` might try for ever, are
    passed over."""
    chance, written = random.Random(0), 0
    while written < patterns * texts:
        pattern = make_pattern(chance)
        try:
            made = lm.generate(texts, seed=written, controls=[Pattern(pattern)], steps=2)
        except UsageError as error:
            assert "no text" in str(error) or "too large" in str(error)
            continue
        written += len(made)
        for text in made:
            if count_paths(parse_pattern(pattern), text.text, 10**5) <= 10**5:
                assert re.fullmatch(pattern, text.text), (pattern, text.text)
    return written


@pytest.mark.long
@pytest.mark.parametrize("method", ["difflm", "mdlm"])
def test_texts_match_patterns_that_nobody_chose(untrained, method):
    assert write_matching(untrained[method], patterns=12, texts=8) == 96


@pytest.mark.slow
@pytest.mark.parametrize("method", ["difflm", "mdlm"])
def test_ten_thousand_texts_match_two_hundred_patterns(untrained, method):
    """5,000 of each family."""
    assert write_matching(untrained[method], patterns=200, texts=25) == 5000


def test_other_controls_hold_beside_a_pattern(untrained):
    for method in ("difflm", "mdlm"):
        asked = [Pattern(r"[A-Z].*\."), Pattern(".*near.*"), WordCount(5, 7), Avoid("river"), Length(8)]
        for text in untrained[method].generate(2, controls=asked, steps=3):
            assert [one["satisfied"] for one in text.controls] == [True] * 5, text.text


BESIDE = [
    [Pattern(r"The .*(pub|inn).*\."), Contains("the river"), Contains("£30"), Length(12)],
    [Pattern(r"[A-Z].* [a-z]+\."), Infill("The ___ pub ___."), Contains("river"), Avoid("near")],
    [Pattern(r"(\w+ ){5}\w+"), Infill("The ___:2 near ___")],
    [Pattern(r"(The|A) .*"), Infill("___ river ___ the ___ inn")],
    [WordCount(6), Infill("___ pub")],
]


@pytest.mark.parametrize("method", FAMILIES)
def test_words_that_are_given_or_asked_for_hold_beside_a_pattern(untrained, method):
    for asked in BESIDE:
        for text in untrained[method].generate(2, controls=asked, steps=2):
            assert [one["satisfied"] for one in text.controls] == [True] * len(asked), (asked, text.text)


@pytest.mark.parametrize("method", ["difflm", "mdlm"])
def test_a_text_is_edited_under_a_pattern(untrained, method):
    edit = Edit("The red pub near the river serves Italian food.", 0.5, ("near", "food"))
    for text in untrained[method].generate(3, controls=[Pattern(r"(\w+ )+[a-z]+\.")], edit=edit, steps=3):
        assert re.fullmatch(r"(\w+ )+[a-z]+\.", text.text)
        assert len(text.tokens) == 10 and (text.tokens[3], text.tokens[8]) == ("near", "food")
    with pytest.raises(UsageError, match="no text with 10 words"):
        untrained[method].generate(1, controls=[Pattern("[^f]*")], edit=edit)


@pytest.mark.long
@pytest.mark.parametrize("method", ["block-diffusion", "ssd-lm"])
def test_blocks_follow_patterns(tmp_path, method):
    """A finished block leaves a way on, whatever it holds."""
    lm = TextDiffusion.from_pretrained(tiny_run(tmp_path, method, steps=1, validate_every=1, save_every=1))
    for asked, record in product(
        ([Pattern(r"(The red inn |A small pub )+(the river )*near")], *BESIDE[:2]), (None, True)
    ):
        lm.inference.record = record
        for text in lm.generate(2, controls=asked, steps=2):
            assert [one["satisfied"] for one in text.controls] == [True] * len(asked), (asked, text.text)


@pytest.mark.parametrize(
    ("controls", "reason"),
    [
        ([Pattern("The [a-z ]*"), Contains("A")], "no text"),
        ([Pattern("The .*"), Infill("A ___")], "no text"),
        ([Pattern("The .*"), Infill("The zebra ___")], "does not know"),
        ([Pattern("The (red )*inn"), Infill("The ___:2 inn"), Avoid("red")], "no text with 4 words"),
        ([Pattern("The inn"), Length(3)], "no text with 3 words matches"),
        ([Pattern("The inn"), Avoid("inn")], "no text"),
        ([Pattern("The .*"), Pattern("A .*")], "no text"),
        ([Pattern("zebra")], "no text"),
    ],
)
def test_contradictions_are_refused(untrained, controls, reason):
    with pytest.raises(UsageError, match=reason):
        untrained["mdlm"].generate(1, controls=controls)


@pytest.mark.parametrize("method", FAMILIES)
def test_requests_with_and_without_a_pattern_share_a_batch(untrained, method):
    """Each gets the texts that it would get alone."""
    lm, asked = untrained[method], [[Pattern(r"The inn (\w+ )*cheap"), Length(5)], [Avoid("inn")], [Length(5)]]
    jobs = [lm.make_job(1, controls=controls, steps=2) for controls in asked]
    together = {owner: texts[0].text for owner, texts in lm.run_jobs(jobs)}
    assert [together[k] for k in range(3)] == [lm.generate(1, controls=c, steps=2)[0].text for c in asked]


def test_lengths_are_drawn_among_those_that_match(untrained):
    """Pairs of words have even lengths."""
    plan = untrained["difflm"].plan_controls([Pattern(r"(\w+ \w+ )*\w+ \w+")])
    assert {one.positions % 2 for one in plan.layouts(torch.arange(50), 0)[0]} == {0}


@pytest.mark.parametrize("items", [(GAP,), (2, GAP, 3, GAP), (ANY, GAP, 4), (GAP, 1, ANY, GAP)])
def test_shares_of_lengths_and_gaps_are_those_of_independent_tokens(items):
    """By enumeration of texts and of where the known tokens stand in them."""
    automaton = random_case(7)[0]
    p = np.array([0.1, 0.3, 0.2, 0.15, 0.25])
    template = Template(automaton, items, p, 5)
    expected = {}
    for n in range(1, 6):
        free = items.count(GAP)
        for sizes in product(range(1, n + 1), repeat=free):
            if sum(sizes) + len(items) - free != n:
                continue
            left = iter(sizes)
            flat = [one for item in items for one in ([ANY] * next(left) if item == GAP else [item])]
            texts = product(*(range(5) if one == ANY else [one] for one in flat))
            chances = [np.prod([p[w] for w, one in zip(text, flat, strict=True) if one == ANY]) for text in texts]
            texts = product(*(range(5) if one == ANY else [one] for one in flat))
            expected[n, sizes] = sum(c for c, text in zip(chances, texts, strict=True) if automaton.accepts(text))
    totals = {n: sum(c for (m, _), c in expected.items() if m == n) for n in range(1, 6)}
    totals = {n: total for n, total in totals.items() if total > 0}
    found = template.lengths
    assert [*found] == [*totals]
    np.testing.assert_allclose([*found.values()], np.array([*totals.values()]) / max(totals.values()))
    n, draws, chance = max(totals), 4000, np.random.default_rng(0)
    drawn = Counter(tuple(template.draw_gaps(n, iter(chance.random(2 * n)))) for _ in range(draws))
    for (m, sizes), value in expected.items():
        if m == n:  # within five standard deviations
            share = value / totals[n]
            assert abs(drawn[sizes] / draws - share) <= 5 * (share * (1 - share) / draws) ** 0.5


@given(st.lists(st.integers(4, 6), min_size=1, max_size=4), st.lists(st.integers(4, 8), max_size=9))
@settings(max_examples=100, deadline=None)
def test_phrases_are_found_wherever_they_stand(phrase, text):
    n = len(phrase)
    for glued in ((), (7,), (4, 8)):
        after = [text[k + n : k + n + 1] for k in range(len(text) - n + 1) if text[k : k + n] == phrase]
        expected = any(not follows or follows[0] not in glued for follows in after)
        assert hold_tokens(phrase, 9, (glued, ())).accepts(text) == expected


@given(st.lists(st.lists(st.integers(4, 6), min_size=1, max_size=3), min_size=1, max_size=3), st.data())
@settings(max_examples=100, deadline=None)
def test_avoided_phrases_stand_nowhere(phrases, data):
    automaton = avoid_phrases(phrases, 9)
    for _ in range(5):
        text = data.draw(st.lists(st.integers(4, 8), max_size=7))
        there = any(text[k : k + len(one)] == one for one in phrases for k in range(len(text)))
        assert automaton.accepts(text) is not there


def test_a_check_does_not_backtrack_for_ever():
    begun = time.perf_counter()
    assert Pattern("(a|a)*(a|b)*c|a*").check("a" * 200).satisfied
    assert not Pattern("(x+x+)+y").check("x" * 200).satisfied
    assert Pattern("[a-z ]+").check("the river").checker == "re.fullmatch"
    assert time.perf_counter() - begun < 10


@pytest.mark.parametrize(("pattern", "ends"), [("a*", 5), ("(a|a)*", 31), ("(a*)*", 31), ("a*a*", 15), ("aaab|b", 0)])
def test_ways_to_read_a_text_are_counted(pattern, ends):
    """By hand, those of all beginnings of aaaa: Σ 2ⁿ⁻¹ splits, pairs of lengths."""
    counted = count_paths(parse_pattern(pattern), "aaaa", 10**9)
    assert counted >= ends and (ends > 0 or counted < 20)


@pytest.mark.parametrize("value", ["0", "5-3", "x", "", "2000", "-3"])
def test_bad_word_counts_are_refused(value):
    with pytest.raises(UsageError, match="words: give a number"):
        WordCount.parse(value)


def test_byte_pairs_follow_patterns(tmp_path):
    run = tiny_run(tmp_path, "mdlm", steps=1, validate_every=1, save_every=1, tokenizer="bpe", vocabulary=300)
    lm, asked = TextDiffusion.from_pretrained(run), [Pattern(r"(The|A) .*\."), WordCount(2, 3)]
    for text in lm.generate(2, controls=asked, steps=3):
        assert re.fullmatch(r"(The|A) .*\.", text.text) and len(text.text.split()) in (2, 3)
    for more in ([Contains("pub"), Avoid("a"), Avoid("old")], [Infill("The ___ pub ___."), Contains("river")]):
        for text in lm.generate(2, controls=[Pattern(r"[\w, .]+"), *more], steps=3):
            assert [one["satisfied"] for one in text.controls] == [True] * (1 + len(more)), (more, text.text)


def test_a_gpu_can_capture_the_rule(untrained):
    """All of its tensors are found, and a copy of them does the same."""
    plan = untrained["mdlm"].plan_controls([Pattern("The .*")])
    mask = torch.ones(1, 6, dtype=torch.bool)
    (rule,) = plan.last_rules(Canvas(mask, 0))
    belief = Belief(torch.randn(1, 6, plan.denoiser.codec.vocabulary))
    found, again = rule(belief, mask, mask), clone_tensors(rule, {})(belief, mask, mask)
    assert torch.equal(found.logits, again.logits) and torch.equal(found.words, again.words)
    assert capture_key(rule) == capture_key(clone_tensors(rule, {}))
    u = torch.rand(1, 6)
    assert torch.equal(found.draw(u), again.draw(u))


@pytest.mark.parametrize("method", FAMILIES)
def test_recorded_steps_write_the_same_texts(untrained, method):
    """As a GPU captures them: one step, replayed over tensors that stay, first of one pattern and then of another."""
    lm = untrained[method]
    asked = [
        [Pattern(r"The .*(pub|inn).*\."), Length(9)],
        [Pattern(r"One .*(pub|inn).*\."), Length(9)],
        [Infill("A ___ inn"), WordCount(5)],
    ]
    made = {}
    for record in (False, True):
        lm.inference.record = record
        try:
            made[record] = [str(text) for controls in asked for text in lm.generate(2, controls=controls, steps=3)]
        finally:
            lm.inference.record = None
    assert made[True] == made[False]


def test_transitions_are_listed_by_where_they_lead():
    """In lists of lists, each once."""
    for pattern in (r"The [A-Z].* near .*\.", r"(\S+ ){3,9}\S+", ".*"):
        chain = chain_of(compile_pattern(pattern, E2E), torch.device("cpu"))
        real = chain.next_classes <= chain.class_begins.shape[0]
        flow = torch.where(real, torch.rand(real.shape), 0.0).flatten()
        expected = torch.zeros(len(real)).index_add(0, chain.next_states.flatten(), flow)
        found = flow
        for group in chain.arrivals:
            found = found[group].sum(-1)
        torch.testing.assert_close(found, expected)


def test_lists_are_sorted_and_know_their_segments():
    found, columns = list_columns(np.arange(8), np.array([2, 0, 2, *[2] * 5]))  # one item of the key 0, seven of 2
    assert found.T.tolist() == [[1, -1, -1, -1, -1, -1, -1, -1], [0, 2, 3, 4, 5, 6, 7, -1]]
    assert columns.tolist() == [[0, 2], [1, 1], [1, 1]]
    found, columns = list_columns(np.zeros(12, int), np.arange(12) // 9, np.arange(12))  # nine, and three
    assert (found >> 16).tolist() == [[0, 1, 2, 9], [3, 4, 5, 10], [6, 7, 8, 11], [-1] * 4]
    assert columns.tolist() == [[0, 0, 0, 1], [1, 0, 0, 1], [0, 0, 1, 1]]


def test_joined_transitions_are_all_of_them_and_have_different_ends():
    for pattern in (r"The [A-Z].* near .*\.", r"(\S+ ){3,9}\S+", ".*"):
        edges = compile_pattern(pattern, E2E).edges
        joined, members = join_transitions(edges)
        assert len({(begin, end) for begin, _, end in joined.tolist()}) == len(joined) < len(edges)
        classes = {union: members[members[:, 1] == union, 0].tolist() for union in set(members[:, 1].tolist())}
        apart = sorted([begin, kind, end] for begin, union, end in joined.tolist() for kind in classes[union])
        assert apart == sorted(edges.tolist())
        assert len({*map(tuple, classes.values())}) == len(classes)


def check_kernels(automaton, logits, inside):
    """All that kernels say is what torch's operations say."""
    plain = plain_chain(automaton, logits.device)
    fast = kernel_chain(plain, automaton.edges, automaton.classes)
    own, other = (one.pass_messages(logits, inside) for one in (plain, fast))
    torch.testing.assert_close(other.log_evidence(), own.log_evidence(), rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(other.later.clamp(min=-1e9), own.later.clamp(min=-1e9), rtol=2e-3, atol=1e-2)
    found, expected = other.posterior_logits(logits), own.posterior_logits(logits)
    torch.testing.assert_close(found.float(), expected.to(logits.dtype).float(), rtol=1e-2, atol=2e-2)
    assert torch.equal(other.likeliest(), own.likeliest())
    u = torch.rand(inside.shape, device=inside.device)
    assert (other.draw(u) == own.draw(u)).float().mean() > 0.9  # another rounding may lead another way
    assert all(automaton.accepts(row[row >= 0].tolist()) for row in other.draw(u))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("pattern", [r"The [A-Z].* near .*\.", r"(\S+ ){5,12}\S+", ".*", r"[^.]*\.( [^.]*\.){0,3}"])
def test_kernels_pass_the_same_messages(pattern):
    device = torch.device("cuda")
    logits, inside = 3 * torch.randn(5, 12, E2E.size, device=device), torch.ones(5, 12, dtype=torch.bool, device=device)
    inside[1, 10:] = inside[2, :2] = False
    logits[3, 5:, 7:], logits[4, 2] = float("-inf"), float("-inf")
    for dtype in (torch.float32, torch.bfloat16):
        check_kernels(compile_pattern(pattern, E2E), logits.to(dtype), inside)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU here, nor Triton's interpreter")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokens", [5, 10])
def test_kernels_pass_the_same_messages_of_random_automata(seed, tokens):
    """Without a GPU too: TRITON_INTERPRET=1 pytest tests/controls/test_patterns.py -k kernels"""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    automaton, logits, *_ = random_case(seed, tokens=tokens)
    assert tokens == 5 or len(join_transitions(automaton.edges)[0]) < len(automaton.edges)
    logits, here, away = logits.to(device), [True] * 4, [False]
    for inside in (here + away, away + here, [*here[:2], *away, *here[2:]]):
        place = torch.tensor(inside).cumsum(0).sub(1).clamp(min=0)
        check_kernels(automaton, logits[:, place], torch.tensor(inside, device=device).expand(2, -1))


@pytest.mark.long
def test_the_benchmark_prints_its_tables(monkeypatch, capsys):
    benchmark = pytest.importorskip("benchmarks.speed.patterns", reason="run from the repository's root")
    monkeypatch.setattr(benchmark, "KINDS", {"beginning": benchmark.KINDS["beginning"]})
    monkeypatch.setattr(benchmark, "LARGE", "(a )*a")
    monkeypatch.setattr(benchmark, "STEPS", 1)
    few = {"device": "cpu", "texts": 1, "places": 40, "pieces": 300, "each": 2, "plain": 3, "steps": 1, "sizes": 1}
    few |= {"masked": "e2e-mdlm-laptop"}
    assert benchmark.main([part for key, value in few.items() for part in (f"--{key}", str(value))]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if " | " in line]
    assert [row[0] for row in rows] == [
        *("model", "e2e", "mdlm", "rule alone", "words", "words", "300 pieces", "300 pieces"),
        *("obeyed, nats/token, self-BLEU", "beginning", "mean", "seconds"),
    ]
    assert rows[8][1:] == ["forward–backward", "drawn and rejected", "∇ log Z × 1"]
    assert rows[9][1].startswith("100.0 %, ") and rows[9][1:] == rows[10][1:]
