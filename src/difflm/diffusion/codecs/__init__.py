"""Tokens ⇄ clean state."""
# ruff: noqa: F401

from difflm.diffusion.base import Codec
from difflm.diffusion.codecs.embedding import Embedding, FixedEmbedding, LearnedEmbedding
from difflm.diffusion.codecs.tokens import Simplex, Tokens
