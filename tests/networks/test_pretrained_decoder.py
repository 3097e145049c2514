"""Left-to-right models from a directory: small ones that the test makes, as any other would be read."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from difflm.app.bench import SMALL
from difflm.controls import Label, Length
from difflm.data.batches import Batch
from difflm.data.tokenizers import START
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import METHODS, TextSpec
from difflm.training.recipe import check
from difflm.training.trainer import Trainer
from tests.support.corpora import write_labels
from tests.support.pretrained import make_decoder, make_encoder
from tests.support.tiny import tiny_run

pytestmark = pytest.mark.usefixtures("hf")

WORDS = ["START", "END", "UNK", "PAD", "food", "pub", "."]
KINDS = ["llama", pytest.param("gpt2", marks=pytest.mark.long)]


def built(folder: Path):
    method = METHODS["autoregressive"](pretrained=str(folder))
    model = method.build(TextSpec(len(WORDS), 24))

    class Names:
        size, kind = len(WORDS), "words"

        def tokens(self, ids):
            return [WORDS[i] for i in ids if i > 3]

    method.start(model, Names())
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_it_begins_as_the_model_of_the_directory(tmp_path, kind):
    """A word is the mean of its pieces; hidden states are those of the library's own model."""
    import transformers

    folder = make_decoder(tmp_path, kind)
    model, theirs = built(folder), transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    pieces = transformers.AutoTokenizer.from_pretrained(folder)
    vectors, output = theirs.get_input_embeddings().weight, theirs.get_output_embeddings().weight
    (food,), pub = (pieces(f" {word}")["input_ids"] for word in ("food", "pub"))
    assert len(pub) > 1 and torch.allclose(model.embedding.weight[4], vectors[food])
    assert torch.allclose(model.embedding.weight[5], vectors[pub].mean(0))
    assert torch.allclose(model.network.head.weight[5], output[pub].mean(0))
    assert torch.allclose(model.embedding.weight[START], vectors[0])
    logits, _ = model.read(torch.tensor([[START, 4, 4]]))
    assert torch.allclose(logits[..., 4], theirs(torch.tensor([[0, food, food]])).logits[..., food], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_cached_words_are_read_as_one_text(tmp_path, kind):
    model, words = built(make_decoder(tmp_path, kind)), torch.tensor([[START, 4, 5, 5, 6], [START, 6, 4, 5, 4]])
    whole, _ = model.read(words)
    first, caches = model.read(words[:, :1], [])
    second, caches = model.read(words[:, 1:4], caches)
    kept = [(keys.clone(), values.clone()) for keys, values in caches]
    third, grown = model.read(words[:, 4:], caches)
    assert torch.allclose(torch.cat([first, second, third], 1), whole, atol=1e-5)
    assert [layer[0].shape[2] for layer in grown] == [5, 5]
    assert all(torch.equal(a, b) for old, new in zip(kept, caches, strict=True) for a, b in zip(old, new, strict=True))


def compute_gradients(folder: Path, run: Path, prepare=lambda trainer: None, **changes):
    """Gradients of one batch, with the library's layers prepared as training prepares them."""
    recipe = check(
        {**SMALL, "method": "autoregressive", "model": {"pretrained": str(folder), "dropout": 0.0}, **changes}
    )
    model = built(folder)
    trainer = Trainer(model, recipe, run, torch.device("cpu"))
    prepare(trainer)
    torch.manual_seed(0)
    trainer.gradients(Batch(torch.randint(4, 7, (3, 12)), torch.tensor([12, 9, 3])))
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_its_layers_may_be_computed_again(tmp_path, kind):
    folder = make_decoder(tmp_path / "theirs", kind)
    assert [len([*block.parameters()]) > 4 for block in built(folder).network.equal_blocks()] == [True, True]
    kept, again = (compute_gradients(folder, tmp_path, recompute=recompute) for recompute in (False, True))
    assert all(torch.allclose(kept[name], again[name], atol=1e-6) for name in kept)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_its_layers_may_be_compiled(tmp_path, kind):
    """Both layers are of one graph; the compiler's last stage, which makes kernels, is left out."""
    folder, graphs = make_decoder(tmp_path / "theirs", kind), []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compile_layers(trainer):
        torch._dynamo.reset()
        for block in trainer.masters.model.network.equal_blocks():
            block.compile(dynamic=False, backend=keep)

    plain = compute_gradients(folder, tmp_path)
    compiled = compute_gradients(folder, tmp_path, compile_layers)
    assert len(graphs) == 1
    assert all(torch.allclose(plain[name], compiled[name], atol=1e-5) for name in plain)


@pytest.mark.long
def test_it_is_fine_tuned_and_its_run_needs_no_directory(tmp_path):
    folder = make_decoder(tmp_path / "theirs", "llama")
    write_labels(tmp_path / "labels.jsonl")
    run = tiny_run(
        tmp_path,
        "autoregressive",
        data=str(tmp_path / "labels.jsonl"),
        task="prompts",
        model={"pretrained": str(folder), "dropout": 0.0},
        steps=2,
    )
    shutil.rmtree(folder)
    assert json.loads((run / "config.json").read_text())["model"]["hidden"] == 32
    for dtype in (None, torch.bfloat16):
        lm = TextDiffusion.from_pretrained(run, dtype=dtype)
        (text,) = lm.generate(1, controls=[Label("food", "French"), Length(5)], method="fine-tuning", beams=2)
        assert len(text.tokens) == 5
        assert lm.infill("The old ___ food.", method="fine-tuning")[0].controls[0]["satisfied"]
        assert lm.generate(1)[0].text
        assert lm.generate(1, controls=[Length(4)], method="pplm")[0].controls[0]["satisfied"]


def test_what_is_no_left_to_right_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match="the directory of a language model"):
        METHODS["autoregressive"](pretrained=str(tmp_path))
    folder = make_decoder(tmp_path / "short", "llama")
    with pytest.raises(UsageError, match="reads 128 words at most; texts and prompts may have 161"):
        METHODS["autoregressive"](pretrained=str(folder)).build(TextSpec(9, 64, 96))
    make_encoder(tmp_path, "bert", masked_lm=True)
    with pytest.raises(UsageError, match="bert does not write from left to right"):
        METHODS["autoregressive"](pretrained=str(tmp_path))
