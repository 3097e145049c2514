"""Tiny models of the Hugging Face library, saved as the library saves them."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.tiny import PARTS

ENCODERS = {  # what a kind has beside the common sizes: ALBERT and ELECTRA project narrow vectors of words up
    "bert": {},
    "roberta": {},
    "albert": {"embedding_size": 16},
    "electra": {"embedding_size": 16},
    "distilbert": {"hidden_dim": 64},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 48},
    "mobilebert": {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16},
}


@pytest.fixture
def hf() -> None:
    if importlib.util.find_spec("transformers") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("the extra `hf` is not installed")


def save_model(folder: Path, library_class: str, kind: str, words: int, **settings: object) -> Path:
    """A network of random weights that follow from its sizes."""
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.AutoConfig.for_model(kind, **{"vocab_size": words, **sizes, **settings})
    torch.manual_seed(5)
    getattr(transformers, library_class).from_config(config).save_pretrained(folder)
    return folder


def make_encoder(folder: Path, kind: str, masked_lm: bool) -> Path:
    """A tiny encoder and its tokenizer, saved as the library saves them."""
    import transformers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "food", "rest", "##aurant", "the", "The", "."]
    words += [f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"] + list("abcdefghijklmnopqrstuvwxyzTAO")
    inner = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    kinds = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    names = {name: f"[{name[:-6].upper()}]" for name in kinds}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    own = {"max_position_embeddings": 64, "pad_token_id": 0, **ENCODERS[kind]}
    return save_model(folder, "AutoModelForMaskedLM" if masked_lm else "AutoModel", kind, len(words), **own)


DECODERS = {"llama": {"num_key_value_heads": 1}, "gpt2": {"n_inner": 64}}


def make_decoder(folder: Path, kind: str) -> Path:
    """A tiny model and its byte pairs, saved as the library saves them."""
    import transformers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<end>", *alphabet, "fo", "od", "food", "Ġfood", "Ġpub"]
    merges = [("f", "o"), ("o", "d"), ("fo", "od"), ("Ġ", "food")]
    inner = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    names = {"eos_token": "<end>", "bos_token": "<end>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    own = {"max_position_embeddings": 128, **DECODERS[kind]}
    return save_model(folder, "AutoModelForCausalLM", kind, len(pieces), **own)


CLASSIFIERS = {"bert": {}, "roberta": {"max_position_embeddings": 66}, "distilbert": {"hidden_dim": 64}}
MOODS = ["dull", "kind", "rude"]


def make_classifier(folder: Path, kind: str = "bert", **changes: object) -> Path:
    """A tiny classifier with random weights and its tokenizer, saved as the library saves them. It knows the words of
    the grammar; others it spells letter by letter."""
    import transformers

    letters = "abcdefghijklmnopqrstuvwxyzé0123456789£"
    known = {word for part in PARTS for words in part for word in words.lower().replace(",", "").split()}
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "rest", "##aurant", ".", ","]
    words += sorted(word for word in known - {"restaurant", "£30"} if len(word) > 1)
    words += [*letters, *(f"##{letter}" for letter in letters)]
    inner = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {name: f"[{name[:-6].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token")}
    pieces = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=64, **names)
    pieces.save_pretrained(folder)
    own = {"max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0, **CLASSIFIERS[kind]}
    own = {**own, "id2label": dict(enumerate(MOODS)), **changes}
    return save_model(folder, "AutoModelForSequenceClassification", kind, len(words), **own)


TEXTS = ["The old pub near the river serves Italian food.", "A small inn sells wine for £30.", "Zürich, naïve — ok?"]


def train_encoder(kind: str) -> Tokenizer:
    """One of each model that the library has, with the special tokens that its users give it."""
    if kind == "bpe":
        encoder = Tokenizer(models.BPE())
        encoder.pre_tokenizer, encoder.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=sorted(alphabet))
    elif kind == "wordpiece":
        encoder = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        encoder.pre_tokenizer, encoder.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[MASK]"])
        encoder.enable_truncation(4)
        encoder.enable_padding(length=9)
    elif kind == "unigram":
        encoder = Tokenizer(models.Unigram())
        encoder.pre_tokenizer, encoder.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    else:
        encoder = Tokenizer(models.WordLevel(unk_token=None))
        encoder.pre_tokenizer, trainer = pre_tokenizers.Whitespace(), trainers.WordLevelTrainer()
    encoder.train_from_iterator(TEXTS, trainer)
    if kind == "wordpiece":
        mark = encoder.token_to_id("[CLS]")
        encoder.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", mark)])
    return encoder
