"""What a control consists of. It compiles to at most four things: known tokens, an automaton of texts (or a rule for
single positions), an energy that steers, and a check of the printed text. A plan is their product."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, lru_cache
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, ClassVar

from difflm.data.labels import Labelling
from difflm.data.tokenizers import Tokenizer
from difflm.data.words import Given
from difflm.errors import UsageError
from difflm.runtime.work import Refused, share_budget

if TYPE_CHECKING:
    from torch import Tensor

    from difflm.controls.patterns.token_automata import TokenAutomaton
    from difflm.diffusion.codecs import Codec
    from difflm.diffusion.samplers.loop import Transform

Prior = tuple["Tensor", Sequence[int]]  # how often words have labels, [V, labels], and the label asked of each position
Wanted = int | Sequence[int] | Sequence[Sequence[int]]  # labels that guidance aims at, as ids
IMPOSED = ("length", "rule", "automaton", "verbatim")  # methods that ensure what a control asks for
MAX_REFUSED = 256  # requests that are remembered
WORDS, CHARACTERS = "words of the printed text", "characters of the printed text"


@dataclass(frozen=True)
class Check:
    """Whether a finished text complies, judged by a checker that took no part in generating it."""

    satisfied: bool | None  # None: nothing can tell
    score: float | None  # 0 to 1
    checker: str


@dataclass(frozen=True)
class ModelInfo:
    """The model that a control is applied to."""

    tokenizer: Tokenizer
    max_words: int  # the largest number of words of a text
    first: int  # canvas position of the first word
    labels: Mapping[str, Labelling] = field(default_factory=dict)  # what its classifiers know
    word_labels: "Mapping[str, Tensor]" = field(default_factory=dict)  # how often a word has a tag, [V, labels]
    told: Sequence[Labelling] = ()  # labels that it has learned to read in a prompt


@dataclass(frozen=True)
class KnownTokens:
    """The tokens of a text that are known: parts, with gaps between them, in the order of the text."""

    parts: Sequence[Sequence[int]]
    sizes: Sequence[int]  # tokens of each gap; of a free one, the fewest
    free: Sequence[bool]  # which gaps may be wider
    most: int  # tokens of the whole text
    given: Sequence[Given]  # what each part gives, by places from its beginning

    @cached_property
    def least(self) -> int:
        return sum(map(len, self.parts)) + sum(self.sizes)

    def join(self, gaps: Iterable[Sequence[int]]) -> list[int]:
        """The items of a text with these items in its gaps."""
        return [*chain(*chain(*zip(self.parts, [*gaps, ()], strict=True)))]

    def place(self, widths: Sequence[int]) -> tuple[int, dict[int, int], Given]:
        """The number of tokens if the free gaps have these widths, the known tokens by position, and what is given."""
        left, place = iter(widths), 0
        ids, given = dict[int, int](), dict[int, tuple[str | None, str | None]]()
        gaps = [next(left) if free else size for size, free in zip(self.sizes, self.free, strict=True)]
        for part, own, gap in zip(self.parts, self.given, [*gaps, 0], strict=True):
            ids |= {place + k: token for k, token in enumerate(part)}
            given |= {place + k: word for k, word in own.items()}
            place += len(part) + gap
        return place, ids, given


@dataclass(frozen=True)
class Canvas:
    """The positions of a batch's texts."""

    mask: "Tensor"  # [B, W] positions that exist
    first: int  # position of the first word
    known: "Tensor | None" = None  # [B, W] the ids of words that are already known, FREE elsewhere

    @property
    def settled(self) -> "Tensor":
        """[B, W] positions whose word is already known."""
        return self.mask & False if self.known is None else self.known >= 0

    def rows(self, part: slice) -> "Canvas":
        return Canvas(self.mask[part], self.first, None if self.known is None else self.known[part])


def need_text(value: object, example: str) -> str:
    """Return a control's text; anything else is an error."""
    if not isinstance(value, str):
        raise UsageError(f"{example.partition('(')[0]} takes text, such as {example}, not {value!r}.")
    return value


