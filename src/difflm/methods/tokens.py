"""What the methods of the discrete family share: sizes, a Transformer over tokens, and a drawn length."""

from collections.abc import Callable
from typing import ClassVar, Literal, TypedDict, Unpack

from torch import nn

from difflm.data.tokenizers import Tokenizer
from difflm.diffusion import Bound, CrossAttention, Denoiser, DiscreteBound, DiscreteProcess, Objective, Tokens
from difflm.diffusion.timesteps import LowDiscrepancy, TimeSampler
from difflm.errors import UsageError
from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.parts import Lengths, build_lengths, build_network
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel, Noising
from difflm.models.lengths import LengthPolicy
from difflm.models.open_start import build_annealed, read_decoder, sizes_of, take_weights
from difflm.networks.transformer import TimeInput
from difflm.runtime.files import Json

CONTINUOUS = (1e-4, 1 - 1e-4)  # times of training: the integrand is not finite at the ends


class TokenParts(TypedDict, total=False):
    """Parts that are usually the same."""

    times: TimeSampler
    lengths: LengthPolicy
    bound: Bound | None
    noising: Noising


class TokenMethod(ReadsSources):
    task: ClassVar[Literal["seq2seq", "either"]] = "either"
    begins_with: ClassVar[tuple[str, ...]] = ("autoregressive", "encoder-decoder")

    hidden: int = 384
    layers: int = 8
    encoder_layers: int = 4
    lengths: Lengths = "predicted"  # of texts with sources
    heads: int = 6

    @property
    def word_width(self) -> int:
        """Of the vectors that the body reads."""
        return self.hidden

    def body(self, texts: TextSpec, time: TimeInput) -> tuple[nn.Module, CrossAttention | None]:
        """From vectors of tokens to logits of words, and how the network reads a source."""
        return build_network(self, texts, self.hidden, texts.vocabulary, time=time, positions=texts.longest)

    def compose(
        self,
        process: DiscreteProcess,
        texts: TextSpec,
        objective: Objective,
        sampling: Sampling | None = None,
        time: TimeInput = "adaptive",
        denoiser: Callable[..., Denoiser] = Denoiser,
        model: Callable[..., DiffusionModel] = DiffusionModel,
        **parts: Unpack[TokenParts],
    ) -> DiffusionModel:
        """Compose the parts that a paper chooses, on the body that all share; by default 50 ancestral steps."""
        network, reads = self.body(texts, time)
        codec = Tokens(process.words, self.word_width, process.states)
        if "lengths" not in parts:
            parts["lengths"] = build_lengths(texts, self.hidden, self.lengths)
        usual: TokenParts = {"times": LowDiscrepancy(limits=CONTINUOUS), "bound": DiscreteBound()}
        own = {"objective": objective, "sampling": sampling or Sampling(steps=50), **usual, **parts}
        return model(denoiser(network, codec, process, reads), **own)


class DecoderStart(TokenMethod):
    """A masked method that can start from a left-to-right model whose attention is gradually opened."""

    keeps = ("decoder", read_decoder, sizes_of)
    pretrained: str = ""
    "The directory of a left-to-right model of Llama's, Qwen's or GPT-2's shape (init=DIR); the sizes are its own."
    decoder: Json = {}  # noqa: RUF012 (pydantic copies it)
    "Its config, which a run keeps."
    shift: bool = True
    "Of such a model: whether a position still speaks of the next one."
    anneal: int = 0
    "Of such a model: updates after which positions see all that follow them; 0: from the first."

    def positions(self, texts: TextSpec) -> int:
        """Of the canvases that such a model reads."""
        return texts.longest

    def body(self, texts: TextSpec, time: TimeInput) -> tuple[nn.Module, CrossAttention | None]:
        if not self.decoder:
            return super().body(texts, time)
        if texts.source_longest:
            raise UsageError("a pretrained decoder reads no sources: leave model.pretrained out.")
        return build_annealed(self.decoder, texts.vocabulary, self.positions(texts), self.shift, self.anneal), None

    def start(self, model: LanguageModel, tokenizer: Tokenizer) -> None:
        if self.decoder:
            take_weights(model, self.pretrained, tokenizer)
