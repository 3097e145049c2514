"""Sources with several equally good answers: samples of diffusion find them all, beam search gives one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from difflm.data.tokenizers import Tokenizer
from difflm.diffusion.condition import Condition
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Steering
from difflm.models.base import LanguageModel
from difflm.training.run import load_run
from tests.support.tiny import train_quietly

# Four answers to each source. No two answers to one source have a word in common; any word occurs in several sources'.
ANSWERS = {
    "a": ["p q r", "s t u v", "w x y", "z k l m"],
    "b": ["q s w", "p t x z", "u k r", "y v m l"],
    "c": ["t w m", "x p k s", "l q v", "r z y u"],
}
RECIPE: dict[str, Any] = {
    "task": "seq2seq",
    "model": {"hidden": 32, "layers": 2, "encoder_layers": 1, "heads": 2, "dropout": 0.0},
    "tokenizer": "words",
    "more_than": 0,
    "longest": 8,
    "source_longest": 8,
    "steps": 300,
    "batch_size": 48,
    "warmup": 20,
    "lr": 1e-2,
    "ema": 0.9,
    "validate_every": 1000,
}


def train(folder: Path, method: str, **sizes: Any) -> tuple[LanguageModel, Tokenizer]:
    pairs = [{"src": source, "trg": text} for source, texts in ANSWERS.items() for text in texts]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs * 40))
    recipe = {**RECIPE, "model": {**RECIPE["model"], **sizes}, "data": str(folder / "pairs.jsonl"), "method": method}
    train_quietly(recipe, folder / method)
    model, tokenizer, _ = load_run(folder / method)
    return model, tokenizer


def measure(model: LanguageModel, tokenizer: Tokenizer, each: int, **changes: Any) -> tuple[float, float]:
    """Write `each` texts from every source: the share that is valid, and the mean share of a source's valid answers
    that is among them."""
    source = torch.tensor(tokenizer.encode_batch(list(ANSWERS))).repeat_interleave(each, 0)
    mask, noise = torch.ones_like(source, dtype=torch.bool), Noise(0, torch.arange(len(source)))
    lengths = model.draw_lengths(noise, Condition(source, mask))
    sampling, steering = replace(model.sampling, **changes), Steering(source=source, source_mask=mask)
    *_, last = model.stream(noise, lengths, 8, sampling, steering)
    rows = zip(last.tokens.tolist(), lengths.tolist(), strict=True)
    made = [tokenizer.decode(model.lengths.words(row[:length])) for row, length in rows]
    groups = zip(range(0, len(made), each), ANSWERS.values(), strict=True)
    valid = [[text for text in made[k : k + each] if text in answers] for k, answers in groups]
    return sum(map(len, valid)) / len(made), sum(len({*some}) for some in valid) / sum(map(len, ANSWERS.values()))


@pytest.mark.long
def test_diffusion_finds_the_answers_that_beam_search_leaves_out(tmp_path):
    """The twin knows all answers too, as its samples show: it is the search that gives the same one again."""
    diffusion, twin = train(tmp_path, "mdlm"), train(tmp_path, "encoder-decoder", label_smoothing=0.0)
    many, few = measure(*diffusion, 64), measure(*diffusion, 4)
    assert many[0] >= 0.9 and many[1] >= 11 / 12
    assert measure(*twin, 64)[1] >= 11 / 12
    valid, searched = measure(*twin, 4, beams=4)
    assert valid == 1 and searched == 0.25
    assert few[1] >= 2 * searched  # four independent draws of four answers find 1 - (3/4)^4 = 68 % of them
