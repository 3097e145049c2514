"""An encoder of the Hugging Face kind as a body: any that `AutoModelForMaskedLM` knows, with or without its weights.

Words keep the run's own vocabulary, so that figures compare: a word's vector is the mean of its pieces' vectors, as
wide as these are; where hidden states are wider, the encoder's own projection lifts it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.errors import DifflmError, UsageError
from difflm.networks.transformer import TimeEmbedding
from difflm.runtime.files import read_json

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


def read_encoder(folder: str) -> dict[str, Any]:
    """The config of a local directory."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UsageError(f"{folder}: no config.json there. Give the directory of an encoder.")
    encoder = read_json(path)
    vague = f"{folder}: config.json does not describe an encoder of hidden states"
    if not isinstance(encoder, dict) or "model_type" not in encoder:
        raise UsageError(f"{vague}.")
    with explained(vague):
        config = library_config(encoder)
    if not hasattr(config, "hidden_size"):
        raise UsageError(f"{vague}.")
    if config.is_encoder_decoder or getattr(config, "is_decoder", False):
        raise UsageError(f"{folder}: {encoder['model_type']} with a decoder. Give the directory of an encoder.")
    return encoder


def library_config(encoder: dict[str, Any]) -> Any:
    """As the library understands it: kinds that spell their sizes otherwise answer to the common names there."""
    named = (key for key in encoder if key not in NOT_SHAPE and not key.startswith("_"))
    shape = {key: encoder[key] for key in named if not key.endswith("implementation")}
    return transformers().AutoConfig.for_model(encoder["model_type"], **shape)


def sizes_of(encoder: dict[str, Any]) -> dict[str, int]:
    config = library_config(encoder)
    return {ours: getattr(config, theirs) for ours, theirs in SIZES.items() if hasattr(config, theirs)}


def masked_lm(encoder: dict[str, Any], dropout: float = 0.0) -> Any:
    """The library's masked language model of this shape, not yet trained."""
    library, kind = transformers(), encoder.get("model_type")
    with explained(f"model.pretrained: no encoder of the kind {kind} is known"):
        config = library_config(encoder)
    if type(config) not in library.MODEL_FOR_MASKED_LM_MAPPING:
        raise UsageError(f"model.pretrained: there is no masked language model of the kind {kind}. Give an encoder.")
    for key, value in config.to_dict().items():
        if "dropout" in key and type(value) in (int, float):  # every kind has other names for its own
            setattr(config, key, dropout)
    with explained(f"model.pretrained: no {kind} can be made of its config.json"):
        return library.AutoModelForMaskedLM.from_config(config, trust_remote_code=False)


def widths(body: Any) -> tuple[int, int]:
    """Of the vectors of words that it reads, and of those that it compares its answers with: neither need be as wide
    as its hidden states (ALBERT, ELECTRA, RemBERT)."""
    return body.get_input_embeddings().weight.shape[1], body.get_output_embeddings().weight.shape[1]


def word_width(encoder: dict[str, Any]) -> int:
    with torch.device("meta"):  # every kind has its own name for it in the config: the shape itself is asked
        return widths(masked_lm(encoder))[0]


class Through(nn.Identity):
    """In the place of the library's own output words, whose bias it may ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", None)


class PretrainedEncoder(nn.Module):
    """[CLS] text [SEP] through the encoder and the transform of its masked-LM head; `head` gives logits of our words.

    `blocks` is empty: the library's layers are not compiled one by one, nor captured, since they may look at masks.
    """

    capturable = False

    def __init__(self, encoder: dict[str, Any], vocabulary: int, width: int, dropout: float, time: TimeDesign) -> None:
        super().__init__()
        self.body = masked_lm(encoder, dropout)
        read, compared = widths(self.body)
        self.body.set_output_embeddings(Through())
        self.body.set_input_embeddings(nn.Embedding(1, read))  # never called: words come as vectors
        self.ends = nn.Parameter(0.02 * torch.randn(2, read))  # [CLS] and [SEP]
        self.head = nn.Linear(compared, vocabulary)
        self.blocks: list[nn.Module] = []
        self.time = time
        if time != "none":
            self.embed_time = TimeEmbedding(128, 512, read if time == "prefix" else self.body.config.hidden_size)
        self._told: Tensor | None = None
        if time == "layers":
            for layer in layers_of(self.body):
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
        logits: Tensor = self.head(out[:, before : before + length])
        return logits


def layers_of(body: nn.Module) -> nn.ModuleList:
    """The encoder's layers: its longest list of modules."""
    lists = [module for module in body.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UsageError("this encoder has no list of layers that could be given the time; use time: none.")
    return max(lists, key=len)


def mean_of_pieces(pieces: Any, words: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """What makes vectors of words of those of pieces, by the tokenizer `pieces`: the mean of each word's own."""
    spelt = [pieces(word.strip(), add_special_tokens=False)["input_ids"] or [pieces.unk_token_id] for word in words]
    return lambda rows: torch.stack([rows[ids].mean(0) for ids in spelt])


@torch.no_grad()
def take_weights(network: PretrainedEncoder, table: Tensor, folder: str, words: Sequence[str]) -> None:
    """Weights of a directory, in place; `table` [words + 1, their width] gets the vectors of words and of the mask."""
    library = transformers()
    with explained(f"pretrained={folder} cannot be read"):
        source = library.AutoModelForMaskedLM.from_pretrained(folder, **LOCAL, use_safetensors=True)
        pieces = library.AutoTokenizer.from_pretrained(folder, **LOCAL)
    mask, *ends = pieces.mask_token_id, pieces.cls_token_id, pieces.sep_token_id
    if None in (mask, *ends):
        raise UsageError(f"pretrained={folder}: its tokenizer lacks a mask, a start or an end token.")
    vectors, output = (part.weight.float() for part in (source.get_input_embeddings(), source.get_output_embeddings()))
    own = network.body.state_dict()
    fitting = {k: v for k, v in source.state_dict().items() if k in own and own[k].shape == v.shape}
    network.body.load_state_dict(fitting, strict=False)
    mean = mean_of_pieces(pieces, words)
    table[: len(words)] = mean(vectors)
    table[len(words)] = vectors[mask]
    network.head.weight.copy_(mean(output))
    network.ends.copy_(vectors[ends])
