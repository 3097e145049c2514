"""What many methods compose in the same way: a network that may read a source, and lengths."""

from collections.abc import Callable
from typing import Literal, TypeVar, Unpack

from difflm.diffusion.denoiser import CrossAttention
from difflm.methods.base import ReadsSources, Sized, TextSpec
from difflm.models.lengths import DrawnFromSource, DrawnLength, LengthPredictor
from difflm.networks import EncoderDecoder, Sizes, SourceSizes, Transformer
from difflm.networks.transformer import Settings

Reader = TypeVar("Reader", bound=EncoderDecoder)


def read_sizes(method: Sized) -> Sizes:
    return Sizes(method.hidden, method.layers, method.heads, method.dropout)


def read_source_sizes(method: ReadsSources, texts: TextSpec) -> SourceSizes:
    return SourceSizes(texts.source_vocabulary or texts.vocabulary, texts.source_longest, method.encoder_layers)


def build_network(
    method: ReadsSources, texts: TextSpec, in_dim: int, out_dim: int, **settings: Unpack[Settings]
) -> tuple[Transformer, CrossAttention | None]:
    """A Transformer of a method's hidden size, layers, heads and dropout; where texts have sources, one that reads them
    through attention, and the conditioning that goes with it."""
    if texts.source_longest:
        return build_reader(EncoderDecoder, method, texts, in_dim, out_dim, **settings)
    return Transformer(in_dim, out_dim, read_sizes(method), **settings), None


def build_reader(
    kind: Callable[..., Reader],
    method: ReadsSources,
    texts: TextSpec,
    in_dim: int,
    out_dim: int,
    **settings: Unpack[Settings],
) -> tuple[Reader, CrossAttention]:
    """A network of this kind, which reads sources."""
    network = kind(in_dim, out_dim, read_sizes(method), read_source_sizes(method, texts), **settings)
    return network, CrossAttention(texts.source_longest)


Lengths = Literal["predicted", "drawn"]


def build_lengths(texts: TextSpec, hidden: int, known: Lengths) -> DrawnLength:
    """Lengths like those of the training texts; if texts have sources, predicted from the source, or drawn by its
    length."""
    if not texts.source_longest:
        return DrawnLength(texts.longest)
    sizes = texts.longest, texts.source_longest
    return LengthPredictor(*sizes, hidden) if known == "predicted" else DrawnFromSource(*sizes)
