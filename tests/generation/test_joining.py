"""Texts that join a batch while it runs: each is the one that it would be alone, to the bit."""

from typing import Any

import pytest
import torch

from difflm.controls import Infill, Label, Length
from difflm.data.tokenizers import SPECIALS, Words
from difflm.fast.inference import Inference
from difflm.generation.jobs import GenerationJob
from difflm.generation.loops import Loop, Progress, Seat, loop_shape
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.scheduler import Request, Scheduler
from difflm.methods import METHODS, TextSpec
from difflm.models.diffusion import DiffusionModel
from tests.support.guides import ASKED

LOOPS = 4  # of different shapes


class Server:
    """A scheduler with one thread: every request comes a step after the one before."""

    def __init__(self, lm: TextDiffusion) -> None:
        self.lm, self.scheduler, self.steps_together = lm, Scheduler(LOOPS), set[frozenset[int]]()

    def serve(self, asked: list[dict[str, Any]]) -> list[list[Any]]:
        jobs = [self.lm.make_job(**one) for one in asked]
        made: dict[int, dict[int, Any]] = {id(job): {} for job in jobs}
        coming = iter(jobs)
        self.lm.inference.sync_weights()

        def step(loop: Loop) -> Progress | None:
            self.steps_together.add(frozenset(seat.step for seat in loop.holders))
            found = loop.step()
            self.add(next(coming, None))
            return found

        self.add(next(coming, None))
        for found in self.scheduler.work(lambda: False, step=step):
            for job, drafts in found.drafts:
                if job.watch is not None:
                    job.watch(drafts)
            for job, part in found.parts:
                texts = self.lm.finish_rows(job, *found.read(job, part))
                assert not texts.keys() & made[id(job)].keys(), "no text is told twice"
                made[id(job)] |= texts
        assert not self.scheduler.loops and next(coming, None) is None
        return [[texts[k] for k in sorted(texts)] for texts in made.values()]

    def add(self, job: GenerationJob | None) -> None:
        if job is not None:
            request = Request(self.lm, [job])
            for row in job.make_rows(self.lm.model):
                request.rows[loop_shape(self.lm, job, row)].append(Seat(job, row))
            self.scheduler.requests.append(request)
            self.scheduler.news = True

    @property
    def joined(self) -> bool:
        """Whether texts at different steps were in one batch."""
        return any(len(steps) > 1 for steps in self.steps_together)


def check(lm: TextDiffusion, asked: list[dict[str, Any]]) -> Server:
    server = Server(lm)
    for one, found in zip(asked, server.serve(asked), strict=True):
        alone = lm.generate(**one)
        about = [(g.text, g.steps, g.denoiser_calls, g.classifier_calls, g.controls, g.warnings) for g in found]
        assert about == [(g.text, g.steps, g.denoiser_calls, g.classifier_calls, g.controls, g.warnings) for g in alone]
    return server


PLAIN = [{"n": 1 + k % 3, "seed": k, "steps": 2 + 5 * k % 7} for k in range(6)]


@pytest.mark.parametrize("method", ["difflm", "mdlm"])
def test_a_text_that_joins_is_the_one_it_would_be_alone(tiny_runs, method):
    assert check(TextDiffusion.from_pretrained(tiny_runs[method]), PLAIN).joined


@pytest.mark.long
@pytest.mark.parametrize(
    "name", sorted(name for name, method in METHODS.items() if method.kind in ("method", "baseline"))
)
def test_texts_of_every_method_are_served(name):
    """Those of models over whole texts join; those of others wait for the next batch. Weights are as they are drawn."""
    sizes = {"hidden": 16, "layers": 2, "heads": 2, "encoder_layers": 1, "embedding_dim": 8}
    method = METHODS[name](**{key: value for key, value in sizes.items() if key in METHODS[name].model_fields})
    words = Words([*SPECIALS, *"abcdefghijkl"])
    for source in {"text": [0], "seq2seq": [6], "either": [0, 6]}[method.task]:
        torch.manual_seed(0)
        model = method.build(TextSpec(words.size, 20, source, 0, words))
        model.observe(torch.ones(21, dtype=torch.long), torch.ones(words.size, dtype=torch.long))
        told = {"source": "a b c d e"[: 2 * source - 3]} if source else {}
        steps = "diffusion" in model.capabilities.settings
        asked = [{**one, **told} if steps else {"n": one["n"], "seed": one["seed"], **told} for one in PLAIN]
        joinable = isinstance(model, DiffusionModel) and model.capabilities.mixed_steps
        for record in (None, True) if joinable else (None,):  # also in the tensors that a captured step would have
            about = {"method": name, "parameters": 1, "recipe": {}}
            assert check(TextDiffusion(model, words, about, Inference(model, record=record)), asked).joined == joinable


