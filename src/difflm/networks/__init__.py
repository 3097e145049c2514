"""Bodies that turn noisy positions into answers: our Transformer, and the layout of the first paper."""

from difflm.networks.bert import BertLayout
from difflm.networks.encoder_decoder import EncoderDecoder, SourceSizes, StagedDecoder
from difflm.networks.transformer import Sizes, Transformer

__all__ = ["BertLayout", "EncoderDecoder", "Sizes", "SourceSizes", "StagedDecoder", "Transformer"]
