"""DiffusER: edits that happen at random times, the way back against enumeration, and rounds of editing."""

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from difflm import TextDiffusion
from difflm.app.live_view import mark_word
from difflm.app.studio.api import streamed
from difflm.app.studio.limits import Limits
from difflm.app.studio.schemas import Asked
from difflm.controls.gaps import Edit
from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Steering
from difflm.errors import UsageError
from difflm.methods import METHODS, TextSpec
from difflm.methods.diffuser.model import EditDiffusion, keep_best
from difflm.methods.diffuser.process import PAPER_STEP, EditProcess
from difflm.methods.levt import (
    DELETE,
    INSERT,
    KEEP,
    REPLACE,
    align,
    between_ends,
    close_slots,
    name_edits,
    open_slots,
)
from difflm.player.frames import Draft, pack_drafts
from difflm.runtime.delayed_flag import DelayedFlag
from tests.support.browsing import Opener, write
from tests.support.drafts import text_of
from tests.support.oracles import longest_common
from tests.support.pairs import reversals
from tests.support.recorded import OnDevice
from tests.support.serving import need, running
from tests.support.tiny import tiny_run

WORDS, LONGEST, SLOT = 12, 8, 99
SMALL = {"hidden": 32, "layers": 1, "encoder_layers": 1, "heads": 2, "dropout": 0.0}


def process(words: int = 4, span: float = 3.0) -> EditProcess:
    return EditProcess(4, 4 + words, END, PAD, span)


def noise_of(count: int, seed: int = 0) -> Noise:
    return Noise(seed, torch.arange(count))


# -- the process ------------------------------------------------------------------------------------------------------


def test_one_step_of_the_paper_keeps_sixty_spans_of_a_hundred():
    """Of 300,000 spans a share lies 0.004 away once in ten thousand times at most."""
    script = process().draw_script(noise_of(3000), 100)
    happened = script.times < PAPER_STEP
    kept, there = ~happened & (script.edits != INSERT), happened | (script.edits != INSERT)
    shares = [float((happened & (script.edits == edit)).sum() / there.sum()) for edit in (REPLACE, DELETE, INSERT)]
    assert shares == pytest.approx([0.2, 0.1, 0.1], abs=0.004)
    assert float(kept.sum() / there.sum()) == pytest.approx(0.6, abs=0.004)
    assert float((script.sizes == 4).float().mean()) == pytest.approx(math.exp(-3) * 3**4 / 24, abs=0.004)
    assert float((script.sizes == 1).float().mean()) == pytest.approx(math.exp(-3) * 4, abs=0.004)


@pytest.mark.parametrize("t", [0.3, 1.0])
def test_texts_at_a_time_are_those_of_an_enumeration(t):
    """Spans of one word, a text "a" over a and b. Of 40,000 draws twenty cells lie 0.02 away once in 10⁶ times."""
    more = t / 4 / (1 - (1 - t) / 4)  # another word is inserted, before the next span takes a word
    expected: Counter[tuple[int, ...]] = Counter()
    for before, after in product(range(12), repeat=2):
        p = (1 - more) ** 2 * more ** (before + after)
        for edit, chance in ((KEEP, 1 - t), (REPLACE, t * 2 / 3), (DELETE, t / 3)):
            count = before + after + (edit == REPLACE)
            if count > 4:
                expected[("long",)] += p * chance
                continue
            for words in product((4, 5), repeat=count):
                text = (*words[:before], 4, *words[before:]) if edit == KEEP else words
                expected[text] += p * chance / 2**count
    count = 40_000
    text = between_ends(Batch(torch.full((count, 14), 4), torch.ones(count, dtype=torch.long)))
    one, noise = process(2, 0.0), noise_of(count)
    made = one.corrupt(text, one.draw_script(noise, 16), torch.full((count,), t), noise)
    found = Counter(tuple(row[1 : row.index(END)]) for row in made.tolist())
    short = {text for text in expected if len(text) <= 3 and text != ("long",)}
    distance = sum(abs(found[text] / count - expected[text]) for text in short) / 2
    assert distance < 0.02 and sum(expected.values()) == pytest.approx(1, abs=1e-6)


