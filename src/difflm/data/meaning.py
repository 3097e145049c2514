"""English: whether a text is, and whether one that says another in other words may mean something else. For that its
negations, numbers and names are compared, and the words that carry its content: what is equal here can still differ in
meaning; what is not equal is refused."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from difflm.data.words import has_phrase
from difflm.runtime.files import read_own_table

TABLE = read_own_table("meaning.yaml", __file__)
NEGATIONS, FUNCTION, ENGLISH, OTHERS = (
    frozenset(TABLE[key].split()) for key in ("negations", "function", "common", "common elsewhere")
)
PREFIXES, NUMBERS = TABLE["prefixes"].split(), {word: str(value) for word, value in TABLE["numbers"].items()}
ALIKE = [line.split() for line in TABLE["alike"]]

LEAST_KEPT = 0.4  # the share of a text's content words that is kept, if it has several

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
FIGURE = re.compile(r"\d+(?:[.,:]\d+)*")
SIGN = re.compile(rf"{WORD.pattern}|{FIGURE.pattern}|\S")
# The end of a sentence; not that of "p.m." or "Mr.".
STOP = re.compile(r"(?<!\b[A-Za-z])(?<!\b[MD]r)(?<!\bM[rs]s)(?<!\bMs)[.!?…]+[\"”’')\]]*(?=\s|$)")
INSIDE = re.compile(r"[\w,;'’-]\s*$")  # what precedes a word that does not begin a sentence


@dataclass(frozen=True)
class Lexicon:
    """The spellings that a model's training texts have within sentences. A word that occurs with a small and with a
    capital letter, such as a name that is a word as well, has two entries."""

    words: frozenset[str] = frozenset()

    @classmethod
    def load(cls, path: Path) -> "Lexicon":
        """One spelling a line."""
        return cls(frozenset(path.read_text(encoding="utf-8").split("\n")))

    def find_unknown(self, text: str, given: str = "") -> list[str]:
        """The words of a text that are neither given nor in the training texts, if anything is known of these."""
        own = {form.lower() for word in WORD.findall(given) for form in (word, drop_owner(word))}
        found = [word for word in WORD.findall(text) if self.words and word.lower() not in own]
        stems = (re.sub("s?['’]s$|['’]$", "", word.replace("’", "'")) or word for word in found)
        known = (not self.words.isdisjoint((stem, stem.lower(), stem.capitalize())) for stem in stems)
        return [word for word, is_known in zip(found, known, strict=True) if not is_known]

    def is_name(self, word: str, inside: bool) -> bool:
        """Whether a word is written like a name: with a capital letter `inside` a sentence, or at its beginning if it
        does not occur without."""
        if not word[0].isupper() or any(word.lower() in others for others in (FUNCTION, NEGATIONS, NUMBERS)):
            return False
        return inside or (bool(self.words) and (word in self.words or word.lower() not in self.words))


def is_other_language(text: str) -> bool:
    """Whether more words of a text are common, or spelt, in other languages than in English: good enough for a warning,
    too coarse to refuse anything. A single word is not judged: it may be a name. Of 5,000 sentences each of ten English
    corpora, at most 0.4 % are taken for another language, 1 % in two about foreign places and people; of 5,000 German
    ones 98.5 % are."""
    words = [word.lower() for word in re.findall(r"[^\W\d_]+", text)]
    foreign = sum(word in OTHERS or not word.isascii() for word in words)
    return len(words) > 1 and foreign > sum(word in ENGLISH for word in words)


def split_small(text: str) -> list[str]:
    return [word.lower().replace("’", "'") for word in WORD.findall(text)]


def count_negations(text: str) -> int:
    return sum(word in NEGATIONS or word.endswith("n't") for word in split_small(text))


def list_numbers(text: str) -> list[str]:
    """The numbers of a text in order of size, in figures where they are words."""
    return sorted([*FIGURE.findall(text), *(NUMBERS[word] for word in split_small(text) if word in NUMBERS)])


def list_names(text: str, lexicon: Lexicon) -> set[str]:
    before = ((place[0], text[max(0, place.start() - 2) : place.start()]) for place in WORD.finditer(text))
    return {drop_owner(word) for word, left in before if lexicon.is_name(word, INSIDE.search(left) is not None)}


def drop_owner(word: str) -> str:
    return re.sub("['’]s$", "", word)


def list_content(text: str) -> list[str]:
    """The words that are no function words, by their stems as far as endings tell."""
    words = [word for word in split_small(text) if word not in FUNCTION and word not in NEGATIONS]
    return [re.sub("(?<=...)(?:ing|ed|es|s|ly|e|y|'s|er)$", "", word) for word in words if not word.endswith("n't")]


def count_content_changes(before: str, after: str) -> int:
    """How many content words are lost or, if these are more, added."""
    old, new = Counter(list_content(before)), Counter(list_content(after))
    return max((old - new).total(), (new - old).total())


def share_kept(before: str, after: str) -> float:
    """The share of the content words of a text that another one has as well."""
    old = Counter(list_content(before))
    return (old & Counter(list_content(after))).total() / max(1, old.total())


def find_fault(before: str, after: str, lexicon: Lexicon, keep: Sequence[str] = ()) -> str | None:
    """Why a text does not say another one in other words; None if nothing tells."""
    old, new = ([sign for sign in SIGN.findall(text.lower()) if sign[0].isalnum()] for text in (before, after))
    changed = {*old} ^ {*new}
    contrary = any(start + word in changed for start in PREFIXES for word in changed)
    if old == new:
        return "nothing"
    if count_negations(before) != count_negations(after) or contrary:
        return "a negation"
    if list_numbers(before) != list_numbers(after):
        return "a number"
    # A name may move to the beginning of a sentence, where nothing tells it from a word; none may vanish or come.
    names = list_names(before, lexicon), list_names(after, lexicon)
    spelt = [{drop_owner(word).lower() for word in WORD.findall(text)} for text in (before, after)]
    if any(name.lower() not in spelt[1] for name in names[0]) or any(n.lower() not in spelt[0] for n in names[1]):
        return "a name"
    if any(not has_phrase(after, phrase) for phrase in keep):
        return "a kept word"
    size, more = len(list_content(before)), len(list_content(after))
    if (size > 1 and share_kept(before, after) < LEAST_KEPT) or more > max(2, 2 * size):
        return "content words"
    ends = [bool(STOP.search(text[-8:])) for text in (before, after)]
    return "the end" if ends[0] and not ends[1] else None


def count_sentences(text: str) -> int:
    return max(1, len(STOP.findall(text)))


def cut_sentences(text: str, most: int) -> str:
    """The first sentences of a text."""
    ends = [found.end() for found in STOP.finditer(text)]
    return text[: ends[most - 1]] if len(ends) >= most else text


def list_exchanges(text: str, keep: Sequence[str] = ()) -> list[str]:
    """The texts in which one word is exchanged for one that means nearly the same."""
    found = []
    for place in WORD.finditer(text):
        word, kept = place[0], any(has_phrase(phrase, place[0]) for phrase in keep)
        for line in ALIKE if not kept else ():
            for other in line if word.lower() in line else ():
                new = other.capitalize() if word[0].isupper() else other
                if other != word.lower():
                    found.append(text[: place.start()] + new + text[place.end() :])
    return found


def list_changes(before: str, after: str) -> list[list[str]]:
    """The words that changed, as what was written and what stands in its place; one of both may be empty."""
    old, new = SIGN.findall(before), SIGN.findall(after)
    parts = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [[" ".join(old[a:b]), " ".join(new[c:d])] for kind, a, b, c, d in parts if kind != "equal"]
