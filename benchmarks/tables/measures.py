"""What a trained model of the great table writes, and its figures: one grid of settings, the same for all, on dev and
on test. A cell of the grid is named `SETTINGS|CALLS|TEMPERATURE`."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.tables.sets import ROOM, Texts
from benchmarks.tables.stats import Features, bleu_of, measure_divergence

if TYPE_CHECKING:
    from difflm.evaluation.corpora import PairSet
    from difflm.generation.pipeline import TextDiffusion

TEMPERATURES = {"pairs": (0.2, 0.5, 0.8, 1.0), "language": (0.7, 0.85, 1.0, 1.15)}
BUDGETS = {"pairs": (20, 5, 50, 200), "language": (50, 200)}  # calls of a text; curves are drawn at the first
WORDS = {"pairs": 16, "language": 24}  # of a usual text: blocks and edits have calls by its length
SAMPLES = 3  # a source, for variety
CANDIDATES, CANDIDATES_AT = 10, 0.8  # of the method's own selection, and their temperature
DRAWS = 16  # noise levels of a bound, for each text
WRITTEN, SCORED = 1000, 1000  # texts without a source, and texts whose bound is measured
FEATURE_TEXTS = 2000  # training texts that freeze the features
NATS = 100  # nats are kept in hundredths
SECOND = ("confidence", "ddim")  # the other sampler that is tried, the first that a model has
NOTHING: Mapping[str, Any] = MappingProxyType({})
MOST_DEV = 512  # sources or texts of dev
Figures = dict[str, float]


@dataclass
class Measured:
    """Figures by cell, and counts of single items that verdicts are computed from."""

    cells: dict[str, Figures] = field(default_factory=dict)
    items: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    def best(self, figure: str, calls: int | None = None) -> str:
        """The cell with the largest figure, among those of a budget."""
        found = {n: c[figure] for n, c in self.cells.items() if calls is None or n.split("|")[1] == str(calls)}
        return max(found, key=lambda name: found[name])


@dataclass(frozen=True)
class Cell:
    name: str
    settings: dict[str, Any]
    samples: int = 1


def steps_within(lm: "TextDiffusion", settings: Mapping[str, Any], calls: int, words: int) -> int:
    """The most steps of at most so many calls; one where a step takes more."""
    own = lm.model.sampling.change(settings)
    fitting = (steps for steps in range(calls, 0, -1) if lm.model.calls(own.change({"steps": steps}), words) <= calls)
    return next(fitting, 1)


@dataclass(frozen=True)
class Grid:
    """The settings that are tried of a model: temperatures with its own sampler and with another one, at budgets of
    calls; the same numbers for all models."""

    lm: "TextDiffusion"
    kind: str

    @property
    def budgets(self) -> Sequence[int]:
        """A left-to-right model has calls by its words alone."""
        return BUDGETS[self.kind] if "diffusion" in self.lm.model.capabilities.settings else BUDGETS[self.kind][:1]

    def cells(self, budget: int, settings: Mapping[str, Any] = NOTHING, samples: int = 1) -> list[Cell]:
        """A cell for each temperature."""
        model = self.lm.model
        knob = "temperature" if model.capabilities.predicts_words else "noise_temperature"
        fixed = {"length_beam": 1} if model.capabilities.length_beam and self.kind == "pairs" else {}
        if "diffusion" in model.capabilities.settings:
            fixed["steps"] = steps_within(self.lm, settings, budget, WORDS[self.kind])
        name = f"{json.dumps(settings, sort_keys=True) if settings else ''}|{budget}"
        return [
            Cell(f"{name}|{value}", {**fixed, knob: value, **settings}, samples) for value in TEMPERATURES[self.kind]
        ]

    def first(self, asked: Sequence[Mapping[str, Any]] = (), samples: int = 1) -> list[Cell]:
        """The cells of the first budget: own sampler, another one, and what claims ask for."""
        model = self.lm.model
        other = next(
            (name for name in SECOND if name in model.capabilities.step_rules and name != model.sampling.sampler), None
        )
        views: list[Mapping[str, Any]] = [NOTHING, *([{"sampler": other}] if other and self.kind == "pairs" else [])]
        return [cell for view in [*views, *asked] for cell in self.cells(self.budgets[0], view, samples)]


# -- pairs ------------------------------------------------------------------------------------------------------------


def count_matches(texts: Sequence[str], references: Sequence[Sequence[str]]) -> "np.ndarray[Any, Any]":
    """sacrebleu's counts of each text, [texts, 10], with 13a tokens."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(tokenize="13a", force=True, effective_order=True)
    scores = (metric.sentence_score(text, list(some)) for text, some in zip(texts, references, strict=True))
    return np.array([[*one.counts, *one.totals, one.sys_len, one.ref_len] for one in scores], np.int32)


