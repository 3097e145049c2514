"""What the trainer, the evaluation and the front doors ask of every model."""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from difflm.data.batches import Batch
from difflm.data.tokenfile import Room
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Frame, Steering
from difflm.diffusion.samplers.steps import STEPS
from difflm.models.sampling import Family, Sampling

Likelihood = Literal["exact", "bound"]
NO_WORDS = "{} writes from {} of a whole text, which no control and no classifier reaches."  # a refusal


@dataclass(frozen=True)
class Losses:
    """Sums over what counts, and how much that is: batches are added up before one division."""

    total: Tensor  # to descend
    terms: Mapping[str, Tensor]
    count: Tensor

    def detached(self) -> "Losses":
        """The same without gradients, in tensors of its own."""
        own = {name: value.detach().clone() for name, value in self.terms.items()}
        return Losses(self.total.detach().clone(), own, self.count.detach().clone())

    def means(self) -> dict[str, Tensor]:
        return {**{name: value / self.count for name, value in self.terms.items()}, "loss": self.total / self.count}


def sum_losses(found: Sequence[Losses]) -> Losses:
    """The losses of several micro-batches together."""

    def add(values: Iterable[Tensor]) -> Tensor:
        return torch.stack(list(values)).sum(0)

    terms = {name: add(one.terms[name] for one in found) for name in found[0].terms}
    return Losses(add(one.total for one in found), terms, add(one.count for one in found))


class Trainable(nn.Module):
    """What the trainer asks of a model."""

    likelihood: Likelihood | None = None  # None: the figure is not a likelihood, and none is printed

    @abstractmethod
    def forward(self, batch: Batch) -> Losses:
        """The losses of a batch of tensors."""

    def begin_update(self, update: int) -> None:
        """Do what is due before an update, which is counted from 0: at a few of them a schedule changes."""

    @abstractmethod
    def nats(self, batch: Batch, noise: Noise, draws: int = 1) -> Tensor:
        """−log p(text) or its bound for each text, END and length included; of a classifier, of its labels. [B]"""


def training_noise(batch: Batch) -> Noise:
    """Random numbers of a batch's texts by their number in the run; of a batch without numbers by torch's generator."""
    if batch.index is not None:
        return Noise(batch.seed, batch.index)
    device = batch.ids.device
    seed = torch.randint(2**62, (1,), device=device)
    return Noise(seed, torch.arange(len(batch.ids), device=device))


class LanguageModel(Trainable):
    """A model that writes."""

    longest: int  # positions
    vocabulary: int
    sampling: Sampling
    samplers: tuple[str, ...] = tuple(STEPS)  # step rules it understands
    families: Collection[Family] = ("any", "left-to-right", "tokens")  # of settings that it understands
    greedy = False  # whether temperature 0 means the likeliest word
    starts: tuple[str, ...] = ("noise",)  # what its texts can be made from, beside a source
    predicts_words = True  # whether a temperature means something
    precision: torch.dtype | None = None  # the width of its network's arithmetic; None: that of the weights
    banned: Tensor
    syncs_with_device = True  # whether sampling synchronises with the device
    source_longest = 0  # the most tokens of a source that it writes from; 0: it has no sources
    has_length_beam = False  # whether lengths are chosen before texts, so that candidates can spread over them
    whole_text = ""  # what it writes from, "latents" or "pixels", where no word has a state of its own
    pieces: Sequence[str] = ()  # what its positions show, where those are no tokens
    room: Room | None = None  # of a picture, where texts are drawn
    whole_canvas = False  # whether each call of the network reads all positions of a text
    one_by_one = False  # whether a CPU makes the first texts of a seed one by one, and not some of them together
    always_planned = False  # whether something is known of every text, such as its first token
    allows_mixed_steps = False  # whether texts of different numbers of steps can be made in one batch

    @property
    def max_words(self) -> int:
        """The most words a text may have."""
        return self.longest

    def nats_and_error(self, batch: Batch, noise: Noise, draws: int) -> tuple[Tensor, Tensor]:
        """`nats`, and the standard error that its draws leave, both [B]: none of what is exact, NaN of one draw."""
        nats = self.nats(batch, noise, draws)
        return nats, torch.zeros_like(nats)

    def nats_calls(self, draws: int) -> int:
        """The number of network calls for the nats of a text, with this many draws of a bound."""
        return 1

    def set_compute_dtype(self, dtype: torch.dtype | None) -> None:
        """Run the network in `dtype`; weights stay as they are."""
        self.precision = dtype

    def ban_tokens(self, ids: Sequence[int]) -> None:
        """Keep as `banned` [V] which tokens no text contains."""
        # A buffer, so that no step copies ids to the device; a constant, so that no file holds it.
        self.register_buffer("banned", torch.zeros(self.vocabulary, dtype=torch.bool), persistent=False)
        self.banned[list(ids)] = True

    @abstractmethod
    def draw_lengths(self, noise: Noise, condition: Condition = UNCONDITIONAL) -> Tensor:
        """How many positions each sample will have, [B]."""

    def rank_lengths(self, ranks: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        """The same by rank [B], 0 the likeliest number of positions: for models that have a length beam."""
        raise TypeError("this model has no length beam")

    @abstractmethod
    def stream(
        self, noise: Noise, lengths: Tensor, width: int, sampling: Sampling, steering: Steering | None = None
    ) -> Iterator[Frame]:
        """Frames of a batch whose texts have `lengths` positions, laid out on `width` of them."""

    @abstractmethod
    def words(self, row: list[int]) -> list[int]:
        """The word ids of one finished row."""

    def calls(self, sampling: Sampling, words: int) -> int:
        """The number of network calls for a text of this many words."""
        return sampling.steps

    def frames(self, sampling: Sampling, words: int) -> int:
        """The largest number of frames of a text of this many words."""
        return sampling.steps

    def draw_pictures(self, frame: Frame) -> Tensor | None:
        """The estimate of the clean state as grey pictures, [B, rows, columns] bytes, where it is made of pixels."""
        return None

    def observe(self, lengths: Tensor, tokens: Tensor) -> None:
        """Learn before training what needs none: how many texts have each length, and how often each token occurs."""

    def reconstruct(self, batch: Batch) -> Tensor:
        """What is read off latents or pixels of given texts, [B, L]: rows of `words`."""
        raise TypeError("this model has neither latents nor pixels")

    def observe_pairs(self, counts: Tensor) -> None:
        """The same of pairs: how many have each length of source and text, [S + 1, L + 1]."""


@torch.no_grad()
def start_from_frequencies(bias: Tensor, counts: Tensor) -> None:
    """A head that begins with log p(token): Adam would need thousands of steps to walk there."""
    smoothed = counts.to(bias) + 1
    bias.copy_((smoothed / smoothed.sum()).log())
