"""What a run says about itself: the figure of the weights it ships, without noise, and each step once."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.assets.quantise import quantise_rows
from difflm.app.bench import SMALL
from difflm.data.batches import Batch
from difflm.fast.accelerate import prepare_blocks
from difflm.fast.master_weights import Ema, MasterWeights
from difflm.machine import avoid_onednn
from difflm.methods import METHODS, TextSpec
from difflm.models.base import Capabilities, Losses, Trainable
from difflm.networks.bert import PostNormBlock
from difflm.networks.transformer import Context
from difflm.runtime.tensors import dequantise, load_tensors, save_tensors
from difflm.training.checkpoints import go_back
from difflm.training.recipe import check
from difflm.training.run import read_config
from difflm.training.trainer import Trainer, Update
from difflm.training.validation import Validation, move_batch
from tests.support.tiny import tiny_run


class Watching:
    def __init__(self):
        self.seen: list[Validation] = []

    def validated(self, now):
        self.seen.append(now)


class Counting(Trainable):
    """A model that costs one nat a word and notes how often it was asked."""

    def __init__(self, likelihood):
        super().__init__()
        self.weight, self.asked = torch.nn.Parameter(torch.zeros(1)), []
        self.capabilities = Capabilities(likelihood=likelihood)

    def nats(self, batch, noise, draws):
        assert len(noise.samples) == len(batch.ids) == len(batch.lengths)
        self.asked.append(len(batch.ids) * draws)
        return batch.lengths.float()


def trainer(tmp_path, likelihood="bound", patience=0):
    recipe = check({**SMALL, "steps": 100, "patience": patience, "validate_every": 1})
    return Trainer(Counting(likelihood), recipe, tmp_path, torch.device("cpu"))


@pytest.mark.parametrize(
    ("likelihood", "texts", "levels"),
    [("bound", 10, 4160), ("bound", 5000, 5000), ("exact", 10, 10), ("bound", 300, 4200)],
)
def test_a_bound_of_few_texts_is_drawn_often(tmp_path, whole_validation, likelihood, texts, levels):
    batch = Batch(torch.full((texts, 3), 5).numpy(), torch.full((texts,), 3).numpy())
    training = trainer(tmp_path, likelihood)
    assert training.validator.measure([batch])[0] == pytest.approx(3 / 4)
    assert training.ema.model.asked == [levels]  # at least 4,096 where it is a bound


@pytest.mark.parametrize(("patience", "reported"), [(0, (3, 2.5)), (5, (2, 2.0))])
def test_the_figure_is_that_of_the_weights_that_are_shipped(tmp_path, patience, reported):
    """Three validations, the second the best: without patience the last weights are shipped, with it the best."""
    training, watching = trainer(tmp_path, patience=patience), Watching()
    for step, nats in enumerate((3.0, 2.0, 2.5), start=1):
        training.step = step
        training.ema.model.weight.data.fill_(step)
        training.note_validation(nats, None, watching)
    validation = training.outcome("done").validation
    assert (validation["step"], validation["nats_per_token"]) == reported
    assert float((training.best_weights or training.ema.model.state_dict())["weight"]) == validation["step"]
    assert [now.best for now in watching.seen] == ([True, True, False] if patience else [False] * 3)


def test_weights_that_nobody_validated_have_no_figure(tmp_path):
    training = trainer(tmp_path)
    training.step = 4
    training.note_validation(2.0, None, Watching())
    training.step = 5
    assert training.outcome("interrupted").validation == {}


def test_a_bound_is_written_as_one():
    assert str(Validation(3, 1.25, "bound")) == "≤ 1.2500 nats/token"
    assert str(Validation(3, 1.25, "exact")) == "1.2500 nats/token"


def test_a_resumed_run_forgets_the_steps_it_will_repeat(tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps = [{"kind": kind, "step": step} for step in (10, 20, 30) for kind in ("train", "validation")]
    measured = {"kind": "metric", "name": "unique", "value": 1.0}
    path.write_text("".join(json.dumps(r) + "\n" for r in [*steps, measured]) + '{"kind": "tr')
    go_back(tmp_path, 20)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*steps[:4], measured]


def test_a_run_ends_with_the_validation_of_its_last_step(tmp_path):
    run = tiny_run(tmp_path, "autoregressive", steps=7, validate_every=3)
    validation = read_config(run)["trained"]["validation"]
    assert validation.keys() == {"nats_per_token", "step", "likelihood"}
    assert (
        validation["step"] == 7 and validation["likelihood"] == "exact" and math.isfinite(validation["nats_per_token"])
    )


def test_eight_bits_a_weight_are_read_as_numbers(tmp_path):
    """To half a step of each row's own scale; vectors stay as they are, and so does a matrix that is called a scale."""
    weights = {"a.weight": torch.randn(5, 7) * 3, "a.bias": torch.randn(7), "zero": torch.zeros(2, 3)}
    save_tensors(tmp_path / "narrow.safetensors", quantise_rows(weights))
    found = load_tensors(tmp_path / "narrow.safetensors")
    assert found.keys() == weights.keys() and torch.equal(found["a.bias"], weights["a.bias"])
    step = weights["a.weight"].abs().amax(1, keepdim=True) / 127
    assert ((found["a.weight"] - weights["a.weight"]).abs() <= 0.501 * step).all() and not found["zero"].any()
    assert dequantise({"norm.scale": torch.ones(3, 3)}).keys() == {"norm.scale"}