def measure_pairs(lm: "TextDiffusion", pairs: "PairSet", cells: Sequence[Cell], seed: int = 0) -> Measured:
    from difflm.data.text_metrics import copy_rate, div_4, pairwise_self_bleu

    found = Measured()
    for cell in cells:
        groups, calls, seconds = write_groups(lm, pairs, cell, seed)
        firsts = [group[0] for group in groups]
        counts = sum(count_matches([group[k] for group in groups], pairs.references) for k in range(cell.samples))
        figures = {"bleu": float(bleu_of(np.sum(counts, 0))), "calls": calls / cell.samples, "seconds": seconds}
        figures["copy_rate"] = copy_rate(firsts, pairs.sources)
        if cell.samples > 1:
            figures["div_4"] = sum(map(div_4, groups)) / len(groups)
            figures["self_bleu"] = sum(map(pairwise_self_bleu, groups)) / len(groups)
        found.cells[cell.name] = figures
        found.items[cell.name] = np.asarray(counts)
    return found


def write_groups(lm: "TextDiffusion", pairs: "PairSet", cell: Cell, seed: int) -> tuple[list[list[str]], float, float]:
    """The samples of each source, the calls for all of them, and seconds."""
    from difflm.evaluation.seq2seq import write_candidates

    _, texts, calls, seconds = write_candidates(lm, pairs.sources, cell.samples, seed, cell.settings)
    return texts, calls, seconds


def measure_selected(lm: "TextDiffusion", pairs: "PairSet", sizes: Sequence[int]) -> Measured:
    """What the method's own selection chooses: the most central of some candidates, drawn at the same temperature by
    all; of left-to-right models also what beam search finds. The best candidate by the references is no result."""
    from difflm.data.text_metrics import choose_oracle, most_central
    from difflm.data.words import split_words
    from difflm.evaluation.seq2seq import write_candidates

    found = Measured()
    cell = next(one for one in Grid(lm, "pairs").first() if one.name.endswith(f"|{CANDIDATES_AT}"))
    if "diffusion" not in lm.model.capabilities.settings:
        search = Cell("beams=5||", {"beams": 5, "length_penalty": 1.0})
        found = measure_pairs(lm, pairs, [search])
    _, made, calls, _ = write_candidates(lm, pairs.sources, max(sizes), 1, cell.settings)
    for size in sizes:
        some = [group[:size] for group in made]
        texts = [group[most_central([split_words(text) for text in group])] for group in some]
        counts = count_matches(texts, pairs.references)
        name = f"mbr={size}|{cell.name.split('|', 1)[1]}"
        found.cells[name] = {"bleu": float(bleu_of(counts.sum(0))), "calls": calls * size / max(sizes)}
        found.items[name] = counts
        if size == max(sizes):
            best = [g[choose_oracle(g, r)] for g, r in zip(some, pairs.references, strict=True)]
            found.cells[f"oracle={size}||"] = {"bleu": float(bleu_of(count_matches(best, pairs.references).sum(0)))}
    return found


# -- texts without sources --------------------------------------------------------------------------------------------


