"""Untrained models that favour what is not asked for."""

import torch

from difflm.data.tokenizers import END, PAD, START, UNK, Bpe, Words
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import METHODS, TextSpec

VOCABULARY = [
    *("\n", ".", ",", "-", "£", "'", "'s", "&", "The", "Mill", "is", "a", "an", "pub", "inn", "coffee", "shop", "near"),
    *("Café", "Sicilia", "the", "river", "serves", "cheap", "Cheap", "CHEAP", "iPad", "food", "family", "friendly"),
    *("30", "20", "French", "and", "not", "old", "for"),
]
WORDS = Words(["START", "END", "UNK", "PAD", *VOCABULARY])
SIZES = {"hidden": 16, "layers": 1, "heads": 2, "dropout": 0.0, "embedding_dim": 16}
LONGEST, STEPS_TAKEN = 20, 3
DIFFUSION = ["difflm", "diffusion-lm", "mdlm", "udlm"]
SPITE = (START, END, UNK, PAD, *(WORDS.words.index(word) for word in ("\n", "cheap", "CHEAP", "iPad")))


def spiteful(method: str, tokenizer: Words | Bpe = WORDS, longest: int = LONGEST, spite: tuple[int, ...] = SPITE):
    torch.manual_seed(1)
    sizes = SIZES if METHODS[method].family == "gaussian" else {k: v for k, v in SIZES.items() if k != "embedding_dim"}
    model = METHODS[method](**sizes).build(TextSpec(tokenizer.size, longest))
    with torch.no_grad():
        model.denoiser.codec.raw.normal_()
        bias = model.denoiser.codec.bias
        if method != "diffusion-lm":
            bias = model.denoiser.network.get_parameter("head.bias")
        bias[list(spite)] += 30
    return TextDiffusion(model.eval(), tokenizer, {"method": method})