@pytest.mark.long
@pytest.mark.parametrize("method", ["difflm", "diffusion-lm", "mdlm", "udlm"])
def test_controls_join_with_their_texts(tiny_runs, method):
    assert check(TextDiffusion.from_pretrained(tiny_runs[method]), [*ASKED, *ASKED[::-1]]).joined


@pytest.mark.long
@pytest.mark.parametrize("method", ["difflm", "mdlm", "udlm"])
def test_texts_join_under_every_step_rule(tiny_runs, method):
    lm = TextDiffusion.from_pretrained(tiny_runs[method])
    for sampler in lm.model.capabilities.step_rules:
        asked = [{"n": 2, "seed": k, "steps": 3 + k, "sampler": sampler, "controls": [Length(6)]} for k in range(3)]
        assert check(lm, asked).joined


@pytest.mark.long
def test_a_classifier_guides_those_who_join(tiny_runs, guide):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"]).guided_by(guide)
    known = lm._load_classifier(guide).labellings["food"].values[1:]
    asked = [{"n": 1, "seed": k, "steps": 6, "controls": [Label("food", known[k % 2]), Length(6)]} for k in range(3)]
    assert check(lm, [*asked, {"n": 1, "seed": 7, "steps": 4, "controls": [Length(6)]}]).joined


def test_each_who_watches_sees_every_step_of_its_own(tiny_runs):
    lm, seen = TextDiffusion.from_pretrained(tiny_runs["difflm"]), [list[Any]() for _ in range(3)]
    asked = [{"n": 1, "seed": k, "steps": 6 - k, "controls": [Length(6)], "watch": seen[k].extend} for k in range(3)]
    made = Server(lm).serve(asked)
    for one, drafts, (text,) in zip(asked, seen, made, strict=True):
        alone = [*lm.stream(1, one["seed"], steps=one["steps"], controls=one["controls"])]
        assert drafts == [draft for (draft,) in alone] and drafts[-1].tokens == text.tokens


def test_who_is_not_wanted_any_more_frees_the_row(tiny_runs):
    lm, steps = TextDiffusion.from_pretrained(tiny_runs["difflm"]), list[Any]()
    job = lm.make_job(1, 1, steps=50, controls=[Infill("The ___:3 .")], watch=steps.append)
    job.wanted = lambda: len(steps) < 2
    (row,) = job.make_rows(lm.model)
    loop = Loop(lm, loop_shape(lm, job, row))
    loop.joining.append(Seat(job, row))
    while loop.holders:
        if (found := loop.step()) is not None:
            assert not found.parts
            steps += found.drafts
    assert len(steps) == 2 and loop.freed == 1


@pytest.mark.long
@pytest.mark.parametrize("method", ["difflm", "mdlm"])
def test_a_gpu_serves_the_same_texts_up_to_rounding(tiny_runs, method):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    lm = TextDiffusion.from_pretrained(tiny_runs[method], device="cuda", dtype=torch.float32)
    asked = [{**one, "seed": k} for k, one in enumerate(PLAIN * 4)]
    server = Server(lm)
    pairs = zip(asked, server.serve(asked), strict=True)
    same = [a.text == b.text for one, found in pairs for a, b in zip(found, lm.generate(**one), strict=True)]
    assert server.joined and sum(same) > 0.9 * len(same)
