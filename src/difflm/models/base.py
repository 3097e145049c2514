"""The interface of every model: what the trainer, the evaluation, the command and the server need of it."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from difflm.data.batches import Batch
from difflm.diffusion.base import Network, State
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Draw, Noise
from difflm.diffusion.samplers.left_to_right import CausalModel, left_to_right
from difflm.diffusion.samplers.loop import Frame, Memory, SamplerInputs, Steering
from difflm.diffusion.timesteps import TimeSampler
from difflm.models.lengths import LengthPolicy
from difflm.models.sampling import Family, Sampling
from difflm.runtime.tensors import Stored

Likelihood = Literal["exact", "bound"]
NO_WORDS = "{} writes from {} of a whole text, which no control and no classifier reaches."  # an error message


@dataclass(frozen=True)
class Losses:
    """Sums of losses, and the count to divide them by: batches are added up before one division."""

    total: Tensor  # the loss to minimise
    terms: Mapping[str, Tensor]
    count: Tensor

    def detached(self) -> "Losses":
        """A copy without gradients."""
        own = {name: value.detach().clone() for name, value in self.terms.items()}
        return Losses(self.total.detach().clone(), own, self.count.detach().clone())

    def means(self) -> dict[str, Tensor]:
        return {**{name: value / self.count for name, value in self.terms.items()}, "loss": self.total / self.count}


def sum_losses(found: Sequence[Losses]) -> Losses:
    """The summed losses of several micro-batches."""
    if len(found) == 1:
        return found[0]

    def add(values: Iterable[Tensor]) -> Tensor:
        return torch.stack(list(values)).sum(0)

    terms = {name: add(one.terms[name] for one in found) for name in found[0].terms}
    return Losses(add(one.total for one in found), terms, add(one.count for one in found))


@dataclass(frozen=True)
class Capabilities:
    """What a model can do. Whoever needs to know asks here, not for the model's class."""

    state: State = "prefix"  # what is made a text step by step
    step_rules: tuple[str, ...] = ()
    settings: tuple[Family, ...] = ("any", "left-to-right", "tokens")  # families of settings that it understands
    starts: tuple[str, ...] = ("noise",)  # what its texts can start from, in addition to a source
    source_limit: int = 0  # tokens of a source; 0: it takes none
    likelihood: Likelihood | None = None  # None: the figure is not a likelihood, and is not reported as one
    predicts_words: bool = True  # whether a temperature has a meaning
    greedy: bool = False  # whether temperature 0 means the likeliest word
    length_beam: bool = False  # whether lengths are chosen before texts, so that candidates can have different ones
    always_planned: bool = False  # whether some positions of every text are known, such as its first token
    mixed_steps: bool = False  # whether texts with different numbers of steps can share a batch
    coupled: bool = False  # whether it follows a teacher's paths, on which the noise alone tells the text
    learned_gaps: bool = False  # whether masks between known words were trained
    reads_in_order: bool = False  # whether it also reads texts from left to right, and so judges them in one call
    unsaid: tuple[int, int] | None = None  # tokens that it does not write side by side, except in rewriting
    whole_canvas: bool = False  # whether each call of the network reads all positions of a text
    one_by_one: bool = False  # whether a CPU makes the first texts of a seed one by one instead of in batches
    syncs_with_device: bool = True  # whether sampling synchronises with the device

    denoises: bool = field(init=False)  # whether it denoises a canvas, so that it has a denoiser and times
    whole_text: str = field(init=False)  # what it writes from, if words have no states of their own, else nothing
    position_beliefs: bool = field(init=False)  # whether it has beliefs about single words, which controls can change

    def __post_init__(self) -> None:
        object.__setattr__(self, "denoises", self.state in ("vectors", "simplex", "tokens", "pixels"))
        object.__setattr__(self, "whole_text", self.state if self.state in ("latents", "pixels") else "")
        object.__setattr__(self, "position_beliefs", self.denoises and not self.whole_text)


class PrefixModel(CausalModel, Protocol):
    """A model that writes from left to right."""

    def draw_memory(self, noise: Noise, steering: Steering) -> Memory | None:
        """What its texts are written from, beside their own words."""


@dataclass(frozen=True)
class TextBatch:
    """Texts that are written together: their random numbers, their numbers of positions [B], the width of the canvas,
    how they are sampled, and what steers them."""

    noise: Noise
    lengths: Tensor
    width: int
    sampling: Sampling
    steering: Steering


class Runner:
    """Runs the parts of a model as they are; `fast.inference` runs faster copies of them."""

    def denoiser_of(self, model: "LanguageModel") -> Denoiser:
        return model.denoiser

    def denoise(self, inputs: SamplerInputs, steering: Steering) -> Iterator[Frame]:
        return inputs.frames()

    def decode(self, part: PrefixModel, batch: TextBatch) -> Iterator[Frame]:
        steering, memory = batch.steering, part.draw_memory(batch.noise, batch.steering)
        given = batch.noise, batch.width, batch.sampling, steering.prefix_rules, steering.known, memory
        return left_to_right(part, *given)


PLAIN = Runner()


