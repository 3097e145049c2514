"""Sizes of gaps that nobody gives: the model says which of them it fills with the least doubt."""

import math
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from difflm import Contains, Infill, Length, Pattern, WordCount
from difflm.controls.base import Control, KnownTokens, ModelInfo
from difflm.controls.patterns.token_automata import ANY, compile_pattern
from difflm.controls.plan import MOST_SIZES, SHARPNESS, ControlPlan, GapSizes, share_sizes
from difflm.data.tokenizers import SPECIALS, Characters
from difflm.diffusion.base import Belief
from difflm.generation.pipeline import TextDiffusion
from difflm.models.base import Capabilities
from difflm.models.batching import Layout
from tests.support.tiny import tiny_run

WORDS, MASK = 10, 10  # six words behind four specials
LEFT, RIGHT, SURE = 4, 5, 6


class OneSize:
    """A denoiser that knows one sentence, LEFT SURE SURE RIGHT, by heart: it says SURE with probability 0.9 where two
    tokens are missing, else nothing."""

    process = SimpleNamespace(mask_id=MASK)
    codec = SimpleNamespace(
        bias=torch.zeros(1), token_mask=lambda ids: torch.isin(torch.arange(WORDS), torch.tensor(ids))
    )

    def __call__(self, x: Tensor, t: Tensor, mask: Tensor) -> Belief:
        logits = torch.zeros(*x.shape, WORDS)
        knows = (mask.sum(-1) == 4).view(-1, 1)
        logits[..., SURE] = torch.where(knows, math.log(0.9 / 0.1 * 5), 0.0)  # beside five other words
        return Belief(logits)


def draft(known: list[list[int]], options: list[list[int]], usual: list[int]) -> GapSizes:
    """A request whose gaps have these sizes, under `OneSize`, without any rules."""
    lengths = SimpleNamespace(forbidden=range(4))
    model = SimpleNamespace(lengths=lengths, capabilities=Capabilities(), vocabulary=WORDS)
    about = {"info": SimpleNamespace(first=0), "model": model}
    rules: Any = dict.fromkeys(("token_rules", "word_rules", "last_rules"), lambda _: [])
    plan: Any = SimpleNamespace(denoiser=OneSize(), **about, **rules)
    gaps = len(known) - 1
    text = KnownTokens(known, [1] * gaps, [True] * gaps, 99, [{}] * len(known))
    plan.lay_out = lambda known, widths: ([Layout(*known.place(own)[:2]) for own in widths], None)
    return GapSizes(plan, text, [None] * gaps, options, usual, lambda _: True)


ONE_GAP = [[LEFT], [RIGHT]], [[1, 2, 3, 4]], [3]
TWO_GAPS = [[LEFT], [RIGHT], [RIGHT]], [[*range(1, 9)], [*range(4, 9)]], [3, 4]


def list_shares(*asked: tuple[list[list[int]], list[list[int]], list[int]]) -> list[list[list[float]]]:
    return [[own.tolist() for own in shares] for shares in share_sizes([draft(*one) for one in asked])]


def test_a_size_scores_the_mean_log_probability_of_what_is_written() -> None:
    ((found,),) = list_shares(ONE_GAP)
    scores = [-math.log(6), math.log(0.9), -math.log(6), -math.log(6)]
    weights = [math.exp(SHARPNESS * score) for score in scores]
    assert found == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-5)


def test_each_gap_is_scored_by_its_own_tokens() -> None:
    """Two gaps of which a denoiser knows nothing: all sizes are alike, for both."""
    (found,) = list_shares(TWO_GAPS)
    assert found == [pytest.approx([1 / 8] * 8), pytest.approx([1 / 5] * 5)]


def test_requests_share_batches_and_nothing_else() -> None:
    together, alone = list_shares(ONE_GAP, TWO_GAPS, ONE_GAP), [*list_shares(ONE_GAP), *list_shares(TWO_GAPS)]
    assert [*chain(*together)] == [pytest.approx(own) for own in chain(*alone, *list_shares(ONE_GAP))]


def test_sizes_are_drawn_by_their_shares() -> None:
    shares = [torch.tensor([0.25, 0.75]).double()]
    sizes = draft([[LEFT], [RIGHT]], [[4, 5]], [4])
    sizes.shares = shares
    assert [sizes.draw([u]) for u in (0.0, 0.2, 0.3, 0.99)] == [[4], [4], [5], [5]]


