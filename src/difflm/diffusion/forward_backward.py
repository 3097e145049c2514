"""Forward–backward over an automaton: beliefs of single positions, given that the whole text is accepted.

Positions are independent under a belief, so that everything is exact: log Z = log P(accepted), the marginals, a joint
draw, the likeliest text. Messages go from state to state along padded lists of transitions: nothing is added in an
order that a device chooses, nothing reads the device, and but for two passes over the positions all of them are worked
out at once. In log space, whose floor stands for what is impossible."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import draw_by_inverse_cdf

IMPOSSIBLE = -1e30  # nats; finite, since −∞ − (−∞) is NaN
UNLIKELY = 1e5  # nats below the likeliest: what other rules forbid is used only if nothing else is accepted


@dataclass(frozen=True)
class TokenChain:
    """An automaton of S states and C classes as tensors; state 0 is the start. Transitions are listed by where they
    begin and by their class. Two classes are added: `C` leaves a state unchanged, for positions outside the text, and
    `C + 1`, which is impossible, pads the lists."""

    classes: Tensor  # [V]
    accepting: Tensor  # [S]
    chunks: tuple[Tensor, ...]  # which tokens, then which of those groups, are summed up; at last a group is a class
    next_states: Tensor  # [S, K] where the transitions of each state lead
    next_classes: Tensor  # [S, K]
    arrivals: tuple[Tensor, ...]  # which of these S · K transitions, then which of their sums, lead to each state
    class_begins: Tensor  # [C, I] of each class the transitions
    class_ends: Tensor  # [C, I]
    class_real: Tensor  # [C, I] which of them are not padding

    def pass_messages(self, logits: Tensor, inside: Tensor) -> "Messages":
        """Compute the messages for beliefs [B, L, V] about texts at the positions `inside` [B, L]."""
        top = logits.float().amax(-1, keepdim=True).clamp(min=IMPOSSIBLE)
        log_p = torch.maximum(logits.float() - top, torch.full_like(top, -UNLIKELY))
        first, *more = self.chunks
        tokens = pick(pad(log_p, (0, 1), value=IMPOSSIBLE), first)
        sums, maxima = tokens.logsumexp(-1), tokens.amax(-1)
        for chunk in more:
            sums, maxima = pick(sums, chunk).logsumexp(-1), pick(maxima, chunk).amax(-1)
        total = sums.logsumexp(-1)
        # Messages stay small numbers where each position's likeliest class that can be read has log probability 0.
        shift = sums[..., :-1].amax(-1, keepdim=True).clamp(min=-2 * UNLIKELY)
        both, here = torch.stack([sums, maxima]) - shift, inside.unsqueeze(-1)
        stay = torch.where(here, IMPOSSIBLE, torch.zeros_like(shift)).expand(2, *shift.shape)
        both = torch.cat([torch.where(here, both, IMPOSSIBLE), stay, torch.full_like(stay, IMPOSSIBLE)], -1)
        norm = (inside * (shift.squeeze(-1) - total)).sum(-1)
        return Messages(self, log_p, inside, both, self.backward(both), norm, top - UNLIKELY)

    def backward(self, log_q: Tensor) -> Tensor:
        """Messages [2, B, L + 1, S] from the last position to the first: log P(accepted | state), and log p of the
        likeliest way to be accepted; `log_q` [2, B, L, C + 2] are the classes' chances."""
        last = torch.where(self.accepting, 0.0, IMPOSSIBLE).expand(*log_q.shape[:2], -1)
        found = [last]
        for i in reversed(range(log_q.shape[2])):
            ways = pick(found[-1], self.next_states) + pick(log_q[:, :, i], self.next_classes)
            best = ways.amax(-1)
            total = best[0] + (ways[0] - best[0].unsqueeze(-1)).exp().sum(-1).log()
            found.append(torch.stack([total, best[1]]))
        return torch.stack(found[::-1], 2)

    def forward(self, messages: "Messages") -> Tensor:
        """P(state | accepted) before each position, [B, L, S]."""
        steps = messages.steps
        states = torch.arange(len(self.accepting), device=steps.device)
        found = [(states == 0).float().expand(len(steps), -1)]
        for i in range(steps.shape[1] - 1):
            flow = (found[-1].unsqueeze(-1) * steps[:, i]).flatten(1)
            for group in self.arrivals:
                flow = pick(flow, group).sum(-1)
            found.append(flow)
        return torch.stack(found, 1)

    def follow(self, choice: Tensor) -> Tensor:
        """The state before each position, [B, L, 1], where `choice` [B, L, S] says which transition each state takes:
        steps are joined two by two, then four by four, and so on."""
        lead = self.next_states.expand(*choice.shape, -1).gather(-1, choice.unsqueeze(-1)).squeeze(-1)
        wide = 1
        while wide < lead.shape[1]:
            lead = torch.cat([lead[:, :wide], lead[:, wide:].gather(-1, lead[:, :-wide])], 1)
            wide *= 2
        return pad(lead[:, :-1, :1], (0, 0, 1, 0))

    def classes_at(self, states: Tensor, choice: Tensor) -> Tensor:
        """The classes [B, L, 1] of the transitions that are taken in these states."""
        return self.next_classes[states.squeeze(-1)].gather(-1, choice.gather(-1, states))


