"""Tokens ⇄ clean state."""

from difflm.diffusion.base import Codec
from difflm.diffusion.codecs.embedding import CentredEmbedding, Embedding, FixedEmbedding, LearnedEmbedding
from difflm.diffusion.codecs.simplex import Simplex
from difflm.diffusion.codecs.tokens import Tokens

__all__ = [
    "CentredEmbedding",
    "Codec",
    "Embedding",
    "FixedEmbedding",
    "LearnedEmbedding",
    "Simplex",
    "Tokens",
]
