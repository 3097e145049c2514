"""Minutes on two cores: a masked model learns a small grammar as well as there is anything to learn."""

import json
import math

import pytest

from difflm.data.words import split_words
from tests.support.tiny import PARTS, tiny_run


@pytest.mark.slow
def test_the_bound_comes_close_to_the_entropy_of_the_grammar(tmp_path):
    """Eight free choices a text, all as likely: the entropy is known. The length, too, is paid for."""
    run = tiny_run(tmp_path, "mdlm", steps=1000, batch_size=64, warmup=20, validate_every=1000, save_every=1000)
    texts = (tmp_path / "grammar.txt").read_text().splitlines()
    tokens = sum(len(split_words(text)) + 1 for text in texts) / len(texts)
    entropy = math.log(math.prod(len(part) for part in PARTS)) / tokens
    validation = json.loads((run / "config.json").read_text())["trained"]["validation"]
    assert validation["likelihood"] == "bound"
    assert entropy - 0.02 < validation["nats_per_token"] < entropy + 0.05
