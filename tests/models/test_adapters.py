"""Files of adapters: peft's format in both directions, merged weights, and adapters that do not belong to a model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from difflm.errors import DifflmError, UsageError
from difflm.methods import METHODS, TextSpec
from difflm.models.adapters import CONFIG, PREFIX, WEIGHTS, Adapter, export_adapters, fingerprint_weights, frozen_state
from difflm.models.open_models import load_open_model
from difflm.networks.low_rank import AdaptedLinear, adapt_linears
from tests.support.open_checkpoints import write_model, write_tokenizer

CPU = torch.device("cpu")
IDS, LEVEL = torch.randint(4, 30, (2, 9), generator=torch.Generator().manual_seed(0)), torch.tensor([0.3, 0.8])


def make_mdlm():
    torch.manual_seed(0)
    model = METHODS["mdlm"](hidden=16, layers=2, heads=2, dropout=0.0).build(TextSpec(40, 12)).eval()
    nn.init.normal_(model.denoiser.network.head.weight)
    return model


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A function that loads a model with these released names of weights."""
    folder = tmp_path_factory.mktemp("models")

    def load(name, **changes):
        if not (folder / name).exists():
            rows = {"mdlm": 90, "diffugpt-head": 40}.get(name)
            write_tokenizer(write_model(folder / name, name, **changes), rows or 124, marks=rows is None)
        return load_open_model(folder / name, CPU, torch.float32).model

    return load


def logits_of(model):
    with torch.no_grad():
        return model.denoiser(IDS, LEVEL).logits


def adapt(model, alpha=8.0, **asked):
    torch.manual_seed(1)
    adapt_linears(model, 4, alpha, **asked)
    for layer in model.modules():
        if isinstance(layer, AdaptedLinear):
            nn.init.normal_(layer.lora_B, std=0.1)
    return model


def save(model, folder, alpha=8.0):
    frozen = frozen_state(model)
    own = {name: weight for name, weight in model.state_dict().items() if name not in frozen}
    tensors, config = export_adapters(own, model.find_stored, alpha)
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


MODELS = {
    "ours": lambda opened: make_mdlm(),
    "llada": lambda opened: opened("llada"),
    "dream": lambda opened: opened("dream"),
    "blocks": lambda opened: opened("a2d-qwen3", block_size=4),
    "dit": lambda opened: opened("mdlm", eos_token_id=80),
}


@pytest.mark.parametrize("name", MODELS)
def test_merged_and_unmerged_logits_agree(name, opened, tmp_path):
    model = adapt(MODELS[name](opened))
    folder, fresh = save(model, tmp_path / "run"), MODELS[name](opened)
    before = logits_of(fresh)
    Adapter.read(folder).add_to(fresh)
    torch.testing.assert_close(logits_of(fresh), logits_of(model), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits_of(fresh), before, atol=1e-3)


def test_adapters_stack(tmp_path):
    one, other, both = adapt(make_mdlm()), adapt(make_mdlm(), targets=["qkv"]), make_mdlm()
    for number, model in enumerate((one, other)):
        Adapter.read(save(model, tmp_path / str(number))).add_to(both)
    name = "blocks.0.attention.qkv"
    layers = [model.denoiser.network.get_submodule(name) for model in (one, other, both)]
    expected = layers[0].weight + layers[1].weight - layers[0].plain
    torch.testing.assert_close(layers[2].weight, expected, atol=1e-6, rtol=0)


def test_layers_that_are_stored_as_one_have_one_adapter(opened, tmp_path):
    """GPT-2 has queries, keys and values in one matrix; the rank of its adapter is the sum of theirs."""
    model = adapt(opened("diffugpt-head", eos_token_id=2), targets=["q_proj", "v_proj"])
    folder = save(model, tmp_path / "run")
    tensors, config = load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text())
    keys = [name for name in tensors if name.endswith("h.0.attn.c_attn.lora_A.weight")]
    assert len(keys) == 1 and len(tensors[keys[0]]) == 8
    assert config["rank_pattern"] == {"attn.c_attn": 8} and config["target_modules"] == ["attn.c_attn"]
    fresh = opened("diffugpt-head")
    Adapter.read(folder).add_to(fresh)
    torch.testing.assert_close(logits_of(fresh), logits_of(model), atol=1e-5, rtol=1e-5)


