"""One object serves several readers at once: each gets the texts that it would get alone."""

from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import pytest
import torch

from difflm.controls import Field, Label, Length
from difflm.diffusion.noise import Noise
from difflm.fast.inference import Inference
from difflm.generation.pipeline import TextDiffusion
from difflm.networks.transformer import Transformer
from difflm.runtime.tensors import module_tensors

pytestmark = pytest.mark.long  # a few seconds of setup

SEEDS = range(6)


@pytest.fixture(scope="module")
def lm(tiny_runs, guide) -> TextDiffusion:
    return TextDiffusion.from_pretrained(tiny_runs["difflm"], dtype=torch.float32).guided_by(guide)


def asked(lm: TextDiffusion, seed: int) -> dict:
    values = lm.labellings["food"].values[1:]
    return {"n": 1, "seed": seed, "steps": 6, "controls": [Label("food", values[seed % len(values)]), Length(9)]}


def drafts(lm: TextDiffusion, seed: int) -> list[list[str]]:
    return [one.tokens for (one,) in lm.stream(**asked(lm, seed))]


def text(lm: TextDiffusion, seed: int) -> str:
    return lm.generate(**asked(lm, seed))[0].text


@pytest.mark.long
def test_a_model_is_asked_for_another_text_at_every_step_of_one(lm):
    alone, free = [drafts(lm, seed) for seed in SEEDS], lm.generate(1, steps=1)[0].text
    for seed in SEEDS:
        found = []
        for (draft,) in lm.stream(**asked(lm, seed)):
            found.append(draft.tokens)
            assert lm.generate(1, steps=1)[0].text == free
        assert found == alone[seed]


def test_streams_are_read_in_turn(lm):
    alone = [drafts(lm, seed) for seed in SEEDS]
    steps = zip_longest(*(lm.stream(**asked(lm, seed)) for seed in SEEDS))
    found = [[one.tokens for (one,) in step] for step in steps]
    assert [list(texts) for texts in zip(*found, strict=True)] == alone


@pytest.mark.long
def test_threads_share_a_model(lm):
    alone = [text(lm, seed) for seed in SEEDS]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda seed: text(lm, seed), [*SEEDS] * 2)) == alone * 2


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_weights_that_did_not_change_are_not_written_over(tiny_runs, dtype):
    """Torch counts changes of a tensor that a gradient needs. What another request asks for must not be one, whether
    weights are compared, as on a CPU, or copied, as on a GPU."""
    model = TextDiffusion.from_pretrained(tiny_runs["difflm"], dtype=torch.float32).model
    inference = Inference(model, dtype)
    inference.sync_weights()
    copy = inference.denoiser
    before = [weight._version for weight in module_tensors(copy)]
    inference.sync_weights()
    assert inference.denoiser is copy and inference._copy is not None
    inference._copy.sync_weights(model.denoiser)
    assert [weight._version for weight in module_tensors(copy)] == before


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_new_weights_wait_for_the_next_request(tiny_runs, dtype):
    """Who is writing on a CPU goes on with the word vectors that it began with."""
    model = TextDiffusion.from_pretrained(tiny_runs["difflm"], dtype=torch.float32).model
    inference = Inference(model, dtype)
    inference.sync_weights()
    copy = inference.denoiser
    table = copy.codec.table().clone()
    with torch.no_grad():
        model.denoiser.codec.raw.mul_(-1)
    inference.sync_weights()
    assert torch.equal(copy.codec.table(), table) and torch.equal(inference.denoiser.codec.table(), -table)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_all_texts_share_the_modulations_of_their_steps_until_weights_change(tiny_runs, dtype, monkeypatch):
    model = TextDiffusion.from_pretrained(tiny_runs["difflm"], dtype=torch.float32).model
    plain, computed = Transformer.modulations_at, []
    monkeypatch.setattr(Transformer, "modulations_at", lambda self, t: computed.append(t) or plain(self, t))

    def write(by: Inference, sample: int) -> torch.Tensor:
        noise, lengths = Noise(0, torch.tensor([sample])), torch.tensor([8])
        *_, last = by.stream(noise, lengths, 16, model.sampling.change({"steps": 4}))
        return last.clean

    inference = Inference(model, dtype)
    inference.sync_weights()
    before = [write(inference, k) for k in range(3)]
    assert len(computed) == 4 and torch.equal(write(Inference(model, dtype), 2), before[2])
    with torch.no_grad():
        model.denoiser.network.blocks[0].modulation.bias += 0.5
    inference.sync_weights()
    now = write(inference, 2)
    assert not torch.equal(now, before[2]) and torch.equal(now, write(Inference(model, dtype), 2))


@pytest.mark.long
def test_the_bundled_model_is_asked_while_it_writes():
    lm = TextDiffusion.from_pretrained("e2e")
    wanted = {"seed": 1, "steps": 4, "controls": [Field("food", "Japanese")]}
    alone = [one.tokens for (one,) in lm.stream(1, **wanted)]
    found = []
    for (draft,) in lm.stream(1, **wanted):
        found.append(draft.tokens)
        lm.generate(1, steps=1)
    assert found == alone
