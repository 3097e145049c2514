"""Choose among candidates, by how likely a model finds them: the model that wrote them, or another one, such as its
twin.

A text is said in other words by candidates that a model writes behind it and a phrase ("In other words:"): the one is
chosen that keeps its meaning as far as that can be checked, and fits best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from difflm.controls.gaps import BLANK, Edit, Infill
from difflm.data.meaning import (
    count_content_changes,
    count_sentences,
    cut_sentences,
    find_fault,
    list_exchanges,
    share_kept,
)
from difflm.errors import UsageError
from difflm.generation.jobs import Chosen, Ids, Rank
from difflm.generation.reading import Reader
from difflm.generation.texts import Repaired
from difflm.models.batching import pad_token_rows
from difflm.models.word_nats import A_TOKEN, nats_in_order
from difflm.runtime.files import Json

VECTOR_DRAWS, TOKEN_DRAWS = 4, 8  # of a bound, per candidate: docs/log, "Ranking candidates"
MOST_REPAIRS = 100
DOUBT = 0.1  # a word with less than this share of the likeliest one's probability is repaired: docs/log
UNKNOWN_SPELLING = 4.0  # nats that a word costs more which no training text has: it must be that much likelier
CPU_TEXTS, GPU_TEXTS = 64, 1024  # candidates that are scored at once

KEPT = "negations, numbers and names"
LOST_WORD = 2.0  # nats that a candidate loses with each content word that it does not keep
MOST_NATS = 3.0  # a token, of an answer read behind the text: 6 of 8 good ones had fewer, and 8 of nonsense more
LONGER = 1.5  # times the tokens of the text that its candidates have at most, and
FEW = 4  # so many more
EXCHANGED = f"no candidate kept {KEPT}, and enough of the rest: only a word was exchanged for one that means the same."
UNCHANGED = f"no candidate kept {KEPT}, and enough of the rest, and no word has an equal: nothing changed."
STOPS = (".", "!", "?", "…", '"', "”", "’", ")")


@dataclass(frozen=True)
class Ranking:
    """Chooses the candidate with the fewest nats per token (words and END) under `scorer`. Candidates of one text share
    the noise of a bound, so that only their words differ. Those too long for the scorer come last.

    Before that, a left-to-right scorer may repair every candidate `repairs` times; the original and all its repairs
    compete. If a `writer` is given, which words it expected counts as well."""

    scorer: Reader
    sources: Sequence[Ids]  # by the number of the text, as the scorer reads them; empty if texts have no source
    seed: int
    repairs: int = 0
    doubt: float = DOUBT
    writer: Reader | None = None

    def __call__(self, numbers: Sequence[int], ids: list[list[Ids]], _: object = None) -> list[Chosen]:
        """On a CPU each text is ranked by itself, so that no choice depends on how a batch is rounded."""
        size = 1 if self.scorer.device.type == "cpu" else max(1, len(ids))
        found = []
        for start in range(0, len(ids), size):
            some = slice(start, start + size)
            for own, group in zip(self.read_versions(numbers[some], ids[some]), ids[some], strict=True):
                best = min(own, key=lambda one: one.nats_per_token)
                index, readings = own.index(best), sum(one.readings for one in own)
                found.append(Chosen(index, readings, ids=None if best.ids == group[index] else best.ids))
        return found

    def read_versions(self, numbers: Sequence[int], ids: list[list[Ids]]) -> list[list[Repaired]]:
        """The likeliest version of each candidate of each text. One that is too long to be read has infinite nats."""
        flat = [(number, row) for number, group in zip(numbers, ids, strict=True) for row in group]
        held = [k for k, (_, row) in enumerate(flat) if 0 < len(row) <= self.scorer.model.max_words]
        found = [Repaired(row, math.inf, 0) for _, row in flat]
        if held:
            rows, own = [flat[k][1] for k in held], [flat[k][0] for k in held]
            each = len(rows) // len(ids) if len(held) == len(flat) else 1
            sources = [self.sources[number] for number in own[::each]] if self.sources else []
            size = CPU_TEXTS if self.scorer.device.type == "cpu" else GPU_TEXTS
            if self.repairs:
                read = self.scorer.repair_ids(rows, self.repairs, self.doubt, size, sources, each, self.writer)
            else:
                model = self.scorer.model
                draws = VECTOR_DRAWS if "vectors" in model.capabilities.settings else TOKEN_DRAWS
                nats = self.scorer.score_ids(rows, self.seed, draws, size, own, sources, each).tolist()
                calls = model.nats_calls(draws)
                read = [Repaired(row, cost / (len(row) + 1), calls) for row, cost in zip(rows, nats, strict=True)]
            for k, one in zip(held, read, strict=True):
                found[k] = one
        rest = iter(found)
        return [[next(rest) for _ in group] for group in ids]


def check_repairs(repairs: int, rank: Rank | None, controls: Sequence[object] = ()) -> None:
    """Reject repairs that nobody can make, or that could undo what was asked for."""
    if isinstance(repairs, bool) or not isinstance(repairs, int) or not 0 <= repairs <= MOST_REPAIRS:
        raise UsageError(f"--repairs must be between 0 and {MOST_REPAIRS}, not {repairs!r}.")
    model = None if rank is None or isinstance(rank, str) else rank.model
    if model is None or model.capabilities.state != "prefix":
        raise UsageError("--repairs needs a left-to-right model that ranks the candidates: give --rank RUN.")
    if controls:
        raise UsageError("--repairs may undo what controls ask for: leave one of them out.")


@dataclass(frozen=True)
class GapFit:
    """Chooses the candidate whose gaps fit best. A model that reads from left to right too finds it by the fewest nats
    of the whole text, where each token may cost `A_TOKEN`; any other by the fewest nats per token, each given all
    others (Salazar et al., 2020), from the token before its first gap to the one after its last. Words that occur
    neither in the training texts nor in what is given cost `UNKNOWN_SPELLING` nats more, if there is a lexicon."""

    writer: Reader
    before: int  # tokens before the first gap, and after the last
    behind: int
    prompt: Sequence[int] = ()  # what is answered
    given: str = ""

    def __call__(self, _: Sequence[int], ids: list[list[Ids]], __: object = None) -> list[Chosen]:
        found = []
        for group in ids:
            costs, calls = [0.0] * len(group), 0
            if not self.writer.model.capabilities.reads_in_order:
                costs, calls = self.read_windows(group)
            elif (different := len({*map(tuple, group)})) > 1:  # otherwise there is nothing to choose
                costs, calls = read_in_order(self.writer, group), different
            odd = map(self.count_odd, map(self.writer.tokenizer.decode, group))
            costs = [cost + UNKNOWN_SPELLING * count for cost, count in zip(costs, odd, strict=True)]
            found.append(Chosen(costs.index(min(costs)), calls))
        return found

    def count_odd(self, text: str) -> int:
        """Words that nobody knows; all, if a text says itself in other words without being asked."""
        phrase = self.writer.gaps.get("restates")
        unasked = phrase is not None and phrase in text and phrase not in self.given
        return len(text if unasked else self.writer.lexicon.find_unknown(text, self.given))

    def read_windows(self, group: list[Ids]) -> tuple[list[float], int]:
        masks = self.writer.check_reads_tokens().denoiser.process.masks
        calls, costs = 0, list[float]()
        for row in group:
            first, end = max(0, self.before - 1), min(len(row), len(row) - self.behind + 1)
            calls += end - first if masks else 1  # for word vectors, one call for all tokens
            costs.append(math.inf)
            if first < end:  # not an empty answer
                logits = self.writer.token_logits(row, self.prompt, first, end)
                costs[-1] = float(cross_entropy(logits, torch.tensor(row[first:end], device=logits.device)))
        return costs, calls


def read_in_order(reader: Reader, rows: Sequence[Ids]) -> list[float]:
    """The nats of texts, where each token may cost `A_TOKEN`, under a model that reads from left to right too. Each
    that was not read ahead is read once, together with the others, as the tokenizer cuts it, since a pattern may have
    been followed in other tokens."""
    found = {**reader.costs}
    texts = [row for row in dict.fromkeys(map(tuple, rows)) if row not in found]
    encode, decode, most = reader.tokenizer.encode, reader.tokenizer.decode, reader.model.max_words
    for k in range(0, len(texts), GPU_TEXTS):
        some = texts[k : k + GPU_TEXTS]
        cut = pad_token_rows([encode(decode(row))[:most] for row in some])
        ids, mask = reader.model.lengths.canvas(*(part.to(reader.device) for part in cut))
        nats = nats_in_order(reader.inference.denoiser, ids, mask) - A_TOKEN * mask
        found |= zip(some, nats.sum(-1).tolist(), strict=True)
    return [found[tuple(row)] for row in rows]


def make_ranking(
    writer: Reader,
    rank: Rank,
    candidates: int,
    sources: list[Ids],
    texts: int,
    seed: int,
    repairs: int = 0,
) -> Ranking:
    """Set up the ranking of candidates for this many texts, equally many per source, whose ids the writer encoded.
    Rejects a model that cannot score the writer's texts."""
    if candidates < 2 and not repairs:
        raise UsageError("--rank chooses among candidates: give --candidates 2 or more.")
    if isinstance(rank, str) and rank != "bound":
        raise UsageError(f"rank must be 'bound' or a model, not {rank!r}.")
    scorer = writer if isinstance(rank, str) else rank
    if scorer.model.capabilities.likelihood is None:
        raise UsageError(f"{scorer.name} has no likelihood and no bound: it cannot rank candidates.")
    if writer.model.capabilities.source_limit and not scorer.model.capabilities.source_limit:
        raise UsageError(f"{scorer.name} reads no source: it cannot rank texts that are written from one.")
    if scorer.tokenizer.fingerprint() != writer.tokenizer.fingerprint():
        raise UsageError(f"{scorer.name} has another vocabulary than {writer.name} and cannot rank its texts.")
    if scorer.model.capabilities.source_limit and not sources:
        raise UsageError(f"{scorer.name} scores texts that are written from a source, and none is given.")
    if scorer is not writer and sources:
        scorer.check_sources(sources)
    told = [row for row in sources for _ in range(texts // len(sources))]
    return Ranking(scorer, told, seed, repairs, DOUBT, writer if repairs and writer.expects_words else None)


@dataclass(frozen=True)
class Rewriting:
    """Chooses among the candidates for a text that is said in other words. Those that change a negation, a number or a
    name, that lose a kept word, that say nothing new, or that have more than `MOST_NATS` are refused. Of the others the
    one with the fewest nats is taken, read behind the text (`read_in_order`); lost content words cost nats as well. If
    all are refused, the text has one word exchanged that has an equal, or stays."""

    writer: Reader
    edit: Edit
    template: Infill

    @property
    def before(self) -> int:
        """The tokens before the answer."""
        return len(self.encode(""))

    def encode(self, answer: str) -> Ids:
        """The tokens of the text, the phrase and an answer."""
        return self.writer.tokenizer.encode(f"{self.template.parts[0].rstrip()} {answer}".rstrip())

    def __call__(self, _: Sequence[int], ids: list[list[Ids]], __: object = None) -> list[Chosen]:
        return [self.choose(group) for group in ids]

    def choose(self, group: list[Ids]) -> Chosen:
        text, lexicon = self.edit.text.strip(), self.writer.lexicon
        read = [self.read_answer(row) for row in group]
        good = [one for one in dict.fromkeys(read) if find_fault(text, one, lexicon, self.edit.keep) is None]
        costs, said = self.list_costs(good, MOST_NATS), list[str]()
        if not costs:
            costs, said = self.list_costs(list_exchanges(text, self.edit.keep)), [EXCHANGED]
        best = min(costs, key=costs.__getitem__, default=text)
        index = read.index(best) if best in read else 0
        ids, checks = self.writer.tokenizer.encode(best), [self.check(best)]
        return Chosen(index, len(good), ids=ids, said=said if costs else [UNCHANGED], checks=checks)

    def read_answer(self, row: Ids) -> str:
        """What a candidate says, as many sentences as the text has, without a mark at the end if that has none."""
        text, answer = self.edit.text.strip(), self.writer.tokenizer.decode(row[self.before :])
        answer = cut_sentences(" ".join(answer.split()), count_sentences(text))
        return answer if text.endswith(STOPS) else answer.rstrip(".!?…")

    def list_costs(self, answers: Sequence[str], most: float = math.inf) -> dict[str, float]:
        """The nats of answers, those of at most so many a token, with what is added for lost and unknown words."""
        text, lexicon, before = self.edit.text, self.writer.lexicon, self.encode("")
        rows = {one: row for one in answers if len(row := self.encode(one)) <= self.writer.model.max_words}
        told, *nats = read_in_order(self.writer, [before, *rows.values()])
        costs = {one: own - told for one, own in zip(rows, nats, strict=True)}
        found = {one: n for one, n in costs.items() if n <= (most - A_TOKEN) * (len(rows[one]) - len(before))}
        for one in found:
            odd = len(lexicon.find_unknown(one, text))
            found[one] += LOST_WORD * count_content_changes(text, one) + UNKNOWN_SPELLING * odd
        return found

    def check(self, answer: str) -> Json:
        text = self.edit.text.strip()
        fault = find_fault(text, answer, self.writer.lexicon, self.edit.keep)
        met, score = fault in (None, "nothing"), round(share_kept(text, answer), 4)
        about = {"checker": f"{KEPT}; the share of content words kept", "guarantee": "exact"}
        return {"name": "edit", "target": text, "satisfied": met, "score": score, **about}


def restate(edit: Edit, phrase: str, writer: Reader) -> Rewriting:
    """The request that says a text in other words; rejects a text that is too long for it."""
    edit.check_value()
    if BLANK.search(edit.text):
        raise UsageError("edit: the text has a gap: fill it with --infill, or give a whole text.")
    text = " ".join(edit.text.split())
    size = len(writer.tokenizer.encode(text))
    most = (writer.model.max_words - len(writer.tokenizer.encode(phrase)) - 1) // 2
    if size > most:
        raise UsageError(
            f"edit: the text has {size} tokens; {writer.name} says texts of at most {most} in other words. Give it "
            "sentence by sentence, or let it be noised and denoised: --strength 0.5."
        )
    closed = text if text.endswith(STOPS) else f"{text}."
    return Rewriting(writer, edit, Infill(f"{closed} {phrase} ___", int(LONGER * size) + FEW))