def test_the_way_back_is_that_of_all_scripts():
    """All scripts of two spans with each edit before s, between s and t, or behind t: what a script showed at s, given
    what it shows at t, is a coin of (t − s) / t for each edit."""
    s, t = 0.35, 0.8
    sizes = {"before": s, "between": t - s, "behind": 1 - t}
    joint: Counter[tuple[object, object]] = Counter()
    for script in product(product((REPLACE, DELETE, INSERT), sizes), repeat=2):
        p = math.prod({REPLACE: 0.5, DELETE: 0.25, INSERT: 0.25}[edit] * sizes[when] for edit, when in script)
        now = tuple(edit if when != "behind" else None for edit, when in script)
        earlier = tuple(edit if when == "before" else None for edit, when in script)
        joint[earlier, now] += p
    for (earlier, now), p in joint.items():
        share = EditProcess.undone_share(t, s)
        undone = [one is None for one, other in zip(earlier, now, strict=True) if other is not None]
        chance = math.prod(share if gone else 1 - share for gone in undone)
        total = sum(q for (_, other), q in joint.items() if other == now)
        assert p / total == pytest.approx(chance)


def test_scripts_show_at_every_time_what_happened_until_then():
    """The same coin in drawn scripts: of 20,000 words and gaps a share lies 0.02 away once in 10⁶ times."""
    one, s, t = process(), 0.35, 0.8
    script, times = one.draw_script(noise_of(1000), 40), torch.ones(1000)
    (early, few), (late, many) = (one.edits_at(script, x * times, 20) for x in (s, t))
    assert bool(((early == KEEP) | (early == late)).all()) and bool((few <= many).all())
    undone = (late != KEEP) & (early == KEEP)
    assert float(undone.sum() / (late != KEEP).sum()) == pytest.approx(one.undone_share(t, s), abs=0.03)
    assert float(1 - few.sum() / many.sum()) == pytest.approx(one.undone_share(t, s), abs=0.03)


def test_noise_has_room_and_an_end():
    one, noise = process(), noise_of(500)
    text = between_ends(Batch(torch.full((500, 9), 4), torch.arange(500) % 10))
    for t in (0.0, 0.5, 1.0):
        made = one.corrupt(text, one.draw_script(noise, 11), torch.full((500,), t), noise)
        assert made.shape == text.shape and bool((made[:, 0] == START).all())
        assert bool(((made == END).sum(1) == 1).all())
        assert bool(((made == PAD) == (made.eq(END).cumsum(1) - made.eq(END).long() > 0)).all())
        assert t or torch.equal(made, text)


# -- edits and their way back -----------------------------------------------------------------------------------------


def replay(plan: list[int], closed: list[int], written: list[bool]) -> list[int]:
    """The text that comes of a plan when its slots are filled by what is written, each until its stop."""
    spans = iter([word for word, new in zip(closed, written, strict=True) if new])
    text: list[int] = []
    for item in plan:
        text += iter(lambda: next(spans), END) if item == SLOT else [item] if item != PAD else []
    assert next(spans, None) is None
    return text


