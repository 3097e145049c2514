"""An encoder of the Hugging Face kind as a body: any that `AutoModelForMaskedLM` knows, with or without its weights.

Words keep the run's own vocabulary, so that figures compare: a word's vector is the mean of its pieces' vectors.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.errors import UsageError
from difflm.files import read_json
from difflm.networks.transformer import TimeEmbedding

TimeDesign = Literal["layers", "prefix", "none"]
EXTRA = "a pretrained encoder needs the extra `hf`: pip install 'difflm[hf]'."


def transformers() -> ModuleType:
    try:
        import transformers as library
    except ImportError:
        raise UsageError(EXTRA) from None
    library.utils.logging.set_verbosity_error()  # its report of a missing head would be taken for a fault
    library.utils.logging.disable_progress_bar()
    return library


def read_encoder(folder: str) -> dict[str, Any]:
    """The config of a local directory."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UsageError(f"{folder}: no config.json there. Give the directory of an encoder.")
    config = read_json(path)
    if not isinstance(config, dict) or not {"model_type", "hidden_size"} <= config.keys():
        raise UsageError(f"{folder}: config.json does not describe an encoder of hidden states.")
    return config


class Through(nn.Identity):
    """In the place of the library's own output words, whose bias it may ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", None)


class PretrainedEncoder(nn.Module):
    """[CLS] text [SEP] through the encoder and the transform of its masked-LM head; `head` gives logits of our words.

    `blocks` is empty: the library's layers are not compiled one by one, nor captured, since they may look at masks.
    """

    captures = False

    def __init__(self, encoder: dict[str, Any], vocabulary: int, dropout: float, time: TimeDesign) -> None:
        super().__init__()
        library = transformers()
        settings = {
            k: v for k, v in encoder.items() if k not in ("model_type", "architectures", "transformers_version")
        }
        settings |= {key: dropout for key in ("hidden_dropout_prob", "attention_probs_dropout_prob") if key in settings}
        config = library.AutoConfig.for_model(encoder["model_type"], **settings)
        self.body = library.AutoModelForMaskedLM.from_config(config)
        hidden = config.hidden_size
        self.body.set_output_embeddings(Through())
        self.body.set_input_embeddings(nn.Embedding(1, hidden))  # never asked: words come as vectors
        self.ends = nn.Parameter(0.02 * torch.randn(2, hidden))  # [CLS] and [SEP]
        self.head = nn.Linear(hidden, vocabulary)
        self.blocks: list[nn.Module] = []
        self.time = time
        if time != "none":
            self.embed_time = TimeEmbedding(128, 512, hidden)
        self._told: Tensor | None = None
        if time == "layers":
            for layer in layers_of(self.body):
                layer.register_forward_pre_hook(self._tell, with_kwargs=True)

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
        raise UsageError("this encoder has no list of layers that time could be told to; use time: none.")
    return max(lists, key=len)


@torch.no_grad()
def take_weights(network: PretrainedEncoder, table: Tensor, folder: str, words: Sequence[str]) -> None:
    """Weights of a directory, in place; `table` [words + 1, hidden] gets the vectors of words and of the mask."""
    library = transformers()
    try:
        source = library.AutoModelForMaskedLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        pieces = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"pretrained={folder} cannot be read: {str(error).splitlines()[0]}") from None
    vectors, output = (part.weight.float() for part in (source.get_input_embeddings(), source.get_output_embeddings()))
    own = network.body.state_dict()
    fitting = {k: v for k, v in source.state_dict().items() if k in own and own[k].shape == v.shape}
    network.body.load_state_dict(fitting, strict=False)
    spelt = [pieces(word.strip(), add_special_tokens=False)["input_ids"] or [pieces.unk_token_id] for word in words]
    mean: Callable[[Tensor], Tensor] = lambda rows: torch.stack([rows[ids].mean(0) for ids in spelt])  # noqa: E731
    table[: len(words)] = mean(vectors)
    table[len(words)] = vectors[pieces.mask_token_id]
    network.head.weight.copy_(mean(output))
    network.ends.copy_(vectors[[pieces.cls_token_id, pieces.sep_token_id]])
