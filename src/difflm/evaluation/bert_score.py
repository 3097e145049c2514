"""BERTScore (Zhang et al., 2020) matches each word piece with the most similar one of the other text, by the cosine of
an encoder's last hidden states. It is neither weighted nor rescaled: only figures of the same encoder compare."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.errors import UsageError
from difflm.networks.pretrained import LOCAL, explained, read_encoder, transformers

BATCH_SIZE = 256


class BertScore:
    """Scores candidates against their best reference, by the encoder of a local directory."""

    def __init__(self, folder: str, device: torch.device) -> None:
        read_encoder(folder)
        library = transformers()
        self.device = device
        with explained(f"encoder={folder} cannot be read"):
            self.pieces = library.AutoTokenizer.from_pretrained(folder, **LOCAL)
            self.body = library.AutoModel.from_pretrained(folder, **LOCAL, use_safetensors=True)
        if self.pieces.pad_token is None:
            raise UsageError(f"encoder={folder}: its tokenizer cannot pad texts to one length. Give an encoder.")
        self.body = self.body.to(device).eval()
        config = self.body.config
        # A tokenizer need not know what its encoder reads; RoBERTa's positions begin at 2.
        self.longest = min(self.pieces.model_max_length, config.to_dict().get("max_position_embeddings", 514) - 2)
        self.name = (
            f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size} ({Path(folder).name})"
        )

    def __call__(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
        """Return F between 0 and 1 for each text."""
        states = self.states([*texts, *(one for many in references for one in many)])
        own, others = states[: len(texts)], iter(states[len(texts) :])
        return [max(f_measure(x, next(others)) for _ in many) for x, many in zip(own, references, strict=True)]

    @torch.no_grad()
    def states(self, texts: Sequence[str]) -> list[Tensor]:
        """Return unit vectors of the pieces of each text, [N, H], without special tokens."""
        found: list[Tensor] = []
        for start in range(0, len(texts), BATCH_SIZE):
            some = self.pieces(
                list(texts[start : start + BATCH_SIZE]),
                padding=True,
                truncation=True,
                max_length=self.longest,
                return_special_tokens_mask=True,
                return_tensors="pt",
            ).to(self.device)
            marks = some.pop("special_tokens_mask")
            unit = F.normalize(self.body(**some).last_hidden_state.float(), dim=-1)
            words = (marks == 0) & (some["attention_mask"] == 1)
            found += [row[here].cpu() for row, here in zip(unit, words, strict=True)]
        return found


def f_measure(candidate: Tensor, reference: Tensor) -> float:
    """Return F of the greedy matches between unit vectors [N, H] and [M, H]; 0 if one side is empty."""
    if not len(candidate) or not len(reference):
        return 0.0
    similar = candidate @ reference.T
    precision, recall = (max(0.0, float(similar.amax(side).mean())) for side in (1, 0))
    return 2 * precision * recall / max(precision + recall, 1e-12)
