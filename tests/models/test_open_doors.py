"""Somebody else's model behind our doors: Python, command and HTTP; and what is refused at them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from difflm import Contains, Infill, Length, Pattern, TextDiffusion, UsageError, WordCount
from difflm.app.cli import main
from difflm.data.open_tokenizer import TokenizerFiles
from difflm.errors import DifflmError
from difflm.fast.inference import Inference
from difflm.generation.loops import Loop, Seat, loop_shape
from difflm.models.open_models import load_network
from difflm.networks.open_transformer import Shape
from tests.support.open_checkpoints import CHAT, write_model, write_tokenizer, write_weights
from tests.support.tiny import tiny_run, write_grammar, write_stories

ASKED = {"infill": "my dog ___ in the garden", "contains": ["old cat", "house"], "length": 24, "steps": 8, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of LLaDA's shape that answers messages."""
    made = write_model(tmp_path_factory.mktemp("models") / "tiny-llada", "llada")
    write_tokenizer(made, template=CHAT)
    return made


@pytest.fixture(scope="module")
def lm(folder: Path) -> TextDiffusion:
    return TextDiffusion.from_pretrained(folder)


def make(lm: TextDiffusion, **changes: object) -> str:
    controls = [Infill(str(ASKED["infill"])), Contains("old cat"), Contains("house"), Length(24)]
    (made,) = lm.generate(1, seed=3, steps=8, controls=controls, **changes)
    assert all(check["satisfied"] for check in made.controls)
    return made.text


def test_a_gap_two_words_and_a_length(lm, folder, capsys):
    """The same request gives the same text in Python and by the command."""
    text = make(lm)
    assert text.startswith("my dog ") and text.endswith(" in the garden") and " old cat" in text and " house" in text
    assert len(lm.tokenizer.encode(text)) == 24
    options = [part for key in ("infill", "length", "steps", "seed") for part in (f"--{key}", str(ASKED[key]))]
    main(["generate", str(folder), *options, "--contains", "old cat", "--contains", "house", "--json"])
    assert json.loads(capsys.readouterr().out)["text"] == text


def test_the_model_believes_what_its_network_says(folder):
    """Ids of ours and theirs differ; what stands is certain, and a mask shows nothing."""
    lm = TextDiffusion.from_pretrained(folder, dtype=torch.float32)
    network, embedding = load_network(folder, torch.float32, torch.device("cpu"))
    own = lm.tokenizer.encode("my dog sleeps in the garden")
    x = torch.tensor([[*own, lm.model.process.mask_id]])
    theirs = torch.tensor([[*(lm.tokenizer.theirs[i] for i in own), 124]])
    with torch.no_grad():
        belief = lm.model.denoiser(x, torch.tensor([0.5]))
        wanted = network(torch.nn.functional.embedding(theirs, embedding), None)[0, -1]
    torch.testing.assert_close(belief.logits[0, -1], wanted[torch.tensor(lm.tokenizer.theirs)])
    assert belief.tokens[0, :-1].tolist() == own


def test_a_prompt_is_seen_and_not_printed(lm):
    """An answer depends on the message, ends by itself, and every step shows the answer alone."""
    (one,), (other,) = (lm.generate(1, source=text, steps=8) for text in ("the dog", "the cat"))
    assert one.text != other.text and "dog" not in one.text[:8]
    drafts = list(lm.stream(1, source="the dog", steps=4))
    assert all(len(draft.tokens) <= 64 for (draft,) in drafts)
    assert "".join(drafts[-1][0].tokens).startswith(lm.generate(1, source="the dog", steps=4)[0].text)


@pytest.mark.long
def test_patterns_and_counts_of_words_hold_behind_a_prompt(lm):
    """Of byte pairs, together with a gap and words that must appear."""
    counted = [Infill("my dog ___ in the garden"), Contains("old cat"), Contains("house"), WordCount(9)]
    for asked in ({"controls": counted}, {"source": "the dog", "controls": [Pattern(r"(the|a) (old )?(dog|cat)\.")]}):
        (made,) = lm.generate(1, steps=8, **asked)
        assert all(check["satisfied"] for check in made.controls)


