"""Left-to-right models of three words, small enough to enumerate all their texts."""

import torch
from torch import Tensor, nn

from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD
from difflm.methods import METHODS, TextSpec
from difflm.models.autoregressive import BANNED, Autoregressive
from difflm.models.base import Sampling
from difflm.networks import Sizes

VOCABULARY = 7  # the four specials and three words
WORDS = [4, 5, 6]


def random_twin(seed: int, std: float) -> Autoregressive:
    model = Autoregressive(VOCABULARY, 5, Sizes(32, 2, 4, 0.0), Sampling("autoregressive", steps=5))
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std)
    return model.eval()


def padded(texts: list[tuple[int, ...]]) -> Batch:
    width = max(1, max(map(len, texts)))
    ids = torch.tensor([list(text) + [PAD] * (width - len(text)) for text in texts])
    return Batch(ids, torch.tensor([len(text) for text in texts]))


def ruled(logits: Tensor, first: bool) -> Tensor:
    logits = logits.clone()
    logits[list(BANNED) + ([END] if first else [])] = float("-inf")
    return logits


SOURCES = [[4, 6, 5], [5], [6, 6, 4, 4, 5]]
SIZES = {"hidden": 32, "layers": 2, "encoder_layers": 1, "heads": 4, "dropout": 0.0}


def random_reader(seed: int, vocabulary: int = 7, longest: int = 5, end: float = -2.0) -> Autoregressive:
    """Random weights, far from uniform. The source has much to say, and END is rare: texts depend on all of both."""
    model = METHODS["encoder-decoder"](**SIZES).build(TextSpec(vocabulary, longest, 6))
    assert isinstance(model, Autoregressive)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=1.0 if ".source." in name or "embed" in name else 0.3)
    with torch.no_grad():
        model.network.head.bias[END] = end
    return model.eval()


def batch_of(texts: list[tuple[int, ...]], source: list[int]) -> Batch:
    width = max(map(len, texts))
    ids = torch.tensor([[*text, *[PAD] * (width - len(text))] for text in texts])
    rows = torch.tensor([source] * len(texts))
    lengths = torch.tensor([len(text) for text in texts])
    return Batch(ids, lengths, rows, torch.full((len(texts),), len(source)))
