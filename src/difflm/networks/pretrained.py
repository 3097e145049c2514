"""Networks of the Hugging Face library: any encoder that `AutoModelForMaskedLM` knows, and any left-to-right model that
`AutoModelForCausalLM` knows, with or without their weights.

Words keep the run's own vocabulary, so that figures compare and words can be counted: a word's vector is the mean of
its pieces' vectors, and so is what answers are compared with. Where hidden states are wider than words, the encoder's
own projection lifts these.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion.base import Network
from difflm.errors import DifflmError, UsageError
from difflm.networks.cache import Cache
from difflm.networks.head import WordHead
from difflm.networks.transformer import TimeEmbedding
from difflm.runtime.files import Json, read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TimeDesign = Literal["layers", "prefix", "none"]
EXTRA = 'a pretrained encoder needs the extra `hf`: pip install ".[hf]".'
SIZES = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
LOCAL = {"local_files_only": True, "trust_remote_code": False}  # code that comes with a model is never run
# The run has its own dtype. The last two name code, as settings do that end in `implementation` or begin with a line.
NOT_SHAPE = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "auto_map", "kernel_config")


def transformers() -> ModuleType:
    try:
        import transformers as library
    except ImportError:
        raise UsageError(EXTRA) from None
    library.utils.logging.set_verbosity_error()  # its report of a missing head would be taken for a fault
    library.utils.logging.disable_progress_bar()
    return library


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn the library's errors, which may fill a page, into one line: what failed, and the start of the error."""
    try:
        yield
    except DifflmError:
        raise
    except Exception as error:
        raise UsageError(f"{what}: {shorten(str(error) or type(error).__name__, 200, placeholder=' …')}") from error


def read_config(folder: str, what: str) -> "tuple[Json, PretrainedConfig]":
    """The config in the local directory of a network, such as "an encoder", and what the library makes of it."""
    path, vague = Path(folder) / "config.json", f"{folder}: config.json does not describe {what}"
    if not path.is_file():
        raise UsageError(f"{folder}: no config.json there. Give the directory of {what}.")
    found = read_json(path)
    if not isinstance(found, dict) or "model_type" not in found:
        raise UsageError(f"{vague}.")
    with explained(vague):
        return found, library_config(found)


def library_config(config: Json) -> "PretrainedConfig":
    """As the library understands it: kinds that spell their sizes otherwise answer to the common names there."""
    named = (key for key in config if key not in NOT_SHAPE and not key.startswith("_"))
    shape = {key: config[key] for key in named if not key.endswith("implementation")}
    return transformers().AutoConfig.for_model(config["model_type"], **shape)


def sizes_of(config: Json) -> dict[str, int]:
    told = library_config(config)
    return {ours: getattr(told, theirs) for ours, theirs in SIZES.items() if hasattr(told, theirs)}


def build_body(auto: str, config: Json, dropout: float) -> Any:
    """A network of this shape, not yet trained, as a class of the library such as `AutoModel` makes it."""
    library = transformers()
    with explained(f"model.pretrained: no model of the kind {config.get('model_type')} is known"):
        told = library_config(config)
    for key, value in told.to_dict().items():  # every kind has other names for its own
        if ("dropout" in key or key.endswith("pdrop")) and type(value) in (int, float):
            setattr(told, key, dropout)
    with explained(f"model.pretrained: no {config['model_type']} can be made of its config.json"):
        return getattr(library, auto).from_config(told, trust_remote_code=False)


@dataclass(frozen=True)
class Pretrained:
    """A network of a directory with its weights."""

    model: "PreTrainedModel"
    pieces: "PreTrainedTokenizerBase"
    vectors: Tensor  # of the pieces of words that it reads
    output: Tensor  # those that its answers are compared with

    @classmethod
    def read(cls, auto: str, folder: str) -> "Pretrained":
        library = transformers()
        with explained(f"pretrained={folder} cannot be read"):
            model = getattr(library, auto).from_pretrained(folder, **LOCAL, use_safetensors=True)
            pieces = library.AutoTokenizer.from_pretrained(folder, **LOCAL)
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        return cls(model, pieces, *(part.weight.float() for part in ends))

    def spell(self, words: Sequence[str], unknown: int | None) -> list[list[int]]:
        """The pieces of each word, or an unknown one."""
        return [self.pieces(word, add_special_tokens=False)["input_ids"] or [unknown] for word in words]


