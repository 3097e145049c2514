"""Encoders from a directory: small ones that the test makes, as any other would be read."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from tiny import MODEL, Silent, tiny_run, write_grammar

from difflm.errors import UsageError
from difflm.fit import train_run
from difflm.methods import METHODS
from difflm.pipeline import TextDiffusion
from difflm.recipe import check

KINDS = ["bert", "roberta"]


@pytest.fixture(autouse=True)
def hf() -> None:
    if importlib.util.find_spec("transformers") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("the extra `hf` is not installed")


def make_encoder(folder: Path, kind: str, masked_lm: bool) -> Path:
    """A tiny encoder and its tokenizer, saved as the library saves them."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "food", "rest", "##aurant", "the", "The", "."]
    words += [f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"] + list("abcdefghijklmnopqrstuvwxyzTAO")
    inner = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    torch.manual_seed(5)
    auto = transformers.AutoModelForMaskedLM if masked_lm else transformers.AutoModel
    auto.from_config(config).save_pretrained(folder)
    return folder


def built(folder: Path, words: list[str], **changes):
    method = METHODS["diffusionbert"](pretrained=str(folder), **changes)
    model = method.build(len(words), 24)

    class Names:
        size = len(words)

        def tokens(self, ids):
            return [words[i] for i in ids]

    method.start(model, Names())
    return model.eval()


WORDS = ["START", "END", "UNK", "PAD", "food", "restaurant", "."]


@pytest.mark.parametrize("kind", KINDS)
def test_words_begin_as_the_mean_of_their_pieces(tmp_path, kind):
    import transformers

    folder = make_encoder(tmp_path, kind, masked_lm=True)
    model = built(folder, WORDS)
    vectors = transformers.AutoModelForMaskedLM.from_pretrained(folder).get_input_embeddings().weight
    raw = model.denoiser.codec.raw
    assert torch.allclose(raw[4], vectors[5]) and torch.allclose(raw[5], (vectors[6] + vectors[7]) / 2)
    assert torch.allclose(raw[7], vectors[4])  # the mask


def test_a_masked_language_model_says_here_what_it_says_there(tmp_path):
    """Logits of words that are one piece equal those of the library's own model, [CLS] and [SEP] in their places."""
    import transformers

    folder = make_encoder(tmp_path, "bert", masked_lm=True)
    model = built(folder, WORDS, spindle=0.0)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    ids, mask = torch.tensor([[4, 7, 6, 0], [6, 4, 7, 4]]), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    pieces = torch.tensor([[2, 5, 4, 10, 3, 0], [2, 10, 5, 4, 5, 3]])
    with torch.no_grad():
        network = model.denoiser.network
        ours = network(model.denoiser.codec.inputs(ids), torch.ones(2), mask)
        bias = theirs.get_output_embeddings().bias
        there = theirs(pieces, attention_mask=(pieces != 0).long()).logits - bias
    for row, length in enumerate((3, 4)):
        found = (ours - network.head.bias)[row, :length, [4, 6]]
        assert torch.allclose(found, there[row, 1 : 1 + length, [5, 10]], atol=1e-5)


@pytest.mark.parametrize("time", ["layers", "prefix", "none"])
def test_time_is_told_in_three_ways(tmp_path, time):
    model = built(make_encoder(tmp_path, "bert", masked_lm=False), WORDS, time=time)
    ids = torch.full((1, 5), 7)
    with torch.no_grad():
        early, late = (
            model.denoiser.network(model.denoiser.codec.inputs(ids), torch.tensor([t]), None) for t in (0.1, 0.9)
        )
    assert torch.allclose(early, late) == (time == "none")


def test_a_run_keeps_what_it_needs_of_its_encoder(tmp_path):
    """Trained from a directory, the run loads where the directory is gone, and its shape alone is another start."""
    folder = make_encoder(tmp_path / "encoder", "bert", masked_lm=False)
    write_grammar(tmp_path / "grammar.txt", 200)
    values = {
        "method": "diffusionbert",
        "model": {"pretrained": str(folder), "dropout": 0.0},
        "data": str(tmp_path / "grammar.txt"),
        "tokenizer": "words",
        "more_than": 0,
        "longest": 24,
        "steps": 3,
        "batch_size": 8,
    }
    train_run(check(values), tmp_path / "run", torch.device("cpu"), Silent(), lambda *_: None, None, False)
    (tmp_path / "encoder").rename(tmp_path / "gone")
    lm = TextDiffusion.from_pretrained(tmp_path / "run")
    assert lm.generate(2, steps=3)[0].tokens and len(lm.score(["The old pub serves Italian food."])) == 1


def test_what_is_no_encoder_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        METHODS["diffusionbert"](pretrained=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="does not describe"):
        METHODS["diffusionbert"](pretrained=str(tmp_path))


def test_without_an_encoder_nothing_changes(tmp_path):
    assert tiny_run(tmp_path, "diffusionbert", steps=2, model={**MODEL, "time": "prefix"}).exists()