class Trainable(nn.Module):
    """What the trainer needs of a model."""

    capabilities = Capabilities()
    draw: Draw | None = None  # what draws the noise of training at once

    @abstractmethod
    def forward(self, batch: Batch) -> Losses:
        """The losses of a batch of tensors."""

    def networks(self) -> list[Network]:
        """Its networks, those within others included."""
        return [part for part in self.modules() if isinstance(part, Network)]

    def begin_update(self, update: int) -> None:
        """Called before each update, counted from 0: a schedule may change."""

    def find_stored(self, layer: str) -> Stored:
        """Where files keep the weight of a linear layer."""
        return Stored(f"{layer}.weight")

    def training_noise(self, batch: Batch) -> Noise:
        """Random numbers for a batch, by the texts' numbers in the run; if it has no numbers, from torch's
        generator."""
        if batch.index is not None:
            return Noise(batch.seed, batch.index, kernel=self.draw)
        device = batch.ids.device
        seed = torch.randint(2**62, (1,), device=device)
        return Noise(seed, torch.arange(len(batch.ids), device=device), kernel=self.draw)

    @abstractmethod
    def nats(self, batch: Batch, noise: Noise, draws: int = 1) -> Tensor:
        """−log p(text) or its bound for each text, including END and length; for a classifier, of its labels. [B]"""


def source_of(batch: Batch) -> tuple[Tensor | None, Tensor | None]:
    """The sources of a batch and their mask."""
    if batch.source is None or batch.source_lengths is None:
        return None, None
    place = torch.arange(batch.source.shape[1], device=batch.source.device)
    return batch.source, place < batch.source_lengths.unsqueeze(1)


class LanguageModel(Trainable):
    """A model that generates texts."""

    longest: int  # positions
    vocabulary: int
    sampling: Sampling
    lengths: LengthPolicy
    denoiser: Denoiser  # these two if it denoises
    times: TimeSampler

    @property
    def max_words(self) -> int:
        """The most words a text may have."""
        return self.lengths.max_words

    def nats_and_error(self, batch: Batch, noise: Noise, draws: int) -> tuple[Tensor, Tensor]:
        """`nats`, and its standard error over draws, both [B]: 0 if it is exact, NaN for a single draw."""
        nats = self.nats(batch, noise, draws)
        return nats, torch.zeros_like(nats)

    def nats_calls(self, draws: int) -> int:
        """The number of network calls for the nats of a text, with this many draws of a bound."""
        return 1

    def forbid_tokens(self, ids: Iterable[int]) -> None:
        """Draw none of these tokens any more."""
        self.lengths.forbidden = tuple({*self.lengths.forbidden, *ids})

    @abstractmethod
    def set_compute_dtype(self, dtype: torch.dtype | None) -> None:
        """Run the network in `dtype`; weights stay as they are."""

    @abstractmethod
    def draw_lengths(self, noise: Noise, condition: Condition = UNCONDITIONAL, ranks: Tensor | None = None) -> Tensor:
        """The number of positions of each sample, [B]; with `ranks` [B], 0 the likeliest number, for models that have a
        length beam."""

    def stream(
        self, noise: Noise, lengths: Tensor, width: int, sampling: Sampling, steering: Steering | None = None
    ) -> Iterator[Frame]:
        """Yield the frames of a batch whose texts have `lengths` positions, padded to `width`."""
        return self.write(TextBatch(noise, lengths, width, sampling, steering or Steering()), PLAIN)

    @abstractmethod
    def write(self, batch: TextBatch, runner: Runner) -> Iterator[Frame]:
        """Yield the frames of a batch."""

    def calls(self, sampling: Sampling, words: int) -> int:
        """The number of network calls for a text of this many words."""
        return sampling.steps

    def frames(self, sampling: Sampling, words: int) -> int:
        """The largest number of frames of a text of this many words."""
        return sampling.steps

    def draw_pictures(self, frame: Frame) -> Tensor | None:
        """The estimate of the clean state as grey pictures, [B, rows, columns] bytes, if it consists of pixels."""
        return None

    def observe(self, lengths: Tensor, tokens: Tensor) -> None:
        """Learn from counts before training: how many texts have each length, and how often each token occurs."""

    def reconstruct(self, batch: Batch) -> Tensor:
        """The words that are read from the latents or pixels of given texts, [B, L]."""
        raise TypeError("this model has neither latents nor pixels")

    @property
    def trains_masked_words(self) -> bool:
        """Whether training computes logits of masked words only."""
        return False

    @property
    def pair_readers(self) -> list[Any]:
        """The parts that learn before training from how often each token follows each other (`read_pairs`)."""
        return []

    def start_from(self, initial: "LanguageModel", lengths: Tensor) -> None:
        """Copy the weights and sampling defaults of another model. Only `lengths` are counted again: the heads' biases
        are already trained."""
        self.load_state_dict({**self.state_dict(), **initial.state_dict()})
        self.sampling = initial.sampling

    def observe_pairs(self, counts: Tensor) -> None:
        """The same for pairs: how many have each length of source and text, [S + 1, L + 1]."""
        self.lengths.observe_pairs(counts)


class WordModel(LanguageModel):
    """A model whose own network writes words, without a denoiser."""

    precision: torch.dtype | None = None  # the dtype of its network's arithmetic; None: that of the weights
    banned: Tensor

    def set_compute_dtype(self, dtype: torch.dtype | None) -> None:
        self.precision = dtype

    def draw_lengths(self, noise: Noise, condition: Condition = UNCONDITIONAL, ranks: Tensor | None = None) -> Tensor:
        return torch.full_like(noise.samples, self.longest)

    def ban_tokens(self, ids: Sequence[int]) -> None:
        """Set `banned` [V], the tokens that no text contains."""
        # A buffer, so that no step copies ids to the device; not persistent, so that it is not saved.
        self.register_buffer("banned", torch.zeros(self.vocabulary, dtype=torch.bool), persistent=False)
        self.forbid_tokens(ids)

    def forbid_tokens(self, ids: Iterable[int]) -> None:
        self.banned[list(ids)] = True
