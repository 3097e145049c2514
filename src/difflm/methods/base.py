"""What every method says about itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from difflm.runtime.files import read_own_table

if TYPE_CHECKING:  # what a method is can be read without torch
    from difflm.data.tokenizers import Tokenizer
    from difflm.models.base import LanguageModel

Row = dict[str, Any]  # a method's line of the table
LISTED: dict[str, Row] = read_own_table("methods.yaml", __file__)


@dataclass(frozen=True)
class TextSpec:
    """The sizes that a model must support: the number of token ids, the most tokens of a text and of its source, and
    the number of token ids of sources."""

    vocabulary: int
    longest: int
    source_longest: int = 0  # 0: texts have no source
    source_vocabulary: int = 0  # 0: that of the texts
    tokenizer: "Tokenizer | None" = None  # for methods that represent tokens by more than their numbers


class Method(BaseModel):
    """A paper's choices as fields, and `build`, which turns them into a model."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    family: ClassVar[str] = ""
    kind: ClassVar[Literal["method", "baseline", "classifier", "adapter"]] = "method"
    # seq2seq: every text is written from a source; either: as the recipe says
    task: ClassVar[Literal["text", "seq2seq", "either"]] = "text"
    one_canvas: ClassVar[bool] = False  # whether source and text share one canvas and its embedding
    reads_prompts: ClassVar[bool] = False  # whether texts can be trained with prompts
    packs: ClassVar[bool] = False  # whether a row may hold several documents, each trained separately
    packs_pretrained: ClassVar[bool] = False  # the same of a model that starts from somebody else's network
    most_words: ClassVar[int] = 0  # the largest number of words of a text, where that is more than training had
    begins_with: ClassVar[tuple[str, ...]] = ()  # other methods whose networks it can start from (init=RUN)
    bound: ClassVar[bool] = True  # whether its likelihood is exact or a true bound
    unbound_by: ClassVar[str] = ""  # the setting without which it has one
    # The field for the config of its pretrained model; what reads that of a directory, and what sizes it says.
    keeps: ClassVar[tuple[str, Callable[[str], Row], Callable[[Row], Row]] | None] = None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        """What `methods.yaml` says of this name belongs to the class."""
        for key, value in LISTED.get(vars(cls).get("name", ""), {}).items():
            if key != "class" and key not in vars(cls):
                setattr(cls, key, value)

    @model_validator(mode="before")
    @classmethod
    def _keep_config(cls, values: object) -> object:
        """Settings with the config of the pretrained model: read of its directory, unless a run has kept it."""
        if cls.keeps is None or not isinstance(values, dict) or not values.get("pretrained"):
            return values
        key, read, sizes = cls.keeps
        if values.get(key):
            return values
        config = read(str(values["pretrained"]))
        return {**values, key: config, **sizes(config)}

    @classmethod
    def describe(cls) -> Row:
        """The method's line of the table."""
        return {key: getattr(cls, key) for key in ("paper", "family", "kind", "bound", "unbound_by")}

    def build(self, texts: TextSpec) -> "LanguageModel":
        """Compose an untrained model for such texts."""
        raise TypeError(f"{self.name} generates no texts")

    def start(self, model: "LanguageModel", tokenizer: "Tokenizer") -> None:
        """Load pretrained weights into a model before its training; most methods have none."""

    def find_fault(self) -> str:
        """Say which size no network can have; "" if all are valid."""
        sizes = self.model_dump()
        for key, value in sizes.items():
            least = 0 if type(self).model_fields[key].default == 0 else 1
            if type(value) is int and value < least:
                return f"model.{key}: should be at least {least}, not {value}"
        if not 0 <= sizes.get("dropout", 0) < 1:
            return f"model.dropout: should be between 0 and 1, not {sizes['dropout']}"
        hidden, heads = sizes.get("hidden", 2), sizes.get("heads", 1)
        if hidden % (2 * heads):
            return f"model.hidden={hidden} does not divide into model.heads={heads} heads of even size"
        return ""


class Sized(Method):
    """A method of a Transformer, whose sizes are those of Vaswani et al. (2017) unless it says otherwise."""

    hidden: int = 512
    layers: int = 6
    heads: int = 8
    dropout: float = 0.1


class ReadsSources(Sized):
    """The same where texts may have sources, which an encoder of so many layers reads."""

    encoder_layers: int = 6
