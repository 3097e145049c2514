"""Bodies that turn noisy positions into answers: our Transformer, and the layout of the first paper."""

from difflm.networks.bert import BertLayout
from difflm.networks.encoder_decoder import EncoderDecoder, StagedDecoder
from difflm.networks.transformer import Transformer

__all__ = ["BertLayout", "EncoderDecoder", "StagedDecoder", "Transformer"]
