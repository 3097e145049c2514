"""The interfaces between the parts of a diffusion model: noise levels, a belief, a process, a codec, a network, a
step of sampling."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion.noise import Noise, Step


@dataclass(frozen=True)
class Levels:
    """Noise levels at times t, [B], [B, L] or, for a whole grid, [N, B, …]. They are computed once and passed down: a
    sampling step needs the levels of two times a dozen times."""

    t: Tensor

    def __getitem__(self, index: object) -> Self:
        """The levels of some steps, rows or positions."""
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def stack(self) -> Tensor:
        """The levels of a grid as one tensor, [N + 1, K, …], times first, so that a step looks them up at once."""
        return torch.stack([getattr(self, f.name) for f in fields(self)], 1)

    @property
    def network_input(self) -> Tensor:
        """What a network is told of the time."""
        return self.t


# What becomes a text, step by step: `prefix` is a text that grows from left to right.
State = Literal["vectors", "simplex", "tokens", "latents", "pixels", "edits", "prefix"]
Times = Tensor | Levels  # a process takes either; levels save it the work


def expand_levels(value: Tensor, state: Tensor) -> Tensor:
    """A quantity per text [B] or per position [B, L], shaped to multiply a state [B, L, …]."""
    return value[(...,) + (None,) * (state.dim() - value.dim())]


def cross_entropy(logits: Tensor, ids: Tensor, smoothing: float = 0.0) -> Tensor:
    """−log p of the ids [B, L] under logits [B, L, V]; a share `smoothing` of the target is uniform."""
    flat, targets = logits.flatten(0, 1), ids.flatten()
    return F.cross_entropy(flat, targets, reduction="none", label_smoothing=smoothing).view(ids.shape)


LEAST = 1e-4  # of a probability that guidance would make negative


@dataclass(frozen=True)
class Belief:
    """Token logits, and the clean state that goes with them.

    The logits are the posterior p(w | x_t) at each position, always. `evidence` is that part of them which comes from
    x_t at the position itself and is known in closed form; what remains, `context`, is the network's opinion from
    elsewhere: the leave-one-out posterior, which uniform and hybrid noise put in the place of x_0.
    `state` is a clean state other than the codec's mean under the logits: one that the network predicted itself, or
    that was clamped to a word. `words` are ids that were chosen by other means than the likeliest logit. `draw` draws
    tokens that depend on each other together, [B, L], by uniform numbers [B, L]; −1 where they do not, which is nowhere
    if it `draws_all`. `quality` are logits of whether the token that stands at each position is right."""

    logits: Tensor  # [B, L, V]
    evidence: Tensor | None = None  # [B, L, V]
    codec: "Codec | None" = None  # what turns logits into a clean state
    state: Tensor | None = None
    words: Tensor | None = None  # [B, L]
    draw: Callable[[Tensor], Tensor] | None = None
    draws_all: bool = False
    quality: Tensor | None = None  # [B, L], of models with such a head
    total: Tensor | None = None  # the weighted sum of the losses, where the head itself computed it

    @cached_property
    def clean(self) -> Tensor:
        """The clean state. It is computed lazily, after the last edit of the logits."""
        if self.state is not None:
            return self.state
        assert self.codec is not None, "a belief without a codec has no clean state"
        return self.codec.expectation(self.logits)

    @cached_property
    def tokens(self) -> Tensor:
        """The token at each position, [B, L]."""
        return self.logits.argmax(-1) if self.words is None else self.words

    @property
    def context(self) -> Tensor:
        """The logits without what x_t shows at the position itself: the leave-one-out posterior."""
        return self.logits if self.evidence is None else self.logits - self.evidence

    @cached_property
    def shares(self) -> Tensor:
        """Probabilities of all tokens, [B, L, V]: computed once for drawing and for displaying the confidence."""
        return self.logits.softmax(-1)

    def confidence_in(self, tokens: Tensor) -> Tensor:
        """Probability of these tokens, [B, L]."""
        return self.shares.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def cross_entropy(self, ids: Tensor, smoothing: float = 0.0) -> Tensor:
        return cross_entropy(self.logits, ids, smoothing)

    def rows(self, part: slice | Tensor) -> "Belief":
        """The belief about some texts."""
        own = ((f.name, getattr(self, f.name)) for f in fields(self))
        rows: dict[str, Any] = {name: value[part] for name, value in own if isinstance(value, Tensor)}
        return replace(self, **rows)

    def contrasted(self, other: "Belief", weight: float, scores: bool = False) -> "Belief":
        """Log-probabilities, and a predicted state, moved by `weight` away from a belief without the condition:
        classifier-free guidance (Ho & Salimans, 2022). Tokens that one of the two rules out stay as they are. With
        `scores` the probabilities are moved, and with them their mean, like a score; none below `LEAST` of itself."""
        here, there = self.logits.log_softmax(-1), other.logits.log_softmax(-1)
        step = (
            (1 + weight - weight * (there - here).exp()).clamp(min=LEAST).log() if scores else weight * (here - there)
        )
        moved = torch.where(here.isfinite() & there.isfinite(), here + step, self.logits)
        if self.state is None or other.state is None:
            return self.with_logits(moved)
        return replace(self, logits=moved, words=None, state=self.state + weight * (self.state - other.state))

    def with_logits(self, logits: Tensor) -> "Belief":
        """The belief under other logits; its clean state follows, unless the network predicted the state itself."""
        return replace(self, logits=logits, words=None)

    def with_state(self, state: Tensor, words: Tensor | None = None) -> "Belief":
        return replace(self, state=state, words=words)


class Process(nn.Module, ABC):
    """How a state is corrupted, and where sampling starts. It is a module, so that a learned schedule is saved.

    `steps` names the step rules that the process understands (`samplers/steps.py`, `samplers/discrete_steps.py`)."""

    steps: tuple[str, ...]
    mask_id: int = -1  # the state that hides a token; −1: there is none
    reads_pairs = False  # whether it learns from which tokens follow each other
    linear = False  # whether its losses are weighted cross-entropies of masked words, and nothing else

    @property
    def masks(self) -> bool:
        return self.mask_id >= 0

    @abstractmethod
    def at(self, t: Times) -> Levels:
        """Noise levels at times t; levels are returned as they are."""

    @abstractmethod
    def draw_noise(self, noise: Noise, step: Step, shape: tuple[int, ...], stream: int = 0) -> Tensor:
        """The random numbers that a corruption or a step takes, for a state of this shape (without the batch)."""

    @abstractmethod
    def prior(self, t: Times, noise: Tensor) -> Tensor:
        """Where sampling starts."""

    @abstractmethod
    def corrupt(self, clean: Tensor, t: Times, noise: Tensor) -> Tensor:
        """q(x_t | x_0)."""

    @abstractmethod
    def display_tokens(self, x: Tensor, guess: Tensor, t: Times) -> Tensor:
        """The tokens to show of a state at time t, given the denoiser's guess."""

    def observe(self, counts: Tensor) -> None:
        """Learn from how often each token occurs."""

    def describe(self, device: torch.device) -> list[float]:
        """Some numbers that distinguish one noise curve from another."""
        raise NotImplementedError