def test_released_names_and_the_config_are_those_of_peft(opened, tmp_path):
    """Golden: what peft 0.21 writes for this module."""
    folder = save(adapt(opened("llada"), targets=["q_proj"]), tmp_path / "run")
    assert PREFIX + "model.transformer.blocks.1.q_proj.lora_B.weight" in load_file(folder / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text())
    told = {key: config[key] for key in ("peft_type", "r", "lora_alpha", "bias", "target_modules")}
    assert told == {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "bias": "none", "target_modules": ["q_proj"]}


def test_peft_reads_and_writes_the_same(tmp_path):
    """With peft itself, where it is installed."""
    peft = pytest.importorskip("peft")
    model = adapt(make_mdlm())
    folder, expected = save(model, tmp_path / "ours"), logits_of(model)
    config, fresh = peft.LoraConfig.from_pretrained(str(folder)), make_mdlm()
    peft.inject_adapter_in_model(config, fresh)
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    left = peft.set_peft_model_state_dict(fresh, {name: one for name, one in tensors.items() if "lora" in name})
    assert not left.unexpected_keys
    torch.testing.assert_close(logits_of(fresh), expected, atol=1e-5, rtol=1e-5)

    written, again = tmp_path / "theirs", make_mdlm()
    config.save_pretrained(str(written))
    theirs = peft.get_peft_model_state_dict(fresh)
    save_file({PREFIX + name: tensor.contiguous() for name, tensor in theirs.items()}, written / WEIGHTS)
    Adapter.read(written).add_to(again)
    torch.testing.assert_close(logits_of(again), expected, atol=1e-5, rtol=1e-5)


def test_alpha_may_be_divided_by_the_root_of_the_rank(tmp_path):
    folder = save(adapt(make_mdlm()), tmp_path / "run")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "lora_alpha": 4.0, "use_rslora": True}))
    fresh = make_mdlm()
    Adapter.read(folder).add_to(fresh)  # 4 / √4 = 8 / 4
    torch.testing.assert_close(logits_of(fresh), logits_of(adapt(make_mdlm())), atol=1e-5, rtol=1e-5)


def test_what_does_not_belong_to_a_model_is_refused_in_a_line(opened, tmp_path):
    folder = save(adapt(opened("llada")), tmp_path / "run")
    with pytest.raises(DifflmError, match=r"adapter of another model: it has no model.transformer"):
        Adapter.read(folder).add_to(opened("dream"))
    small = METHODS["mdlm"](hidden=8, layers=2, heads=2).build(TextSpec(40, 12))
    with pytest.raises(DifflmError, match=r"adapter of another model: .* has another shape"):
        Adapter.read(save(adapt(make_mdlm()), tmp_path / "ours")).add_to(small)
    with pytest.raises(UsageError, match=r"holds no adapter_config.json"):
        Adapter.read(tmp_path)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(UsageError, match="DoRA"):
        Adapter.read(folder)


def test_a_fingerprint_is_of_the_weights(tmp_path):
    one, same, other = (write_model(tmp_path / name, "llada") for name in ("one", "same", "other"))
    weights = load_file(other / "model.safetensors")
    key = [*weights][-1]
    save_file({**weights, key: weights[key] + 1}, other / "model.safetensors")
    assert fingerprint_weights(one) == fingerprint_weights(same) != fingerprint_weights(other)
    folder = save(adapt(make_mdlm()), tmp_path / "run")
    told = {"adapter": {"base": "one", "fingerprint": fingerprint_weights(one)}}
    (folder / "config.json").write_text(json.dumps(told))
    adapter = Adapter.read(folder)
    adapter.check_base(same)
    with pytest.raises(DifflmError, match="adapter of another model"):
        adapter.check_base(other)
