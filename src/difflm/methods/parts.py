"""What many methods compose in the same way: a network that may read a source, and lengths."""

from typing import Any, Literal

from difflm.diffusion.denoiser import CrossAttention
from difflm.methods.base import TextSpec
from difflm.models.length_predictor import LengthPredictor
from difflm.models.lengths import DrawnFromSource, DrawnLength
from difflm.networks import EncoderDecoder, Transformer


def build_network(
    texts: TextSpec, sizes: tuple[int, int, int, int, int, float], encoder_layers: int, **settings: Any
) -> tuple[Transformer, CrossAttention | None]:
    """A Transformer of these sizes (in, out, hidden, layers, heads, dropout); where texts have sources, one that reads
    them through attention, and the conditioning that goes with it."""
    vocabulary, longest = texts.source_vocabulary or texts.vocabulary, texts.source_longest
    if not longest:
        return Transformer(*sizes, **settings), None
    network = EncoderDecoder(
        *sizes, source_vocabulary=vocabulary, source_longest=longest, encoder_layers=encoder_layers, **settings
    )
    return network, CrossAttention(longest)


Lengths = Literal["predicted", "drawn"]


def build_lengths(texts: TextSpec, hidden: int, known: Lengths) -> DrawnLength:
    """Lengths like those of the training texts; if texts have sources, predicted from the source, or drawn by its
    length."""
    if not texts.source_longest:
        return DrawnLength(texts.longest)
    sizes = texts.longest, texts.source_longest
    return LengthPredictor(*sizes, hidden) if known == "predicted" else DrawnFromSource(*sizes)