def mean_rows(rows: Tensor, spelt: Sequence[Sequence[int]]) -> Tensor:
    """The mean of each word's own rows."""
    return torch.stack([rows[ids].mean(0) for ids in spelt])


def load_fitting(body: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load the weights that a body has in the same shape."""
    own = body.state_dict()
    body.load_state_dict({k: v for k, v in weights.items() if k in own and own[k].shape == v.shape}, strict=False)


# -- encoders ----------------------------------------------------------------------------------------------------------


def read_encoder(folder: str) -> Json:
    """The config of a local directory."""
    encoder, config = read_config(folder, "an encoder")
    if not hasattr(config, "hidden_size"):
        raise UsageError(f"{folder}: config.json does not describe an encoder.")
    if config.is_encoder_decoder or getattr(config, "is_decoder", False):
        raise UsageError(f"{folder}: {encoder['model_type']} with a decoder. Give the directory of an encoder.")
    return encoder


def widths(body: Any) -> tuple[int, int]:
    """Of the vectors of words that it reads, and of those that it compares its answers with: neither need be as wide
    as its hidden states (ALBERT, ELECTRA, RemBERT)."""
    return body.get_input_embeddings().weight.shape[1], body.get_output_embeddings().weight.shape[1]


def word_width(encoder: Json) -> int:
    with torch.device("meta"):  # every kind has its own name for it in the config: the shape itself is asked
        return widths(build_body("AutoModelForMaskedLM", encoder, 0.0))[0]


class Through(nn.Identity):
    """In the place of the library's own output words, whose bias it may ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", None)


class PretrainedEncoder(Network):
    """[CLS] text [SEP] through the encoder and the transform of its masked-LM head; `head` gives logits of our words.
    The library's layers are not compiled one by one, nor captured, since they may look at masks."""

    capturable = False

    def __init__(self, encoder: Json, vocabulary: int, width: int, dropout: float, time: TimeDesign) -> None:
        super().__init__()
        self.body = build_body("AutoModelForMaskedLM", encoder, dropout)
        read, compared = widths(self.body)
        self.body.set_output_embeddings(Through())
        self.body.set_input_embeddings(nn.Embedding(1, read))  # never called: words come as vectors
        self.ends = nn.Parameter(0.02 * torch.randn(2, read))  # [CLS] and [SEP]
        self.head = nn.Linear(compared, vocabulary)
        self.time = time
        if time != "none":
            self.embed_time = TimeEmbedding(128, 512, read if time == "prefix" else self.body.config.hidden_size)
        self._told: Tensor | None = None
        if time == "layers":
            lists = [part for part in self.body.modules() if isinstance(part, nn.ModuleList)]
            if not lists:
                raise UsageError("this encoder has no list of layers that could be given the time; use time: none.")
            for layer in max(lists, key=len):
                layer.register_forward_pre_hook(self._tell, with_kwargs=True)
        # Kinds differ in what they accept, and in how long a text may be: one that fails should fail before training.
        fails = f"model.pretrained: {encoder['model_type']} does not work on canvases of {width} words here"
        with explained(fails), torch.no_grad():
            self(torch.zeros(1, width, read), torch.zeros(1))

    def _tell(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        assert self._told is not None
        if args:
            return (args[0] + self._told, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + self._told}

    def forward(self, inputs: Tensor, t: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = inputs.shape
        mask = torch.ones(batch, length, dtype=torch.bool, device=inputs.device) if mask is None else mask
        before = 1
        x = F.pad(inputs, (0, 0, 1, 1))
        place = torch.arange(length + 2, device=x.device)
        last = (mask.sum(-1, keepdim=True) + 1).unsqueeze(-1)
        x = torch.where((place == 0).view(1, -1, 1), self.ends[0].to(x.dtype), x)
        x = torch.where(place.view(1, -1, 1) == last, self.ends[1].to(x.dtype), x)
        there = place <= last.squeeze(-1)
        if self.time != "none":
            told = self.embed_time(t).to(x.dtype)
            if self.time == "prefix":
                x = torch.cat([x[:, :1], told[:, :1], x[:, 1:]], dim=1)
                there, before = F.pad(there, (1, 0), value=True), 2
            else:
                self._told = told
        out: Tensor = self.body(inputs_embeds=x, attention_mask=there.long()).logits
        return self.head(out[:, before : before + length])

    @torch.no_grad()
    def take_weights(self, table: Tensor, folder: str, words: Sequence[str]) -> None:
        """Load those of a directory; `table` [words + 1, their width] gets the vectors of words and of the mask."""
        source = Pretrained.read("AutoModelForMaskedLM", folder)
        pieces = source.pieces
        mask, *ends = pieces.mask_token_id, pieces.cls_token_id, pieces.sep_token_id
        if None in (mask, *ends):
            raise UsageError(f"pretrained={folder}: its tokenizer lacks a mask, a start or an end token.")
        load_fitting(self.body, source.model.state_dict())
        spelt = source.spell([word.strip() for word in words], pieces.unk_token_id)
        table[: len(words)] = mean_rows(source.vectors, spelt)
        table[len(words)] = source.vectors[mask]
        self.head.weight.copy_(mean_rows(source.output, spelt))
        self.ends.copy_(source.vectors[ends])


# -- left-to-right models ----------------------------------------------------------------------------------------------


def read_decoder(folder: str) -> Json:
    """The config of a local directory."""
    (decoder, config), library = read_config(folder, "a language model"), transformers()
    sees_all = type(config) in library.MODEL_FOR_MASKED_LM_MAPPING and not config.is_decoder
    if sees_all or type(config) not in library.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(f"{folder}: {decoder['model_type']} does not write from left to right.")
    return decoder


class PretrainedDecoder(WordHead):
    """Vectors of words through the library's layers; `head` gives logits of our words. It answers to the calls of
    `Transformer` that reading takes. Training may compile the library's layers, but nothing captures them: the library
    asks the device for masks at every call."""

    capturable = False

    def __init__(self, decoder: Json, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.body = build_body("AutoModel", decoder, dropout)
        config = self.body.config
        if width > (most := getattr(config, "max_position_embeddings", width)):
            raise UsageError(f"model.pretrained: it reads {most} words at most; texts and prompts may have {width}.")
        self.body.set_input_embeddings(nn.Embedding(1, config.hidden_size))  # never called: words come as vectors
        self.input, self.norm = nn.Identity(), nn.Identity()
        self.head = nn.Linear(config.hidden_size, vocabulary)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def equal_blocks(self) -> list[nn.Module]:
        """The library's layers, which it names as those that devices do not share."""
        names = self.body._no_split_modules or ()
        return [part for part in self.body.modules() if type(part).__name__ in names]

    def run(
        self, x: Tensor, t: None, mask: Tensor | None, caches: Sequence[Cache | None] | None, start: int, **_: Any
    ) -> tuple[Tensor, list[Cache | None]]:
        """Hidden states of words that follow those of the caches; with None, nothing is cached. Of a mask [B, L, K] the
        library takes what the last word sees: it reads from left to right anyway."""
        if caches is None:
            return self.body(inputs_embeds=x, use_cache=False).last_hidden_state, []
        seen: dict[str, Tensor] = {}
        if mask is not None and len(mask) == len(x):
            places = mask[:, -1].long().cumsum(1) - 1
            seen = {"attention_mask": mask[:, -1].long(), "position_ids": places[:, -x.shape[1] :].clamp(min=0)}
        kept = transformers().DynamicCache()
        for layer, cache in enumerate(caches):
            if cache is not None:
                kept.update(*cache, layer)
        out = self.body(inputs_embeds=x, past_key_values=kept, use_cache=True, **seen)
        return out.last_hidden_state, [(one[0], one[1]) for one in out.past_key_values]

    @torch.no_grad()
    def take_weights(self, table: Tensor, folder: str, words: Sequence[str], ids: Sequence[int] = ()) -> None:
        """Weights of a directory, in place; `table` [words, hidden] gets the vectors of words. The first two words are
        START and END, which begin as the library's own. With `ids`, words are pieces of the model itself: their numbers
        there, behind the four special words."""
        source = Pretrained.read("AutoModelForCausalLM", folder)
        end, begin = source.pieces.eos_token_id, source.pieces.bos_token_id
        if end is None:
            raise UsageError(f"pretrained={folder}: its tokenizer lacks an end token.")
        load_fitting(self.body, source.model.base_model.state_dict())
        # A word inside a text is spelt with the space before it.
        spelt = source.spell([f" {word.strip()}" for word in words], end)
        if ids:
            spelt = [[end]] * 4 + [[number] for number in ids]
        spelt[:2] = [[end if begin is None else begin], [end]]
        table.copy_(mean_rows(source.vectors, spelt))
        self.head.weight.copy_(mean_rows(source.output, spelt))
        self.head.bias.zero_()  # its logits include how frequent words are