@pytest.mark.long
def test_blocks_come_one_after_the_other(lm):
    """With blocks of 8, no word of a block is written before the block before it is whole."""
    mask = lm.model.process.mask_id
    job, seen = lm.make_job(1, steps=64, block=8), []
    (row,) = job.make_rows(lm.model)
    loop = Loop(lm, loop_shape(lm, job, row), joining=[Seat(job, row)])
    while loop.holders:
        loop.step()
        seen.append(loop.frame.state[0].clone())
    for state in seen:
        blocks = (state == mask).unflatten(0, (-1, 8)).sum(-1).tolist()
        begun = [k for k, left in enumerate(blocks) if left < 8]
        assert all(blocks[k] == 0 for k in begun[:-1])
    assert (seen[-1] != mask).all() and len(seen) >= 8


def test_what_is_kept_of_a_prompt_changes_nothing(tmp_path):
    """Of a network that sees no later block, the whole blocks of a prompt are read once; shifted or not, the answer is
    that of reading all."""
    for name, shift in (("a2d-qwen3", False), ("a2d-qwen2", True)):
        network, embedding = load_network(
            write_model(tmp_path / name, name, block_size=4), torch.float32, torch.device("cpu")
        )
        network.shape = replace(network.shape, shift=shift)
        vectors = torch.nn.functional.embedding(torch.arange(40).view(2, 20), embedding)
        for length in (3, 4, 8, 11, 12):
            kept = network.shape.count_kept(length)
            mask = torch.ones(2, 20 - kept, dtype=torch.bool)
            with torch.no_grad():
                memory = network.read_prompt(vectors[:, :kept]) if kept else None
                found = network(vectors[:, kept:], None, mask, memory)[:, length - kept :]
                torch.testing.assert_close(found, network(vectors, None)[:, length:], atol=1e-5, rtol=0)


@pytest.mark.long
def test_a_prompt_kept_and_one_read_every_time_give_one_text(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "blocks", "a2d-qwen3", block_size=4)
    write_tokenizer(folder, template=CHAT)
    lm = TextDiffusion.from_pretrained(folder, dtype=torch.float32)  # sums of bfloat16 depend on what is read together
    (kept,) = lm.generate(1, source="the dog sleeps", steps=16)
    monkeypatch.setattr(Shape, "count_kept", lambda *_: 0)
    (whole,) = lm.generate(1, source="the dog sleeps", steps=16)
    assert kept.text == whole.text


@pytest.mark.parametrize(("name", "changes"), [("llada", {}), ("a2d-qwen3", {"block_size": 4})])
def test_captured_steps_write_the_same_texts(tmp_path, name, changes):
    """As a GPU captures them: behind prompts of several lengths, with words that must appear, in blocks."""
    folder = write_model(tmp_path / name, name, **changes)
    write_tokenizer(folder, template=CHAT)
    lm = TextDiffusion.from_pretrained(folder)
    captured = TextDiffusion(lm.model, lm.tokenizer, lm.config, Inference(lm.model, record=True))
    captured.chat = lm.chat
    for source in ("the dog", "the cat sleeps", "the cat is old"):
        for asked in ({}, {"temperature": 0.9, "top_p": 0.9, "controls": [Contains("cat")]}):
            one, other = (writer.generate(1, source=source, steps=6, **asked)[0] for writer in (lm, captured))
            assert one.text == other.text


@pytest.mark.native
def test_bfloat16_keeps_the_rules(folder):
    enabled, lm = torch._C._get_mkldnn_enabled(), TextDiffusion.from_pretrained(folder, dtype=torch.bfloat16)
    assert lm.model.denoiser.network.head.weight.dtype is torch.bfloat16
    make(lm, temperature=1.0)
    assert torch._C._get_mkldnn_enabled() == enabled  # torch turns it off where a processor lacks bfloat16


@pytest.mark.long
@pytest.mark.parametrize("sampler", ["ancestral", "entropy", "first-hitting", "margin", "remask", "threshold"])
def test_every_order_keeps_what_is_asked(lm, sampler):
    block = 0 if sampler in ("ancestral", "remask") else 8
    make(lm, sampler=sampler, block=block, temperature=0.9, top_p=0.95)


def changed(folder: Path, tmp_path: Path, **changes: object) -> Path:
    """The directory with some keys of its config changed, or weights."""
    other = tmp_path / "changed"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **changes}))
    return other


