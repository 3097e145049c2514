"""A left-to-right model of others as the beginning of one that denoises: init=DIR."""

import json

import pytest
import torch
from open_checkpoints import MODELS, draw_weights, write_model, write_tokenizer, write_weights
from tiny import Silent, write_grammar

from difflm.generation.pipeline import TextDiffusion
from difflm.models.open_models import load_network
from difflm.networks.open_transformer import AnnealedTransformer, Shape
from difflm.training.fit import train_run
from difflm.training.recipe import load_recipe

CPU = torch.device("cpu")


@pytest.fixture
def llama(tmp_path):
    folder = write_model(tmp_path / "llama", "diffullama", eos_token_id=100)
    write_tokenizer(folder, rows=110, marks=False)
    return folder


def gpt2(folder):
    """The golden DiffuGPT under GPT-2's own names."""
    keys = MODELS["diffugpt"]["keys"]
    names = {
        key: key.replace("denoise_model", "transformer").replace("embed_tokens", "transformer.wte") for key in keys
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["diffugpt"]["config"]))
    write_weights(folder, {names[key]: weight for key, weight in draw_weights(keys).items()})
    write_tokenizer(folder, rows=110, marks=False)
    return folder


def begun(folder, tmp_path, *changes):
    """A run of one update at a learning rate of nothing."""
    write_grammar(tmp_path / "my.txt", 30)
    options = ["steps=1", "batch_size=4", "warmup=0", "lr=1e-30", "ema=0", "sample_every=0", "longest=64", *changes]
    recipe = load_recipe("own-text", ["method=mdlm", f"data={tmp_path}/my.txt", f"init={folder}", *options])
    train_run(recipe, tmp_path / "run", CPU, Silent(), lambda *_: None, None, False)
    return TextDiffusion.from_pretrained(tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize(("kind", "shift"), [("llama", True), ("llama", False), ("gpt2", True)])
def test_a_run_begins_with_a_left_to_right_model(llama, tmp_path, kind, shift):
    """Before anything is learned, a run says of its tokens what the published network says, with full attention."""
    folder = llama if kind == "llama" else gpt2(tmp_path / "gpt2")
    lm = begun(folder, tmp_path, f"model.shift={str(shift).lower()}")
    own = lm.tokenizer.encode("the dog sleeps in the garden")
    theirs = torch.tensor([[lm.tokenizer.theirs[token - 4] for token in own]])
    reference = llama if kind == "llama" else write_model(tmp_path / "reference", "diffugpt")
    network, embedding = load_network(reference, torch.float32, CPU)
    network.shape = Shape(**{**vars(network.shape), "shift": shift})
    with torch.no_grad():
        wanted = network(torch.nn.functional.embedding(theirs, embedding), None)[..., torch.tensor(lm.tokenizer.theirs)]
        codec, level = lm.model.denoiser.codec, lm.model.process.at(torch.tensor([0.5]))
        found = lm.model.denoiser.network(*codec.inputs(torch.tensor([own]), level, None), None)[..., 4:]
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    assert len(lm.generate(1, steps=4)) == 1


def test_attention_opens_from_causal_to_full():
    """At the first update the last token moves no earlier answer, after `updates` all, in between some."""
    torch.manual_seed(0)
    shape = Shape(hidden=16, layers=1, heads=2, inner=16, kv_heads=2, head_dim=8)
    network = AnnealedTransformer(shape, 8, updates=10).train()
    x = torch.randn(1, 12, 16)
    other = x.clone()
    other[:, -1] += 1

    def moved(update):
        network.begin_update(update)
        torch.manual_seed(update)
        one = network(x, None)
        torch.manual_seed(update)
        return ((one - network(other, None)).abs().amax(-1) > 1e-6)[0, :-1]

    assert not moved(0).any() and moved(10).all() and 0 < moved(5).sum() < 11
    network.eval()
    assert ((network(x, None) - network(other, None)).abs().amax(-1) > 1e-6).all()
