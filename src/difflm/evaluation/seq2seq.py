"""`evaluate --task seq2seq` compares what systems wrote for each source with what people wrote, and with the source.

A row is one system with one way to choose among its candidates; the last row is the copy baseline, which returns every
source unchanged. `figures.yaml` defines the figures.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from difflm.data import text_metrics as metrics
from difflm.data.words import split_words
from difflm.errors import UsageError
from difflm.evaluation import shared
from difflm.evaluation.bert_score import BertScore
from difflm.evaluation.corpora import PairSet, pairs_for, read_pair_set
from difflm.evaluation.options import Options, Watcher, say
from difflm.evaluation.reports import SEQ2SEQ, Report, Row
from difflm.generation.checks import check_device
from difflm.generation.jobs import Chosen, Ids, Rank
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.ranking import Ranking, check_repairs, make_ranking
from difflm.generation.reading import Reader
from difflm.runtime.files import Json

COPY = "copy of the source"
SAMPLES = 3  # candidates per source for the figures of variety, as in DiffuSeq: both depend on their number


@dataclass(frozen=True)
class Outputs:
    """The texts of one system: equally many candidates for each source, and the cost of all of them together."""

    candidates: Sequence[Sequence[str]]
    calls: float  # network calls per source, over all its candidates
    seconds: float  # for all sources and candidates
    how: str = ""  # how one of the candidates was chosen, in words
    chosen: Sequence[int] = ()  # the index of the chosen candidate of each source; empty: the first of each
    selection: Literal["first", "mbr", "oracle"] = "first"  # "first": the system has ordered its candidates itself
    about: Json = field(default_factory=dict)  # method, sampling …

    @property
    def texts(self) -> list[str]:
        """The chosen text of each source."""
        indices = self.chosen or [0] * len(self.candidates)
        return [some[index] for some, index in zip(self.candidates, indices, strict=True)]


def measure_outputs(
    sources: Sequence[str],
    references: Sequence[Sequence[str]],
    systems: Mapping[str, Sequence[Outputs]],
    similarity: BertScore | None = None,
    about: Json | None = None,
    notes: Iterable[str] = (),
) -> Report:
    """Measure the systems' outputs, by the name of their rows, and the copy baseline on the same sources."""
    metrics.check_references(sources, references)
    copies = Outputs([[source] for source in sources], calls=0, seconds=0.0)
    named = [(name, one) for name, made in systems.items() for one in made]
    rows = []
    for name, outputs in [*named, (COPY, copies)]:
        texts = outputs.texts
        measured, signature = metrics.measure_texts(texts, sources, references)
        figures: dict[str, float | None] = {**dict.fromkeys(SEQ2SEQ), **measured}
        if len(outputs.candidates[0]) >= SAMPLES:
            samples = [some[:SAMPLES] for some in outputs.candidates]
            figures["self_bleu"] = sum(map(metrics.pairwise_self_bleu, samples)) / len(samples)
            figures["div_4"] = sum(map(metrics.div_4, samples)) / len(samples)
        if similarity is not None:
            figures["bert_score"] = sum(similarity(texts, references)) / len(texts)
        figures |= {"calls": outputs.calls, "seconds": outputs.seconds}
        own = {"how": outputs.how, "selection": outputs.selection, "candidates": len(outputs.candidates[0])}
        varied = {figure: SAMPLES * len(sources) for figure in ("self_bleu", "div_4") if figures[figure] is not None}
        rows.append(Row(name, figures, own | outputs.about, count=len(sources), texts=varied))
    count = sum(map(len, references))
    shared = {**(about or {}), "references": count, "bleu_sacre_signature": signature}
    found = [f"BERTScore: by {similarity.name}, neither weighted nor rescaled"] if similarity else []
    legend = [f"sacreBLEU: {signature}", "calls, seconds: all candidates included"]
    if any(row.figures["div_4"] is not None for row in rows):
        legend.append(f"self-BLEU, div-4: of the first {SAMPLES} candidates of each source")
    if any(row.about["selection"] == "oracle" for row in rows):
        legend.append("oracle: chosen by the references, an upper limit")
    title = f"{len(sources):,} sources, {count:,} references"
    return Report("seq2seq", title, rows, shared, legend, [*found, *notes])


