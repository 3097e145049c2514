"""The results of generation in Python: texts, how they were generated, and the model's beliefs about their words."""

import html
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from difflm.errors import UsageError
from difflm.player.frames import PlayedText
from difflm.player.page import page


@dataclass(frozen=True)
class Repaired:
    """The likeliest version of a text that a left-to-right model has repaired, as ids."""

    ids: list[int]
    nats_per_token: float  # END included; also those by which its writer expected other words more, weighed
    readings: int  # versions that were read, and one more if the writer was asked what it expects


@dataclass(frozen=True)
class TokenBelief:
    """A model's belief about one token of a finished text, given all other tokens."""

    token: str
    probability: float
    alternatives: dict[str, float]  # the likeliest tokens and their probabilities, best first

    def __repr__(self) -> str:
        likely = ", ".join(f"{token!r} {p:.0%}" for token, p in self.alternatives.items())
        return f"{self.token!r} {self.probability:.0%} ({likely})"


@dataclass(frozen=True, repr=False)
class Generation(PlayedText):
    """One text and how it was generated; it prints as its text."""

    read: Callable[..., list[TokenBelief]] | None = field(default=None, compare=False)  # computes `alternatives`

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        met = [bool(one["satisfied"]) for one in self.controls if one["satisfied"] is not None]
        checked = f", {sum(met)} of {len(met)} controls met" if met else ""
        return f"Generation({self.text!r}, seed {self.seed}, {self.steps} steps{checked})"

    def __getstate__(self) -> dict[str, object]:
        """What a pickle or a deep copy keeps: everything but the model, which `read` calls."""
        return {**self.__dict__, "read": None}

    def _repr_html_(self) -> str:
        return Texts([self])._repr_html_()

    @cached_property
    def alternatives(self) -> list[TokenBelief]:
        """For each token of the text, its probability given all others, and likelier tokens in its place. The model is
        called once."""
        if self.read is None:
            raise UsageError("this text, or its copy, has no model: use lm.alternatives(text).")
        return self.read()


class Texts(list[Generation]):
    """A list of texts. A notebook shows the texts, and plays them if they contain their drafts."""

    def __repr__(self) -> str:
        return "\n".join(repr(text) for text in self)

    def _repr_html_(self) -> str:
        if not self or not all(text.drafts for text in self):
            return "".join(f"<p>{html.escape(text.text)}</p>" for text in self)
        framed = html.escape(page(self, {}).decode("utf-8"))
        return f'<iframe srcdoc="{framed}" style="width: 100%; height: 38em; border: 0"></iframe>'