class Codec(nn.Module):
    """A state has one row per text; the codec defines its other axes."""

    name: ClassVar[str] = ""  # in a recipe, unless it is registered under another
    vocabulary: int
    holds_tokens = False  # whether a state consists of tokens, so that known ones can be put into it
    predicts_tokens = True  # whether the network predicts logits
    state: State = "vectors"
    reads_pairs = False  # whether it learns from which tokens follow each other
    x0_std = 0.0  # how far x_0 spreads around the state of its token
    bias: Tensor  # [V] log-frequencies, learned
    raw: Tensor  # vectors of tokens
    view_dim: int
    adds_evidence = False  # to the network's logits

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary

    @abstractmethod
    def state_shape(self, width: int) -> tuple[int, ...]:
        """Shape of one text's state on a canvas of `width` positions."""

    @abstractmethod
    def encode(self, ids: Tensor) -> Tensor:
        """The clean state of tokens [B, L], without noise."""

    def evidence(self, x: Tensor, level: Levels) -> Tensor | None:
        """The evidence of each position's own noisy state for its token, [B, L, V], if the codec adds it to logits."""
        return None

    @abstractmethod
    def inputs(self, x: Tensor, level: Levels, evidence: Tensor | None) -> tuple[Tensor, ...]:
        """The network's inputs for a noisy state: the state itself first, then features derived from it."""

    @abstractmethod
    def belief(self, answer: Tensor, x: Tensor, level: Levels, evidence: Tensor | None, process: Process) -> Belief:
        """The belief that corresponds to the network's output."""

    def frozen(self) -> "Codec":
        """The codec for a model that is not trained, with everything precomputed that can be."""
        return self

    def frozen_tensors(self) -> list[Tensor]:
        """The tensors of `frozen`, with their current values."""
        return [self.raw]

    @abstractmethod
    def table(self) -> Tensor:
        """The vectors of all tokens, [V, D]: for maps of words, and to tell models apart."""

    @abstractmethod
    def expectation(self, logits: Tensor) -> Tensor:
        """The clean state in the mean under token logits."""

    @abstractmethod
    def view(self, x: Tensor, level: Levels) -> Tensor:
        """The input of a classifier for a noisy state, [B, L, view_dim]."""

    def clean_of(self, ids: Tensor) -> Tensor:
        """The clean state of a belief that is certain of these tokens."""
        return self.encode(ids)

    def nearest(self, x: Tensor, banned: Tensor | None = None) -> Tensor:
        """Ids of the tokens nearest to a clean state, `banned` [V] ones left out."""
        near = self.closeness(x)
        return (near if banned is None else near.masked_fill(banned, float("-inf"))).argmax(-1)

    def closeness(self, x: Tensor) -> Tensor:
        """How near each token is to a clean state, [B, L, V]."""
        return x

    def readout(self, x: Tensor) -> Tensor:
        """Rounding: log p(w | x_0) up to a constant."""
        return self.closeness(x)

    def picture(self, x: Tensor) -> Tensor | None:
        """States as grey pictures [B, rows, columns] of bytes, if they consist of pixels."""
        return None

    def token_mask(self, ids: Sequence[int]) -> Tensor:
        """True for these tokens, [V], on the codec's device."""
        return token_mask(self.vocabulary, tuple(ids), self.bias.device)


