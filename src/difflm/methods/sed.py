"""SED: Self-conditioned Embedding Diffusion for Text Generation (Strudel et al., 2022).

The paper's vectors come from a BERT that its authors trained; here they come from a file, from neighbouring words of
the training texts, or are random. The cross-entropy reads x_0, as in the paper; an unofficial implementation reads the
estimate. A source, which the paper does not have, precedes the text without noise (Gong et al., 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.texts import check_readable, read_lines
from difflm.data.tokenizers import Tokenizer
from difflm.diffusion import GaussianBound, Noise, Objective, TimeSampler, denoiser
from difflm.diffusion.codecs.embedding import FixedEmbedding, Norm
from difflm.diffusion.processes import gaussian
from difflm.errors import DifflmError, UsageError
from difflm.methods.base import Sized, TextSpec
from difflm.methods.diffusion_lm import CERTAIN
from difflm.methods.parts import read_sizes
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel, Noising
from difflm.models.lengths import RandomPads
from difflm.networks import Transformer


@dataclass(frozen=True)
class Spans:
    """The text is cut into 1 to `most` spans, any number as likely, of which every second one is given: the even ones
    or, by a coin, the odd ones. One span is all generated (Strudel et al., 2022)."""

    most: int = 5

    def __call__(self, lengths: Tensor, width: int, noise: Noise) -> Tensor:
        count, coin = noise.uniform(0, 2, stream=denoiser.GIVEN).T.unsqueeze(-1)
        spans = (count * self.most).long().minimum(lengths.unsqueeze(1) - 1) + 1
        # Cuts that differ: the first few places of a random order.
        place = torch.arange(width, device=lengths.device)
        inside = place < lengths.unsqueeze(1)
        order = torch.where(inside & (place > 0), noise.uniform(1, width, stream=denoiser.GIVEN), 2.0)
        cut = order.argsort(-1).argsort(-1) < spans - 1
        return ((cut.cumsum(-1) + (coin < 0.5)) % 2 == 1) & (spans > 1) & inside


def read_word_vectors(path: str, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The places of those `words` that the file has, [N], and their vectors, [N, D]. Words of several tokens, which a
    line cannot hold, are not read; nor is word2vec's first line, which counts."""
    check_readable(Path(path))
    places = {word: place for place, word in enumerate(words) if word}
    found: dict[int, np.ndarray] = {}
    size = 0
    for number, line in read_lines(Path(path)):
        word, *numbers = line.split() or [""]
        size = size or (len(numbers) if number > 1 or len(numbers) > 1 else 0)
        place = places.get(word)
        if place is None:
            continue
        try:
            vector = np.array(numbers, np.float32)
        except ValueError:
            raise DifflmError(f"line {number} of {path} is not a word and its numbers.") from None
        if len(vector) != size or not np.isfinite(vector).all():
            raise DifflmError(f"line {number} of {path}: {size} finite numbers are expected after {word!r}.")
        found[place] = vector
    if not found:
        raise UsageError(f"{path} has vectors of none of the {len(places):,} words of the vocabulary.")
    return np.array(list(found), np.int64), np.stack(list(found.values()))


SPARE = 16  # more directions than are kept make those that are kept exact
OWN = 0.5  # share of a random vector in one made of counts: words that occur in the same places stay apart


class ReadoutEmbedding(FixedEmbedding):
    """A fixed table, and a separate head that reads words from vectors. The head is initialised with the table; only
    the cross-entropy of clean vectors trains it (Strudel et al., 2022). `reads_pairs`: the table is computed from how
    often words are neighbours, once they are counted."""

    def __init__(self, table: Tensor, norm: Norm = "none", x0_std: float = 0.0, reads_pairs: bool = False) -> None:
        super().__init__(table, norm, x0_std)
        self.reads_pairs = reads_pairs
        self.head = nn.Parameter(self.table().clone())

    @torch.no_grad()
    def set_table(self, table: Tensor) -> None:
        self.raw.copy_(table)
        self.head.copy_(self.table())

    @torch.no_grad()
    def read_pairs(self, pairs: Tensor) -> None:
        """Learn vectors from how often each token precedes each other one, [V, V]. Tokens that were not counted keep
        their vectors."""
        found = F.normalize(cooccurrence_vectors(pairs.to(self.raw), self.dim), dim=-1)
        counted = (pairs.sum(0) + pairs.sum(1) > 0).unsqueeze(1)
        self.set_table(torch.where(counted, found + OWN * F.normalize(self.raw, dim=-1), self.raw))

    def readout(self, x: Tensor) -> Tensor:
        return F.linear(x, self.head, self.bias)

    def frozen(self) -> "ReadoutEmbedding":
        made = ReadoutEmbedding(self.table().detach(), x0_std=self.x0_std)
        return made.requires_grad_(False).to(self.bias.device)

    def frozen_tensors(self) -> list[Tensor]:
        return [*super().frozen_tensors(), self.head]