def need_number(value: object, example: str) -> int:
    """Return a control's whole number, which may be given as text."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value.strip()[:9])  # longer numbers are too large anyway
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise UsageError(f"{example.partition('(')[0]} takes a whole number, such as {example}, not {value!r}.")
    return int(value)


class Control(ABC):
    """A request for a property of texts. Subclasses are frozen values, and are combined by listing them."""

    name: ClassVar[str] = ""

    head: str | None = None  # the head of a classifier that guides towards it
    forbids: str = ""  # a word that must not appear
    reads_text: ClassVar[bool] = False  # whether `check` reads the printed text instead of its words
    whole: ClassVar[bool] = False  # whether there must be no other spans than the requested ones
    keeps_text: ClassVar[bool] = False  # whether text of the user stays as it is
    counts: int | None = None  # if it counts words between spaces: how many more than the fewest there may be
    needs_automaton: bool = False  # whether no rule for single positions can enforce it

    @property
    def target(self) -> object:
        """The requested value as JSON: the first field of a dataclass, unless a subclass says otherwise."""
        own = fields(self) if is_dataclass(self) else ()
        return getattr(self, own[0].name) if own else None

    @classmethod
    def parse(cls, value: str) -> "Control":
        """Read the VALUE of `--control NAME=VALUE`, the option for registered controls."""
        raise UsageError(f"{cls.name} cannot be given as NAME=VALUE: use its own option, or Python.")

    def check_value(self) -> None:  # noqa: B027 (most controls take any value)
        """Reject what no model can do, so that none is loaded for it; `prepare` rejects it, too."""

    def check_labels(self, labels: Mapping[str, Labelling]) -> None:  # noqa: B027
        """Reject a label that none of the model's classifiers knows, so that no model is loaded for it."""

    def check_words(self, least: int, info: ModelInfo) -> None:  # noqa: B027
        """Reject a number of words between spaces that no text of a model has, or none in which `least` words are."""

    def bind(self, info: ModelInfo) -> "Control":
        """The same request in terms of this model's tokens."""
        return self

    def prepare(self, info: ModelInfo) -> None:
        """Reject, before any sampling, what this model cannot do."""
        self.check_value()
        if self.head and self.head not in info.labels:
            raise UsageError(f"{self.name}: no classifier knows the label {self.head!r}. Give one with --guide DIR.")

    def length(self, info: ModelInfo) -> int | None:
        """The number of tokens, if the control determines it."""
        return None

    def min_length(self, info: ModelInfo) -> int:
        """The fewest tokens of a text that can comply."""
        return 1

    def given(self) -> str:
        """Text of the user that stays as it is."""
        return ""

    def verbatim(self, info: ModelInfo) -> str | None:
        """Words that must appear verbatim; those of all controls are placed together."""
        return None

    def wordings(self, info: ModelInfo) -> Sequence[str]:
        """Ways to express it. Together with a control of every word, one of them must appear: otherwise a step that
        suits many words a little would win over the one that expresses this."""
        return ()

    def automaton(self, info: ModelInfo) -> "TokenAutomaton | None":
        """The texts that comply. If any control needs an automaton, the product of all of them is imposed."""
        return None

    def bans(self, info: ModelInfo) -> Sequence[int] | None:
        """The tokens that it forbids, if it asks for nothing else."""
        return None

    def prior(self, info: ModelInfo) -> Prior | None:
        """What single words say about it."""
        return None

    def rule(self, codec: "Codec", info: ModelInfo, canvas: Canvas) -> "Transform | None":
        """The rule that it imposes on every belief."""
        return None

    # log p(it holds), [B], of texts of which each word has a probability, [B, L, V], at some positions [B, L], for a
    # ModelInfo: any function with a gradient, which is climbed.
    energy: ClassVar[Callable[..., "Tensor"] | None] = None

    def wanted(self, info: ModelInfo) -> Wanted | None:
        """The labels under `head` that guidance aims at, as ids: one for the text, one per word, or [first, last,
        label] for each span, with further labels if any of them will do."""
        return None

    @property
    def guarantee(self) -> str:
        """What it compiles to ensures: "steered" by an energy, "exact" by anything else, "none" by a check alone."""
        if self.head or self.energy:
            return "steered"
        own = (getattr(type(self), part) is not getattr(Control, part) for part in IMPOSED)
        return "exact" if any(own) else "none"

    @abstractmethod
    def check(self, words: Sequence[str]) -> Check:
        """Check a finished text; `words` are those of the printed text."""

    def __str__(self) -> str:
        return f"{self.name} {self.target}"


class Exact(Control):
    """A control whose check reads the printed text and knows no degrees."""

    reads_text = True

    @abstractmethod
    def judge(self, text: str) -> tuple[bool, str]:
        """Whether a printed text complies, and who says so."""

    def check(self, words: Sequence[str]) -> Check:
        assert isinstance(words, str)
        complies, checker = self.judge(words)
        return Check(complies, float(complies), checker)


class KnownText(Control):
    """A text of which some tokens are known: a template with gaps, or an edited text."""

    parts: Sequence[str]  # what is kept of it
    keeps_text = True

    @abstractmethod
    def texts(self, tokenizer: Tokenizer) -> Sequence[str]:
        """The given texts as the model reads them."""

    @abstractmethod
    def known(self, info: ModelInfo) -> KnownTokens:
        """What is known of its tokens."""

    def length(self, info: ModelInfo) -> int | None:
        known = self.known(info)
        return None if any(known.free) else known.least

    def min_length(self, info: ModelInfo) -> int:
        return self.known(info).least


@lru_cache(MAX_REFUSED)
def remember_refusal(asked: Hashable) -> list[str]:
    """Where it is noted why a request was refused."""
    return []


@contextmanager
def prepare_together(controls: Sequence[Control], info: ModelInfo, edit: object = None) -> Iterator[None]:
    """What is prepared inside for the controls of a request shares one budget of work, and if it is refused, it is
    refused at once the next time: a few requests are remembered, if they can be."""
    try:
        told = remember_refusal((info.tokenizer, info.max_words, info.first, tuple(controls), edit))
    except TypeError:
        told = []
    if told:
        raise Refused(told[0])
    try:
        with share_budget(", ".join(dict.fromkeys(c.name for c in controls))):
            yield
    except Refused as error:
        told.append(str(error.args[0]))
        raise
