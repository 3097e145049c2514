"""Block diffusion: who sees whom, what is kept, and the two ends of its scale."""

import pytest
import torch

from difflm.controls import Contains, Length
from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD
from difflm.diffusion.base import Levels
from difflm.diffusion.condition import Condition
from difflm.diffusion.noise import Noise
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import METHODS, TextSpec
from difflm.models.base import Sampling
from difflm.models.block_diffusion import BlockLengths, BlockwiseDenoiser
from tests.support.tiny import tiny_run

WORDS, LONGEST = 14, 18


def model(block: int = 4):
    torch.manual_seed(0)
    made = METHODS["block-diffusion"](hidden=16, layers=2, heads=2, block=block).build(TextSpec(WORDS, LONGEST)).eval()
    torch.nn.init.normal_(made.denoiser.network.head.weight, std=0.5)
    return made


def texts(rows: int = 3, length: int = 20) -> torch.Tensor:
    return torch.randint(4, WORDS, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_a_clean_word_reaches_the_blocks_behind_it_and_no_other():
    """Perturb a word of block 2: answers of blocks up to 2 do not move, those of blocks 3 and 4 do."""
    made, clean = model(), texts()
    noisy, t = torch.full_like(clean, WORDS), torch.ones(3)
    changed = clean.clone()
    changed[:, 9] = (changed[:, 9] - 3) % (WORDS - 4) + 4
    moved = (
        (
            made.denoiser(noisy, t, None, Condition(given=clean)).logits
            - made.denoiser(noisy, t, None, Condition(given=changed)).logits
        )
        .abs()
        .amax(-1)
    )
    assert float(moved[:, :12].max()) == 0
    assert bool((moved[:, 12:] > 0).all())


@torch.no_grad()
def test_a_noisy_word_reaches_its_own_block_alone():
    made, clean = model(), texts()
    noisy, t = torch.full_like(clean, WORDS), torch.ones(3)
    changed = noisy.clone()
    changed[:, 9] = 5
    moved = (
        made.denoiser(noisy, t, None, Condition(given=clean)).logits
        - made.denoiser(changed, t, None, Condition(given=clean)).logits
    )
    moved = torch.nan_to_num(moved, nan=0.0, posinf=1.0, neginf=1.0).abs().amax(-1)
    assert bool((moved[:, 8:12] > 0).all()) and float(moved[:, :8].max()) == 0 and float(moved[:, 12:].max()) == 0


@torch.no_grad()
@pytest.mark.parametrize("block", [1, 2, 4])
def test_kept_keys_are_exact(block):
    """Block after block with what was kept of the others, against all of them at once."""
    made, clean = model(block), texts()
    noisy, t = torch.full_like(clean, WORDS), torch.ones(3)
    noisy[:, ::3] = clean[:, ::3]
    whole = made.denoiser(noisy, t, None, Condition(given=clean)).logits
    writing = BlockwiseDenoiser(made.denoiser, steps=1)
    for start in range(0, 20, block):
        canvas = torch.cat([clean[:, :start], noisy[:, start:]], 1)
        times = (torch.arange(20) >= start).float().expand(3, -1)
        found = writing(canvas, Levels(times), None).logits[:, start : start + block]
        there = torch.isfinite(found)
        assert torch.equal(there, torch.isfinite(whole[:, start : start + block]))
        assert torch.allclose(found[there], whole[:, start : start + block][there], atol=1e-5)


@torch.no_grad()
def test_what_lies_beyond_the_window_is_neither_seen_nor_kept():
    """A text three times as long as those of training: whole and block by block still agree."""
    made, clean = model(), texts(2, 60)
    assert made.denoiser.window == 20
    noisy = torch.full_like(clean, WORDS)
    whole = made.denoiser(noisy, torch.ones(2), None, Condition(given=clean)).logits
    far = clean.clone()
    far[:, 0] = 4 + (far[:, 0] - 3) % (WORDS - 4)
    # Two layers reach two windows back.
    assert torch.equal(made.denoiser(noisy, torch.ones(2), None, Condition(given=far)).logits[:, 44:], whole[:, 44:])
    writing = BlockwiseDenoiser(made.denoiser, steps=1)
    for start in range(0, 60, 4):
        canvas = torch.cat([clean[:, :start], noisy[:, start:]], 1)
        times = (torch.arange(60) >= start).float().expand(2, -1)
        found = writing(canvas, Levels(times), None).logits[:, start : start + 4]
        assert torch.allclose(found, whole[:, start : start + 4], atol=1e-4)


@torch.no_grad()
def test_each_text_looks_back_as_far_as_it_may():
    """What is kept of a row that looks back over two blocks is that of a model with so small a window."""
    made, clean = model(), texts(2, 40)
    noisy = torch.full_like(clean, WORDS)
    writing = BlockwiseDenoiser(made.denoiser, 1, torch.tensor([8, made.denoiser.window]))
    found = torch.zeros(*clean.shape, WORDS)
    for start in range(0, 40, 4):
        canvas = torch.cat([clean[:, :start], noisy[:, start:]], 1)
        times = (torch.arange(40) >= start).float().expand(2, -1)
        found[:, start : start + 4] = writing(canvas, Levels(times), None).logits[:, start : start + 4]
    for row, window in enumerate((9, 20)):  # a block lies before another by less than the window
        made.denoiser.window = window
        whole = made.denoiser(noisy, torch.ones(2), None, Condition(given=clean)).logits
        assert torch.allclose(found[row], whole[row], atol=1e-4)


@pytest.mark.parametrize(
    ("counts", "back"),
    [
        ({18: 90}, 8),  # cut from one long text: four blocks and a half
        ({5: 20, 12: 40, 17: 40}, 4),  # half of them have 12 words at least
        ({3: 50}, 4),  # a block in any case
    ],
)
def test_long_texts_look_back_as_far_as_half_of_training_could(counts, back):
    lengths = BlockLengths(LONGEST, 4, 512)
    lengths.observe(torch.tensor([counts.get(n, 0) for n in range(LONGEST + 1)]))
    assert int(lengths.seen_back) == back


@pytest.mark.long
def test_a_long_neighbour_changes_nothing(tmp_path):
    lm = TextDiffusion.from_pretrained(tiny_run(tmp_path, "block-diffusion", steps=3))
    works = [lm.make_job(2, 3, controls=[Length(n)]) for n in (9, 60)]
    together = {number: [made[k].text for k in sorted(made)] for number, made in lm.run_jobs(works)}
    alone = [[text.text for text in lm.generate(2, 3, controls=[Length(n)])] for n in (9, 60)]
    assert [together[0], together[1]] == alone


@pytest.mark.long
def test_texts_go_on_behind_the_length_of_training(tmp_path):
    """Pieces of 24 letters of a rhyme of 30: five times as long, the rhyme still goes round."""
    rhyme = "one two three four five sixes "
    (tmp_path / "rhyme.txt").write_text(rhyme * 400)
    changes = {"data": str(tmp_path / "rhyme.txt"), "tokenizer": "characters", "chunk": 24, "steps": 600}
    lm = TextDiffusion.from_pretrained(tiny_run(tmp_path, "block-diffusion", **changes))
    made = [text.text for text in lm.generate(20, controls=[Length(120)])]
    right = [[text[k : k + 6] in 2 * rhyme for text in made for k in range(a, b)] for a, b in ((0, 18), (24, 114))]
    before, behind = (sum(found) / len(found) for found in right)
    assert before > 0.9 and behind > 0.75  # looking back as far as the longest texts of training: 0.03


@torch.no_grad()
def test_blocks_of_one_word_are_the_chain_rule():
    """Their bound is −log p, word by word with what was kept: the likelihood of a model that writes left to right."""
    made, ids, lengths = model(1), texts(3, 9), torch.tensor([9, 4, 7])
    nats = made.nats(Batch(ids, lengths), Noise(0, torch.arange(3)), 1)
    canvas, mask = made.lengths.canvas(ids, lengths)
    writing, total = BlockwiseDenoiser(made.denoiser, steps=1), torch.zeros(3)
    for place in range(canvas.shape[1]):
        hidden = torch.cat([canvas[:, :place], torch.full_like(canvas[:, place:], WORDS)], 1)
        times = (torch.arange(canvas.shape[1]) >= place).float().expand(3, -1)
        p = writing(hidden, Levels(times), None).logits[:, place].log_softmax(-1)
        total -= p.gather(-1, canvas[:, place : place + 1]).squeeze(-1) * mask[:, place]
    assert torch.allclose(nats, total, atol=1e-4)


def test_the_canvas_ends_with_the_block_of_its_end():
    canvas, mask = BlockLengths(LONGEST, 4, 512).canvas(
        torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]]), torch.tensor([5, 3])
    )
    assert canvas.tolist() == [[5, 6, 7, 8, 9, END, PAD, PAD], [5, 6, 7, END, PAD, PAD, PAD, PAD]]
    assert mask.sum(-1).tolist() == [8, 4]


