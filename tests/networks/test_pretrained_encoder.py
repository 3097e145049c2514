"""Encoders from a directory: small ones that the test makes, as any other would be read."""

import json
from pathlib import Path

import pytest
import torch

from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import METHODS, TextSpec
from tests.support.pretrained import ENCODERS, make_encoder
from tests.support.tiny import MODEL, tiny_run, train_quietly, write_grammar

pytestmark = pytest.mark.usefixtures("hf")

KINDS = ["bert", "roberta", "albert", "electra", "distilbert", "rembert"]


def built(folder: Path, words: list[str], **changes):
    method = METHODS["diffusionbert"](pretrained=str(folder), **changes)
    model = method.build(TextSpec(len(words), 24))

    class Names:
        size = len(words)

        def tokens(self, ids):
            return [words[i] for i in ids]

    method.start(model, Names())
    return model.eval()


WORDS = ["START", "END", "UNK", "PAD", "food", "restaurant", "."]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_words_begin_as_the_mean_of_their_pieces(tmp_path, kind):
    import transformers

    folder = make_encoder(tmp_path, kind, masked_lm=True)
    model = built(folder, WORDS)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    vectors, output = theirs.get_input_embeddings().weight, theirs.get_output_embeddings().weight
    raw, network = model.denoiser.codec.raw, model.denoiser.network
    assert raw.shape == (len(WORDS) + 1, ENCODERS[kind].get("embedding_size", vectors.shape[1]))
    assert torch.allclose(raw[4], vectors[5]) and torch.allclose(raw[5], (vectors[6] + vectors[7]) / 2)
    assert torch.allclose(raw[7], vectors[4])  # the mask
    assert torch.allclose(network.head.weight[5], (output[6] + output[7]) / 2)
    assert torch.equal(network.ends, vectors[[2, 3]])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_shape_alone_begins_with_vectors_of_its_own(tmp_path, kind):
    folder = make_encoder(tmp_path, kind, masked_lm=True)
    learned, fresh = (built(folder, WORDS, weights=weights).denoiser for weights in (True, False))
    assert fresh.codec.raw.shape == learned.codec.raw.shape
    assert fresh.network.head.weight.shape == learned.network.head.weight.shape
    assert not torch.isclose(fresh.codec.raw, learned.codec.raw).all(-1).any()
    # 8 × 16 normal draws: their deviation is known to 1/√(2·128), 6 %; five of these are allowed.
    assert fresh.codec.raw.std().item() == pytest.approx(0.02, rel=0.3)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_language_model_says_here_what_it_says_there(tmp_path, kind):
    """Logits of words that are one piece equal those of the library's own model, [CLS] and [SEP] in their places."""
    import transformers

    folder = make_encoder(tmp_path, kind, masked_lm=True)
    model = built(folder, WORDS, spindle=0.0)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    ids, mask = torch.tensor([[4, 7, 6, 0], [6, 4, 7, 4]]), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    pieces = torch.tensor([[2, 5, 4, 10, 3, 0], [2, 10, 5, 4, 5, 3]])
    with torch.no_grad():
        network = model.denoiser.network
        ours = network(model.denoiser.codec.inputs(ids, None, None)[0], torch.ones(2), mask)
        bias = theirs.get_output_embeddings().bias
        there = theirs(pieces, attention_mask=(pieces != 0).long()).logits - bias
    for row, length in enumerate((3, 4)):
        found = (ours - network.head.bias)[row, :length, [4, 6]]
        assert torch.allclose(found, there[row, 1 : 1 + length, [5, 10]], atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "albert", "distilbert"])
@pytest.mark.parametrize("time", ["layers", "prefix", "none"])
def test_time_is_told_in_three_ways(tmp_path, kind, time):
    model = built(make_encoder(tmp_path, kind, masked_lm=False), WORDS, time=time)
    ids = torch.full((1, 5), 7)
    with torch.no_grad():
        early, late = (
            model.denoiser.network(model.denoiser.codec.inputs(ids, None, None)[0], torch.tensor([t]), None)
            for t in (0.1, 0.9)
        )
    assert torch.allclose(early, late) == (time == "none")


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_the_runs_own_whatever_a_kind_calls_it(tmp_path, kind):
    folder = make_encoder(tmp_path, kind, masked_lm=False)
    for dropout in (0.0, 0.5):
        model = built(folder, WORDS, dropout=dropout).train()
        with torch.no_grad():
            one, other = (
                model.denoiser.network(model.denoiser.codec.inputs(torch.full((1, 5), 7), None, None)[0], torch.ones(1))
                for _ in range(2)
            )
        assert torch.equal(one, other) == (dropout == 0.0)


