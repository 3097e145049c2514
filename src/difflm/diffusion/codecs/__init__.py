"""Tokens ⇄ clean state."""

from difflm.diffusion.codecs.embedding import Embedding, FixedEmbedding, LearnedEmbedding
from difflm.diffusion.codecs.tokens import Tokens

__all__ = [
    "Embedding",
    "FixedEmbedding",
    "LearnedEmbedding",
    "Tokens",
]