def corrupted(count: int, words: int) -> tuple[Tensor, Tensor]:
    """Texts of 0 to 7 words, and the same at random times."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 4 + words, (count, 7), generator=generator)
    target = between_ends(Batch(ids, torch.randint(0, 8, (count,), generator=generator)))
    one, noise = process(words), noise_of(count)
    target = torch.nn.functional.pad(target, (0, 4), value=PAD)
    return one.corrupt(target, one.draw_script(noise, 12), torch.rand(count, generator=generator), noise), target


def test_ten_thousand_corrupted_texts_find_their_way_back():
    text, target = corrupted(10_000, 4)
    found = align(text, text != PAD, target, target != PAD)
    edits, stands_for = name_edits(found)
    plan = open_slots(text, text != PAD, edits, SLOT, PAD)
    closed, written = close_slots(target, target != PAD, found, END, PAD)
    rows = zip(plan.tolist(), closed.tolist(), written.tolist(), target.tolist(), strict=True)
    assert all(replay(p, c, w) == [word for word in row if word != PAD] for p, c, w, row in rows)
    words = (text != PAD) & (text != START) & (text != END)
    assert not bool((plan[:, 1:] == SLOT).logical_and(plan[:, :-1] == SLOT).any())
    assert torch.equal((edits == KEEP)[words] | (edits == INSERT)[words], (found >= 0)[words])
    assert bool((target.gather(1, stands_for) == text)[found >= 0].all())
    finished = ((edits == KEEP) | (text == PAD)).all(1)
    assert torch.equal(finished, (text == target).all(1))
    for one, other, kept in zip(text[:40].tolist(), target[:40].tolist(), found[:40].tolist(), strict=True):
        inner = [[word for word in row if word >= 4] for row in (one, other)]
        assert sum(at >= 0 for at in kept) - 2 == longest_common(*inner)  # the fewest edits


TEXT = st.lists(st.integers(4, 6), max_size=6)


@given(text=TEXT, edits=st.lists(st.sampled_from([KEEP, REPLACE, DELETE, INSERT]), min_size=7, max_size=7))
@settings(max_examples=60)
def test_slots_are_where_words_are_to_be_written(text, edits):
    """Whatever a tagger says: against a loop over the words."""
    wanted: list[int] = []
    for word, edit in zip([START, *text], edits, strict=False):
        wanted += [] if edit == DELETE else [SLOT] if edit == REPLACE else [word, SLOT] if edit == INSERT else [word]
    wanted.append(END)
    merged = [item for k, item in enumerate(wanted) if item != SLOT or k == 0 or wanted[k - 1] != SLOT]
    ids = torch.tensor([[START, *text, END, PAD]])
    marks = torch.tensor([[*edits[: len(text) + 1], KEEP, KEEP]])
    plan = open_slots(ids, ids != PAD, marks, SLOT, PAD)[0].tolist()
    assert [item for item in plan if item != PAD] == merged and plan[: len(merged)] == merged


# -- the model --------------------------------------------------------------------------------------------------------


def build(source: int = 8, longest: int = LONGEST, words: int = WORDS, **changes) -> EditDiffusion:
    torch.manual_seed(0)
    model = METHODS["diffuser"](**{**SMALL, **changes}).build(TextSpec(words, longest, source))
    assert isinstance(model, EditDiffusion)
    return model


def unlearned(**changes) -> EditDiffusion:
    """A model that says something else of every text."""
    model = build(**changes)
    for layer in (model.tagger.head, model.generator.head):
        layer.weight.data.normal_()
    return model.eval()


def sourced(batch: Batch) -> Steering:
    assert batch.source is not None and batch.source_lengths is not None
    mask = torch.arange(batch.source.shape[1]) < batch.source_lengths.unsqueeze(1)
    return Steering(source=batch.source, source_mask=mask)


def generate(model: EditDiffusion, steering: Steering, count: int, **changes):
    with torch.no_grad():
        sampling = model.sampling.change(changes)
        lengths = torch.full((count,), model.longest)
        return [*model.eval().stream(noise_of(count), lengths, 16, sampling, steering)]


def test_all_parts_learn_from_a_batch():
    model = build().train()
    for layer in (model.tagger.head, model.generator.head):
        layer.weight.data.normal_(std=0.1)
    losses = model(reversals(24, 0, 6))
    losses.total.backward()
    assert {*losses.terms} == {"tags", "words", "guesses"} and torch.isfinite(losses.total)
    parts = model.tagger.head, model.generator.head, model.generator.encoder.head, model.tag_embedding, model.embedding
    assert all(float(part.weight.grad.abs().sum()) > 0 for part in parts)


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 1.0, "start": "noise"}, {"beams": 3, "revisions": 2}, {"sampler": "ancestral"}],
    ids=str,
)
def test_texts_are_words_and_fit(changes):
    """Whatever an untrained model says: no text is empty at last, too long, or holds anything but words."""
    model = unlearned()
    frames = generate(model, sourced(reversals(12, 0, 6)), 12, steps=4, **changes)
    for frame in frames:
        written = frame.tokens != PAD
        assert frame.tokens.shape == (12, 16) == frame.edits.shape and torch.equal(written, frame.mask)
        assert bool(((frame.tokens >= 4) & (frame.tokens < WORDS) | ~written).all())
        assert bool((written.sum(-1) <= LONGEST).all()) and bool((written.int().diff(dim=1) <= 0).all())
        assert bool((frame.confidence >= 0).all()) and bool((frame.confidence <= 1 + 1e-6).all())
    assert bool((frames[-1].tokens != PAD).any(1).all()) and not bool(frames[-1].edits.any())
    assert int(frames[-1].calls.max()) <= model.calls(model.sampling.change({"steps": 4, **changes}), LONGEST)


@pytest.mark.parametrize("changes", [{}, {"beams": 2, "revisions": 2}], ids=str)
def test_a_text_does_not_depend_on_those_beside_it(changes):
    model, batch = unlearned(), reversals(6, 0, 6)
    many = generate(model, sourced(batch), 6, steps=3, **changes)[-1]
    parts = (part[3:4] for part in (batch.ids, batch.lengths, batch.source, batch.source_lengths))
    with torch.no_grad():
        sampling = model.sampling.change({"steps": 3, **changes})
        *_, one = model.stream(Noise(0, torch.tensor([3])), torch.tensor([8]), 16, sampling, sourced(Batch(*parts)))
    assert one.tokens.tolist() == many.tokens[3:4].tolist() and one.calls.tolist() == many.calls[3:4].tolist()


def test_beams_find_the_likeliest_texts_of_an_enumeration():
    """All texts of one or two words over two words, written from nothing. END of a full text is certain."""
    model = unlearned(source=0, longest=2, words=6)
    texts = [words for n in (1, 2) for words in product((4, 5), repeat=n)]
    nothing = torch.tensor([[START, END, PAD, PAD]])
    edits = torch.tensor([[INSERT, KEEP, KEEP, KEEP]])
    with torch.no_grad():
        memory = model.read_edited(nothing, edits, None)
        expected = {}
        for words in texts:
            network, ids = model.generator, torch.tensor([[START, *words]])
            x, _ = network.run(network.input(model.embedding(ids)), None, None, None, 0, memory=memory)
            logits = network.answer(x)[0].masked_fill(model.banned, -math.inf)
            logits[0, END] = -math.inf
            nats = logits.log_softmax(-1)
            steps = [*words, *([END] if len(words) < 2 else [])]
            expected[words] = sum(float(nats[k, word]) for k, word in enumerate(steps))
        plan = open_slots(nothing, nothing != PAD, edits, model.slot, PAD)
        sampling = model.sampling.change({"beams": 6, "revisions": 3, "steps": 1})
        made, fresh, log_p, _ = model.fill_slots(plan, memory, noise_of(1), 0, sampling, 6)
    found = {tuple(row[1 : row.index(END)]): p for row, p in zip(made.tolist(), log_p[0].tolist(), strict=True)}
    assert found == pytest.approx(expected, abs=1e-4) and sum(map(math.exp, found.values())) == pytest.approx(
        1, abs=1e-3
    )
    assert torch.equal(fresh, (made >= 4))
    (frame,) = generate(model, Steering(), 1, beams=6, revisions=3, steps=1)
    assert tuple(frame.tokens[0][frame.tokens[0] != PAD].tolist()) == max(expected, key=expected.__getitem__)


def test_many_texts_are_searched_in_parts(monkeypatch):
    model, steering = unlearned(), sourced(reversals(6, 0, 6))
    whole = generate(model, steering, 6, steps=1, beams=2, revisions=2)
    monkeypatch.setattr("difflm.methods.diffuser.model.MOST_ROWS", 8)
    parts = generate(model, steering, 6, steps=1, beams=2, revisions=2)
    assert torch.equal(whole[0].tokens, parts[0].tokens) and torch.equal(whole[0].calls, parts[0].calls)


def test_equal_revisions_are_one():
    text = torch.tensor([[4], [5], [4], [6]])
    best, _, log_p = keep_best(text, text > 4, torch.tensor([[-3.0, -2.0, -1.0, -9.0]]), 3)
    assert best.tolist() == [[4], [5], [6]] and log_p.tolist() == [[-1, -2, -9]]


def test_texts_begin_with_what_was_asked_for():
    model, batch = unlearned(), reversals(12, 0, 6)
    steering, noise = sourced(batch), noise_of(12)

    def begin(steering: Steering, start: str) -> list[list[int]]:
        rows = model.begin(noise, model.sampling.change({"start": start}), steering).tolist()
        return [row[1 : row.index(END)] for row in rows]

    assert begin(steering, "nothing") == [[]] * 12
    sources = [[word for word in row if word != PAD] for row in batch.source.tolist()]
    assert begin(steering, "source") == sources
    given = replace(steering, begin=torch.tensor([[7, 6, PAD]] * 12))
    assert begin(given, "noise") == [[7, 6]] * 12
    noised = begin(steering, "noise")
    assert UNK not in {word for row in noised for word in row} and len({*map(len, noised)}) > 2


class Oracle(EditDiffusion):
    """Knows the target of every text, and edits accordingly."""

    target: Tensor

    def read_text(self, text, source):
        edits, _ = name_edits(align(text, text != PAD, self.target, self.target != PAD))
        return text, torch.nn.functional.one_hot(edits.where(text != PAD, KEEP), 4).double().log()

    def read_edited(self, text, edits, source):
        self.asked = text, edits
        return []

    def fill_slots(self, plan, memory, noise, step, sampling, beams):
        """Slots that are open now; those of edits that come later are not."""
        text, edits = self.asked
        found = align(text, text != PAD, self.target, self.target != PAD)
        rows = []
        for words, own, at, target in zip(*(x.tolist() for x in (text, edits, found, self.target)), strict=True):
            made, last = [], -1
            for k, (word, edit) in enumerate(zip(words, own, strict=True)):
                if word == PAD:
                    break
                last = max(last, at[k])
                upto = next((a for a in at[k + 1 :] if a >= 0), last + 1)
                made += [word] if edit in (KEEP, INSERT) else []
                if edit == INSERT or (edit == REPLACE and own[k - 1] != REPLACE):
                    made += target[last + 1 : upto]
            rows.append([*made, *[PAD] * (self.longest + 2 - len(made))][: self.longest + 2])
        made = torch.tensor(rows)
        return made, made != text, torch.zeros(len(made), 1), torch.ones(len(made), dtype=torch.long)


def test_with_exact_networks_edits_are_undone_at_the_rate_of_the_process():
    """From time 1 down in four steps: texts that are finished become more, and all are at last. A text whose noise is
    one edit is finished with the probability 1 − s: of 400 of them the share lies 0.1 away once in 10⁴ times."""
    model = build(0, 20)
    model.__class__ = Oracle
    count = 400
    words = torch.arange(4, 24).expand(count, -1)
    model.target = between_ends(Batch(words, torch.full((count,), 6)))
    model.lengths.observe(torch.nn.functional.one_hot(torch.tensor(6), 21) * count)
    begin = words[:, :6].clone()
    begin[:, 2:4] = 11
    frames = generate(model, Steering(begin=begin), count, sampler="ancestral", steps=4)
    right = model.target[:, 1:17].masked_fill(model.target[:, 1:17] == END, PAD)
    done = [float((frame.tokens == right).all(1).float().mean()) for frame in frames]
    assert done == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.1) and done == sorted(done)
    noisy = generate(model, Steering(), count, sampler="ancestral", start="noise", steps=4)
    shares = [float((frame.tokens == right).all(1).float().mean()) for frame in noisy]
    assert shares == sorted(shares) and shares[-1] == 1
    (only,) = generate(model, Steering(), count, start="noise", steps=4)
    assert torch.equal(only.tokens, right)


def test_a_round_never_looks_at_the_device(monkeypatch):
    """But for news of texts that are done, which are read long after they were sent."""
    monkeypatch.setattr(torch, "autocast", lambda *given, **more: nullcontext())  # it does not know the device
    monkeypatch.setattr(DelayedFlag, "__call__", lambda self, flag: False)
    model = build(2, 2).eval().to("meta")
    here = torch.zeros(2, dtype=torch.long, device="meta")
    steering = Steering(source=here.expand(2, 2), source_mask=here.expand(2, 2) > 0)
    sampling = model.sampling.change({"beams": 2, "revisions": 2, "steps": 1, "start": "noise"})
    with torch.no_grad(), OnDevice():
        (frame,) = model.stream(Noise(here, here), here, 16, sampling, steering)
    assert frame.tokens.is_meta and frame.edits is not None and frame.edits.is_meta


@pytest.mark.long
def test_sequences_are_reversed_and_only_the_source_says_how():
    """From nothing. Some texts with a wrong word are put right, and none was right before."""
    model, updates = build(hidden=64, layers=2, encoder_layers=2, span=1.0).train(), 150
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, updates)
    for step in range(updates):
        loss = model(reversals(32, step, 4)).means()["loss"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
    batch = reversals(60, 9999, 4)
    right = torch.nn.functional.pad(batch.ids, (0, 12), value=PAD)

    def exact(steering: Steering) -> float:
        return (generate(model, steering, 60, steps=4)[-1].tokens == right).all(-1).float().mean().item()

    steering = sourced(batch)
    assert steering.source is not None and steering.source_mask is not None
    others = Steering(source=steering.source.roll(4, 0), source_mask=steering.source_mask.roll(4, 0))
    assert exact(steering) > 0.75 and exact(others) < 0.15
    wrong = batch.ids.clone()
    wrong[:, 0] = 4 + (wrong[:, 0] - 4 + 3) % (WORDS - 4)
    assert exact(replace(steering, begin=wrong)) > 0.1


# -- the front doors --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm(tmp_path_factory) -> TextDiffusion:
    """Of texts without sources; it has hardly learned anything."""
    return TextDiffusion.from_pretrained(tiny_run(tmp_path_factory.mktemp("edits"), "diffuser", steps=1))


@pytest.mark.long
def test_texts_are_written_watched_and_edited(lm):
    made = lm.generate(3, steps=2)
    assert made[0].text == lm.generate(1, steps=2)[0].text and len({text.text for text in made}) == 3
    *_, last = lm.stream(1, steps=2)
    assert [token for token in last[0].tokens if token] == made[0].tokens
    (edited,) = lm.generate(1, edit=Edit("the old pub"), steps=1, temperature=0.0)
    assert edited.tokens and edited.text != lm.generate(1, steps=1, temperature=0.0)[0].text
    for (draft,) in lm.stream(1, steps=2, start="noise"):
        assert len(draft.edits) == len(draft.tokens) and {*draft.edits} <= {"keep", "replace", "delete", "insert"}
        assert streamed(draft, 1, False)["edits"] == draft.edits


def test_words_that_it_does_not_know_are_named_and_do_not_stay(lm):
    (made,) = lm.generate(1, edit=Edit("the Zorblax pub"), steps=3)
    assert "it does not know 'Zorblax'" in made.warnings[0] and "UNK" not in made.tokens
    assert not lm.generate(1, edit=Edit("the old pub"), steps=1)[0].warnings


def test_requests_with_and_without_a_text_to_edit_have_batches_of_their_own(lm):
    asked = [{"edit": Edit("the old pub")}, {"start": "noise"}, {}]
    jobs = [lm.make_job(1, temperature=0.0, steps=1, **one) for one in asked]
    together = {owner: made[0].text for owner, made in lm.run_jobs(jobs)}
    assert [together[k] for k in range(3)] == [lm.generate(1, temperature=0.0, steps=1, **one)[0].text for one in asked]


def test_a_server_bounds_revisions():
    limits = Limits()
    with pytest.raises(UsageError, match=f"revisions must be at most {limits.candidates} on this server"):
        Asked(beams=2, revisions=limits.candidates + 1).check(limits)


def test_the_player_holds_the_edits():
    draft = Draft(0, 0, 0.5, ["the", "pub"], [1.0, 1.0], [True, True], ["keep", "delete"])
    plain = replace(draft, edits=[])
    assert [frame.get("e") for frame in pack_drafts([draft, plain], False, {})] == ["kd", None]
    assert "edits" not in streamed(plain, 1, False)


@pytest.mark.long
def test_a_browser_marks_edits_until_the_text_is_finished(open_player):
    played = text_of(["the", "cheap", "pub"], steps=2)
    first, last = (replace(draft, edits=["keep", "delete", "insert"]) for draft in played.drafts)
    tab = open_player([replace(played, drafts=[first, last])])
    marks = "() => [...document.querySelectorAll('.word')].map((word) => word.dataset.edit)"
    assert tab.evaluate(marks) == ["keep"] * 3  # where motion is reduced, it begins with the text
    tab.keyboard.press("Home")
    assert tab.evaluate(marks) == first.edits
    struck = "() => getComputedStyle(document.querySelectorAll('.word')[1]).textDecorationLine"
    assert tab.evaluate(struck) == "line-through"


@pytest.mark.long
def test_the_studio_edits_a_text(lm, browser):
    need("fastapi", "uvicorn")
    with running(lm) as server:
        opener = Opener(browser, server.url)
        tab = opener("#steps=2")
        tab.fill("#start", "the old pub")
        assert (
            tab.inner_text("#meaning") == "The model edits this text directly."
            and tab.locator("#rewriting").is_hidden()
        )
        made = write(tab)
        assert made == [text.text for text in lm.generate(len(made), edit=Edit("the old pub"), steps=2)]
        assert tab.evaluate("document.querySelectorAll('.word[data-edit]').length") > 0 and not opener.wrong
        for context in opener.contexts:
            context.close()


def test_marks_stand_at_the_words_that_are_edited():
    assert [mark_word(" pub", edit) for edit in ("keep", "replace", "delete", "insert")] == [
        *(" pub", " ~pub", " -pub", " pub+")
    ]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"edit": Edit("the pub", keep=("pub",))}, "edits the text directly: leave keep and strength out"),
        ({"edit": Edit("the pub", 0.9)}, "edits the text directly"),
        ({"edit": Edit(" ")}, "text 1 is empty"),
        ({"edit": Edit("the " * 30)}, "text 1 has 30 tokens; this model reads at most 24"),
        ({"start": "source"}, "start source is not for this model. Known: noise, nothing"),
        ({"start": "words"}, "start must be one of noise, nothing, source, not words"),
        ({"revisions": 2}, "revisions needs a beam search: give beams as well"),
        ({"source": "the pub"}, "was trained on texts without sources"),
        ({"clamp": True}, "clamp is for models that diffuse word vectors"),
        ({"length_beam": 2}, "a length beam needs a model"),
    ],
)
def test_what_it_cannot_do_is_refused_in_a_line(lm, asked, said):
    with pytest.raises(UsageError) as error:
        lm.generate(1, **asked)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_models_that_edit_nothing_refuse_its_settings():
    e2e = TextDiffusion.from_pretrained("e2e")
    for asked in ({"start": "nothing"}, {"revisions": 2}):
        with pytest.raises(UsageError, match="is for models that edit texts"):
            e2e.generate(1, **asked)
