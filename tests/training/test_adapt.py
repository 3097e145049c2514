"""Adapters in training: conversations are learned, the base stays as it is, and a run holds little beside them."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from difflm import TextDiffusion
from difflm.app.cli import main
from difflm.data.batches import Batch
from difflm.data.chat import read_conversations
from difflm.data.tokenizers import END, PAD
from difflm.diffusion.noise import Noise
from difflm.models.open_models import load_open_model
from tests.support.open_checkpoints import CHAT, write_model, write_tokenizer

KINDS = {"llada": ("llada", {}), "dream": ("dream", {}), "blocks": ("a2d-qwen3", {"block_size": 4})}
HEADS = ("model.transformer.ff_out.weight", "lm_head.weight", "model.embed_tokens.weight")
CPU = torch.device("cpu")
NAMES = ["dog", "cat", "garden", "house", "sleeps", "runs"]
TALKS = [(f"the {a} {b} {c}", f"my {c}") for a, b, c in itertools.product(NAMES, NAMES, NAMES)][:200]
QUICK = ["steps=3", "warmup=0", "batch_size=8", "patience=0", "log_every=1", "save_every=2", "validate_every=2"]


def write_talks(path, talks=TALKS):
    path.write_text("".join(json.dumps({"prompt": a, "answer": b}) + "\n" for a, b in talks))
    return path


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A function that makes a base of a kind, whose frozen head can be sure of a word."""
    folder = tmp_path_factory.mktemp("bases")

    def make(kind):
        name, changes = KINDS[kind]
        if not (path := folder / kind).exists():
            write_tokenizer(write_model(path, name, **changes), template=CHAT)
            weights = load_file(path / "model.safetensors")
            scales = {key: 6 if key in HEADS else 2.5 if one.dim() > 1 else 1 for key, one in weights.items()}
            save_file({key: one * scales[key] for key, one in weights.items()}, path / "model.safetensors")
        return path

    return make


def train(base, data, out, *changes):
    return main(["train", "chat", f"model.pretrained={base}", f"data={data}", "--out", str(out), *map(str, changes)])


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.long] * (k != "blocks")) for k in KINDS])
def test_two_hundred_conversations_are_learned(kind, bases, tmp_path):
    base, data = bases(kind), write_talks(tmp_path / "talks.jsonl")
    before = load_file(base / "model.safetensors")
    settings = ["lora=32", "steps=400", "lr=8e-3", "warmup=20", "batch_size=32", "patience=0", "validate_every=400"]
    assert train(base, data, tmp_path / "run", *settings) == 0
    assert all(torch.equal(weight, before[key]) for key, weight in load_file(base / "model.safetensors").items())
    lm = TextDiffusion.from_pretrained(tmp_path / "run")
    told = [str(lm.generate(1, source=prompt, temperature=0)[0]).strip() for prompt, _ in TALKS[::9]]
    assert told == [answer for _, answer in TALKS[::9]]


