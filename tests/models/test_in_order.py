"""Texts that a masked model writes from left to right: the chain rule, by enumeration."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from difflm import Contains, Infill, Json, Length
from difflm.controls.ordered import (
    FollowAutomaton,
    Ordered,
    end_sentences,
    is_final,
    join_prefix_rules,
    lay_out_words,
)
from difflm.controls.patterns.token_automata import ANY
from difflm.data.tokenizers import END, PAD, SPECIALS
from difflm.diffusion.base import Belief
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Steering, Unsaid
from difflm.errors import UsageError
from difflm.generation.pipeline import LAID_OUT, WHOLE, TextDiffusion
from difflm.generation.requests import Request
from difflm.methods import METHODS
from difflm.methods.base import TextSpec
from difflm.models.base import PLAIN, TextBatch
from difflm.models.in_order import HIDDEN, IN_ORDER, OrderedReader
from difflm.models.sampling import Sampling
from difflm.models.word_nats import nats_in_order
from tests.support.open_checkpoints import MODELS
from tests.support.tiny import tiny_run

WORDS, GIVEN, DRAWS = 9, 6, 30_000  # five words behind four specials
SAMPLING = Sampling(sampler=IN_ORDER)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = {**MODELS["diffullama"]["config"], "vocab_size": WORDS}
    made = METHODS["mdlm"](decoder=config, hidden=32, in_order=0.5, dropout=0.0).build(TextSpec(WORDS, 12)).eval()
    with torch.no_grad():
        made.denoiser.network.head.weight.normal_(std=0.3)
        made.denoiser.codec.raw.normal_()
    return made


def draw(model, known, length, rules=(), count=DRAWS, width=16):
    """Texts of this length, as tuples."""
    given = torch.full((count, width), -1)
    for k, token in enumerate(known):
        given[:, k] = token
    steering = Steering(given if known else None, prefix_rules=rules)
    lengths = torch.full((count,), length)
    batch = TextBatch(Noise(3, torch.arange(count)), lengths, width, SAMPLING, steering)
    *_, last = model.write(batch, PLAIN)
    assert last.tokens.shape == (count, width)
    return [tuple(row[:length]) for row in last.tokens.tolist()]


def next_chances(model, prefix):
    """p(word | those before it) of every word, by a call without slots."""
    if not prefix:
        hidden = torch.full((1, HIDDEN), model.process.mask_id)
        logits = model.denoiser(hidden, torch.ones(1)).logits[0, 0]
    else:
        vectors = F.embedding(torch.tensor([prefix]), model.denoiser.codec.raw)
        seen = torch.ones(1, len(prefix), len(prefix), dtype=torch.bool).tril()
        logits = model.denoiser.network.answer(model.denoiser.network.run(vectors, seen, None)[:, -1])[0, :WORDS]
    return logits.masked_fill(torch.arange(WORDS) < len(SPECIALS), float("-inf")).softmax(-1)


def compare(found, wanted):
    """Shares of drawn texts with their chances: within five standard errors."""
    assert sum(wanted.values()) == pytest.approx(1, abs=1e-5) and set(found) <= set(wanted)
    for text, p in wanted.items():
        assert found.count(text) / len(found) == pytest.approx(p, abs=5 * (p * (1 - p) / len(found)) ** 0.5 + 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("known", [(), (GIVEN,), (GIVEN, 5)])
def test_texts_are_drawn_by_the_chain_rule(model, known):
    wanted = {}
    for rest in product(range(len(SPECIALS), WORDS), repeat=3 - len(known)):
        text, p = (*known, *rest), 1.0
        for k in range(len(known), 3):
            p *= float(next_chances(model, text[:k])[text[k]])
        wanted[text] = p
    assert max(wanted.values()) > 2 * min(wanted.values())  # it prefers some
    compare(draw(model, known, 3), wanted)


class Letters:
    """Words of one letter, as a tokenizer that spells."""

    spells, whole_words, unit, kind, size = True, False, "tokens", "letters", WORDS

    def spellings(self):
        return ["a", "Be", ".", " ", "Dr"]

    readable_pieces = spellings


LETTERS = Letters()


@torch.no_grad()
def test_under_an_automaton_each_word_is_drawn_among_those_that_can_still_be_followed_to_its_end(model):
    """A text ends as soon as it is accepted, at its room at the latest: chances are those of the chain rule, each
    renormalised over the words after which the rest fits."""
    automaton, room = end_sentences(LETTERS, begins=True), 4  # a, Be, ., blank, Dr are 4 to 8
    rule = FollowAutomaton(Ordered(automaton), [room] * DRAWS, torch.device("cpu"))

    def goes_on(text):
        """Whether some end fits: by trying all of them."""
        rests = (rest for n in range(room - len(text) + 1) for rest in product(range(4, WORDS), repeat=n))
        return any(automaton.accepts([*text, *rest]) for rest in rests)

    wanted = {}

    def follow(text, p):
        if text and automaton.accepts(text):
            wanted[(*text, END, *[PAD] * room)[:room]] = p
            return
        chances = next_chances(model, text)
        allowed = [word for word in range(4, WORDS) if len(text) < room and goes_on((*text, word))]
        total = sum(float(chances[word]) for word in allowed)
        for word in allowed:
            follow((*text, word), p * float(chances[word]) / total)

    follow((), 1.0)
    found = draw(model, (), room, [join_prefix_rules([(slice(0, DRAWS), rule)])])
    compare(found, wanted)
    assert all(model.lengths.words([*text]) == [t for t in text if t >= 4] for text in found[:50])
    assert not any(text[0] in (4, 6, 7) for text in found)  # no text begins with a small letter, a full stop or a blank


@torch.no_grad()
def test_slots_hold_what_a_whole_reading_sees(model):
    """Token by token, several at once, or the whole text in one call: the same chances."""
    ids, mask = torch.randint(4, WORDS, (3, 8)), torch.ones(3, 8, dtype=torch.bool)
    one, many = (OrderedReader(model.denoiser, mask, range(4)) for _ in range(2))
    found = [one.read(ids[:, k : k + 1]) for k in range(7)]
    torch.testing.assert_close(many.read(ids[:, :5]), found[4], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(many.read(ids[:, 5:6]), found[5], atol=1e-5, rtol=1e-5)
    nats = torch.stack([F.cross_entropy(found[k], ids[:, k + 1], reduction="none") for k in range(7)], 1)
    torch.testing.assert_close(nats, nats_in_order(model.denoiser, ids, mask)[:, 1:], atol=1e-4, rtol=1e-4)


def test_a_text_ends_at_the_end_of_a_sentence_and_not_before_its_share(model):
    automaton = end_sentences(LETTERS)
    assert all(automaton.accepts(text) for text in ((4, 6), (6,), (4, 6, 7), (8, 6, 4, 6)))  # "a." "." "a. " "Dr.a."
    assert not any(automaton.accepts(text) for text in ((4,), (8, 6), (4, 6, 4)))
    assert not is_final(automaton)
    half = Ordered(automaton, (4, 4), 0.5)
    assert half.fewest(10) == 5 and half.fewest(3) == 3
    rule = FollowAutomaton(half, [10] * 200, torch.device("cpu"))
    found = draw(model, (4, 4), 10, [rule], count=200)
    ends = [text.index(END) if END in text else 10 for text in found]
    assert min(ends) >= 5 and len({*ends}) > 2
    assert all(automaton.accepts(text[:end]) for text, end in zip(found, ends, strict=True))
    assert not any(automaton.accepts(text[:k]) for text, end in zip(found, ends, strict=True) for k in range(5, end))


def test_required_words_are_laid_out_where_the_automaton_accepts_them():
    automaton = end_sentences(LETTERS)
    pattern = SimpleNamespace(automaton=automaton, lengths=[6])
    seen = set()
    for seed in range(300):
        u = torch.rand(60, generator=torch.Generator().manual_seed(seed)).tolist()
        total, known = lay_out_words([[5], [4, 5]], 6, 1, pattern, 9, u)
        line = [known.get(k, ANY) for k in range(total)]
        assert 6 <= total <= 8 and line[-1] == 6 and line[0] == ANY and automaton.accepts(line)
        assert any(line[k : k + 2] == [4, 5] for k in range(total)) and sorted(known.values()) == [4, 5, 5, 6]
        seen.add((total, *known))
    assert len(seen) > 20  # in any order, and anywhere
    assert lay_out_words([[4] * 8], 6, 0, pattern, 9, [0.5] * 60) == (6, {})  # no room


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """A model of pieces that says it reads in order: what it writes makes no sense, but is what was asked for."""
    folder = tmp_path_factory.mktemp("ordered")
    run = tiny_run(
        folder,
        "mdlm",
        tokenizer="bpe",
        vocabulary=300,
        longest=64,
        steps=1,
        model={"hidden": 16, "layers": 1, "heads": 2},
    )
    trained = TextDiffusion.from_pretrained(run)
    torch.manual_seed(2)
    size = len(trained.tokenizer.spellings()) + len(SPECIALS)
    config = {**MODELS["diffullama"]["config"], "vocab_size": size}
    model = METHODS["mdlm"](decoder=config, hidden=32, in_order=0.5, context=0.5, dropout=0.0).build(TextSpec(size, 64))
    with torch.no_grad():
        model.denoiser.network.head.weight.normal_(std=0.2)
    return TextDiffusion(
        model.eval(), trained.tokenizer, {**trained.config, "gaps": {"sampler": "confidence", "candidates": 2}}
    )


FORM = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 40}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}


def test_requests_are_met_and_written_in_order_where_nothing_is_given_behind_a_gap(lm):
    ordered = {"The old pub ___": [Infill("The old pub ___")], "form": [Json(FORM)], "nothing": []}
    for controls in ordered.values():
        job = lm.make_job(3, 1, controls=controls)
        assert job.sampling.sampler == IN_ORDER and job.plan is not None and not job.plan.laid_out
        assert lm.make_job(3, 1, controls=controls, sampler="confidence").sampling.sampler == "confidence"
        for text in lm.generate(3, 1, controls=controls):
            assert all(one["satisfied"] for one in text.controls), text.text
            assert controls == ordered["form"] or text.text.rstrip()[-1] in ".!?…\"'”’)]"
    for controls in ([Infill("The ___ pub.")], [Contains("pub"), Length(6)]):
        job = lm.make_job(1, 1, controls=controls)
        assert job.sampling.sampler == "confidence"
        (text,) = lm.generate(1, 1, controls=controls, candidates=2)
        assert all(one["satisfied"] for one in text.controls), text.text
        with pytest.raises(UsageError, match="in-order is for texts"):
            lm.make_job(1, controls=controls, sampler=IN_ORDER)


def test_a_text_depends_on_its_seed_alone_not_on_those_beside_it(lm):
    asked = [[Infill("The old pub ___")], [Infill("A quiet ___")], [Json(FORM)], []]
    jobs = [lm.make_job(5, 7, controls=own) for own in asked]
    together = [{} for _ in jobs]
    for owner, texts in lm.run_jobs(jobs):
        together[owner] |= {k: text.text for k, text in texts.items()}
    for own, found in zip(asked, together, strict=True):
        alone = lm.generate(2, 7, controls=own)
        assert [text.text for text in alone] == [found[0], found[1]]
    assert len({*together[0].values()}) > 1


def test_a_text_alone_is_the_best_of_those_that_its_model_reads(lm):
    def count(**asked):
        return lm.settle(Request(**asked)).candidates

    assert count() == count(infill="The old pub ___") == WHOLE
    assert count(words="6", contains=["pub"]) == LAID_OUT
    assert count(infill="The ___ pub.") == 2  # as its config says
    assert count(n=2) == count(contains=["pub"]) == count(edit="The old pub.") == count(candidates=1) == 1
    (best,), drafts = lm.generate(1, 5, candidates=4), lm.generate(4, 5)
    rows = [lm.tokenizer.encode(one.text) for one in drafts]
    assert best.text in [one.text for one in drafts] and best.denoiser_calls >= sum(map(len, rows)) / 2


def test_tokens_that_are_said_in_rewriting_alone_do_not_stand_together_elsewhere():
    given, x = torch.tensor([[True, False, False, False]]), torch.tensor([[1, 2, 1, 3]])
    belief = Unsaid((1, 2), given)(Belief(torch.zeros(1, 4, 4)), x, torch.zeros(1))
    assert (belief.logits < 0).nonzero().tolist() == [[0, 0, 1], [0, 3, 2]]  # what is given stays, and may be followed