@lru_cache(64)
def token_mask(vocabulary: int, ids: tuple[int, ...], device: torch.device) -> Tensor:
    """True for these tokens, [V]; cached, since a copy from the host makes a GPU wait."""
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[list(ids)] = True
    return mask.to(device)


class Network(nn.Module):
    """Answers from what a codec makes of a noisy state, its times and its mask."""

    capturable = True  # whether its calls can be captured: nothing in it reads the device to decide what to do
    causal = False  # whether a position sees only those before it
    encodes_sources = False  # whether `encode` reads sources, to which texts attend
    has_word_head = False  # whether its last states can be asked for instead of words (`networks/head.py`)

    def equal_blocks(self) -> Sequence[nn.Module]:
        """Its parts that are alike, one after the other: a trainer compiles them one by one."""
        return [*dict(self.named_children()).get("blocks", nn.ModuleList()).children()]

    def position_parts(self) -> Sequence[nn.Module]:
        """The parts of its blocks that read every position, with the layers that can compute in eight bits."""
        return ()

    def begin_update(self, update: int) -> None:
        """Called before each update of training, counted from 0: what it sees may change."""


@dataclass(frozen=True)
class Order:
    """Where masks become words: in blocks of `block` positions, one after the other (0: anywhere), counted from the
    first position that is not given, or from this many positions before the canvas, [B, 1]. Words of at least the
    probability `sure` are written together by rules that use it."""

    block: int = 0
    before: Tensor | None = None
    sure: float = 0.9


@dataclass(frozen=True)
class StepState:
    """The inputs of a step from t to s, with the beliefs at t and one step earlier."""

    process: Any  # Gaussian or discrete: each rule is for one kind
    x: Tensor
    belief: Belief
    level: Levels  # at t
    next_level: Levels  # at s
    noise: Callable[[], Tensor]  # drawn only by the rules that need it
    last: tuple[Tensor, Levels] | None = None  # the clean state believed one step earlier, and its level
    ask: Callable[[Tensor, Levels], Belief] | None = None  # the denoiser, for rules that call it twice
    free: Tensor | None = None  # positions that are not given, [B, L]; None: all
    eta: float = 1.0  # the share of the ancestral step's spread that the rule draws as new noise
    order: Order | None = None  # where masks become words; None: anywhere

    @property
    def t(self) -> Tensor:
        return self.level.t

    @property
    def s(self) -> Tensor:
        return self.next_level.t


StepRule = Callable[[StepState], Tensor]