def test_a_run_holds_adapters_and_names_its_base(bases, tmp_path, capsys):
    base, run = bases("llada"), tmp_path / "run"
    assert train(base, write_talks(tmp_path / "talks.jsonl"), run, *QUICK) == 0
    assert "--source" in capsys.readouterr().out
    assert not (run / "model.safetensors").exists()
    config = json.loads((run / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (16, 32.0, str(base))
    state = load_file(run / "checkpoints" / "step-3" / "state.safetensors")
    assert not [name for name in state if name.startswith(("model.", "ema.")) and name.endswith("proj.weight")]
    alone = TextDiffusion.from_pretrained(run)
    added = TextDiffusion.from_pretrained(base, adapter=run)
    plain = TextDiffusion.from_pretrained(base)
    name = "denoiser.network.layers.0.self_attn.q_proj.weight"
    weights = [lm.model.state_dict()[name] for lm in (alone, added, plain)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert main(["generate", str(base), "--adapter", str(run), "--source", "the dog", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 0


def test_a_resumed_run_repeats_the_uninterrupted_one(bases, tmp_path):
    base, data = bases("blocks"), write_talks(tmp_path / "talks.jsonl")
    quick = [one for one in QUICK if not one.startswith("steps")]
    assert train(base, data, tmp_path / "whole", *quick, "decay=none", "steps=4") == 0
    assert train(base, data, tmp_path / "parts", *quick, "decay=none", "steps=2") == 0
    assert train(base, data, tmp_path / "parts", *quick, "decay=none", "steps=4", "--resume") == 0
    whole, parts = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)


def test_a_model_of_ours_gets_adapters(tiny_runs, tmp_path, capsys):
    """The run keeps lengths of its own texts, and generates; with another base it is refused."""
    texts = tmp_path / "my.txt"
    texts.write_text("".join(f"the {name} {'very ' * k}small\n" for name in NAMES for k in range(3)))
    run, base = tmp_path / "run", tiny_runs["mdlm"]
    given = ["train", "own-text", "method=mdlm", f"init={base}", "lora=4", f"data={texts}", "--out", str(run), *QUICK]
    assert main([*given, "sample_every=0"]) == 0
    assert TextDiffusion.from_pretrained(run).generate(1)[0].tokens
    config = json.loads((run / "config.json").read_text())
    assert config["adapter"]["base"] == str(base)
    other = [f"init={tiny_runs['autoregressive']}" if one.startswith("init") else one for one in given]
    assert main([*other[: -1 - len(QUICK)], str(tmp_path / "other")]) == 2
    assert "init is a autoregressive model" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_text_depends_on_no_neighbour(kind, bases):
    model = load_open_model(bases(kind), CPU, torch.float32).model
    ids = torch.full((2, 8), PAD)
    ids[0, :3], ids[1, :8] = torch.arange(10, 13), torch.arange(20, 28)
    source = torch.full((2, 7), PAD)
    source[0, :5], source[1] = torch.arange(30, 35), torch.arange(40, 47)
    lengths, before, index = torch.tensor([3, 8]), torch.tensor([5, 7]), torch.tensor([4, 9])
    both = Batch(ids, lengths, source, before, index=index)
    alone = Batch(ids[:1], lengths[:1], source[:1, :5], before[:1], index=index[:1])
    other = Batch(ids[1:], lengths[1:], source[1:], before[1:], index=index[1:])
    whole, parts = model(both).total, [model(one).total for one in (alone, other)]
    torch.testing.assert_close(whole, sum(parts), rtol=1e-5, atol=1e-5)
    model.capabilities = replace(model.capabilities, likelihood=None)
    nats = model.nats(both, Noise(0, index))
    torch.testing.assert_close(nats[:1], model.nats(alone, Noise(0, index[:1])), rtol=1e-4, atol=1e-4)


def test_prompts_are_seen_and_not_learned(bases):
    for kind in KINDS:
        model = load_open_model(bases(kind), CPU, torch.float32).model
        ids, source = torch.arange(10, 14).unsqueeze(0), torch.arange(30, 35).unsqueeze(0)
        batch = Batch(ids, torch.tensor([3]), source, torch.tensor([5]))
        made = model.lay_out(batch, Noise(0, torch.tensor([3])), ends=False)
        assert made.ids[0, :9].tolist() == [30, 31, 32, 33, 34, 10, 11, 12, END]
        assert not made.free[:, :5].any() and made.mask[:, :5].all() and made.free.any()
        learned = {place for k in range(40) for place in model.lay_out(
            batch, Noise(0, torch.tensor([k])), ends=False).free[0].nonzero().flatten().tolist()}  # fmt: skip
        assert learned >= {5, 6, 7, 8}


WRONG = [
    ('{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}', "roles alternate"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "roles alternate"),
    ('{"prompt": "a", "answer": "  "}', "an answer is empty"),
    ('{"text": "a"}', "neither messages nor a prompt"),
    ('{"messages": [{"role": "robot", "content": "a"}]}', "a message has a role"),
    ("no JSON", "not JSON"),
]


@pytest.mark.parametrize(("line", "said"), WRONG)
def test_a_wrong_conversation_is_refused_in_a_line(line, said, bases, tmp_path, capsys):
    data = tmp_path / "talks.jsonl"
    data.write_text('{"prompt": "the dog", "answer": "my dog"}\n' + line + "\n")
    assert train(bases("llada"), data, tmp_path / "run") != 0
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"line 2 of {data}" in error and said in error
    assert [*(tmp_path / "run").iterdir()] == [] if (tmp_path / "run").exists() else True


def test_other_mistakes_are_refused_in_a_line(bases, tmp_path, capsys):
    data, base = write_talks(tmp_path / "talks.jsonl"), bases("llada")
    mute = write_model(tmp_path / "mute", "llada")
    write_tokenizer(mute)
    wrong = [
        ((mute, data), "has no chat template"),
        ((base, data, "lora=0"), "give lora=16"),
        ((base, data, "targets=[qkv]"), "the network has no qkv"),
        ((tmp_path, data), "holds no config.json of an open diffusion model"),
        ((base, data, "longest=80"), "leaves no room for prompts"),
    ]
    for number, (given, said) in enumerate(wrong):
        assert train(*given[:2], tmp_path / str(number), *QUICK, *given[2:]) != 0
        assert said in capsys.readouterr().err
        assert not (tmp_path / str(number) / "config.json").exists()
    assert main(["train", "own-text", f"data={data}", "lora=4", "--out", str(tmp_path / "x")]) == 2
    assert "adapters are of a trained model" in capsys.readouterr().err
    assert main(["train", "own-text", f"data={data}", "task=conversations", "--out", str(tmp_path / "x")]) == 2
    assert "difflm train chat" in capsys.readouterr().err


def test_an_adapter_of_other_weights_is_refused(bases, tmp_path, capsys):
    run, other = tmp_path / "run", tmp_path / "other"
    assert train(bases("llada"), write_talks(tmp_path / "talks.jsonl"), run, *QUICK) == 0
    write_tokenizer(write_model(other, "llada"), template=CHAT)
    assert main(["generate", str(other), "--adapter", str(run), "--source", "the dog"]) == 2
    error = capsys.readouterr().err
    assert "is an adapter of another model" in error and error.count("\n") <= 2


def test_every_answer_of_a_conversation_is_learned(tmp_path):
    talk = [("system", "be kind"), ("user", "a"), ("assistant", "b "), ("user", "c"), ("assistant", "d")]
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in talk]}))
    found = [*read_conversations(path)]
    assert [one.target for one in found] == ["b", "d"] and [one.continues for one in found] == [False, True]
    assert [len(json.loads(one.source)) for one in found] == [2, 4]
