"""Whether the controls of a request agree with each other and with a model, as far as its tokenizer can tell: what no
text can satisfy is refused before the model is loaded."""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from difflm.controls.base import Control, KnownText, ModelInfo
from difflm.controls.edits import Edit, EditedText
from difflm.controls.gaps import Infill
from difflm.controls.phrases import Phrases, find_required
from difflm.errors import UsageError


def check_agreement(controls: Sequence[Control], edit: Edit | None, info: ModelInfo) -> None:
    """Refuse controls that contradict each other, or that are too long for a model. Their automata are not built, and
    labels are not looked up."""
    bound = [control.bind(info) for control in controls]
    for control in bound:
        if not control.head and (control.keeps_text or not control.needs_automaton):
            control.prepare(info)
    edited = None if edit is None else EditedText(edit.text.strip(), edit.keep)
    keeps: KnownText | None = find_template(bound, edit) or edited
    words, _ = agree_on_length([*bound, edited] if edited else bound, info)
    parts = keeps.parts if keeps else ()
    check_avoided(bound, info, parts)
    required = find_required(bound, info, parts)
    least = len({word for phrase in required for word in phrase.phrase.split() if word.isalnum()})  # they may overlap
    for control in bound:
        control.check_words(least, info)
    if keeps is None and required and not any(control.needs_automaton for control in bound):
        Phrases([[one] for one in required], info).widen(None, words)


def find_template(controls: Sequence[Control], edit: Edit | None) -> Infill | None:
    """The only template with gaps, if there is any; a text is not edited as well."""
    infills = [cast(Infill, control) for control in controls if control.keeps_text]
    if len(infills) > 1:
        raise UsageError("infill can be given only once; put all gaps in one text.")
    if infills and edit is not None:
        raise UsageError("edit and infill cannot be combined: mark gaps, or give a whole text.")
    if edit is not None:
        edit.check_value()
    return infills[0] if infills else None


def agree_on_length(controls: Sequence[Control], info: ModelInfo) -> tuple[int | None, int]:
    """The number of tokens on which the controls must agree, if any, and the fewest that satisfy all of them."""
    asked = [(c.name, n) for c in controls if (n := c.length(info)) is not None]
    for (one, n), (other, m) in pairwise(asked):
        if n != m:
            raise UsageError(f"{one} asks for {n} {info.tokenizer.unit}, {other} for {m}: no text has both.")
    needed = [(c, c.min_length(info)) for c in controls]
    least = max([1, *(n for _, n in needed)])
    if not asked:
        return None, least
    words = asked[0][1]
    for control, n in needed:
        if words < n:
            raise UsageError(f"{control} needs {n} {info.tokenizer.unit}; a length of {words} is too short.")
    if words > info.max_words:
        raise UsageError(f"{words} {info.tokenizer.unit} are requested; this model takes at most {info.max_words}.")
    return words, least


def check_avoided(controls: Sequence[Control], info: ModelInfo, known: Sequence[str]) -> None:
    """Reject words that are both required and excluded."""
    wanted = [("the words that stay", text) for text in known]
    wanted += [(str(c), text) for c in controls if (text := c.verbatim(info)) is not None]
    for where, text in wanted:
        for control in controls:
            if control.forbids and not control.check(text).satisfied:
                word = control.forbids.strip()
                raise UsageError(f"avoid {word!r} contradicts {where}: a word cannot be both required and excluded.")