@dataclass
class LanguageMeasure:
    """What texts are compared with: real ones, their 4-grams, and a judge where one knows the words."""

    texts: Texts
    judge: "TextDiffusion | None"
    features: Features
    seen: set[int]
    alike: list[str]  # training texts that samples are compared with, where dev and test are of other meanings

    @classmethod
    def make(cls, lm: "TextDiffusion", texts: Texts, device: str) -> "LanguageMeasure":
        from difflm.app.console import note
        from difflm.evaluation.shared import load_judge

        training = [separate_words(text) for text in texts.training()]
        seen = {gram for text in training for gram in hash_grams(text)}
        real = random.Random(0).sample(training, min(FEATURE_TEXTS, len(training)))
        alike = random.Random(1).sample(training, min(2 * WRITTEN, len(training))) if texts.apart else []
        return cls(texts, load_judge(None, [lm], device, note), Features(real), seen, alike)

    def real(self, split: str) -> list[str]:
        return [separate_words(text) for text in (self.texts.dev if split == "dev" else self.texts.test)]

    def scored(self, lm: "TextDiffusion", texts: Sequence[str]) -> "np.ndarray[Any, Any] | None":
        """Nats (in hundredths) and tokens of each text, [texts, 2]; None where there is no likelihood."""
        from difflm.evaluation.shared import score, tokens_of

        if lm.model.capabilities.likelihood is None:
            return None
        room = lm.config["recipe"]["longest"] - ROOM  # the same texts for all
        rows = [ids for ids in lm.tokenizer.encode_batch(list(texts)) if 0 < len(ids) <= room][:SCORED]
        nats = score(lm, rows, 0, 1 if lm.model.capabilities.likelihood == "exact" else DRAWS)
        return np.stack([np.round(nats * NATS), tokens_of(rows)], 1).astype(np.int32)

    def measure(self, lm: "TextDiffusion", split: str, cells: Sequence[Cell]) -> Measured:
        """Bound and samples; dev and test have samples of their own, since settings are chosen on dev."""
        real = self.texts.dev[:MOST_DEV] if split == "dev" else self.texts.test
        found = Measured()
        scored = self.scored(lm, real)
        if scored is not None:
            found.cells["bound"] = {"nats": float(scored[:, 0].sum() / scored[:, 1].sum() / NATS)}
            found.items["bound"] = scored
        vectors = self.features((self.alike or self.real(split))[: min(WRITTEN, len(real))])
        for cell in cells:
            self.add_samples(found, lm, cell, vectors, seed=1 + (split == "test"))
        return found

    def add_samples(self, found: Measured, lm: "TextDiffusion", cell: Cell, real: Any, seed: int) -> None:
        from difflm.data.text_metrics import distinct_n, unique_share
        from difflm.evaluation.language import write_samples
        from difflm.evaluation.shared import score, tokens_of

        made = write_samples(lm, cell.settings, min(WRITTEN, len(real)), seed)
        texts = [separate_words(text) for text in made.texts]
        grams = self.count_seen(texts)
        figures = {
            "distinct_4": distinct_n([text.split() for text in texts], 4),
            "memorised": float(grams[:, 0].sum() / max(1, grams[:, 1].sum())),
            "unique": unique_share(texts),
            "calls": float(made.figures["denoiser_calls"] or 0),
        }
        figures["mauve_like"], histograms = measure_divergence(real, self.features(texts))
        found.items[f"cells {cell.name}"] = histograms.astype(np.int32)
        found.items[f"grams {cell.name}"] = grams
        if self.judge is not None:
            rows = [ids for ids in made.ids if ids]
            if rows:
                nats = score(self.judge, rows, 0, 1)
                found.items[f"judge {cell.name}"] = np.stack([np.round(nats * NATS), tokens_of(rows)], 1).astype(
                    np.int32
                )
                figures["judge"] = float(nats.sum() / tokens_of(rows).sum())
            figures["empty"] = 1 - len(rows) / len(made.ids)
        found.cells[cell.name] = figures

    def real_figures(self, split: str) -> Figures:
        """The same figures of real text: the ceiling of divergence, its variety, what of it was seen in training."""
        from difflm.data.text_metrics import distinct_n

        first, alike = self.real(split)[:WRITTEN], self.alike or self.real(split)
        grams, other = self.count_seen(first), alike[WRITTEN : 2 * WRITTEN] or alike[:WRITTEN]
        area, _ = measure_divergence(self.features(alike[:WRITTEN]), self.features(other))
        return {
            "distinct_4": distinct_n([text.split() for text in first], 4),
            "memorised": float(grams[:, 0].sum() / max(1, grams[:, 1].sum())),
            "mauve_like": area,
            "mauve_of_training": float(bool(self.alike)),
        }

    def count_seen(self, texts: Sequence[str]) -> "np.ndarray[Any, Any]":
        """4-grams of each text that occur in training, and all of them, [texts, 2]."""
        every = [[gram in self.seen for gram in hash_grams(text)] for text in texts]
        return np.array([[sum(one), len(one)] for one in every], np.int32)


def separate_words(text: str) -> str:
    """A text with spaces between its words, as corpora may have them and printed texts have not."""
    from difflm.data.words import split_words

    return " ".join(split_words(text)).lower()


def hash_grams(text: str, n: int = 4) -> Iterator[int]:
    """Hashes of the 4-grams of words."""
    words = text.split()
    return (hash(tuple(words[k : k + n])) for k in range(len(words) - n + 1))
