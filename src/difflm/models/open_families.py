"""The families of open diffusion language models, as `open_families.yaml` describes them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from difflm.errors import UsageError
from difflm.models.sampling import Sampling
from difflm.networks.open_transformer import DitShape, Shape
from difflm.runtime.files import read_own_table
from difflm.runtime.tensors import Stored

Config = Mapping[str, Any]
Names = str | float | Sequence[str | float]  # settings of a config, of which the first that is set counts; or a number
EMBEDDING, HEAD, HEAD_BIAS = "embedding", "head.weight", "head.bias"  # weights with a row for each token
BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|sampling_eps_(min|max)|attn\.(bias|masked_bias))$")


def look_up(config: object, name: str) -> object:
    """The value of a setting; a dot leads into another one. None: it is not there."""
    for part in name.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def first_set(config: Config, names: Names) -> Any:
    listed = names if isinstance(names, list) else [names]
    for name in listed:
        if not isinstance(name, str):
            return name
        if value := look_up(config, name):
            return value
    raise KeyError(listed[0])


@dataclass(frozen=True)
class Layout:
    """What configs call the sizes of a network, and what files call its weights."""

    sizes: Mapping[str, Names]
    keys: Mapping[str, str]
    expects: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only_if: Mapping[str, str] = field(default_factory=dict)
    layer: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, list[str]] = field(default_factory=dict)
    transposed: bool = False

    def find_key(self, name: str) -> Stored:
        """Where the weight is stored that has this name in our network."""
        if name in self.keys or not self.parts:
            return Stored(self.keys.get(name, self.layer + name))
        _, number, rest = name.split(".", 2)
        part, kind = rest.rsplit(".", 1)
        for whole, parts in self.fused.items():
            if part in parts:
                key = f"{self.layer.format(number)}{whole}.{kind}"
                return Stored(key, parts.index(part), len(parts), self.transposed)
        return Stored(f"{self.layer.format(number)}{self.parts[part]}.{kind}", transposed=self.transposed)

    def read_shape(self, config: Config) -> Shape | DitShape:
        """The sizes of the network that a config describes; one that the network does not support is refused."""
        for key, usual in self.expects.items():
            if (value := look_up(config, key)) not in (usual, None):
                raise UsageError(f"{key.split('.')[-1]}={value!r} is not supported, only {usual!r}")
        told = [name for name in self.sizes if name not in self.only_if or config.get(self.only_if[name])]
        found = {name: first_set(config, self.sizes[name]) for name in told} | {**self.fixed}
        if "classes" in found:
            found["classes"] += 1  # the last one is none of them
        if "condition" in found:
            return DitShape(**found)
        hidden, heads, ratio = found["hidden"], found["heads"], found.pop("ratio", 0)
        found["inner"] = found["inner"] or ratio * hidden
        found["kv_heads"] = found.get("kv_heads", heads)
        found["head_dim"] = found.get("head_dim") or hidden // heads
        found["window"] = found.get("window", 0) // 2  # on either side
        return Shape(**found)


@dataclass(frozen=True)
class Family:
    name: str
    layout: Layout
    sampling: Sampling
    kinds: Sequence[str] = ()
    mask: int | None = None
    noise: Literal["masks", "uniform", "gaussian"] = "masks"
    context: Names = "max_position_embeddings"
    vocabulary: Names = "vocab_size"
    added_rows: int = 0
    ends: Sequence[str] = ()
    tokenizer: str = ""
    begins: bool = False
    blocks: Mapping[str, int] = field(default_factory=dict)

    @property
    def shifts(self) -> bool:
        """Whether the network's output at a position predicts the next one."""
        return bool(self.layout.fixed.get("shift"))

    def count_words(self, config: Config) -> int:
        """The number of rows of its embedding."""
        return int(first_set(config, self.vocabulary)) + self.added_rows

    def count_positions(self, config: Config) -> int:
        """The largest number of positions that it reads."""
        return int(first_set(config, self.context))

    def find_mask(self, config: Config) -> int | None:
        rows = self.count_words(config)
        return None if self.mask is None or self.mask >= rows else self.mask % rows

    def find_block(self, name: str) -> int:
        """Positions of a block, by the name of a directory; 0: it has none."""
        for pattern, size in self.blocks.items():
            if found := re.search(pattern, name, re.IGNORECASE):
                return size or int(found[1])
        return 0


TABLE = read_own_table("open_families.yaml", __file__)


def build_layout(layout: str, sizes: Config | None = None, fixed: Config | None = None) -> Layout:
    """A layout of the table, with other sizes."""
    own = TABLE["layouts"][layout]
    return Layout(**{**own, "sizes": own["sizes"] | (sizes or {}), "fixed": own.get("fixed", {}) | (fixed or {})})


def build_family(name: str, row: dict[str, Any]) -> Family:
    layout = build_layout(*(row.pop(key, None) for key in ("layout", "sizes", "fixed")))
    return Family(name, layout, Sampling(**row.pop("sampling")), **row)


FAMILIES = {name: build_family(name, {**row}) for name, row in TABLE["families"].items()}
CAUSAL = {name: build_layout(**row) for name, row in TABLE["causal"].items()}
MASKS_OF_NAMES: dict[str, int] = TABLE["masks_of_names"]
