"""Tokens ⇄ clean state."""

from difflm.codecs.embedding import Embedding, FixedEmbedding, LearnedEmbedding

__all__ = ["Embedding", "FixedEmbedding", "LearnedEmbedding"]
