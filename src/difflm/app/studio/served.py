"""The models that a server serves, and what can be asked of each."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from starlette.exceptions import HTTPException

from difflm.annotators.e2e_fields import FIELDS
from difflm.app.studio.limits import Limits
from difflm.controls.base import ModelInfo, prepare_together
from difflm.controls.learned import PHRASES, POS
from difflm.controls.patterns.pattern import Pattern, join_patterns
from difflm.controls.phrases import MOST
from difflm.data.corpora import describe_training
from difflm.data.labels import NONE, Kind
from difflm.data.tokenizers import UNK
from difflm.errors import UsageError, say_in_request
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.ranking import KEPT
from difflm.models.diffusion import DiffusionModel
from difflm.runtime.files import Json

OTHERS = 5  # likely words for a place of a text
# Requests that show what a bundled model does well: the page opens with the first, and offers the others.
EXAMPLES: dict[str, dict[str, Json]] = json.loads(Path(__file__).with_name("examples.json").read_text("utf-8"))
SOME_JSON = '{"a": [0]}'  # whose signs a model must know to write any


class Models:
    """The models that one server serves; a request that names none gets the first."""

    def __init__(self, served: "Sequence[Served]") -> None:
        self.all, self.first = {one.name: one for one in served}, served[0]
        if len(self.all) < len(served):
            names = [one.name for one in served]
            raise UsageError(f"two models are called {max(names, key=names.count)!r}: rename one of them.")
        self.names = ", ".join(self.all)
        self.has_spare_core = torch.get_num_threads() > 1  # for a student that writes beside its teacher

    def find(self, name: str | None) -> "Served":
        if name is not None and name not in self.all:
            known = f"this is {self.first.name!r}" if len(self.all) == 1 else f"these are {self.names}"
            raise HTTPException(404, f"the model {name[:100]!r} is not served here; {known}.")
        return self.first if name is None else self.all[name]

    def facts(self) -> list[Json]:
        return [{**one.facts(), "preview": self.find_preview(one)} for one in self.all.values()]

    def find_preview(self, served: "Served") -> str | None:
        """The student of a model, with the same words, that writes in the fewest steps: its text can be read while its
        teacher still writes. None on a GPU, where nobody waits, and none where both would share a core: the teacher
        would take longer."""
        if served.lm.device.type != "cpu" or not self.has_spare_core:
            return None
        words, others = served.lm.config.get("tokenizer"), self.all.values()
        students = [one for one in others if one.lm.config.get("teacher") == served.name]
        students = [one for one in students if one.lm.config.get("tokenizer") == words]
        fastest = min(students, key=lambda one: one.steps, default=served)
        return fastest.name if fastest.steps < served.steps else None


class Served:
    def __init__(self, lm: TextDiffusion, name: str) -> None:
        self.lm, self.name = lm, Path(name).name or name  # for a run its name, not its path
        self.labellings = lm.labellings  # loads the classifiers before the first request
        self.steps = lm.model.sampling.steps
        # Whether positions are words, not pieces of words or characters of a picture.
        self.whole_words = lm.tokenizer.whole_words and not lm.model.lengths.pieces

    def known(self, kind: Kind) -> dict[str, list[str]]:
        """The labels of this kind that the model's classifiers know."""
        found = self.labellings.values()
        return {one.name: [value for value in one.values if value != NONE] for one in found if one.kind == kind}

    def facts(self) -> Json:
        lm, model = self.lm, self.lm.model
        # The examples of `e2e` suit every other model that knows restaurants, too, and those of `english` every other
        # one of English.
        alike = "e2e" if "food" in self.known("text") else "english" if lm.config.get("language") == "en" else ""
        examples = EXAMPLES.get(self.name) or EXAMPLES.get(alike, {})
        return {
            "name": self.name,
            "method": lm.config["method"],
            "parameters": lm.config["parameters"],
            "longest": model.max_words,
            "steps": self.steps,
            "temperature": model.sampling.temperature,
            "whole_words": self.whole_words,
            "device": str(lm.device),
            "learned": describe_training(lm.config),
            "vocabulary": len(lm.tokenizer.pieces),
            "left_to_right": "diffusion" not in model.capabilities.settings,
            "examples": [{"name": name, "request": request} for name, request in examples.items()],
        }

    def controls(self, limits: Limits) -> Json:
        """What may be asked of each control, by its name; null if this model does not support it."""
        lm = self.lm
        steered = lm.model.capabilities.position_beliefs
        labels, tags, phrases = self.known("text"), self.known("tags").get(POS), self.known("spans").get(PHRASES)
        exact = steered and self.whole_words
        spelt = steered and (lm.tokenizer.spells or lm.tokenizer.whole_words)  # so that words can be counted and kept
        rewriting = {"keeps": KEPT} if "restates" in lm.gaps else {}
        unit = lm.tokenizer.length_unit if steered and not lm.model.lengths.pieces else None
        return {
            "source": {"most": lm.model.capabilities.source_limit} if lm.model.capabilities.source_limit else None,
            "length": {"most": lm.model.max_words, "unit": unit} if unit else None,
            "field": {name: values for name, values in labels.items() if name in FIELDS} or None,
            "label": {name: values for name, values in labels.items() if name not in FIELDS} or None,
            "pos": {"tags": tags} if tags and exact else None,
            "tree": {"labels": phrases} if phrases and exact else None,
            "span": {"labels": phrases} if phrases and exact else None,
            "contains": {"most": MOST} if steered else None,
            "avoid": {} if steered else None,
            "pattern": {"unit": self.lm.tokenizer.unit} if spelt else None,
            "json_schema": {} if spelt and UNK not in lm.tokenizer.encode(SOME_JSON) else None,
            "infill": {"sizes": spelt} if steered else None,
            "alternatives": {"most": OTHERS} if self.weighs_words else None,
            "edit": rewriting if spelt else {"noise": "none"} if "edits" in lm.model.capabilities.settings else None,
            "samplers": list(lm.model.capabilities.step_rules),
            "limits": {"n": limits.n, "steps": limits.steps, "candidates": limits.candidates, "rows": limits.rows},
        }

    def judge_pattern(self, pattern: str) -> Json:
        """The lengths of texts that can match the pattern, or the error in it."""
        model, unit = self.lm.model, self.lm.tokenizer.unit
        try:
            if not model.capabilities.position_beliefs:
                raise UsageError("pattern: this model cannot follow one.")
            asked, info = [Pattern(pattern)], ModelInfo(self.lm.tokenizer, model.max_words, first=0)
            with prepare_together(asked, info):
                bound = join_patterns(asked, info, None, 1, model.denoiser.codec.bias)
        except UsageError as error:
            return {"message": say_in_request(error), "lengths": [], "unit": unit}
        return {"message": None, "lengths": [*bound.lengths], "unit": unit}

    @property
    def weighs_words(self) -> bool:
        """Whether it can say how likely other words are at a position. Not on a GPU: it may be capturing another
        thread's steps, and accepts no other work then."""
        model = self.lm.model
        if type(model) is not DiffusionModel or not self.whole_words or model.capabilities.source_limit:
            return False
        return self.lm.reads_tokens and model.denoiser.codec.adds_evidence and self.lm.device.type == "cpu"

    def find_alternatives(self, text: str) -> Json:
        """For each word of a text, its probability given all others, and the likeliest words in its place."""
        if not self.weighs_words:
            raise UsageError("this model cannot say how likely other words are.")
        words = []
        for belief in self.lm.alternatives(text, k=OTHERS):
            likely = [{"word": word, "p": round(p, 4)} for word, p in belief.alternatives.items()]
            own = round(belief.probability, 4) if belief.token else None
            words.append({"word": belief.token or None, "p": own, "likely": likely})
        return {"words": words}
