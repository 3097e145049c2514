"""The interface of every diffusion of tokens: the state is the ids themselves, [B, L].

Ids 0 … words − 1 are tokens; a process with masks has one state more, `mask_id` = words. A belief's logits are about
the clean token given all of x_t. What the network predicts from context alone is `belief.context`: that leave-one-out
vector replaces x_0 wherever a position's own noise is not a mask (docs/tokens.md)."""

from abc import abstractmethod

import torch
from torch import Tensor

from difflm.diffusion.base import Belief, Levels, Process, Times
from difflm.diffusion.noise import Noise, Step

NUMBERS = 3  # uniform numbers a position takes: one moves it, two together say where to
FINE = 2.0**-23  # what the counter's numbers cannot resolve
MANY, PART = 4096, 256  # states above which one is drawn in two steps, and of a part


class DiscreteProcess(Process):
    """Times s < t are [B] or [B, L] everywhere; nats are [B, L]."""

    steps: tuple[str, ...] = ("ancestral",)
    settles = False  # whether a word, once written, is final

    def __init__(self, words: int, states: int) -> None:
        super().__init__()
        self.words, self.states = words, states

    @abstractmethod
    def back(self, z: Tensor, x: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """q(x_t | x_s) q(x_s | x) normalised, [B, L, states], where x [B, L, words] replaces x_0: the posterior for one
        word, the model's step for a belief."""

    def posterior(self, z: Tensor, ids: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return self.back(z, one_hot_states(ids, self.words, t.dtype), t, s)

    @abstractmethod
    def survival(self, ids: Tensor, t: Tensor) -> Tensor:
        """α: the probability that each word has met no noise by t, [B, L]."""

    def at(self, t: Times) -> Levels:
        return Levels(t) if isinstance(t, Tensor) else t

    def read_pairs(self, pairs: Tensor) -> None:
        """Learn from how often each token precedes each other one, [words, words]; used with `reads_pairs`."""

    def draw_noise(self, noise: Noise, step: Step, shape: tuple[int, ...], stream: int = 0) -> Tensor:
        return noise.uniform(step, *shape, NUMBERS, stream=stream)

    def display_tokens(self, x: Tensor, guess: Tensor, t: Times) -> Tensor:
        """Words that are final, at t = 0 all of them, and guesses elsewhere."""
        final = x != self.mask_id
        return torch.where(final if self.settles else final & expand_to(self.at(t).t <= 0, x, final), x, guess)

    def describe(self, device: torch.device) -> list[float]:
        """How likely the middle word is still unchanged at five times."""
        ids = torch.full((5, 1), self.words // 2, device=device)
        return self.survival(ids, torch.linspace(0.1, 0.9, 5, device=device)).flatten().tolist()

    @abstractmethod
    def posterior_logits(self, logits: Tensor, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of p(w | x_t) behind the network's own [B, L, words], and that part of them which is evidence."""

    def reverse(self, z: Tensor, belief: Belief, t: Tensor, s: Tensor) -> Tensor:
        """p(x_s | x_t), [B, L, states]."""
        return self.back(z, belief.context.softmax(-1), t, s)

    def draw_step(self, z: Tensor, belief: Belief, t: Tensor, s: Tensor, fresh: Tensor) -> Tensor:
        return draw_transition(self.reverse(z, drawn_belief(belief, fresh), t, s), z, fresh)

    def prior_nats(self, ids: Tensor) -> Tensor:
        """KL(q(x_1 | x_0) ‖ prior)."""
        raise NotImplementedError(f"a bound needs {type(self).__name__}.prior_nats; without one, give bound=None")

    def rate_nats(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor) -> Tensor:
        """The integrand of the bound in continuous time."""
        raise NotImplementedError(f"a bound needs {type(self).__name__}.rate_nats; without one, give bound=None")

    def step_nats(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor, s: Tensor) -> Tensor:
        """KL(q(x_s | x_t, x_0) ‖ p(x_s | x_t)) of one step of a chain; at s = 0 it is −log p(x_0 | x_1)."""
        return kl_divergence(self.posterior(z, ids, t, s), self.reverse(z, belief, t, s))


def expand_to(value: Tensor, state: Tensor, like: Tensor) -> Tensor:
    """A quantity per text [B] or position [B, L], in the width of `like`, shaped to multiply [B, L] or [B, L, N]."""
    return value.to(like.dtype)[(...,) + (None,) * (state.dim() - value.dim())]


def certain_logits(ids: Tensor, words: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits without doubt: 0 at the token and −∞ elsewhere, [B, L, words]."""
    logits = torch.full((*ids.shape, words), float("-inf"), dtype=dtype, device=ids.device)
    return logits.scatter(-1, ids.unsqueeze(-1), 0.0)


CERTAIN = 1e4  # nats: a softmax leaves others nothing; if a rule forbids the word, the likeliest other one is left


def keep_visible(logits: Tensor, z: Tensor, mask_id: int) -> Tensor:
    """Logits that are certain of unmasked words, and unchanged at masks."""
    gain = torch.where(z == mask_id, 0.0, CERTAIN).to(logits.dtype)
    return logits.scatter_add(-1, z.clamp(max=logits.shape[-1] - 1).unsqueeze(-1), gain.unsqueeze(-1))


def one_hot_states(ids: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """1 at the state and 0 elsewhere, [B, L, size]; torch's own version would read the ids, and a GPU would wait."""
    return torch.zeros(*ids.shape, size, dtype=dtype, device=ids.device).scatter(-1, ids.unsqueeze(-1), 1.0)


def gather_tokens(values: Tensor, ids: Tensor) -> Tensor:
    """The entry of each position's token."""
    return values.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def kl_divergence(q: Tensor, p: Tensor) -> Tensor:
    """KL(q ‖ p) over the last axis; where q is 0, p does not matter."""
    tiny = torch.finfo(p.dtype).tiny
    return torch.where(q > 0, q * (q.clamp(min=tiny).log() - p.clamp(min=tiny).log()), 0.0).sum(-1)


def draw_transition(p: Tensor, z: Tensor, fresh: Tensor) -> Tensor:
    """Draw one state each from p [B, L, states], given the current one: first whether it changes, then to what. Gumbel
    noise in float32 over both at once cannot draw anything rarer than 2⁻²⁴, and in a long chain every single word is
    (Zheng et al., 2024)."""
    stay = gather_tokens(p, z)
    others = p.scatter(-1, z.unsqueeze(-1), 0.0)
    total = others.sum(-1, dtype=torch.float64)
    moves = (fresh[..., 0] * (stay + total.to(p.dtype)) >= stay) & (total > 0)
    return torch.where(moves, draw_states(others, fresh), z)


def draw_states(p: Tensor, fresh: Tensor) -> Tensor:
    """One state each from p [B, L, states], which need not sum to 1. Of many states a part is drawn first, then one
    within it: p is read once, and nothing of its size is written."""
    u, states = fresh[..., 1:2].double() + (fresh[..., 2:3].double() - 0.5) * FINE, p.shape[-1]
    if states <= MANY:
        shares = p.double().cumsum(-1)
        return find_share(shares, u * shares[..., -1:]).squeeze(-1)
    whole = states // PART * PART
    sums = p[..., :whole].unflatten(-1, (-1, PART)).sum(-1, dtype=torch.float64)
    sums = torch.cat([sums, p[..., whole:].sum(-1, keepdim=True, dtype=torch.float64)], -1)
    shares = sums.cumsum(-1)
    value = u * shares[..., -1:]
    part = find_share(shares, value)
    place = part * PART + torch.arange(PART, device=p.device)
    inside = (p.gather(-1, place.clamp(max=states - 1)).double() * (place < states)).cumsum(-1)
    found = find_share(inside, value - (shares - sums).gather(-1, part))
    last = (inside < inside[..., -1:]).sum(-1, keepdim=True)  # with a share: sums of another order may end before
    # Where p is not a number, still a state: the text is refused when it is read.
    return place.gather(-1, torch.minimum(found, last)).squeeze(-1).clamp(max=states - 1)


def draw_words(belief: Belief, fresh: Tensor, logits: Tensor | None = None) -> Tensor:
    """Draw a word each from the belief, or from other logits, [B, L]; words that are drawn jointly take precedence. The
    third random number is used, since the first two move x_t."""
    together = None if belief.draw is None else belief.draw(fresh[..., 2])
    if together is not None and belief.draws_all:
        return together
    words = draw_states(belief.shares if logits is None else logits.softmax(-1), fresh)
    return words if together is None else torch.where(together >= 0, together, words)


def drawn_belief(belief: Belief, fresh: Tensor) -> Belief:
    """The belief made certain of jointly drawn words: x_s then follows q(x_s | x_t, x_0)."""
    if belief.draw is None:
        return belief
    together = belief.draw(fresh[..., 2])
    sure = certain_logits(together.clamp(min=0), belief.logits.shape[-1], belief.logits.dtype)
    return belief.with_logits(torch.where((together >= 0).unsqueeze(-1), sure, belief.logits))


def find_share(shares: Tensor, value: Tensor) -> Tensor:
    """The first of sums [B, L, N] that exceeds a value [B, L, 1], by its number."""
    return torch.searchsorted(shares, value, right=True).clamp(max=shares.shape[-1] - 1)
