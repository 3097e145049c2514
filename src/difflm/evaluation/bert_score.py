"""BERTScore (Zhang et al., 2020): each word piece is matched with the most similar one on the other side, similarity
being the cosine of an encoder's last hidden states. No weights by rarity, no rescaling: figures of one encoder alone
compare."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.errors import UsageError
from difflm.networks.hf_encoder import explained, read_encoder, transformers

SINGLE_BATCH_POSITIONS = 256  # texts that are encoded at once


class BertScore:
    """F of candidates against their best reference, by the encoder of a local directory."""

    def __init__(self, folder: str, device: torch.device) -> None:
        read_encoder(folder)
        library = transformers()
        self.device = device
        with explained(f"encoder={folder} cannot be read"):
            self.pieces = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self.body = library.AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        if self.pieces.pad_token is None:
            raise UsageError(f"encoder={folder}: its tokenizer cannot fill texts up to one length. Give an encoder.")
        self.body = self.body.to(device).eval()
        config = self.body.config
        self.name = (
            f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size} ({Path(folder).name})"
        )

    def __call__(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
        """0 to 1, one a text."""
        states = self.states([*texts, *(one for many in references for one in many)])
        own, others = states[: len(texts)], iter(states[len(texts) :])
        return [max(f_measure(x, next(others)) for _ in many) for x, many in zip(own, references, strict=True)]

    @torch.no_grad()
    def states(self, texts: Sequence[str]) -> list[Tensor]:
        """Unit vectors of the pieces of each text, [N, H], the marks of beginning, end and filling left out."""
        found: list[Tensor] = []
        for start in range(0, len(texts), SINGLE_BATCH_POSITIONS):
            some = self.pieces(
                list(texts[start : start + SINGLE_BATCH_POSITIONS]),
                padding=True,
                truncation=True,
                return_special_tokens_mask=True,
                return_tensors="pt",
            ).to(self.device)
            marks = some.pop("special_tokens_mask")
            unit = F.normalize(self.body(**some).last_hidden_state.float(), dim=-1)
            words = (marks == 0) & (some["attention_mask"] == 1)
            found += [row[here].cpu() for row, here in zip(unit, words, strict=True)]
        return found


def f_measure(candidate: Tensor, reference: Tensor) -> float:
    """Of the greedy matches between unit vectors [N, H] and [M, H]; 0 where a side is empty."""
    if not len(candidate) or not len(reference):
        return 0.0
    similar = candidate @ reference.T
    precision, recall = (max(0.0, float(similar.amax(side).mean())) for side in (1, 0))
    return 2 * precision * recall / max(precision + recall, 1e-12)
