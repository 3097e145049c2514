"""Tokens ⇄ clean state."""

from difflm.diffusion.base import Codec as Codec
from difflm.diffusion.codecs.embedding import CentredEmbedding as CentredEmbedding
from difflm.diffusion.codecs.embedding import Embedding as Embedding
from difflm.diffusion.codecs.embedding import FixedEmbedding as FixedEmbedding
from difflm.diffusion.codecs.embedding import LearnedEmbedding as LearnedEmbedding
from difflm.diffusion.codecs.tokens import Simplex as Simplex
from difflm.diffusion.codecs.tokens import Tokens as Tokens