def cooccurrence_vectors(pairs: Tensor, dim: int) -> Tensor:
    """The main directions [V, dim] of positive pointwise mutual information with the words before and after (Levy &
    Goldberg, 2014), each weighed by the root of its singular value."""
    expected = pairs.sum(1, keepdim=True) * pairs.sum(0) / pairs.sum().clamp(min=1)
    information = torch.where(pairs > 0, pairs / expected.clamp(min=1e-12), 1).log().clamp(min=0)
    return main_directions(torch.cat([information, information.T], 1), dim, power=0.5)


def main_directions(vectors: Tensor, dim: int, power: float = 1.0) -> Tensor:
    """Vectors [V, N] along their `dim` main directions, zeros where they have fewer; with a power other than 1, each
    direction's singular value is raised to it. A random projection finds them, since a whole decomposition of many
    words takes minutes."""
    left, values, _ = torch.svd_lowrank(vectors, q=min(dim + SPARE, *vectors.shape), niter=4)
    found = (left * values**power)[:, :dim]
    return F.pad(found, (0, dim - found.shape[1]))


class Sed(Sized):
    name, task = "sed", "either"
    one_canvas = True

    embedding_dim: int = 32
    hidden: int = 896
    layers: int = 12
    heads: int = 14
    vectors: Literal["neighbours", "random"] = "neighbours"
    vectors_file: str = ""  # lines of a word and its numbers, as GloVe's; a run keeps them
    drop: float = Field(default=0.1, ge=0, lt=1)  # share of texts learned without their given words
    pads: float = Field(default=0.1, ge=0, lt=1)  # chance of a pad before a word

    def build(self, texts: TextSpec) -> LanguageModel:
        dim, counts = self.embedding_dim, self.vectors == "neighbours" and not self.vectors_file
        source = texts.source_longest
        vectors = torch.randn(texts.vocabulary, dim)
        codec = ReadoutEmbedding(vectors, norm="sphere", x0_std=0.01, reads_pairs=counts)
        network = Transformer(2 * dim if source else 3 * dim + 1, dim, read_sizes(self), time="addition")
        process = gaussian.Gaussian(gaussian.Cosine())
        reads = denoiser.PartialNoising(source) if source else denoiser.MaskStack()
        return DiffusionModel(
            denoiser.Denoiser(network, codec, process, reads, denoiser.SelfConditioning("both")),
            objective=Objective({"mse": 1.0, "rounding_ce": 1.0}),
            times=TimeSampler(),
            lengths=RandomPads(texts.longest, self.pads),
            sampling=Sampling("ancestral", steps=1000),
            bound=GaussianBound(certain_below=CERTAIN),
            drop=None if source else denoiser.ConditionDrop(self.drop, self_condition=True),
            noising=Noising(given=None if source else Spans()),
        )

    def start(self, model: LanguageModel, tokenizer: Tokenizer) -> None:
        if self.vectors_file:
            words = ["".join(tokenizer.tokens([i])) for i in range(tokenizer.size)]
            ids, vectors = read_word_vectors(self.vectors_file, words)
            codec = cast(ReadoutEmbedding, model.denoiser.codec)
            found = main_directions(torch.from_numpy(vectors), codec.dim).to(codec.raw)
            codec.set_table(codec.raw.index_copy(0, torch.from_numpy(ids).to(codec.raw.device), found))
