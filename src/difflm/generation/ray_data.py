"""Generate the texts of a .jsonl file on the actors of a Ray cluster, with Ray Data.

An actor loads the model once. The texts are those of `difflm generate --input`, line by line.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from difflm.errors import DifflmError
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import parse_request, read_requests
from difflm.runtime.files import write_atomic

BATCH = 16  # requests that an actor is given at a time


class Answer:
    """The work of an actor: generate the texts of some requests."""

    def __init__(self, model: str, device: str = "auto") -> None:
        self.lm = TextDiffusion.from_pretrained(model, device)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Map `number` and `request` of each line to `number` and `texts`, one line each."""
        numbers = [int(number) for number in batch["number"]]
        requests = [parse_request(str(line), f"request {k}") for k, line in zip(numbers, batch["request"], strict=True)]
        jobs = [self.lm.make_job(**request.job()) for request in requests]
        made: list[dict[int, str]] = [{} for _ in jobs]
        for owner, texts in self.lm.run_jobs(jobs):
            made[owner] |= {k: " ".join(str(text).split("\n")) for k, text in texts.items()}
        return {"number": numbers, "texts": ["\n".join(own[k] for k in sorted(own)) for own in made]}


def map_requests(
    model: str, requests: str | Path, out: str | Path, actors: int = 1, gpus: float = 0.0, device: str = "auto"
) -> None:
    """Write the texts of all requests to `out`, in their order, with this many actors, each with this many `gpus`. The
    model and the files have the same path on every machine."""
    try:
        import ray.data
    except ImportError:
        raise DifflmError('this needs Ray: pip install ".[ray]".') from None
    asked = read_requests(Path(requests))  # errors in a line are reported before an actor starts
    lines = [{"number": k, "request": one.model_dump_json(exclude_unset=True)} for k, one in enumerate(asked)]
    answered = ray.data.from_items(lines).map_batches(
        Answer,
        fn_constructor_kwargs={"model": model, "device": device},
        batch_size=BATCH,
        num_gpus=gpus,
        compute=ray.data.ActorPoolStrategy(size=actors),
    )
    found = {int(row["number"]): str(row["texts"]) for row in answered.iter_rows()}
    write_atomic(Path(out), "".join(f"{found[number]}\n" for number in sorted(found)))