@pytest.mark.long
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("kind", ["bert", "albert", "electra", "distilbert"])
def test_a_run_keeps_what_it_needs_of_its_encoder(tmp_path, kind, weights):
    """Trained from a directory, the run loads where the directory is gone."""
    folder = make_encoder(tmp_path / "encoder", kind, masked_lm=False)
    write_grammar(tmp_path / "grammar.txt", 200)
    values = {
        "method": "diffusionbert",
        "model": {"pretrained": str(folder), "dropout": 0.0, "weights": weights},
        "data": str(tmp_path / "grammar.txt"),
        "tokenizer": "words",
        "more_than": 0,
        "longest": 24,
        "steps": 3,
        "batch_size": 8,
    }
    train_quietly(values, tmp_path / "run")
    (tmp_path / "encoder").rename(tmp_path / "gone")
    lm = TextDiffusion.from_pretrained(tmp_path / "run")
    assert lm.generate(2, steps=3)[0].tokens and len(lm.score(["The old pub serves Italian food."])) == 1


def test_an_encoder_in_half_precision_is_read_in_the_runs_own(tmp_path):
    import transformers

    folder = make_encoder(tmp_path, "bert", masked_lm=True)
    transformers.AutoModelForMaskedLM.from_pretrained(folder).half().save_pretrained(folder)
    assert {p.dtype for p in built(folder, WORDS).parameters()} == {torch.float32}


def test_what_is_no_encoder_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        METHODS["diffusionbert"](pretrained=str(tmp_path))
    for content in ("{}", "[]", '{"model_type": "unheard-of"}', '{"model_type": "bert", "hidden_size": "wide"}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(UsageError, match="does not describe") as refused:
            METHODS["diffusionbert"](pretrained=str(tmp_path))
        assert_short(refused)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "bart"}, "decoder"),
        ({"model_type": "bert", "is_decoder": True}, "decoder"),
        ({"model_type": "gpt2"}, "AutoModelForMaskedLM"),
        ({"model_type": "bert", "hidden_size": 30, "num_attention_heads": 4}, r"config\.json"),
    ],
)
def test_what_does_not_fill_masks_is_refused(tmp_path, config, reason):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=reason) as refused:
        built(tmp_path, WORDS)
    assert_short(refused)


def test_an_encoder_that_cannot_answer_is_refused_before_training(tmp_path):
    """MobileBERT takes its output words apart; BERT has a vector for each place, and no more."""
    with pytest.raises(UsageError, match="mobilebert does not work") as refused:
        built(make_encoder(tmp_path / "mobile", "mobilebert", masked_lm=True), WORDS)
    assert_short(refused)
    method = METHODS["diffusionbert"](pretrained=str(make_encoder(tmp_path / "bert", "bert", masked_lm=True)))
    with pytest.raises(UsageError, match="canvases of 64 words") as refused:
        method.build(TextSpec(len(WORDS), 50))  # which are written on 64, and [CLS] and [SEP] beside them
    assert_short(refused)
    assert method.build(TextSpec(len(WORDS), 48))


@pytest.mark.parametrize("encoder", [{"model_type": "unheard"}, {"hidden_size": 32}])
def test_a_kept_shape_that_is_not_known_is_refused(encoder):
    """As of a run that a newer library made."""
    with pytest.raises(UsageError, match="no model of the kind") as refused:
        METHODS["diffusionbert"](encoder=encoder).build(TextSpec(20, 12))
    assert_short(refused)


def test_a_kept_shape_names_no_code():
    """`attn_implementation` may name a repository, whose code the library would fetch and run."""
    from difflm.networks.pretrained import library_config

    names = {"attn_implementation": "some/code", "_attn_implementation": "some/code", "auto_map": {"AutoModel": "a.B"}}
    config = library_config({"model_type": "bert", "hidden_size": 32, **names})
    assert config.hidden_size == 32 and "some/code" not in str(vars(config)) and not hasattr(config, "auto_map")


@pytest.mark.parametrize("decoder", [{"model_type": "unheard"}, {"model_type": ["gpt2"]}, {"n_embd": 32}])
def test_a_kept_decoder_that_is_not_known_is_refused(decoder):
    with pytest.raises(UsageError, match="no model of the kind") as refused:
        METHODS["autoregressive"](decoder=decoder).build(TextSpec(20, 12))
    assert_short(refused)


def test_files_that_cannot_be_used_are_refused(tmp_path):
    import transformers

    folder = make_encoder(tmp_path, "bert", masked_lm=True)
    pieces = transformers.AutoTokenizer.from_pretrained(folder)
    pieces.mask_token = None
    pieces.save_pretrained(folder)
    with pytest.raises(UsageError, match="lacks a mask") as refused:
        built(folder, WORDS)
    assert_short(refused)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UsageError, match="cannot be read") as refused:
        built(folder, WORDS)
    assert_short(refused)


def assert_short(refused):
    message = str(refused.value)
    assert len(message.splitlines()) == 1 and len(message) < 400


def test_without_an_encoder_nothing_changes(tmp_path):
    assert tiny_run(tmp_path, "diffusionbert", steps=2, model={**MODEL, "time": "prefix"}).exists()