def test_known_words_are_placed_around_gaps_of_these_sizes() -> None:
    tokenizer = Characters([" ", "a", "b"])
    info, infill = ModelInfo(tokenizer, 99, first=0), Infill("a___b a___")
    assert infill.known(info).place([2, 1]) == (7, {0: 5, 3: 6, 4: 4, 5: 5}, {})


def test_sizes_that_do_not_fit_together_are_drawn_again() -> None:
    shares = [torch.tensor([0.5, 0.5])] * 2
    asked = draft([[LEFT], [RIGHT], [RIGHT]], [[1, 2], [1, 2]], [9, 9])
    sizes = replace(asked, fits=lambda drawn: sum(drawn) == 3)
    sizes.shares = shares
    assert sizes.draw([0.1, 0.1, 0.9, 0.9, 0.1, 0.9]) == [1, 2]
    assert sizes.draw([0.1, 0.1, 0.9, 0.9]) == [9, 9]


def test_automata_say_which_sizes_can_match() -> None:
    tokenizer = Characters([" ", "a", "b"])
    automaton, (first, space) = compile_pattern(r"a \w \w", tokenizer), map(tokenizer.encode, ("a ", " "))
    found = [automaton.accepts([*first, *[ANY] * m, *space, *[ANY] * n]) for m in (1, 2) for n in (1, 2)]
    assert found == [True, False, False, False]
    assert automaton.can_contain(tokenizer.encode("a b")) and not automaton.can_contain(tokenizer.encode("ab"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> TextDiffusion:
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "dropout": 0.0, "context": 0.5}
    folder = tmp_path_factory.mktemp("pieces")
    run = tiny_run(folder, "mdlm", tokenizer="bpe", vocabulary=300, longest=64, steps=3, model=sizes)
    return TextDiffusion.from_pretrained(run)


COUNTED = [
    "The ___:1 pub is near the river.",
    "The old pub ___:2 river.",
    "The ___:3 is ___:1 and ___.",
    "A pub (___:2).",
]


@pytest.mark.parametrize("template", COUNTED)
def test_counted_gaps_have_their_words_and_touch_no_other(pieces: TextDiffusion, template: str) -> None:
    plan = pieces.plan_controls([Infill(template)])
    assert isinstance(plan, ControlPlan) and plan.gap_sizes is not None and plan.infill is not None
    lowest = [own[0] for own in plan.gap_sizes.options]
    assert all(low >= (words or 1) for low, words in zip(lowest, plan.infill.gaps, strict=True))
    assert all(len(own) <= MOST_SIZES for own in plan.gap_sizes.options)  # not whatever leaves room in a whole text
    given = re.split(r"___(?::\d)?", template)
    for made in pieces.infill(template, n=4, seed=2, steps=4):
        found = re.fullmatch("(.+)".join(map(re.escape, given)), made.text)
        assert found and made.controls[0]["satisfied"], made.text
        for text, words in zip(found.groups(), plan.infill.gaps, strict=True):
            assert words in (None, len(text.split())) and text == text.strip(), made.text
            if words:  # each is a word: some letter or digit, and few signs
                assert all(any(map(str.isalnum, word)) for word in text.split()), made.text


def test_a_gap_that_must_hold_words_is_large_enough(pieces: TextDiffusion) -> None:
    plain, more = (pieces.plan_controls([Infill("The ___ pub."), *own]) for own in ([], [Contains("cheap river")]))
    assert isinstance(plain, ControlPlan) and plain.gap_sizes and plain.gap_sizes.options == [[*range(1, 9)]]
    assert isinstance(more, ControlPlan) and more.gap_sizes
    needed = len(pieces.tokenizer.encode(" cheap river"))
    assert more.gap_sizes.options == [[*range(needed, needed + MOST_SIZES)]]


@pytest.mark.parametrize("more", [[Pattern("The [a-z ]+ pub.*")], [Contains("old")], [Length(4)], [WordCount(3, 5)]])
def test_gaps_of_which_more_is_asked_are_sized_by_the_model_too(pieces: TextDiffusion, more: list[Control]) -> None:
    plan = pieces.plan_controls([Infill("The ___ pub."), *more])
    assert isinstance(plan, ControlPlan) and plan.gap_sizes is not None
    assert share_sizes([plan.gap_sizes])[0] and all(len(own) <= MOST_SIZES for own in plan.gap_sizes.options)


def test_gaps_share_the_words_that_a_length_leaves(pieces: TextDiffusion) -> None:
    for made in pieces.infill("The ___ pub ___ river.", n=4, seed=3, steps=4, controls=[Length(8)]):
        assert len(made.text.split()) == 8 and all(one["satisfied"] for one in made.controls), made.text


@pytest.mark.parametrize(
    "asked", [[], [Length(3)], [Contains("犬")], [Infill("犬は___です。")], [Infill("犬 ___:2 é")]]
)
def test_no_character_is_broken(pieces: TextDiffusion, asked: list[Control]) -> None:
    """More than a third of its pieces are bytes of characters that take several."""
    for drafts in pieces.stream(4, 3, steps=4, controls=asked):
        assert not any("\ufffd" in token for draft in drafts for token in draft.tokens)
        assert "犬" not in str(asked) or all("犬" in "".join(draft.tokens) for draft in drafts)
    spelt = pieces.tokenizer.spellings()
    for row in chain(*pieces.run_unchecked([pieces.make_job(4, 3, steps=4, controls=asked)])):
        whole = "".join(spelt[i - len(SPECIALS)] for i in row.ids).encode("utf-8", "surrogateescape")
        assert pieces.tokenizer.decode(row.ids) == whole.decode()
    for made in pieces.edit("犬はここです。", 4, steps=4, strength=0.5):
        assert "\ufffd" not in made.text


@pytest.mark.long
def test_gaps_of_a_model_of_pieces_are_short_and_the_rest_stays(tmp_path: Path) -> None:
    """Texts of the grammar have up to 40 pieces: lengths of whole texts would make gaps of dozens."""
    run = tiny_run(
        tmp_path, "mdlm", tokenizer="bpe", vocabulary=300, longest=64, steps=3,
        model={"hidden": 32, "layers": 2, "heads": 2, "dropout": 0.0, "context": 0.5},
    )  # fmt: skip
    model = TextDiffusion.from_pretrained(run)
    made = model.infill("The old pub ___ river.", n=3, seed=1, steps=4)
    known = len(model.tokenizer.encode("The old pub")) + len(model.tokenizer.encode(" river."))
    for one in made:
        assert one.text.startswith("The old pub ") and one.text.endswith(" river.")
        assert known < len(model.encode([one.text])[0]) <= known + 8 + 8  # spelled anew, a gap may have more pieces
    assert model.infill("The old pub ___ river.", n=1, seed=1, steps=4)[0].text == made[0].text
    for template, more in (("The old pub ___ river.", [Contains("cheap")]), ("The ___:1 pub ___ river.", [])):
        for one in model.generate(6, seed=1, steps=4, controls=[Infill(template), *more]):
            assert all(control["satisfied"] for control in one.controls)
            assert len(one.text) <= len("The old cheap pub  river.") + 8 * 8, one.text  # most pieces have few letters


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> TextDiffusion:
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "dropout": 0.0, "context": 0.5}
    return TextDiffusion.from_pretrained(tiny_run(tmp_path_factory.mktemp("gaps"), "mdlm", steps=3, model=sizes))


