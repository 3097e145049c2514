"""What every method says about itself."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from difflm.data.tokenizers import Tokenizer
    from difflm.models.base import LanguageModel


class Method(BaseModel):
    """A paper's choices as fields, and `build`, which turns them into a model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    paper: ClassVar[str]
    family: ClassVar[str]
    kind: ClassVar[Literal["method", "baseline", "classifier"]] = "method"
    bound: ClassVar[bool] = True  # whether its likelihood is exact or a true bound

    def has_bound(self) -> bool:
        """Whether a model with these very settings has a likelihood or a bound."""
        return self.bound

    def build(self, vocabulary: int, longest: int) -> "LanguageModel":
        """A fresh model for texts of at most `longest` tokens."""
        raise TypeError(f"{self.name} writes no texts")

    def start(self, model: "LanguageModel", tokenizer: "Tokenizer") -> None:
        """Give a fresh model what it begins to train with, beyond chance; most begin with nothing."""