# -- generating -------------------------------------------------------------------------------------------------------


def measure_seq2seq(runs: Sequence[str], options: Options, _: Watcher) -> Report:
    """Measure a run and its rivals on the same sources: those of a file, or those that the run's training held out."""
    ranks = list(dict.fromkeys(options.rank or ()))
    if (ranks or options.oracle) and options.mbr < 2 and not options.repairs:
        raise UsageError(f"--{'rank' if ranks else 'oracle'} chooses among candidates: give --mbr 2 or more.")
    if len({*ranks} - {"bound"}) > 1:
        raise UsageError("--rank takes one run at most; `bound` may be given as well.")
    if options.repairs and not {*ranks} - {"bound"}:
        raise UsageError("--repairs needs a left-to-right run that ranks the candidates: give --rank RUN.")
    if options.pairs is None and options.column is not None:
        raise UsageError("--column names the columns of --pairs FILE.")
    similarity = BertScore(options.encoder, check_device(options.device)) if options.encoder else None
    given = read_pair_set(options.pairs, options.column, options.data, options.split) if options.pairs else None
    models = shared.load_runs(runs, options.device)
    for lm in models.values():
        lm.source_room()
    rankers: list[Rank] = ["bound" if r == "bound" else TextDiffusion.from_pretrained(r, options.device) for r in ranks]
    if given is None:
        shared.check_same_data(models, options.data)
        given = pairs_for(next(iter(models.values())), options.data, options.split)
    pairs = given.sample(options.samples, options.skip, options.seed)
    return evaluate_seq2seq(models, pairs, options, rankers, similarity)


def evaluate_seq2seq(
    models: Mapping[str, TextDiffusion],
    pairs: PairSet,
    options: Options,
    ranks: Sequence[Rank] = (),
    similarity: BertScore | None = None,
) -> Report:
    """Generate texts from all sources with all models, and measure them. `ranks` are further choices among the
    candidates: by the model's own bound, by a twin."""
    readers = [*models.values(), *(rank for rank in ranks if not isinstance(rank, str))]
    fitting = pairs.keep(np.all([reads(lm, pairs.sources) for lm in readers], axis=0).tolist())
    notes = [f"seconds: on {shared.device_name(next(iter(models.values())).device)}"]
    if left_out := len(pairs.sources) - len(fitting.sources):
        notes.append(f"{left_out:,} sources are left out, they are longer than a model reads")
    if not fitting.sources:
        raise UsageError("no source fits into all of these models.")
    rankings = {name: rank_by(lm, fitting.sources, options, ranks) for name, lm in models.items()}
    written = {name: [*write_outputs(name, lm, fitting, options, rankings[name])] for name, lm in models.items()}
    say("measuring")
    about = {"corpus": fitting.name, "split": fitting.split, "seed": options.seed}
    return measure_outputs(fitting.sources, fitting.references, written, similarity, about, notes)


def reads(lm: Reader, sources: Sequence[str]) -> list[bool]:
    """Return for each source whether it fits the model."""
    room = lm.source_room()
    return [0 < len(ids) <= room for ids in lm.tokenizer.for_sources.encode_batch(list(sources))]


def rank_by(lm: TextDiffusion, sources: Sequence[str], options: Options, ranks: Sequence[Rank]) -> dict[str, Ranking]:
    """Return the rankings of candidates, by the names of their rows; a model that cannot be ranked so is rejected."""
    told, best, found = lm.encode_sources(sources), f", best of {options.mbr}" if options.mbr > 1 else "", {}
    for rank in ranks:
        name, repairs = f"by the twin{best}", options.repairs
        if rank == "bound":
            name, repairs = f"by bound{best}", 0
        if repairs:
            check_repairs(repairs, rank)
            name += f", {repairs} {'repair' if repairs == 1 else 'repairs'} each"
        found[name] = make_ranking(lm, rank, options.mbr, told, len(told), options.seed, repairs)
    return found