def test_of_candidates_the_one_is_kept_whose_gap_fits_best(masked: TextDiffusion) -> None:
    """The same candidates are read word by word: the nats of the gap and of one word on either side of it."""
    template = "The old pub ___ the river."
    made = masked.infill(template, n=1, seed=5, candidates=6)
    tried = masked.infill(template, n=6, seed=5)

    def doubt(text: str) -> float:
        words = masked.alternatives(text)[2:-2]  # pub … the
        return -sum(math.log(word.probability) for word in words) / len(words)

    assert len({one.text for one in tried}) > 1
    assert made[0].text == min(tried, key=lambda one: doubt(one.text)).text
    assert made[0].denoiser_calls > sum(one.denoiser_calls for one in tried)


def test_a_model_says_how_its_gaps_are_filled(masked: TextDiffusion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked, "gaps", {"sampler": "confidence", "temperature": 0.5})
    between, ending = [Infill("The ___ is near.")], [Infill("The pub ___")]
    asked = [
        masked.make_job(1, controls=between).sampling,
        masked.make_job(1, controls=between, temperature=1.0, sampler=None).sampling,
        masked.make_job(1, controls=ending).sampling,
        masked.make_job(1, controls=[Contains("old"), *between]).sampling,  # whatever else is asked for
    ]
    usual = masked.model.sampling.sampler
    assert [(one.sampler, one.temperature) for one in asked] == [
        ("confidence", 0.5),
        ("confidence", 1.0),
        (usual, 1.0),
        ("confidence", 0.5),
    ]
