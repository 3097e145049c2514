"""A left-to-right model of others as the beginning of one that denoises: init=DIR."""

import json

import pytest
import torch

from difflm.app.cli import main
from difflm.data.batches import Batch
from difflm.diffusion.base import Levels
from difflm.diffusion.condition import Condition
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import METHODS, TextSpec
from difflm.models.block_diffusion import BlockwiseDenoiser
from difflm.models.open_models import load_network
from difflm.models.word_nats import nats_in_order
from difflm.networks.open_transformer import OpenTransformer, Shape
from difflm.training.fit import train_run
from difflm.training.own_text import own_recipe
from difflm.training.recipe import check, load_recipe
from difflm.training.texts import Setup
from tests.support.open_checkpoints import MODELS, draw_weights, write_model, write_tokenizer, write_weights
from tests.support.tiny import Silent, write_grammar

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


def begun(folder, tmp_path, *changes, method="mdlm"):
    """A run of one update at a learning rate of nothing."""
    write_grammar(tmp_path / "my.txt", 30)
    options = ["steps=1", "batch_size=4", "warmup=0", "lr=1e-30", "ema=0", "sample_every=0", "longest=64", *changes]
    recipe = load_recipe("own-text", [f"method={method}", f"data={tmp_path}/my.txt", f"init={folder}", *options])
    train_run(Setup(recipe, tmp_path / "run", CPU, lambda *_: None), Silent())
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
    network = OpenTransformer(shape, 8, updates=10).train()
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


def test_slopes_are_finite_beside_words_that_stand():
    """At time 0, where the clean context of a gap is, the weight of the bound is infinite and counts nothing."""
    torch.manual_seed(0)
    config = {**MODELS["diffullama"]["config"], "vocab_size": 14}
    model = METHODS["mdlm"](decoder=config, hidden=32, context=1.0).build(TextSpec(14, 12)).train()
    batch = Batch(ids=torch.randint(4, 14, (4, 12)), lengths=torch.full((4,), 10), index=torch.arange(4))
    model(batch).total.backward()
    slopes = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert slopes and all(bool(torch.isfinite(one).all()) for one in slopes)


def test_a_share_of_texts_is_read_from_left_to_right():
    """Their loss is the chain rule's: each word but the first, given those before it alone."""
    torch.manual_seed(0)
    config = {**MODELS["diffullama"]["config"], "vocab_size": 14}
    model = METHODS["mdlm"](decoder=config, hidden=32, in_order=0.5, dropout=0.0).build(TextSpec(14, 12)).eval()
    lengths = torch.tensor([10, 7, 10, 4])
    batch = Batch(ids=torch.randint(4, 14, (4, 12)), lengths=lengths, index=torch.arange(4))
    found = model(batch)
    wanted = torch.zeros(())
    for row, length in zip(batch.ids[:2], lengths[:2], strict=True):
        for k in range(1, int(length)):  # the answer behind k words is no answer of the words that follow
            vectors = torch.nn.functional.embedding(row[None, :k], model.denoiser.codec.raw)
            causal = torch.ones(1, k, k, dtype=torch.bool).tril()
            states = model.denoiser.network.run(vectors, causal, None)
            logits = model.denoiser.network.answer(states[:, -1:])
            wanted = wanted + torch.nn.functional.cross_entropy(logits[:, 0], row[k : k + 1])
    torch.testing.assert_close(found.terms["in_order"], wanted.detach(), atol=1e-4, rtol=1e-5)
    assert found.total.item() > wanted.item()
    whole = torch.arange(12) < lengths.unsqueeze(1)
    judged = nats_in_order(model.denoiser, batch.ids, whole)  # in one call, of a finished text
    torch.testing.assert_close(judged[:2].sum(), wanted.detach(), atol=1e-4, rtol=1e-5)
    assert bool((judged[:, 0] == 0).all()) and bool((judged[~whole] == 0).all())
    found.total.backward()
    assert all(bool(torch.isfinite(one.grad).all()) for one in model.parameters() if one.grad is not None)


def test_rows_of_several_texts_are_refused_before_training():
    given = {"method": "mdlm", "data": "x.txt", "steps": 1, "rows": "packed", "longest": 64}
    start = {"pretrained": "", "decoder": {**MODELS["diffullama"]["config"], "vocab_size": 14}, "in_order": 0.5}
    with pytest.raises(UsageError, match=r"model\.in_order: packed rows are not read in order"):
        check({**given, "model": start})


def test_only_a_model_that_began_from_left_to_right_reads_so():
    with pytest.raises(UsageError, match=r"model\.in_order: for a model that starts"):
        load_recipe("own-text", ["data=x.txt", "method=mdlm", "model.in_order=0.2"])


