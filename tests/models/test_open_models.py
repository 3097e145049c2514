"""Other people's models: what they answer, what is refused, and that our doors open to them."""

import json
import math

import numpy as np
import pytest
import torch

from difflm import Infill, Length, TextDiffusion
from difflm.diffusion.base import StepState
from difflm.diffusion.samplers.steps import ddim
from difflm.models.open_families import FAMILIES
from difflm.models.open_models import is_tied, load_network
from difflm.networks.rotary import compute_rotations
from tests.support.open_checkpoints import (
    GOLDEN,
    MODELS,
    draw_weight,
    draw_weights,
    write_model,
    write_tokenizer,
    write_weights,
)

CASES = [(name, case["name"]) for name, model in MODELS.items() for case in model["cases"]]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Directories of golden models by name and changed settings."""
    made = {}

    def folder_of(name, **changes):
        key = name, json.dumps(changes)
        if key not in made:
            made[key] = write_model(tmp_path_factory.mktemp(name), name, shards=1 + len(made) % 2, **changes)
        return made[key]

    return folder_of


def test_weights_are_those_of_the_golden_values():
    """A changed generator of numbers must not be taken for a wrong network."""
    for one in GOLDEN["about"]["weights_check"]:
        values = draw_weight(one["key"], one["shape"])
        np.testing.assert_allclose(values.ravel()[:4], one["first"], rtol=1e-5)
        np.testing.assert_allclose(values.sum(), one["sum"], rtol=1e-5)


def answer(network, embedding, case):
    """Logits of the released class: what our network says at a position of itself, they say a position earlier."""
    ids, mask = torch.tensor(case["input_ids"]), case["attention_mask"]
    sigma = torch.tensor(case["sigma"] or [0.0, 0.0], dtype=torch.float64)
    t = ((1 - torch.exp(-sigma)) / (1 - 1e-3)).float()
    seen, more = None if mask is None else torch.tensor(mask, dtype=torch.bool), {}
    if "classes" in case:
        more["classes"] = torch.tensor(case["classes"])
    if "clean_ids" in case:  # noisy blocks beside the clean text
        length, size = ids.shape[1], case["block_size"]
        block = torch.arange(length) // size
        row, column = block.unsqueeze(1), block.unsqueeze(0)
        above = torch.cat([row == column, column < row], 1)
        seen = torch.cat([above, torch.cat([torch.zeros(length, length, dtype=torch.bool), column <= row], 1)])[None]
        more["turn"] = tuple(part.repeat(2, 1) for part in compute_rotations(length, network.head_dim, CPU))
        ids = torch.cat([ids, torch.tensor(case["clean_ids"])], 1)
    logits = network(torch.nn.functional.embedding(ids, embedding), t, seen, **more)[:, : len(case["input_ids"][0])]
    if case.get("output") == "log score":
        scale = torch.expm1(sigma).log().float().view(-1, 1, 1) + math.log(logits.shape[-1] - 1)
        logits = (logits - scale).scatter(-1, ids.unsqueeze(-1), 0.0)
    return logits


@pytest.mark.parametrize(("name", "which"), CASES)
def test_golden_logits(folders, name, which):
    model, tolerance = MODELS[name], GOLDEN["about"]["tolerance"]
    case = next(case for case in model["cases"] if case["name"] == which)
    changes = dict(case.get("config_change", {}))
    if name.startswith("a2d") and "block_size" in case:
        changes["block_size"] = case["block_size"]
    folder = folders(name, **changes)
    network, embedding = load_network(folder, torch.float32, CPU)
    with torch.no_grad():
        logits = answer(network, embedding, case)
    ids = torch.tensor(case["input_ids"])
    there = torch.ones_like(ids, dtype=torch.bool)
    if case["attention_mask"] is not None:
        there = torch.tensor(case["attention_mask"], dtype=torch.bool)
    if model["shift"]:  # the released network speaks at p of p + 1; of its last position we say nothing
        network.shape = type(network.shape)(**{**vars(network.shape), "shift": False})
        with torch.no_grad():
            plain = answer(network, embedding, case)
        torch.testing.assert_close(logits[:, 1:], plain[:, :-1], atol=1e-6, rtol=0)
        logits = plain
    for row, wanted in enumerate(case["logits"]):
        for position, values in zip(case["positions"], wanted, strict=True):
            if values is not None:
                found = logits[row, position, : len(values)].numpy()
                np.testing.assert_allclose(found, values, atol=tolerance["logits_absolute"], rtol=0)
    kept = logits[there].double()
    assert abs(kept.sum() - case["sum"]) <= 2e-3 + 1e-5 * abs(case["sum"])
    np.testing.assert_allclose(kept.square().sum(), case["sum_of_squares"], rtol=1e-5)


@pytest.mark.long
def test_modernbert_answers_as_the_hugging_face_library(tmp_path):
    """Local and global layers, padding and not, with its weights drawn as those of the golden models."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    theta = {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    more = {"num_attention_heads": 4, "local_attention": 8, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(
        **sizes, **theta, **more, attn_implementation="eager", tie_word_embeddings=True
    )
    model = transformers.ModernBertForMaskedLM(config).eval()
    keys = {key: list(value.shape) for key, value in model.state_dict().items() if key != "decoder.weight"}
    weights = draw_weights(keys)
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) <= {"decoder.weight"}
    model.tie_weights()
    every = {"global_attn_every_n_layers": 3, "norm_eps": 1e-5, "max_position_embeddings": 64, "decoder_bias": True}
    own = {**sizes, **theta, **more, **every, "model_type": "modernbert", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(own))
    write_weights(tmp_path, weights)
    network, embedding = load_network(tmp_path, torch.float32, CPU)
    ids, mask = torch.arange(40).view(2, 20) + 5, torch.ones(2, 20, dtype=torch.long)
    mask[1, 15:] = 0
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask).logits
        found = network(torch.nn.functional.embedding(ids, embedding), None, mask.bool())
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], atol=2e-5, rtol=0)