def write_outputs(
    name: str, lm: TextDiffusion, pairs: PairSet, options: Options, rankings: Mapping[str, Ranking]
) -> Iterator[Outputs]:
    """Yield a model's texts: one sample, the most central and the likeliest of several, and beam search if it supports
    that."""
    settings, mbr, seed = shared.settings_for(lm, options.settings), options.mbr, options.seed

    def describe(how: str, **changes: object) -> Json:
        sampling = shared.describe_sampling(lm.sampling(**settings, **changes))
        return {"how": how, "about": {"method": lm.config["method"], "sampling": f"{how}: {sampling}"}}

    ids, texts, calls, seconds = write_candidates(lm, pairs.sources, mbr, seed, settings, f"{name}: writing")
    yield Outputs([group[:1] for group in texts], calls / mbr, seconds / mbr, **describe("one sample"))
    if mbr > 1:
        start = time.perf_counter()
        chosen = [metrics.most_central(list(map(split_words, group))) for group in texts]  # as `translate --mbr` does
        own = seconds + time.perf_counter() - start
        yield Outputs(texts, calls, own, chosen=chosen, selection="mbr", **describe(f"MBR of {mbr}"))
    for how, ranking in rankings.items():
        say(f"{name}: ranking")
        start = time.perf_counter()
        best = ranking(range(len(ids)), ids)
        own, cost = seconds + time.perf_counter() - start, sum(one.calls for one in best) / len(best)
        chosen = [one.index for one in best]
        yield Outputs(put_repairs(lm, texts, best), calls + cost, own, chosen=chosen, **describe(how))
    if mbr > 1 and options.oracle:  # an upper limit, not a result: it looks at the references
        chosen = list(map(metrics.choose_oracle, texts, pairs.references))
        yield Outputs(texts, calls, seconds, chosen=chosen, selection="oracle", **describe(f"oracle of {mbr}"))
    if "left-to-right" in lm.model.capabilities.settings and (beams := options.beams):
        search = {**settings, "beams": beams}
        _, texts, calls, seconds = write_candidates(lm, pairs.sources, 1, seed, search, f"{name}: writing")
        yield Outputs(texts, calls, seconds, **describe(f"{beams} beams", beams=beams))


def put_repairs(lm: TextDiffusion, texts: list[list[str]], best: Sequence[Chosen]) -> list[list[str]]:
    """The candidates of each source, the chosen one as it was repaired."""
    kept = [[*group] for group in texts]
    for group, one in zip(kept, best, strict=True):
        if one.ids is not None:
            group[one.index] = lm.tokenizer.decode(one.ids)
    return kept


def write_candidates(
    lm: TextDiffusion, sources: Sequence[str], each: int, seed: int, settings: Json, doing: str = ""
) -> tuple[list[list[Ids]], list[list[str]], float, float]:
    """Return the candidates of each source as ids and as texts, the calls per source, and the seconds for all."""
    warm = lm.make_job(1, seed, source=sources[0], **settings)  # the first call is slower than the next ones
    deque(lm.run_jobs([warm]), maxlen=0)
    job = lm.make_job(1, seed, mbr=each, source=sources, **settings)  # as `translate --mbr` writes them
    rows, seconds = shared.write_rows(lm, job, doing)
    ids = [[row.ids for row in rows[k : k + each]] for k in range(0, len(rows), each)]
    texts = [[lm.tokenizer.decode(one) for one in group] for group in ids]
    return ids, texts, sum(row.calls for row in rows) / len(sources), seconds
