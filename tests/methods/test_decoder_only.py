"""Left-to-right models that read a source as a prompt: new ones, and pretrained ones with their own pieces."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD, START, PretrainedTokenizer
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Steering
from difflm.errors import UsageError
from difflm.fast.inference import Inference
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import METHODS, TextSpec
from tests.support.pretrained import make_decoder
from tests.support.tiny import tiny_run

pytestmark = pytest.mark.usefixtures("hf")

SOURCES, WORDS = [[4, 6, 5], [5], [6, 6, 4, 4, 5]], 9
KINDS = ["new", pytest.param("llama", marks=pytest.mark.long), pytest.param("gpt2", marks=pytest.mark.long)]


def build(kind: str, folder: Path):
    sizes = (
        {"hidden": 32, "layers": 2, "heads": 2} if kind == "new" else {"pretrained": str(make_decoder(folder, kind))}
    )
    model = METHODS["decoder-only"](**sizes).build(TextSpec(WORDS, 6, 8))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in (model.embedding.weight, model.network.head.weight):
            parameter.normal_()
        model.network.head.bias[END] = -2.0
    return model.eval()


def padded(rows: list[list[int]], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    return torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows]), lengths


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_words_follow_the_source_whatever_stands_beside_it(tmp_path, kind):
    """One word at a time behind sources of several lengths, as in reading source and text at once."""
    model = build(kind, tmp_path)
    source, lengths = padded(SOURCES, 8)
    memory = model.encode_source(source, torch.arange(8) < lengths.unsqueeze(1))
    texts = torch.tensor([[START, 4, 7, 8], [START, 5, 5, 6]]).repeat(3, 1)
    caches, found = [], []
    for words in texts.split([1, 1, 2], 1):
        logits, caches = model.read(words, caches, memory)
        found.append(logits)
    for row, logits in enumerate(torch.cat(found, 1)):
        told = SOURCES[row // 2]
        whole, _ = model.read(torch.tensor([[*told, *texts[row].tolist()]]))
        assert torch.allclose(logits, whole[0, len(told) :], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_only_the_text_counts(tmp_path, kind):
    """−log p of the words and of END given the source, which has no loss itself."""
    model = build(kind, tmp_path)
    texts = [[4, 7], [8, 5, 5], [6]]
    batch = Batch(*padded(texts, 3), *padded(SOURCES, 6))
    for row, (source, text) in enumerate(zip(SOURCES, texts, strict=True)):
        logits, _ = model.read(torch.tensor([[*source, START, *text]]))
        words = torch.tensor([*text, END])
        expected = -logits[0, len(source) :].log_softmax(-1).gather(1, words.unsqueeze(1)).sum()
        assert torch.allclose(model.nats(batch)[row], expected, atol=1e-4)
    assert torch.allclose(model.forward(batch).total, model.nats(batch).sum(), atol=1e-3)
    with pytest.raises(UsageError, match="source"):
        model.nats(Batch(*padded(texts, 3)))


@pytest.mark.parametrize("beams", [0, 3])
@torch.no_grad()
def test_texts_are_the_same_alone_and_among_others(tmp_path, beams):
    model = build("new", tmp_path)
    sampling = model.sampling.change({"beams": beams})

    def write(sources: list[list[int]], first: int) -> list[list[int]]:
        ids, lengths = padded(sources, 8)
        steering = Steering(source=ids, source_mask=torch.arange(8) < lengths.unsqueeze(1))
        samples = torch.arange(first, first + len(sources))
        full = torch.full((len(sources),), 6)
        *_, last = Inference(model, None, record=True).stream(Noise(3, samples), full, 6, sampling, steering)
        return last.tokens.tolist()

    together = write(SOURCES, 0)
    assert together == [write([source], n)[0] for n, source in enumerate(SOURCES)]


@pytest.mark.long
def test_its_own_pieces_begin_as_they_are(tmp_path):
    """With the tokenizer of the directory, every piece keeps its vector and its logit."""
    import transformers

    folder = make_decoder(tmp_path, "llama")
    tokenizer = PretrainedTokenizer.read(folder)
    method = METHODS["decoder-only"](pretrained=str(folder))
    model = method.build(TextSpec(tokenizer.size, 16, 16))
    method.start(model, tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer.encode("fine food, good pub")
    with torch.no_grad():
        logits, _ = model.eval().read(torch.tensor([ids]))
        expected = theirs(torch.tensor([[tokenizer.theirs[i - 4] for i in ids]])).logits
    assert torch.allclose(logits[..., 4:], expected[..., tokenizer.theirs], atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["new", "llama"])
def test_it_is_trained_on_pairs_and_translates(tmp_path, kind):
    pairs = [{"src": f"food pub {k % 7}", "trg": f"pub food {k % 7}"} for k in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = {"tokenizer": "words", "model": {"hidden": 32, "layers": 2, "heads": 2, "dropout": 0.0}}
    if kind == "llama":
        folder = str(make_decoder(tmp_path / "theirs", "llama"))
        settings = {"tokenizer": folder, "model": {"pretrained": folder, "dropout": 0.0}}
    run = tiny_run(tmp_path, "decoder-only", data=str(tmp_path / "pairs.jsonl"), longest=24, steps=300, **settings)
    shutil.rmtree(tmp_path / "theirs", ignore_errors=True)
    lm = TextDiffusion.from_pretrained(run)
    sources = ["food pub 3", "food pub 5"]
    for how in ({"temperature": 0.0}, {"beams": 3}):
        assert [text.text for text in lm.translate(sources, **how)] == ["pub food 3", "pub food 5"]
    right, wrong = lm.score(["pub food 3", "pub food 4"], source="food pub 3")
    assert right < wrong
