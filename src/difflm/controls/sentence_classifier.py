"""Sentence classifiers of the Hugging Face library, which know neither noise nor the model that they guide: each
word's tokens are replaced by their mean vectors under the belief, and log f(label | text) is an energy."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from difflm.controls.guidance import GuidanceTarget, LabelReader
from difflm.data.labels import NONE, NOTHING, Labelling
from difflm.data.tokenizers import END, SPECIALS, Tokenizer
from difflm.data.words import join_words
from difflm.diffusion.denoiser import autocast_to
from difflm.errors import UsageError
from difflm.networks.pretrained import LOCAL, explained, transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OFFSET = 2  # positions before the first that some kinds, such as RoBERTa, do not use


class SentenceClassifier(LabelReader):
    """`spellings` are the tokens of each of the model's words, empty for specials. A text is [CLS] tokens [SEP], cut
    after `room` tokens."""

    reads_words = True

    def __init__(
        self,
        name: str,
        body: "PreTrainedModel",
        labels: Sequence[str],
        spellings: Sequence[Sequence[int]],
        ends: Sequence[int],
        room: int,
    ) -> None:
        super().__init__()
        self.labellings = {name: Labelling(name, "text", (NONE, *labels))}
        self.numbers, self.word_counts = {}, {}
        self.body, self.room = body, room
        longest = max(map(len, spellings))
        # If a word has fewer tokens than the likeliest one, its last token is repeated.
        padded = [[*pieces, *[pieces[-1] if pieces else ends[1]] * (longest - len(pieces))] for pieces in spellings]
        self.register_buffer("pieces", torch.tensor(padded).T)
        self.register_buffer("counts", torch.tensor([len(pieces) for pieces in spellings]))
        self.register_buffer("ends", torch.tensor(ends))

    pieces: Tensor  # [pieces of a word, V]
    counts: Tensor  # [V]
    ends: Tensor  # [2]

    def forward(self, logits: Tensor, there: Tensor) -> Tensor:
        """log p(label | text), [B, labels], for beliefs about words [B, L, V] at the positions `there`. The likeliest
        words determine how many tokens each position has, and where the text ends."""
        words, chances = logits.argmax(-1), logits.softmax(-1)
        before_end = (words == END).cumsum(1) == 0
        counts = self.counts[words] * (there & before_end)
        table = cast(Tensor, self.body.get_input_embeddings().weight)
        vectors = torch.stack([chances @ table[pieces].to(chances.dtype) for pieces in self.pieces], 2).flatten(1, 2)
        used = (torch.arange(len(self.pieces), device=words.device) < counts.unsqueeze(-1)).flatten(1)
        order = (~used).long().argsort(dim=1, stable=True)[:, : self.room]  # used ones first
        last = used.sum(1, keepdim=True).clamp(max=self.room) + 1  # the position of the end token
        place = torch.arange(order.shape[1] + 2, device=words.device)
        text = vectors.gather(1, order.unsqueeze(-1).expand(-1, -1, vectors.shape[-1]))
        first, final = table[self.ends].to(text.dtype)
        text = torch.cat([first.expand(len(text), 1, -1), text, torch.zeros_like(text[:, :1])], 1)
        text = torch.where((place == last).unsqueeze(-1), final, text)
        with autocast_to(text.device, self.precision):
            answer = self.body(inputs_embeds=text, attention_mask=(place <= last).long()).logits
        return answer.float().log_softmax(-1)


def read_labels(targets: Sequence[GuidanceTarget], logits: Tensor, there: Tensor) -> Tensor:
    """log f(labels | text) of each text, summed over targets, [B]."""
    total = torch.zeros(len(logits), device=logits.device)
    for target in targets:
        labels = target.labels  # the classifier's first label is the second value, after NONE
        found = target.classifier(logits, there).gather(1, (labels - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        total = total + found * (labels != NOTHING)
    return total


def load_sentence_classifier(folder: Path, tokenizer: Tokenizer) -> SentenceClassifier:
    """Load the classifier of a directory; its label has the directory's name."""
    if tokenizer.unit == "characters":
        raise UsageError(f"{folder}: a sentence classifier reads words; this model writes characters.")
    library = transformers()
    with explained(f"{folder} cannot be read"):
        pieces = library.AutoTokenizer.from_pretrained(folder, **LOCAL)
        body, found = library.AutoModelForSequenceClassification.from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, **LOCAL
        )
    if found["missing_keys"]:
        raise UsageError(f"{folder} holds no trained sentence classifier: it lacks {min(found['missing_keys'])}.")
    config, ends = body.config, [pieces.cls_token_id, pieces.sep_token_id]
    if config.num_labels < 2 or config.problem_type not in (None, "single_label_classification"):
        raise UsageError(f"{folder} is not a classifier with one label of several values.")
    if None in ends or pieces("")["input_ids"] != ends:
        raise UsageError(f"{folder}: its tokenizer must put a start and an end token around each text, as BERT's does.")
    places = config.to_dict().get("max_position_embeddings") or pieces.model_max_length
    room = min(pieces.model_max_length, places - OFFSET) - len(ends)
    labels = [config.id2label[k] for k in range(config.num_labels)]
    name = folder.resolve().name
    made = SentenceClassifier(name, body.float().eval(), labels, spell_words(tokenizer, pieces), ends, room)
    with explained(f"{folder} does not read vectors of words"), torch.no_grad():
        made(torch.zeros(1, 2, tokenizer.size), torch.ones(1, 2, dtype=torch.bool))
    return made


def spell_words(tokenizer: Tokenizer, pieces: "PreTrainedTokenizerBase") -> list[list[int]]:
    """The classifier's tokens for each of the model's tokens, as in a printed text."""
    texts = ["".join(tokenizer.tokens([token])) for token in range(len(SPECIALS), tokenizer.size)]
    if tokenizer.whole_words:
        texts = [join_words(["a", text])[1:] if text else "" for text in texts]  # with a space before it, or without
    found: list[list[int]] = pieces(texts, add_special_tokens=False)["input_ids"]
    known = pieces.get_vocab()
    for k, text in enumerate(texts):  # the continuation of a word, which some vocabularies write this way
        if not tokenizer.whole_words and f"##{text}" in known:
            found[k] = [known[f"##{text}"]]
    return [[]] * len(SPECIALS) + found
