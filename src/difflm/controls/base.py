"""What is asked of a text: a rule to impose while it forms, an energy to descend, and a check once it is there."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar

from difflm.data.labels import Kind, Labelling
from difflm.data.tokenizers import Tokenizer, Words
from difflm.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from difflm.data.token_automata import TokenAutomaton
    from difflm.diffusion.codecs import Codec
    from difflm.diffusion.samplers.loop import Transform


@dataclass(frozen=True)
class Check:
    """Whether a finished text obeys, found by something that had no part in making it. `satisfied` is None where the
    checker is not installed."""

    satisfied: bool | None
    score: float | None  # 0 to 1
    checker: str


@dataclass(frozen=True)
class ModelInfo:
    """The model that a control is asked of."""

    tokenizer: Tokenizer
    max_words: int  # the most words of a text
    first: int  # canvas position of the first word
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)  # what its classifiers tell apart
    word_labels: "Mapping[str, Tensor]" = field(default_factory=dict)  # how often a word bears a tag, [V, labels]
    kinds: "Mapping[str, Kind]" = field(default_factory=dict)  # whether a label is of texts, words or spans
    told: Sequence[Labelling] = ()  # labels that it has learned to read in a prompt

    @property
    def whole_words(self) -> bool:
        """Whether one token is one word, so that words can be counted before they are there."""
        return isinstance(self.tokenizer, Words)

    @property
    def unit(self) -> str:
        """What its tokens are called."""
        return self.tokenizer.kind if self.tokenizer.kind in ("words", "characters") else "tokens"


@dataclass(frozen=True)
class Canvas:
    """The positions of a batch's texts."""

    mask: "Tensor"  # [B, W] positions that exist
    first: int  # position of the first word
    settled: "Tensor"  # [B, W] positions whose word is known already
    known: "Tensor | None" = None  # [B, W] their ids, FREE elsewhere

    def rows(self, part: slice) -> "Canvas":
        known = None if self.known is None else self.known[part]
        return Canvas(self.mask[part], self.first, self.settled[part], known)


def need_text(value: Any, example: str) -> str:
    """A control's text as it is given; anything else is refused."""
    if not isinstance(value, str):
        name = example.partition("(")[0]
        raise UsageError(f"{name} takes text, such as {example}, not {value!r}.")
    return value


def need_number(value: Any, example: str) -> int:
    """A control's whole number, also one that is written as text."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value.strip()[:9])  # more digits are too many anyway
    if not isinstance(value, Integral) or isinstance(value, bool):
        name = example.partition("(")[0]
        raise UsageError(f"{name} takes a whole number, such as {example}, not {value!r}.")
    return int(value)


class Control(ABC):
    """Subclasses are frozen values: what a person asks. They compose by being listed."""

    name: ClassVar[str]

    head: str | None = None  # the head of a classifier that guides towards it
    reads_text: ClassVar[bool] = False  # whether `check` judges the printed text itself and not its words
    whole: ClassVar[bool] = False  # whether the spans it asks for shall be the only ones

    @property
    def target(self) -> Any:
        """What is asked, as JSON: of a dataclass, its first field, unless a subclass says otherwise."""
        return getattr(self, fields(self)[0].name)  # type: ignore[arg-type]

    @classmethod
    def parse(cls, value: str) -> "Control":
        """Read the VALUE of `--control NAME=VALUE`, by which a registered control is asked for outside Python."""
        raise UsageError(f"{cls.name} cannot be given as NAME=VALUE: use its own option, or Python.")

    @abstractmethod
    def check(self, words: Sequence[str]) -> Check:
        """`words` are those of the printed text."""

    def prepare(self, info: ModelInfo) -> None:  # noqa: B027 (most controls have nothing to refuse)
        """Refuse, before any sampling, what this model cannot do."""

    def length(self, info: ModelInfo) -> int | None:
        """The number of tokens it settles by itself."""
        return None

    def min_length(self, info: ModelInfo) -> int:
        """The fewest tokens of a text that can obey."""
        return 1

    def verbatim(self, info: ModelInfo) -> str | None:
        """Words that must appear exactly so; those of all controls are placed together."""
        return None

    def wordings(self, info: ModelInfo) -> Sequence[str]:
        """Ways to say it. Beside a control that speaks of every word one of them must appear, or a step that suits many
        words a little would win over the one that says this."""
        return ()

    def rule(self, codec: "Codec", info: ModelInfo, canvas: Canvas) -> "Transform | None":
        """What it imposes on every belief."""
        return None

    def automaton(self, info: ModelInfo) -> "TokenAutomaton | None":
        """The texts that comply, as an automaton, for use together with a pattern, whose rule then enforces both."""
        return None

    def wanted(self, info: ModelInfo) -> Any:
        """The labels under `head` that guidance climbs towards, as ids: one of the text, one a word, or
        [first, last, label] for each span, with further labels where any of them will do."""
        return None

    def __str__(self) -> str:
        return f"{self.name} {self.target}"