@pytest.fixture
def langflow(tmp_path):
    """A DiT over word vectors under the names of LangFlow; its network says nothing: its head is zero."""
    model = MODELS["mdlm"]
    keys = {**model["keys"], "backbone.self_cond_proj.weight": [32, 64]}
    weights = draw_weights(keys)
    for name in ("weight", "bias"):
        weights[f"backbone.output_layer.linear.{name}"].zero_()
    schedule = {"proposal.loc": torch.tensor(4.72), "proposal.scale": torch.tensor(0.85)}
    config = {**model["config"], "model_type": "langflow", "eos_token_id": 80, "model_length": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_weights(tmp_path, {**weights, **schedule, "proposal.entropy": torch.ones(4)})
    write_tokenizer(tmp_path, rows=90, marks=False)
    return tmp_path


def test_vectors_say_what_bayes_says(langflow):
    """Where the network says nothing, the belief is the exact posterior of each vector's word: c · z Eᵀ with
    c = α/σ² = exp((softplus(−γ) − γ)/2), and a step is the paper's."""
    lm = TextDiffusion.from_pretrained(langflow)
    denoiser, process = lm.model.denoiser, lm.model.process
    t, s = torch.tensor([0.7]), torch.tensor([0.5])
    gamma, later = (4.72 - 0.85 * torch.log(-torch.log(one)) for one in (t, s))
    table = denoiser.codec.table()
    torch.testing.assert_close(table.norm(dim=-1), torch.full((len(table),), math.sqrt(32)))
    z = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0))
    softplus, sigmoid = torch.nn.functional.softplus, torch.sigmoid
    with torch.no_grad():
        belief = denoiser(z, t)
        wanted = (torch.exp((softplus(-gamma) - gamma) / 2) * (z @ table.T)).log_softmax(-1)
        torch.testing.assert_close(belief.logits.log_softmax(-1), wanted, atol=1e-4, rtol=1e-4)
        clean, kept = belief.clean, sigmoid(-later).sqrt()
        moved = kept * clean + torch.exp((later - gamma) / 2) * (
            z * torch.exp((softplus(gamma) - softplus(later)) / 2) - kept * clean
        )
        found = ddim(StepState(process, z, belief, process.at(t), process.at(s), lambda: torch.zeros(())))
    torch.testing.assert_close(found, moved, atol=1e-4, rtol=1e-4)
    (made,) = lm.generate(1, steps=4, controls=[Infill("my ___ the"), Length(9)])
    assert made.text.startswith("my") and made.text.endswith(" the")


SIZES = {  # configs as published, and how many parameters the published models have
    "llada": (
        {"d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288}
        | {"embedding_size": 126464, "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
        8_015_581_184,
    ),
    "dream": (
        {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
        | {"intermediate_size": 18944, "vocab_size": 152064, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
        7_615_616_512,
    ),
    "a2d-qwen3": (
        {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
        | {"head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
        | {"tie_word_embeddings": True},
        596_049_920,
    ),
    "diffugpt": (
        {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
        | {"layer_norm_epsilon": 1e-5, "model_type": "gpt2"},
        124_439_808,
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_networks_have_the_published_sizes(name):
    config, count = SIZES[name]
    family = FAMILIES[name]
    with torch.device("meta"):
        network = family.layout.read_shape(config).build(family.count_words(config))
    own = [weight.numel() for weight in network.parameters()]
    embedding = network.head.weight.numel() * (not is_tied(config))
    assert sum(own) + embedding == count
    if name == "llada":
        assert len(own) + 1 == 291