def moved(tmp_path, batches, **changes):
    """Weights after two steps of a small model with dropout."""
    sizes = {**SMALL["model"], "hidden": 32, "layers": 2, "heads": 2, "dropout": 0.2}
    recipe = check({**SMALL, "model": sizes, "steps": 10, "warmup": 0, **changes})
    torch.manual_seed(0)
    model = recipe.build_method().build(TextSpec(50, 16))
    trainer = Trainer(model, recipe, tmp_path, torch.device("cpu"))
    for _ in range(2):
        losses = trainer.train_step(batches)
    return losses, {name: weight.detach().clone() for name, weight in model.named_parameters()}


def made_up(seed, texts=8):
    draw = np.random.default_rng(seed)
    return Batch(draw.integers(4, 50, (texts, 12)), draw.integers(3, 13, texts))


def test_computing_again_moves_weights_alike(tmp_path):
    """Dropout too: the second time draws what the first did."""
    kept, again = (moved(tmp_path, [made_up(0)], recompute=recompute) for recompute in (False, True))
    assert all(torch.equal(kept[1][name], again[1][name]) for name in kept[1])


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles with g++")
def test_a_compiler_that_computes_norms_again_keeps_less(tmp_path):
    def keep(recompute):
        """Bytes that one step keeps for its gradient, and the gradient of an input layer."""
        sizes = {"hidden": 32, "layers": 2, "heads": 2, "dropout": 0.0}
        recipe = check({**SMALL, "method": "mdlm", "model": sizes, "steps": 10, "recompute": recompute})
        torch.manual_seed(0)
        model = recipe.build_method().build(TextSpec(50, 16))
        trainer = Trainer(model, recipe, tmp_path, torch.device("cpu"))
        prepare_blocks(model, compiled=True, recompute=False)
        kept = {}

        def note(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        torch._dynamo.reset()
        batch = replace(made_up(0), index=np.arange(8))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            trainer.gradients(move_batch(batch, trainer.device))
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        found = sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)
        return found, model.denoiser.network.input.weight.grad

    (whole, gradient), (less, again) = keep(False), keep("light")
    assert less < 0.85 * whole and torch.allclose(gradient, again, atol=1e-5)


def test_losses_of_several_batches_are_their_mean(tmp_path):
    losses, _ = moved(tmp_path, [made_up(0), made_up(1)], accumulate=2, lr=1e-12)
    each = [moved(tmp_path, [made_up(seed)], lr=1e-12)[0]["loss"] for seed in (0, 1)]
    assert losses["loss"] == pytest.approx(float(sum(each)) / 2, rel=0.2)  # the second has other noise