def refusal(folder: Path) -> str:
    with pytest.raises(DifflmError) as caught:
        TextDiffusion.from_pretrained(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mask_token_id": 5}, "the mask is 5 for its config.json and 124 for its token <|mdm_mask|>"),
        ({"model_type": "bert"}, "diffusion models of the kind bert are not supported"),
        ({"alibi": True}, "alibi=True is not supported"),
        ({"d_model": 16}, "another shape than its config.json says"),
        ({"n_layers": 3}, "it lacks model.transformer.blocks.2."),
        ({"n_layers": "many"}, "does not describe a llada model"),
        ({"n_layers": 1}, "surplus key: model.transformer.blocks.1."),
        ({"eos_token_id": 124}, "names no token that ends a text"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(folder, tmp_path, changes, said):
    assert said in refusal(changed(folder, tmp_path, **changes))


def test_a_missing_or_surplus_key_is_named(folder, tmp_path):
    other = changed(folder, tmp_path)
    weights = load_file(other / "model.safetensors")
    lost = weights.pop("model.transformer.ln_f.weight")
    write_weights(other, weights)
    assert "it lacks model.transformer.ln_f.weight" in refusal(other)
    write_weights(other, {**weights, "model.transformer.ln_f.weight": lost, "classifier.weight": lost.clone()})
    assert "surplus key: classifier.weight" in refusal(other)


def test_pickles_are_not_read(folder, tmp_path):
    other = changed(folder, tmp_path)
    (other / "model.safetensors").unlink()
    assert "holds no model.safetensors" in refusal(other)
    (other / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin is a pickle" in refusal(other)


def test_shards_must_be_those_of_the_index(folder, tmp_path):
    other = changed(folder, tmp_path)
    weights = load_file(other / "model.safetensors")
    (other / "model.safetensors").unlink()
    write_weights(other, weights, shards=3)
    assert TextDiffusion.from_pretrained(other).generate(1, steps=2)
    index = other / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**places, "lost.weight": "model-00001-of-00003.safetensors"}}))
    assert "disagree about lost.weight" in refusal(other)
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    assert "lists no safetensors files of its directory" in refusal(other)


def test_a_mask_must_be_named(folder, tmp_path):
    other = changed(folder, tmp_path, mask_token_id=None)
    text = (other / "tokenizer.json").read_text().replace("<|mdm_mask|>", "<|other|>")
    (other / "tokenizer.json").write_text(text)
    assert "names no mask" in refusal(other)