@torch.no_grad()
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_documents_of_a_packed_row_are_read_as_alone(kind, shift):
    """Each document of a row is answered as if it stood in a row of its own, from its own first position on."""
    torch.manual_seed(0)
    shape = Shape(hidden=16, layers=2, heads=2, inner=16, kv_heads=1, head_dim=8, shift=shift)
    learned = Shape(**{**vars(shape), "rope": 0.0, "positions": 12, "kv_heads": 2, "norm": "layer", "gated": False})
    network = OpenTransformer(shape if kind == "llama" else learned, 8, updates=0).train()
    x, lengths = torch.randn(1, 12, 16), (5, 4, 3)
    documents = torch.arange(3).repeat_interleave(torch.tensor(lengths)).unsqueeze(0)
    alone = torch.cat([network(part, None) for part in x.split(lengths, 1)], 1)
    torch.testing.assert_close(network(x, None, documents), alone, atol=1e-5, rtol=0)


# -- blocks -----------------------------------------------------------------------------------------------------------

WORDS, LENGTH = 14, 24


def blocks(shift=True, kind="llama", block=4):
    """A block diffusion model of random weights, whose places are told apart."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40, "vocab_size": WORDS}
    config = {**MODELS["diffugpt"]["config"], **sizes, "n_inner": None}
    if kind == "llama":
        config = {**MODELS["diffullama"]["config"], "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8}
        config |= {"num_key_value_heads": 1, "intermediate_size": 24}
    method = METHODS["block-diffusion"](decoder=config, shift=shift, block=block, hidden=16, heads=2, anneal=10)
    made = method.build(TextSpec(WORDS, LENGTH)).eval()
    torch.nn.init.normal_(made.denoiser.places)
    return made


def noisy_texts():
    clean = torch.randint(4, WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    noisy = torch.full_like(clean, WORDS)
    noisy[:, ::3] = clean[:, ::3]
    return clean, noisy


@torch.no_grad()
@pytest.mark.parametrize(("kind", "shift", "block"), [("llama", True, 4), ("llama", False, 4), ("gpt2", True, 1)])
def test_blocks_that_are_kept_are_exact(kind, shift, block):
    """Block after block with what was kept of the others, against all of them at once; texts that look back over two
    blocks too, against a model with so small a window."""
    made, (clean, noisy) = blocks(shift, kind, block), noisy_texts()
    windows, back = (made.denoiser.window, 9 if block == 4 else 3), torch.tensor([99, 8 if block == 4 else 2, 99])
    whole = made.denoiser(noisy, torch.ones(3), None, Condition(given=clean)).logits
    made.denoiser.window = windows[1]
    near = made.denoiser(noisy, torch.ones(3), None, Condition(given=clean)).logits
    made.denoiser.window = windows[0]
    for asked, wanted in ((None, whole), (back, torch.stack([whole[0], near[1], whole[2]]))):
        writing = BlockwiseDenoiser(made.denoiser, steps=1, back=asked)
        for start in range(0, LENGTH, block):
            canvas = torch.cat([clean[:, :start], noisy[:, start:]], 1)
            times = (torch.arange(LENGTH) >= start).float().expand(3, -1)
            found = writing(canvas, Levels(times), None).logits[:, start : start + block]
            torch.testing.assert_close(found, wanted[:, start : start + block], atol=2e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_blocks_begin_as_the_left_to_right_model(kind):
    """At the first update the first word of a block is answered as the causal network answers behind the word before:
    of blocks of one word, every word but the first, which stands behind START."""
    for block in (1, 4):
        made, (clean, noisy) = blocks(True, kind, block), noisy_texts()
        network, denoiser = made.denoiser.network, made.denoiser
        words, _ = denoiser.read_words(clean)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().unsqueeze(0)
        hidden = network.run(words, causal, None, torch.arange(LENGTH) + 1)
        wanted = made.denoiser.codec.belief(
            network.answer(hidden), torch.full_like(clean, WORDS), made.process.at(torch.ones(3)), None, made.process
        ).logits
        made.train()
        made.begin_update(0)
        noisy = torch.full_like(noisy, WORDS)
        found = denoiser(noisy, torch.ones(3), None, Condition(given=clean)).logits
        torch.testing.assert_close(found[:, block::block], wanted[:, block - 1 : -1 : block], atol=2e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("shift", [True, False])
def test_words_reach_the_blocks_that_may_see_them(shift):
    """A clean word moves the answers of later blocks, a noisy one those of its own block, each of them."""
    made, (clean, noisy) = blocks(shift), noisy_texts()

    def moved(other_noisy, other_clean):
        one = made.denoiser(noisy, torch.ones(3), None, Condition(given=clean)).answer
        two = made.denoiser(other_noisy, torch.ones(3), None, Condition(given=other_clean)).answer
        return (one - two).abs().amax(-1) > 1e-6

    seen = []
    made.denoiser.codec.belief = lambda answer, *_: type("Answered", (), {"answer": answer})
    for at in (8, 11):
        changed = [one.clone() for one in (noisy, clean)]
        for one in changed:
            one[:, at] = 4 + (clean[:, at] - 3) % (WORDS - 4)
        seen.append((moved(changed[0], clean), moved(noisy, changed[1])))
    for by_noisy, by_clean in seen:
        assert by_noisy[:, 8:12].all() and not by_noisy[:, :8].any() and not by_noisy[:, 12:].any()
        assert by_clean[:, 12:].all() and not by_clean[:, :12].any()


@pytest.mark.long
@pytest.mark.parametrize("shift", [True, False])
def test_a_run_of_blocks_begins_with_a_left_to_right_model(llama, tmp_path, shift, capsys):
    lm = begun(llama, tmp_path, f"model.shift={str(shift).lower()}", method="block-diffusion")
    network, embedding = load_network(llama, torch.float32, CPU)
    theirs = lm.model.denoiser.network.layers[1].mlp.up_proj.weight
    assert torch.equal(theirs, network.layers[1].mlp.up_proj.weight)
    assert torch.equal(lm.model.denoiser.codec.raw[4:-1], embedding[torch.tensor(lm.tokenizer.theirs)])
    texts = lm.generate(2, steps=2)
    assert len(texts) == 2 and lm.model.capabilities.likelihood == "bound"
    assert len(TextDiffusion.from_pretrained(tmp_path / "run", dtype=torch.bfloat16).generate(2, steps=2)) == 2
    argv = ["evaluate", str(tmp_path / "run"), "--samples", "2", "--draws", "1", "--steps", "2", "--score-texts", "1"]
    assert main(argv) == 0


@pytest.mark.long
def test_texts_of_ones_own_choose_no_sizes_for_it(llama, tmp_path, capsys):
    write_grammar(tmp_path / "my.txt", 60)
    for method in ("mdlm", "block-diffusion"):
        argv = ["train", str(tmp_path / "my.txt"), f"method={method}", f"init={llama}"]
        assert main([*argv, "--dry-run"]) == 0 and "estimate for 110 words" in capsys.readouterr().err
    assert main([*argv, "steps=1", "batch_size=4", "sample_every=0", "--out", str(tmp_path / "run")]) == 0
    told: list[str] = []
    changes = ["method=block-diffusion", f"init={llama}"]
    recipe = own_recipe(str(tmp_path / "my.txt"), changes, None, "cpu", told.append)
    assert recipe.build_method().model_dump()["hidden"] == 32 and not any("model.hidden" in line for line in told)


def test_a_method_that_cannot_begin_so_says_which_can(llama, tmp_path):
    said = "sedd cannot start from somebody else's model; give method=, one of .*mdlm, .*block-diffusion"
    with pytest.raises(UsageError, match=said):
        load_recipe("own-text", ["method=sedd", f"data={tmp_path}/my.txt", f"init={llama}"])


@pytest.mark.parametrize("rows", ["texts", "packed"])
def test_one_recipe_adapts_a_left_to_right_model(llama, tmp_path, rows, capsys):
    """`train adapt` takes the tokenizer from the same directory; its first loss is finite, and its run writes."""
    write_grammar(tmp_path / "my.txt", 40)
    changes = [f"model.pretrained={llama}", f"data={tmp_path}/my.txt", "steps=2", "batch_size=8", "longest=64"]
    changes += [f"rows={rows}", *(["widths=[]"] if rows == "packed" else ["widths=[16,64]"])]
    assert main(["train", "adapt", *changes, "--out", str(tmp_path / "run")]) == 0
    lm = TextDiffusion.from_pretrained(tmp_path / "run")
    assert len(lm.infill("the dog ___ in the garden")[0].text) > 0
    assert main(["train", "adapt", f"data={tmp_path}/my.txt", "--out", str(tmp_path / "none")]) == 2
    assert "model.pretrained=DIR" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_a_library_network_reads_no_packed_rows(llama, tmp_path):
    with pytest.raises(UsageError, match=r"autoregressive with model\.pretrained reads one.*: mdlm"):
        load_recipe("adapt", ["method=autoregressive", f"init={llama}", "rows=packed", "data=my.txt", "widths=[]"])
