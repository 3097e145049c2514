"""Left-to-right rivals: the twin of the same data, and GPT-2-small as everybody runs it."""

from typing import Any

import torch

from difflm.app.bench.clock import Row, rounded, timed
from difflm.app.bench.writing import Reader, sampling_speed
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.models.autoregressive import Autoregressive

TOKENS = 64  # that GPT-2 writes


def check_twin(twin: TextDiffusion) -> TextDiffusion:
    if not isinstance(twin.model, Autoregressive):
        raise UsageError(f"a twin writes from left to right; this run is {twin.config['method']}.")
    return twin


def twin_speed(twin: TextDiffusion, name: str, texts: int, reader: Reader, compiled: bool) -> Row:
    """The twin at temperature 1, its step recorded on a GPU; `compiled`: its blocks compiled as well."""
    before, twin.inference.compiled = twin.inference.compiled, compiled
    try:
        row = sampling_speed(twin, name, texts, reader, temperature=1.0)
    finally:
        twin.inference.compiled = before
    way = "compiled and recorded" if compiled else "recorded" if twin.device.type == "cuda" else "eager"
    del row["steps"]  # as many as the text has words
    return {"rival": "twin", "decoding": f"key-value cache, {way}", **row}


def gpt2_speed(texts: int, device: torch.device, tokens: int = TOKENS) -> Row:
    """transformers' `generate` with the sizes of GPT-2-small and weights by chance: speed does not ask what it says."""
    import transformers

    torch.manual_seed(0)
    sizes: Any = transformers.GPT2Config()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = transformers.GPT2LMHeadModel(sizes)
    model.to(device=device, dtype=dtype).eval()
    start = torch.full((texts, 1), sizes.bos_token_id, device=device)
    asked: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "use_cache": True}
    asked |= {"attention_mask": torch.ones_like(start), "pad_token_id": sizes.eos_token_id}
    with torch.no_grad():
        found = timed(device, lambda: model.generate(start, **asked), repeats=3, at_most=5.0)
    about = {"rival": "gpt2-small", "decoding": f"transformers {transformers.__version__} generate"}
    size = {"texts": texts, "tokens": tokens, "dtype": str(dtype).removeprefix("torch.")}
    return {**about, **size, **found.figures(), "texts_per_second": rounded(texts / found.seconds)}
