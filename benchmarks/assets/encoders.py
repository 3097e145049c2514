"""A pretrained encoder of words for `train_parser`, from a directory as sentence-transformers has them."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from difflm.annotators.parser import Sentences, pad_rows


class PretrainedWords(nn.Module):
    """An encoder of word pieces such as MiniLM; a word is represented by its last piece."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.body = AutoModel.from_pretrained(directory, local_files_only=True, use_safetensors=True)
        self.width = self.body.config.hidden_size

    def read(self, sentences: Sentences) -> dict[str, Tensor]:
        words = [list(words) for words in sentences]
        pieces = self.tokenizer(words, is_split_into_words=True, padding=True, truncation=True, return_tensors="pt")
        lengths = pieces["attention_mask"].sum(1)
        lasts = []
        for row, own in enumerate(words):
            last = {word: at for at, word in enumerate(pieces.word_ids(row)) if word is not None}
            found = [0]
            for word in range(len(own)):  # a word without pieces shares those of the word before
                found.append(last.get(word, found[-1]))
            lasts.append([*found, int(lengths[row]) - 1])
        return {"ids": pieces["input_ids"], "lasts": pad_rows(lasts), "lengths": lengths}

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return vectors of [CLS], of each word and of [SEP], [B, words + 2, width]."""
        ids, lasts = inputs["ids"], inputs["lasts"]
        mask = torch.arange(ids.shape[1], device=ids.device) < inputs["lengths"].unsqueeze(1)
        states: Tensor = self.body(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return states.gather(1, lasts.unsqueeze(-1).expand(-1, -1, self.width))