class Plain(Trainable):
    """Squares of a weight, once for every token."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, batch):
        per_text = (self.weight - batch.ids[:, 0]) ** 2
        total = (per_text * batch.lengths).sum()
        return Losses(total, {"square": total}, batch.lengths.sum())


def test_tokens_of_several_batches_count_alike_however_they_are_cut(tmp_path):
    """Three texts and five, accumulated, give the gradient and the losses of the eight at once."""
    whole, found = made_up(3), []
    parts = [whole.map(lambda array, part=part: array[part]) for part in (slice(0, 3), slice(3, 8))]
    for batches in ([whole], parts):
        model = Plain()
        recipe = check({**SMALL, "steps": 9, "warmup": 0, "lr": 0.1, "accumulate": len(batches)})
        trainer = Trainer(model, recipe, tmp_path, torch.device("cpu"))
        grads = []
        trainer.update = lambda step, lr, place, model=model, grads=grads: grads.append(float(model.weight.grad))
        losses = trainer.train_step(batches)
        found.append((grads[0], float(losses["loss"]), float(losses["square"])))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_bert_of_narrow_arithmetic_keeps_it_between_layers():
    block = PostNormBlock(16, 2, 0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert block(torch.randn(2, 3, 16), Context()).dtype is torch.bfloat16
    assert block(torch.randn(2, 3, 16), Context()).dtype is torch.float32


def learner(precision="bf16", **more):
    """A small model without dropout, and its recipe."""
    torch.manual_seed(0)
    sizes = {"hidden": 64, "layers": 2, "heads": 2, "dropout": 0}  # heads of 32: kernels of our own take them
    settings = {"model": {**sizes, "embedding_dim": 16}, "steps": 20, "warmup": 0, "precision": precision, **more}
    recipe = check({**SMALL, **settings})
    return recipe.build_method().build(TextSpec(50, 16)), recipe


def test_matrices_of_the_copy_that_learns_are_narrow_and_the_rest_is_the_models_own():
    model, _ = learner()
    working = MasterWeights(model, torch.bfloat16)
    apart = {name for name, weight in working.weights.items() if weight.apart}
    matrices = {
        f"{at}.{kind}"
        for at, part in model.named_modules()
        if isinstance(part, torch.nn.Linear)
        for kind in ("weight", "bias")
    }
    assert apart == matrices and matrices < set(working.weights)
    assert {working.weights[name].used.dtype for name in apart} == {torch.bfloat16}
    own, theirs = dict(working.model.named_buffers()), dict(model.named_buffers())
    assert own.keys() == theirs.keys() and all(own[name] is theirs[name] for name in own)
    assert MasterWeights(model, None).model is model


@pytest.mark.long
def test_a_narrow_copy_learns_what_autocast_does():
    """Gradients of narrow matrices are what autocast takes, rounded alike; so weights and average move alike."""
    found = []
    for narrow in (False, True):
        model, recipe = learner(clip=0.5, weight_decay=0.1)
        working, ema = MasterWeights(model, torch.bfloat16 if narrow else None), Ema(model, 0.99)
        update = Update(working, ema, recipe, torch.device("cpu"), recorded=False)
        for step in range(3):
            torch.manual_seed(step)
            batch = made_up(step)
            with avoid_onednn(torch.device("cpu"), torch.bfloat16):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = working.model(batch.map(torch.from_numpy)).means()["loss"]
                loss.backward()
            update(step, recipe.rate(step), 0)
            assert all(weight.grad is None for weight in (*model.parameters(), *working.used))
        found.append((dict(model.named_parameters()), dict(ema.model.named_parameters())))
        assert all(torch.equal(w.used, w.whole.to(w.used.dtype)) for w in working.weights.values())
    for plain, own in zip(*found, strict=True):
        assert all(torch.allclose(plain[name], own[name], atol=1e-5) for name in plain)


def stepped(working, ema, update, steps):
    for step in steps:
        torch.manual_seed(step)
        batch = made_up(step)
        with avoid_onednn(torch.device("cpu"), torch.bfloat16), torch.autocast("cpu", dtype=torch.bfloat16):
            working.model(batch.map(torch.from_numpy)).means()["loss"].backward()
        update(step, update.recipe.rate(step), 0)


@pytest.mark.long
def test_a_narrow_copy_goes_on_where_a_checkpoint_left_it():
    """Three steps, all that a checkpoint holds into fresh ones, three more: as six, to the bit."""
    found = []
    for parts in ([range(6)], [range(3), range(3, 6)]):
        saved = None
        for steps in parts:
            model, recipe = learner(clip=0.5)
            ema = Ema(model, 0.99)
            working = MasterWeights(model, torch.bfloat16)
            update = Update(working, ema, recipe, torch.device("cpu"), recorded=False)
            if saved is not None:
                model.load_state_dict(saved[0])
                ema.model.load_state_dict(saved[1])
                update.load(saved[2])
            stepped(working, ema, update, steps)
            states = model.state_dict(), ema.model.state_dict(), update.state(steps[-1] + 1)
            saved = tuple({name: tensor.clone() for name, tensor in state.items()} for state in states)
        found.append(saved)
    for whole, parted in zip(*found, strict=True):
        assert all(torch.equal(whole[name], parted[name]) for name in whole)


@pytest.mark.parametrize("precision, compiled", [("fp32", False), ("fp32", True), ("bf16", False), ("bf16", True)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_recorded_steps_move_weights_as_unrecorded_ones(tmp_path, accumulate, precision, compiled):
    """Two widths, five steps each, so that every recording is replayed: gradients, and the update in one pass."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    found = []
    for recorded in (False, True):
        how = {"compile": recorded and compiled, "accumulate": accumulate, "precision": precision}
        model, recipe = learner(**how, weight_decay=0.1, clip=0.5, lr=1e-4)
        trainer = Trainer(model, recipe, tmp_path, torch.device("cuda"), capture=recorded)
        assert (trainer.update.fused is not None) == recorded
        for step in range(10):
            batches = [made_up(step + 100 * micro) for micro in range(accumulate)]
            if step % 2:
                batches = [Batch(b.ids[:, :8], b.lengths.clip(max=8)) for b in batches]
            trainer.train_step(batches)
        weights = (*model.parameters(), *trainer.ema.model.parameters())
        found.append(torch.cat([p.detach().flatten() for p in weights]))
    assert torch.allclose(*found, atol=1e-4 if precision == "fp32" else 5e-4)


