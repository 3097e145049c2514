"""Tokens ⇄ clean state."""

from difflm.codecs.embedding import Embedding, FixedEmbedding, LearnedEmbedding
from difflm.codecs.tokens import Tokens

__all__ = ["Embedding", "FixedEmbedding", "LearnedEmbedding", "Tokens"]