def test_a_tokenizer_that_spells_spaces_by_itself(tmp_path):
    """As that of Llama 2: what stands around a gap is spelt as inside a text, each space once."""
    folder = write_model(tmp_path / "diffullama", "diffullama", eos_token_id=2, mask_token_id=None)
    words = [f"▁{word}" for word in ["my", "dog", "cat", "sleeps", "in", "the", "garden", "old", "a"]] + ["▁"]
    encoder = Tokenizer(models.Unigram([(one, -1.0) for one in ["<unk>", "<s>", "</s>", *words]], unk_id=0))
    encoder.pre_tokenizer, encoder.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    encoder.save(str(folder / "tokenizer.json"))
    with pytest.raises(UsageError, match="its mask 811 is outside the 112 rows"):  # known by its name
        TextDiffusion.from_pretrained(folder)
    folder = write_model(tmp_path / "other", "diffullama", eos_token_id=2)
    encoder.save(str(folder / "tokenizer.json"))
    lm = TextDiffusion.from_pretrained(folder)
    controls = [Infill("my dog ___ in the garden"), Contains("old cat"), Length(9)]
    (made,) = lm.generate(1, steps=4, controls=controls)
    assert all(check["satisfied"] for check in made.controls)
    assert made.text.startswith("my dog ") and "  " not in made.text.replace("▁", " ").strip()[:6]


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_byte_pairs_of_two_files_are_those_of_one(tmp_path, kind):
    """vocab.json and merges.txt make the tokenizer that the library makes of them."""
    text = "It's 2026: the dogs' 12 old\n\n  gardens, don't they run? Ünder — naïve  spaces "
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"), ("'", "s"), ("1", "2"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("o", "l")]
    pieces = {piece: k for k, piece in enumerate([*signs, *(a + b for a, b in merges)])}
    (tmp_path / "vocab.json").write_text(json.dumps(pieces))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges))
    settings = {"tokenizer_class": kind, "added_tokens_decoder": {str(len(pieces)): {"content": "<|endoftext|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    files = TokenizerFiles(tmp_path)
    assert files.find_among(["<|endoftext|>", "<|none|>"]) == [len(pieces)]
    found = files.encoder.encode(text)
    assert files.encoder.decode(found.ids) == text
    assert {"Ġthe", "'s", "ol"} <= {*found.tokens}
    assert ("12" in found.tokens) is (kind == "GPT2Tokenizer")  # Qwen cuts numbers into digits


@pytest.mark.long
def test_texts_do_not_depend_on_those_beside_them(lm):
    """Nor do answers to prompts of other lengths, asked together."""
    asked = {"steps": 4, "temperature": 1.0}
    texts = [made.text for made in lm.generate(11, **asked)]
    assert texts[9:] == [made.text for made in lm.generate(12, **asked)][9:11] and len({*texts}) > 8
    prompts = ["the dog", "the cat is old", "a"]
    jobs = [lm.make_job(1, source=prompt, **asked) for prompt in prompts]
    together = {owner: made[0].text for owner, made in lm.run_jobs(jobs)}
    assert together == {k: lm.generate(1, source=prompt, **asked)[0].text for k, prompt in enumerate(prompts)}


@pytest.mark.long
def test_models_and_tokenizers_come_from_the_hub(tmp_path, monkeypatch):
    """No code is fetched; MDLM's tokenizer is that of GPT-2."""
    hub = pytest.importorskip("huggingface_hub")
    model, words = write_model(tmp_path / "model", "mdlm"), tmp_path / "words"
    words.mkdir()
    write_tokenizer(words, rows=90, marks=False)
    asked = {}

    def snapshot_download(name, revision, allow_patterns):
        asked[name] = allow_patterns
        return str({"kuleshov-group/mdlm-owt": model, "openai-community/gpt2": words}[name])

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    lm = TextDiffusion.from_pretrained("kuleshov-group/mdlm-owt")
    assert lm.name == "mdlm-owt" and lm.generate(1, steps=2)
    assert [*asked] == ["kuleshov-group/mdlm-owt", "openai-community/gpt2"]
    assert not any(pattern.endswith(("py", "bin")) for patterns in asked.values() for pattern in patterns)
    with pytest.raises(UsageError, match="nor a directory, and the Hub does not give it"):
        TextDiffusion.from_pretrained("nobody/nothing")


def test_messages_cannot_forge_the_marks_of_a_chat(lm):
    with pytest.raises(UsageError, match=r"contains <\|eot_id\|>"):
        lm.generate(1, source="the dog <|eot_id|>", steps=2)
    with pytest.raises(UsageError, match="a message has a role"):
        lm.generate(1, messages=[{"role": "oracle", "content": "the dog"}], steps=2)


def test_a_template_runs_in_a_sandbox(folder, tmp_path):
    other = changed(folder, tmp_path)
    write_tokenizer(other, template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(DifflmError, match=r"chat template of .* fails"):
        TextDiffusion.from_pretrained(other).generate(1, source="the dog", steps=2)


def test_a_model_without_a_template_continues_texts(tmp_path):
    write_tokenizer(write_model(tmp_path / "a", "llada"))
    lm = TextDiffusion.from_pretrained(tmp_path / "a")
    (made,) = lm.infill("my dog ___", steps=8)
    assert made.text.startswith("my dog") and made.controls[0]["satisfied"]
    with pytest.raises(UsageError, match="has no chat template"):
        lm.generate(1, messages=[{"role": "user", "content": "the dog"}])
    with pytest.raises(UsageError, match="block is for the samplers"):
        lm.generate(1, sampler="ancestral", block=8)


WRITERS = {name: (name, {}) for name in ("dream", "mdlm", "bd3lm", "sedd", "udlm", "diffugpt", "diffullama")}
WRITERS |= {"a2d-qwen3": ("a2d-qwen3", {}), "a2d-qwen2": ("a2d-qwen2", {"block_size": 4})}
WRITERS |= {
    "sdar": ("a2d-qwen3", {"model_type": "sdar"}),
    "fast-dllm": ("a2d-qwen2", {"model_type": "Fast_dLLM_Qwen", "bd_size": 16}),
    "duo": ("udlm", {"model_type": "DUO"}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WRITERS)
def test_every_family_writes(tmp_path, name):
    """A text of a settled length with a word that must appear, and one that goes on."""
    golden, changes = WRITERS[name]
    folder = write_model(tmp_path / name, golden, **(changes if name == "sedd" else {"eos_token_id": 80, **changes}))
    write_tokenizer(folder, rows=90, marks=False)
    lm = TextDiffusion.from_pretrained(folder)
    assert lm.config["method"] == name
    (made,) = lm.generate(1, steps=4, controls=[Length(8), Contains("dog")])
    assert " dog" in made.text and len(lm.tokenizer.encode(made.text)) <= 8
    (made,) = lm.generate(1, steps=4, temperature=0.8)
    assert isinstance(made.text, str)


QWEN3 = """{%- for message in messages %}
{%- if message.role == 'tool' %}{%- continue %}{%- endif %}
{{- '<|reserved_0|>' + message.role + '\\n' + message.content.split('</think>')[-1] + '<|eot_id|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|reserved_0|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""


def test_templates_are_rendered_as_elsewhere(folder, tmp_path):
    """Blanks around blocks as in the Hugging Face library, thinking switched off, loops that go on."""
    other = changed(folder, tmp_path)
    write_tokenizer(other, template=QWEN3)
    chat = TextDiffusion.from_pretrained(other).chat
    told = [{"role": "system", "content": "a b"}, {"role": "user", "content": "the dog"}]
    wanted = "<|reserved_0|>system\na b<|eot_id|>\n<|reserved_0|>user\nthe dog<|eot_id|>\n<|reserved_0|>assistant\n"
    assert chat.render(told) == wanted + "<think>\n\n</think>\n\n"


# -- measuring --------------------------------------------------------------------------------------------------------

FEW = ["--samples", "2", "--score-texts", "2", "--draws", "2", "--steps", "4", "--json"]


def measured(capsys, *argv):
    assert main([*map(str, argv)]) == 0
    out, err = capsys.readouterr()
    return {row["name"]: row for row in map(json.loads, out.splitlines())}, err


@pytest.mark.long
def test_other_peoples_models_are_measured(folder, tmp_path, capsys):
    """By their bound, by a judge who reads any text, and by how diverse they are; what was copied nobody knows, a
    shifted network has no bound, and nothing is written into their directories."""
    write_grammar(tmp_path / "my.txt", 60)
    judge = tiny_run(tmp_path / "judge", "autoregressive", tokenizer="bpe", vocabulary=280, longest=200, steps=2)
    shifted = write_model(tmp_path / "tiny-dream", "dream", eos_token_id=100, mask_token_id=101)
    write_tokenizer(shifted, rows=112, marks=False)
    before = {path: path.stat().st_mtime_ns for one in (folder, shifted) for path in one.iterdir()}
    given = ["--on", tmp_path / "my.txt", "--judge", judge, *FEW]
    rows, err = measured(capsys, "compare", folder, shifted, *given)
    own, other = rows["tiny-llada"], rows["tiny-dream"]
    assert own["nats_per_token"] > 1 and own["notes"]["likelihood"] == "bound" and own["judge_nats_per_token"] > 1
    assert own["distinct_1"] > 0 and own["copied"] is None and own["split"] == "all"
    assert other["nats_per_token"] is None and "dream has no likelihood" in other["notes"]["nats_per_token"]
    assert err.count("is somebody else's: nothing was appended to it") == 2
    assert before == {path: path.stat().st_mtime_ns for one in (folder, shifted) for path in one.iterdir()}
    lm = TextDiffusion.from_pretrained(folder)
    texts = (tmp_path / "my.txt").read_text().splitlines()[:8]
    nats = sum(lm.score(texts, draws=8)) / sum(len(ids) + 1 for ids in lm.encode(texts))
    assert own["nats_per_token"] == pytest.approx(nats, rel=0.2)


@pytest.mark.long
def test_other_peoples_models_stand_beside_runs(folder, tmp_path, capsys):
    """On what the run held out; and on gaps."""
    run = tiny_run(tmp_path, "mdlm", steps=2)
    rows, _ = measured(capsys, "compare", run, folder, *FEW)
    assert {"mdlm", "tiny-llada"} <= {*rows} and rows["mdlm"]["corpus"] == rows["tiny-llada"]["corpus"] == "grammar.txt"
    assert (run / "metrics.jsonl").exists()
    write_stories(tmp_path / "data")
    given = ["--task", "infill", "--data", tmp_path / "data", "--sets", "roc", "--mbr", "2", "--draws", "1"]
    longer = write_model(tmp_path / "longer", "llada", max_sequence_length=400)
    write_tokenizer(longer)
    rows, _ = measured(capsys, "evaluate", longer, *given, "--samples", "2", "--steps", "4", "--json")
    assert rows["longer"]["kept"] == 1.0 and not (longer / "infill-roc.txt").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "what somebody else's model was trained on is not known: give --on NAME or FILE."),
        (["--task", "control"], "is somebody else's model: its controls have no classifiers."),
        (["--task", "seq2seq"], "is somebody else's model: it learned no pairs."),
        (["--task", "infill", "--on", "e2e"], "--on is for --task language"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(folder, capsys, argv, said):
    assert main(["evaluate", str(folder), *argv]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if "bundled judge" not in line]
    assert said in err[0] and len(err) == 1
