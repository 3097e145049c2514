"""Codecs by name, so that a setting of a method can choose one.

Codecs of other packages join through the entry points `difflm.codecs`, or by `CODECS.register(MyCodec, "my-name")`.
"""

from difflm.diffusion.codecs import Codec, FixedEmbedding, LearnedEmbedding, Tokens
from difflm.runtime.registry import Registry

CODECS: Registry[Codec] = Registry(
    "difflm.codecs", Codec, {"embedding": LearnedEmbedding, "fixed-embedding": FixedEmbedding, "tokens": Tokens}
)
