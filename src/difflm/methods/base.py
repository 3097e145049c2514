"""What every method says about itself."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from difflm.data.tokenizers import Tokenizer
    from difflm.diffusion.processes import DiscreteProcess
    from difflm.models.base import LanguageModel
else:  # for annotations alone: listing methods imports no torch
    DiscreteProcess = LanguageModel = Any


@dataclass(frozen=True)
class TextSpec:
    """What a model must hold: the number of token ids, and the most tokens of a text and of its source."""

    vocabulary: int
    longest: int
    source_longest: int = 0  # 0: texts have no source


class Method(BaseModel):
    """A paper's choices as fields, and `build`, which turns them into a model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    paper: ClassVar[str]
    family: ClassVar[str]
    kind: ClassVar[Literal["method", "baseline", "classifier"]] = "method"
    task: ClassVar[Literal["text", "seq2seq"]] = "text"  # seq2seq: every text is written from a source
    bound: ClassVar[bool] = True  # whether its likelihood is exact or a true bound

    def has_bound(self) -> bool:
        """Whether a model with these very settings has a likelihood or a bound."""
        return self.bound

    def build(self, texts: TextSpec) -> LanguageModel:
        """Compose an untrained model for such texts."""
        raise TypeError(f"{self.name} generates no texts")

    def start(self, model: LanguageModel, tokenizer: "Tokenizer") -> None:
        """Load pretrained weights into a model before its training begins; most methods have none."""
