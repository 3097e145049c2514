"""Say a text in other words: among candidates that a model wrote behind the text and a phrase ("In other words:"), the
one is chosen that keeps its meaning as far as that can be checked, and fits best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
from difflm.generation.jobs import Chosen, Ids
from difflm.generation.ranking import UNKNOWN_SPELLING, read_in_order
from difflm.generation.reading import Reader
from difflm.models.word_nats import A_TOKEN
from difflm.runtime.files import Json

KEPT = "negations, numbers and names"
LOST_WORD = 2.0  # nats that a candidate loses with each content word that it does not keep
MOST_NATS = 3.0  # a token, of an answer read behind the text: 6 of 8 good ones had fewer, and 8 of nonsense more
LONGER = 1.5  # times the tokens of the text that its candidates have at most, and
FEW = 4  # so many more
EXCHANGED = f"no candidate kept {KEPT}, and enough of the rest: only a word was exchanged for one that means the same."
UNCHANGED = f"no candidate kept {KEPT}, and enough of the rest, and no word has an equal: nothing changed."
STOPS = (".", "!", "?", "…", '"', "”", "’", ")")


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
