"""Seconds from noise to printed text, free or steered, and what a judge reads in the texts."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from difflm.app.bench.clock import Row, rounded, timed
from difflm.errors import UsageError
from difflm.evaluation.control import Made, Protocol, by_control
from difflm.evaluation.language import ratio, score, tokens_of
from difflm.evaluation.targets import Target
from difflm.generation.jobs import Generation, GenerationJob
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import Request
from difflm.models.autoregressive import Autoregressive
from difflm.models.diffusion import DiffusionModel

# One of each kind, where no file of targets is given.
TARGETS = (
    Target("length", Request(length=14)),
    Target("field", Request(field={"food": "Japanese"})),
    Target("pos", Request(pos="DET PROPN PROPN AUX DET ADJ NOUN VERB ADJ NOUN PUNCT")),
    Target("tree", Request(tree="(S (PP * (NP * * *)) * (NP * *) (VP * (NP * *)) *)")),
)


@dataclass(frozen=True, eq=False)
class Reader:
    """A judge, asked once about texts made in one way, however often these are timed."""

    judge: TextDiffusion | None
    texts: int  # that are read
    known: dict[Any, Row] = field(default_factory=dict)

    def of(self, key: Any, make: Callable[[int], list[str]]) -> Row:
        if self.judge is None:
            return {}
        if key not in self.known:
            self.known[key] = self.read(make(self.texts))
        return self.known[key]

    def read(self, texts: Sequence[str]) -> Row:
        assert self.judge is not None
        rows = [
            ids for ids in self.judge.tokenizer.encode_batch(list(texts)) if 0 < len(ids) <= self.judge.model.max_words
        ]
        if not rows:
            return {}
        nats, error = ratio(score(self.judge, rows, 0, 1, lambda done, total: None), tokens_of(rows))
        told = {} if error is None else {"judge_error": rounded(error)}
        return {"judge_nats_per_token": round(nats, 3), **told, "judged_texts": len(rows)}


def sampling_speed(lm: TextDiffusion, name: str, texts: int, reader: Reader, **settings: Any) -> Row:
    """So many texts, their lengths drawn by the model, as `difflm generate` makes them."""

    def make(n: int) -> list[str]:
        return [one.text for one in lm.generate(n, **settings)]

    lm.inference.clear_recorded()  # what another row recorded would not count in this one's memory
    found = timed(lm.device, lambda: make(texts), repeats=3, at_most=5.0)
    way = manner(lm)
    about = {"model": name, "texts": texts, "steps": lm.sampling(**settings).steps, **way}
    rate = {"texts_per_second": rounded(texts / found.seconds)}
    key = name, way["compiled"], *sorted(settings.items())
    return {**about, **found.figures(), **rate, **reader.of(key, make)}


def control_speed(
    lm: TextDiffusion, name: str, targets: Sequence[Target], texts: int, reader: Reader, **settings: Any
) -> tuple[Row, list[Made]]:
    """About so many texts for targets of one control, as many for each; and the texts. The row says how many."""
    each, asked = max(1, texts // len(targets)), targets[:texts]
    protocol = Protocol(each=each, settings=settings)
    made: list[Made] = []

    def make() -> None:
        made[:] = unchecked(lm, asked, [protocol.make_job(lm, target, number) for number, target in enumerate(asked)])

    lm.inference.clear_recorded()
    found = timed(lm.device, make, repeats=3, at_most=5.0)
    count = each * len(asked)
    row = {
        "model": name,
        "control": asked[0].control,
        "texts": count,
        "targets": len(asked),
        "steps": lm.sampling(**settings).steps,
        **manner(lm),
        **found.figures(),
        "texts_per_second": rounded(count / found.seconds),
    }
    return {**row, **(reader.read([t.text for one in made for t in one.texts]) if reader.judge else {})}, list(made)


def unchecked(lm: TextDiffusion, targets: Sequence[Target], jobs: Sequence[GenerationJob]) -> list[Made]:
    """Texts of jobs that are alike, printed. Checkers think on the CPU, and are no part of writing."""
    made: list[dict[int, Generation]] = [{} for _ in jobs]
    for rows in lm.run_unchecked(jobs):
        for row in rows:
            text, words = lm.tokenizer.decode(row.ids), lm.tokenizer.tokens(row.ids)
            steps = jobs[row.owner].sampling.steps
            made[row.owner][row.sample] = Generation(text, words, steps, row.calls, 0.0, row.seed)
    return [Made(t, [texts[k] for k in sorted(texts)]) for t, texts in zip(targets, made, strict=True)]


def each_control(targets: Sequence[Target], lm: TextDiffusion) -> dict[str, list[Target]]:
    """Targets by control, of those controls that this model can be asked for."""
    found = {}
    for control, asked in by_control(targets).items():
        with suppress(UsageError):
            lm.plan_controls(asked[0].asked.controls())
            found[control] = asked
    return found


def manner(lm: TextDiffusion) -> Row:
    """What its network writes in, and whether its steps are compiled."""
    compiles = not isinstance(lm.model, DiffusionModel) or not lm.model.denoiser.codec.holds_tokens
    return {"dtype": arithmetic(lm), "compiled": compiles and lm.inference.compiled}


def arithmetic(lm: TextDiffusion) -> str:
    """What its network writes in."""
    model = lm.model
    if isinstance(model, DiffusionModel):
        dtype = lm.inference.denoiser.precision
    else:
        dtype = model.precision or model.written_in if isinstance(model, Autoregressive) else None
    return str(dtype or torch.float32).removeprefix("torch.")
