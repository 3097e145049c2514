"""Forward–backward over an automaton: beliefs of single positions, given that the whole text is accepted.

Positions are independent under a belief, so that everything is exact: log Z = log P(accepted), the marginals, a joint
draw, the likeliest text. In log space, whose floor stands for what is impossible; nothing reads the device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from difflm.diffusion.samplers.left_to_right import draw_by_inverse_cdf

IMPOSSIBLE = -1e30  # nats; finite, since −∞ − (−∞) is no number
UNLIKELY = 1e5  # nats below the likeliest: what other rules forbid is taken only where nothing else is accepted


@dataclass(frozen=True)
class TokenChain:
    """An automaton as tensors. State 0 is the start, the last one is never left; tokens of the last class are never
    read."""

    classes: Tensor  # [V]
    table: Tensor  # [S, C] the next state
    accepting: Tensor  # [S]
    edges: Tensor  # [3, E] of each transition the state, the class and the next state

    def log_classes(self, log_p: Tensor) -> Tensor:
        """log probabilities of the classes, [B, L, C], from those of the tokens [B, L, V]."""
        return scatter_logsumexp(log_p, self.classes, self.table.shape[1])

    def step_back(self, later: Tensor, log_q: Tensor, combine: "Combine") -> Tensor:
        """One position towards the start: messages [B, S], from those behind it and the classes' chances [B, C]."""
        begin, kind, end = self.edges
        return combine(later[:, end] + log_q[:, kind], begin, len(self.table))

    def step_on(self, earlier: Tensor, log_q: Tensor) -> Tensor:
        begin, kind, end = self.edges
        return scatter_logsumexp(earlier[:, begin] + log_q[:, kind], end, len(self.table))

    def backward_messages(self, log_q: Tensor, inside: Tensor, combine: "Combine") -> list[Tensor]:
        """Messages [B, S] behind each position, the last ones first made: log P(accepted | state there). Positions that
        are not `inside` [B, L] are passed over."""
        last = torch.where(self.accepting, 0.0, IMPOSSIBLE).expand(len(log_q), -1)
        found = [last]
        for i in reversed(range(log_q.shape[1])):
            found.append(torch.where(inside[:, i, None], self.step_back(found[-1], log_q[:, i], combine), found[-1]))
        return found[::-1]

    def choose_tokens(
        self, log_p: Tensor, inside: Tensor, messages: list[Tensor], choose: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """A token at every position [B, L], chosen one after the other by its log probability and that of what then
        follows, [B, V]."""
        state, found = torch.zeros_like(inside[:, 0], dtype=torch.long), []
        for i in range(log_p.shape[1]):
            follows = messages[i + 1].gather(1, self.table[state])
            token = choose(log_p[:, i] + follows[:, self.classes], i)
            state = torch.where(inside[:, i], self.table[state, self.classes[token]], state)
            found.append(token)
        return torch.stack(found, 1)


Combine = Callable[[Tensor, Tensor, int], Tensor]


def scatter_logsumexp(values: Tensor, index: Tensor, size: int) -> Tensor:
    """log Σ exp of the values [..., N] that share an index [N], [..., size]."""
    at = index.expand(values.shape)
    top = scatter_max(values, index, size)
    total = torch.zeros_like(top).scatter_add(-1, at, (values - top.gather(-1, at)).exp())
    return (top + total.clamp(min=1e-30).log()).clamp(min=IMPOSSIBLE)


def scatter_max(values: Tensor, index: Tensor, size: int) -> Tensor:
    lowest = values.new_full((*values.shape[:-1], size), IMPOSSIBLE)
    return lowest.scatter_reduce(-1, index.expand(values.shape), values, "amax")


def floor_logits(logits: Tensor) -> Tensor:
    """Logits in float32 in which nothing is quite impossible."""
    logits = logits.float()
    return torch.maximum(logits, logits.amax(-1, keepdim=True) - UNLIKELY)


def log_evidence(chain: TokenChain, logits: Tensor, inside: Tensor) -> Tensor:
    """log P(accepted), [B]."""
    log_q = chain.log_classes(floor_logits(logits).log_softmax(-1))
    return chain.backward_messages(log_q, inside, scatter_logsumexp)[0][:, 0]


def posterior_logits(chain: TokenChain, logits: Tensor, inside: Tensor) -> Tensor:
    """Logits of each position's token, given that the text is accepted: a number is added for each class, the largest
    of them 0, so that a pattern that tells nothing changes no bit."""
    logits = floor_logits(logits)
    log_q = chain.log_classes(logits.log_softmax(-1))
    messages = chain.backward_messages(log_q, inside, scatter_logsumexp)
    begin, kind, end = chain.edges
    states = torch.arange(len(chain.table), device=logits.device)
    earlier, factors = torch.where(states == 0, 0.0, IMPOSSIBLE).expand(len(logits), -1), []
    for i in range(logits.shape[1]):
        both = earlier[:, begin] + messages[i + 1][:, end]
        factor = scatter_logsumexp(both, kind, chain.table.shape[1])
        factors.append(factor - factor.amax(-1, keepdim=True))
        # Only sums of messages matter, so that each is made relative to its largest.
        on = chain.step_on(earlier, log_q[:, i])
        earlier = torch.where(inside[:, i, None], (on - on.amax(-1, keepdim=True)).clamp(min=IMPOSSIBLE), earlier)
    factor = torch.stack(factors, 1)
    factor = factor.masked_fill(factor < IMPOSSIBLE / 2, float("-inf"))
    return torch.where(inside.unsqueeze(-1), logits + factor[..., chain.classes], logits)


def draw_accepted(chain: TokenChain, logits: Tensor, inside: Tensor, u: Tensor) -> Tensor:
    """A text [B, L] from the belief, given that it is accepted, by uniform numbers [B, L]."""
    log_p = floor_logits(logits).log_softmax(-1)
    messages = chain.backward_messages(chain.log_classes(log_p), inside, scatter_logsumexp)
    return chain.choose_tokens(
        log_p, inside, messages, lambda scores, i: draw_by_inverse_cdf(scores.softmax(-1), u[:, i])
    )


def likeliest_accepted(chain: TokenChain, logits: Tensor, inside: Tensor) -> Tensor:
    """The likeliest text that is accepted, [B, L] (Viterbi, 1967)."""
    log_p = floor_logits(logits).log_softmax(-1)
    log_q = scatter_max(log_p, chain.classes, chain.table.shape[1])
    messages = chain.backward_messages(log_q, inside, scatter_max)
    return chain.choose_tokens(log_p, inside, messages, lambda scores, i: scores.argmax(-1))