def pick(values: Tensor, index: Tensor) -> Tensor:
    """values[..., index]"""
    return values.index_select(-1, index.flatten()).view(*values.shape[:-1], *index.shape)


@dataclass(frozen=True)
class Messages:
    """The messages of an automaton about a belief."""

    chain: TokenChain
    log_p: Tensor  # [B, L, V] relative to the likeliest token
    inside: Tensor  # [B, L]
    log_q: Tensor  # [2, B, L, C + 2] log probabilities of the classes, and those of their likeliest tokens
    later: Tensor  # [2, B, L + 1, S]
    norm: Tensor  # [B]
    lowest: Tensor  # [B, L, 1] the least logit that a token is taken to have

    @cached_property
    def steps(self) -> Tensor:
        """P(transition | its first state, accepted), [B, L, S, K]."""
        chain, later = self.chain, self.later[0]
        ways = pick(later[:, 1:], chain.next_states) + pick(self.log_q[0], chain.next_classes)
        return (ways - later[:, :-1].unsqueeze(-1)).clamp(max=0.0).exp()

    def log_evidence(self) -> Tensor:
        """log P(accepted), [B]."""
        return self.later[0, :, 0, 0] + self.norm

    def posterior_logits(self, logits: Tensor) -> Tensor:
        """Logits of each position's token, given that the text is accepted: a number is added for each class, the
        largest of them 0, so that a pattern that tells nothing changes no bit."""
        chain, later = self.chain, self.later[0]
        reached = chain.forward(self)
        earlier = torch.where(reached > 0, reached.log(), IMPOSSIBLE) - later[:, :-1]
        ways = pick(earlier, chain.class_begins) + pick(later[:, 1:], chain.class_ends)
        factor = torch.where(chain.class_real, ways, IMPOSSIBLE).logsumexp(-1)
        factor = factor - factor.amax(-1, keepdim=True)
        factor = factor.masked_fill(factor < IMPOSSIBLE / 2, float("-inf"))
        floored = torch.maximum(logits.float(), self.lowest)
        return torch.where(self.inside.unsqueeze(-1), floored + pick(factor, chain.classes), logits.float())

    def draw(self, u: Tensor) -> Tensor:
        """A text [B, L] from the belief, given that it is accepted, by uniform numbers [B, L]; FREE outside."""
        shares = self.steps.double().cumsum(-1)
        target = u.double()[..., None, None] * shares[..., -1:]
        choice = (shares <= target).sum(-1).clamp(max=shares.shape[-1] - 1)
        states = self.chain.follow(choice)
        own = shares.gather(2, states.unsqueeze(-1).expand(*states.shape, shares.shape[-1])).squeeze(2)
        chosen = choice.gather(-1, states)
        below = torch.where(chosen > 0, own.gather(-1, (chosen - 1).clamp(min=0)), 0.0)
        # Where each number lies in the share of its class is another uniform number.
        rest = (target.squeeze(-1).gather(-1, states) - below) / (own.gather(-1, chosen) - below).clamp(min=1e-300)
        other = self.chain.classes != self.chain.classes_at(states, choice)
        log_p = self.log_p.masked_fill(other, IMPOSSIBLE)
        p = (log_p - log_p.amax(-1, keepdim=True)).exp()
        tokens = draw_by_inverse_cdf(p, rest.squeeze(-1).clamp(0, 1 - 1e-9))
        return torch.where(self.inside, tokens, FREE)

    def likeliest(self) -> Tensor:
        """The likeliest text that is accepted (Viterbi, 1967), [B, L]; the likeliest tokens outside."""
        chain = self.chain
        choice = (pick(self.later[1, :, 1:], chain.next_states) + pick(self.log_q[1], chain.next_classes)).argmax(-1)
        kinds = chain.classes_at(chain.follow(choice), choice)
        other = (chain.classes != kinds) & self.inside.unsqueeze(-1)
        return self.log_p.masked_fill(other, IMPOSSIBLE).argmax(-1)