def test_moments_of_one_pass_are_those_of_the_optimiser(tmp_path):
    """So that a checkpoint means the same however its steps were made."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    states = []
    for recorded in (False, True):
        model, recipe = learner(precision="fp32", compile=False, clip=0.5)
        trainer = Trainer(model, recipe, tmp_path, torch.device("cuda"), capture=recorded)
        for step in range(4):
            trainer.train_step([made_up(step)])
        states.append(trainer.update.state(trainer.step))
    assert states[0].keys() == states[1].keys()
    assert all(torch.allclose(a.cpu(), states[1][name].cpu(), rtol=1e-2, atol=1e-5) for name, a in states[0].items())


@pytest.mark.parametrize(
    "name", sorted(name for name, method in METHODS.items() if method.kind in ("method", "baseline"))
)
def test_every_method_trains_with_matrices_in_bfloat16_as_on_a_gpu(name):
    """A GPU takes gradients of a copy whose linear layers are in bfloat16, under autocast; a CPU never would."""
    torch.manual_seed(0)
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "encoder_layers": 1, "embedding_dim": 8}
    method = METHODS[name](**{key: value for key, value in sizes.items() if key in METHODS[name].model_fields})
    for source in {"text": [0], "seq2seq": [6], "either": [0, 6]}[method.task]:
        model = method.build(TextSpec(12, 8, source))
        model.observe(torch.ones(9, dtype=torch.long), torch.ones(12, dtype=torch.long))
        batch = Batch(torch.randint(5, 12, (4, 6)), torch.tensor([6, 5, 4, 3]), index=torch.arange(4))
        if source:
            batch = replace(batch, source=torch.randint(5, 12, (4, 6)), source_lengths=torch.tensor([6, 5, 4, 3]))
        narrow = MasterWeights(model, torch.bfloat16)
        with avoid_onednn(torch.device("cpu"), torch.bfloat16):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = narrow.model(batch)
            losses.total.backward()
        moved = [weight.used.grad for weight in narrow.weights.values() if weight.used.grad is not None]
        assert torch.isfinite(losses.total) and any(grad.abs().sum() > 0 for grad in moved)