@torch.no_grad()
@pytest.mark.parametrize("sampler", ["ancestral", "first-hitting", "confidence", "threshold", "remask"])
def test_every_order_fills_every_block(sampler):
    made = model()
    frames = list(made.stream(Noise(0, torch.arange(4)), torch.full((4,), 20), 32, Sampling(sampler, steps=4)))
    last = frames[-1]
    assert bool((last.state[:, : (last.step + 1)] < WORDS).all())
    ended = (last.tokens == END).any(-1)
    assert bool((ended | (last.tokens[:, 16:20] != PAD).all(-1)).all())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return TextDiffusion.from_pretrained(tiny_run(tmp_path_factory.mktemp("blocks"), "block-diffusion"))


def test_texts_may_be_longer_than_those_of_training(written):
    (text,) = written.generate(controls=[Length(70), Contains("coffee shop")])
    assert len(text.tokens) == 70 and all(check["satisfied"] for check in text.controls)
    assert text.denoiser_calls == 17 * 5 + 2  # 17 blocks of 4 steps, each kept; of the last, END and PAD are known


def test_requests_of_different_steps_do_not_mix(written):
    works = [written.make_job(1, seed=3, steps=steps, controls=[Length(9)]) for steps in (2, 4)]
    together = {owner: made[0].text for owner, made in written.run_jobs(works)}
    alone = [written.generate(1, 3, steps=steps, controls=[Length(9)])[0].text for steps in (2, 4)]
    assert [together[0], together[1]] == alone


def test_an_edit_is_refused(written):
    from difflm.controls.gaps import Edit

    with pytest.raises(UsageError, match="left to right"):
        written.generate(edit=Edit("The old pub serves food."))
