"""The library as people type it: arguments that editors list, what controls accept, mistakes, what a notebook shows."""

import inspect
import re
from html import unescape

import pytest
import torch

import difflm
from benchmarks.assets import reference
from difflm import (
    Avoid,
    Contains,
    Edit,
    Field,
    Label,
    Length,
    Pattern,
    Span,
    Tags,
    TextDiffusion,
    Tree,
    UsageError,
    WordCount,
)
from difflm.diffusion.processes import Absorbing
from difflm.errors import rename_options, say_in_request, speak_command
from difflm.generation.jobs import Settings
from difflm.models.sampling import SETTINGS
from difflm.models.word_nats import masked_logits
from tests.support.oracles import JOINT
from tests.support.tiny import write_grammar
from tests.support.token_oracles import ExactTokens

WRITERS = ("generate", "stream", "infill", "edit", "translate")


# -- thirty mistakes: each is answered by a sentence that says what to do ---------------------------------------------

MISTAKES = {
    "a model of another name": (lambda lm: TextDiffusion.from_pretrained("e3e"), "Bundled: "),
    "no model": (lambda lm: TextDiffusion.from_pretrained(None), "name a model, such as 'e2e'"),
    "a device that is not there": (lambda lm: lm.to("gpu"), 'Try device="cpu"'),
    "no device": (lambda lm: lm.to(None), 'Try device="cpu"'),
    "a dtype that is not there": (
        lambda lm: TextDiffusion.from_pretrained("e2e", dtype="half"),
        "dtype must be float32",
    ),
    "a text for a number": (lambda lm: lm.generate("4"), "n must be a whole number, not '4'"),
    "no texts": (lambda lm: lm.generate(0), "n must (be|lie) between 1 and 1,000,000"),
    "half a seed": (lambda lm: lm.generate(seed=0.5), "seed must be a whole number"),
    "a negative seed": (lambda lm: lm.generate(seed=-1), "seed must (be|lie) between 0"),
    "a misspelt setting": (lambda lm: lm.generate(temprature=0.5), "Did you mean 'temperature'?"),
    "a misspelt argument": (lambda lm: lm.generate(control=[Length(5)]), "Did you mean 'controls'?"),
    "a control as an argument": (lambda lm: lm.generate(length=14), r"give controls=\[Length\(…\)\]"),
    "a word as a control": (lambda lm: lm.generate(controls="French"), r"a list of controls, such as \[Length\(14\)\]"),
    "a number among controls": (lambda lm: lm.generate(controls=[14]), "14 is not a control"),
    "an edit among controls": (lambda lm: lm.generate(controls=[Edit("a pub")]), "Edit(.*) is not a control"),
    "too many steps": (lambda lm: lm.generate(steps=10**6), "steps must (be|lie) between 1 and 10,000"),
    "an adverb for steps": (lambda lm: lm.generate(steps="fast"), "steps must (be|lie) between 1 and 10,000, not fast"),
    "an unknown sampler": (lambda lm: lm.generate(sampler="magic"), "Known: "),
    "a setting of other models": (lambda lm: lm.generate(block=4), "block is for models of masks"),
    "both ways to choose": (lambda lm: lm.generate(mbr=2, candidates=2), "give one of them"),
    "nothing to choose by": (
        lambda lm: lm.generate(candidates=2),
        "a field, (a )?label, tags or (a )?tree, give infill, or (use )?mbr",
    ),
    "rank without candidates": (lambda lm: lm.generate(rank="bound"), "give candidates 2 or more"),
    "guidance in words": (lambda lm: lm.generate(guidance="strong"), "guidance must be a number from 0 to 1,000"),
    "a length in words": (lambda lm: Length("ten"), r"such as Length\(14\), not 'ten'"),
    "a length beyond the model": (lambda lm: lm.generate(controls=Length(99)), "between 1 and 24 words"),
    "an unknown field": (lambda lm: Field("fod", "French"), "Did you mean 'food'?"),
    "an unknown value": (lambda lm: Field("food", "Martian"), "Known: Chinese"),
    "an unknown tag": (lambda lm: lm.generate(controls=Tags("NOUN VERP")), "Did you mean 'VERB'?"),
    "tags as numbers": (lambda lm: Tags(3), r'such as Tags\("PROPN AUX ADJ"\)'),
    "two words to avoid": (lambda lm: lm.generate(controls=Avoid("the pub")), r'such as Avoid\("cheap"\)'),
    "no word to avoid": (lambda lm: Avoid(None), r'such as Avoid\("cheap"\)'),
    "nothing to contain": (lambda lm: lm.generate(controls=Contains("")), r'such as Contains\("Japanese"\)'),
    "a label without a classifier": (
        lambda lm: lm.generate(controls=Label("topic", "sport")),
        r"lm.guided_by\(folder\)",
    ),
    "a tree with words": (lambda lm: lm.generate(controls=Tree("(S (NP the pub))")), r"write \* for every word"),
    "an open bracket": (lambda lm: lm.generate(controls=Pattern("(a")), "pattern"),
    "a span from its end": (
        lambda lm: lm.generate(controls=Span(5, 2, "VP")),
        "the first must not come after the last",
    ),
    "a template without a gap": (lambda lm: lm.infill("The pub."), "mark at least one gap with ___"),
    "no template": (lambda lm: lm.infill([]), "give a text or a list of texts"),
    "a number for a template": (lambda lm: lm.infill(5), "template must be a text or a list of texts, not 5"),
    "an edit too strong": (lambda lm: lm.edit("The pub.", strength=2), "strength must (lie above 0|be greater than 0)"),
    "a strength in words": (lambda lm: lm.edit("The pub.", strength="low"), "strength must be a number above 0"),
    "an empty edit": (lambda lm: lm.edit(" "), "the text is empty"),
    "a source for a model without": (lambda lm: lm.translate("Guten Tag"), "was trained on texts without sources"),
    "messages for a model without": (
        lambda lm: lm.generate(messages=[{"role": "user", "content": "Hi"}]),
        "no chat template",
    ),
    "a watcher that cannot": (lambda lm: lm.generate(watch="yes"), "watch must be a function"),
    "progress in words": (lambda lm: lm.generate(progress="bar"), "progress must be True, False or a function"),
    "a text too long to score": (lambda lm: lm.score("pub " * 99), "Shorten or split it"),
    "nothing to score": (lambda lm: lm.score(""), "text 1 is empty"),
    "nothing to read": (lambda lm: lm.alternatives(""), "text 1 is empty"),
    "a number to score": (lambda lm: lm.score([3]), "text must be a text or a list of texts, not 3"),
    "nowhere to train": (lambda lm: difflm.train("own-text"), "Give out=, a new directory"),
    "an unknown key of a recipe": (
        lambda lm: difflm.train("own-text", "run", data="x.txt", stps=3),
        "Did you mean 'steps'?",
    ),
    "an unknown task": (lambda lm: difflm.evaluate("e2e", "langage"), "Did you mean 'language'?"),
    "an unknown option": (lambda lm: difflm.evaluate("e2e", sampels=3), "Did you mean 'samples'?"),
    "an option of another task": (lambda lm: difflm.evaluate("e2e", oracle=True), "task seq2seq"),
    "a classifier that is not there": (lambda lm: lm.guided_by("nowhere"), "nowhere"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_by_a_sentence_that_says_what_to_do(lm, mistake):
    """Never a traceback of torch, never an option of the command."""
    make, said = MISTAKES[mistake]
    with pytest.raises(UsageError, match=said) as raised:
        make(lm)
    message = str(raised.value)
    assert "--" not in message and "\n" not in message and message.endswith((".", "?")) and len(message) < 400


def test_a_command_hears_its_options_and_python_its_arguments():
    error = UsageError("--noise-temperature must lie above 0: give --infill, or with --edit and --keep, -n 3.")
    assert str(error) == "noise_temperature must lie above 0: give lm.infill, or with lm.edit and keep=, n 3."
    with speak_command():
        assert str(error).startswith("--noise-temperature")
        assert say_in_request(error).startswith("noise_temperature")
    assert rename_options("a well-known pub -- cheap - 5", {}) == "a well-known pub -- cheap - 5"


# -- what people type --------------------------------------------------------------------------------------------------


def test_controls_accept_what_people_type():
    assert Length("14") == Length(14) and Length(torch.tensor(14).item()) == Length(14)
    assert Tags("PROPN AUX") == Tags(["PROPN", "AUX"]) == Tags(("PROPN", "AUX"))
    assert Field("familyFriendly", True) == Field("family friendly", "yes")
    assert WordCount("8-12") == WordCount(8, 12) and WordCount("8") == WordCount(8)
    assert Span("7", "10", "VP") == Span(7, 10, "VP")
    assert Pattern(re.compile("The .*")) == Pattern("The .*")
    assert Edit("The Mill", keep="Mill") == Edit("The Mill", keep=("Mill",))


@pytest.mark.parametrize("name", WRITERS)
def test_editors_see_every_setting(name):
    """No argument hides behind `**`: all settings of `Sampling` are keywords, None where they are left out."""
    parameters = inspect.signature(getattr(TextDiffusion, name)).parameters
    assert all(parameters[setting].default is None for setting in SETTINGS)
    assert all(one.kind is not one.VAR_KEYWORD for one in parameters.values())


def test_settings_are_those_of_sampling():
    assert [*Settings.__annotations__] == [*SETTINGS]


def test_a_list_has_the_texts_that_each_alone_would_have(lm):
    templates = ["The ___ pub near the river.", "One ___:2 beside the river."]
    both = lm.infill(templates, n=2, seed=3, steps=3)
    apart = [text for one in templates for text in lm.infill(one, n=2, seed=3, steps=3)]
    assert [text.text for text in both] == [text.text for text in apart]
    edits = lm.edit(["The old pub.", "A red pub."], keep="pub", strength=0.3, steps=3)
    assert len(edits) == 2 and all("pub" in text.text for text in edits)
    lists = lm.generate(controls=[[Length(5)], [Length(7)]], steps=2)
    assert [len(text.tokens) for text in lists] == [5, 7] and lists[1].text == lm.generate(controls=Length(7), steps=2)[
        0
    ].text


def test_progress_and_frames_see_every_step(lm, capsys):
    told, seen = [], []
    texts = lm.generate(
        2, steps=4, progress=lambda done, total: told.append((done, total)), frames=True, watch=seen.append
    )
    assert told[-1] == (8, 8) and [done for done, _ in told] == sorted(done for done, _ in told)
    assert [draft.step for draft in texts[0].drafts] == [0, 1, 2, 3] and sum(map(len, seen)) == 8
    again = lm.generate(2, steps=4, progress=True)
    assert [*map(str, texts)] == [*map(str, again)] and "100%" in capsys.readouterr().err


def test_a_notebook_shows_texts_and_plays_their_frames(lm):
    plain, played = lm.generate(2, steps=2), lm.generate(1, steps=2, frames=True)
    assert plain._repr_html_().count("<p>") == 2 and "iframe" not in plain._repr_html_()
    page = unescape(played._repr_html_())
    assert "<iframe srcdoc" in page and played[0].text in page and played[0]._repr_html_().startswith("<iframe")
    assert repr(lm).startswith("TextDiffusion('difflm': difflm, ") and plain[0].text in repr(plain)


def test_a_model_moves(lm):
    assert lm.to("cpu") is lm and lm.device.type == "cpu"


# -- what a model believes of each word --------------------------------------------------------------------------------


def test_masked_words_are_as_likely_as_the_joint_says():
    """Under the exact denoiser of nine cells, hiding each of two words gives the conditionals of Bayes' rule."""
    process = Absorbing(3)
    denoiser = ExactTokens(process)
    for a in range(3):
        for b in range(3):
            found = masked_logits(denoiser, torch.tensor([[a, b]]), torch.ones(1, 2, dtype=torch.bool)).softmax(-1)
            exact = torch.stack([JOINT[:, b] / JOINT[:, b].sum(), JOINT[a] / JOINT[a].sum()])
            torch.testing.assert_close(found[:, :3].float(), exact.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", ["difflm", "mdlm"])
def test_a_text_tells_the_alternatives_of_its_words(tiny_runs, method):
    lm = TextDiffusion.from_pretrained(tiny_runs[method])
    (text,) = lm.generate(controls=Length(6), steps=4)
    found = text.alternatives
    assert [belief.token for belief in found] == text.tokens
    for belief in found:
        chances = [*belief.alternatives.values()]
        assert chances == sorted(chances, reverse=True) and sum(chances) <= 1 + 1e-6 and 0 <= belief.probability <= 1
        assert belief.alternatives.get(belief.token, belief.probability) == pytest.approx(belief.probability)
    assert [belief.probability for belief in lm.alternatives(text.text)] == pytest.approx(
        [b.probability for b in found]
    )
    assert len(lm.alternatives([text.text, "The pub."], k=2)[1][0].alternatives) == 2


def test_a_model_that_reads_left_to_right_cannot_tell(tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["autoregressive"])
    with pytest.raises(UsageError, match=r"use lm\.score"):
        lm.alternatives("The pub.")


@pytest.mark.long
def test_training_returns_a_run_and_evaluation_a_report(tmp_path):
    write_grammar(tmp_path / "my.txt", 200)
    told = []
    sizes = {"hidden": 32, "layers": 1, "heads": 2, "embedding_dim": 16}
    how = dict(steps=4, method="difflm", init="none", model=sizes, device="cpu", log_every=2)
    run = difflm.train(tmp_path / "my.txt", tmp_path / "run", progress=lambda *now: told.append(now), **how)
    assert (run.step, run.stopped, told[-1]) == (4, "done", (4, 4))
    assert len(run.load().generate(2, steps=2)) == 2
    before = (run.folder / "metrics.jsonl").read_text()
    report = difflm.evaluate(
        run.folder, samples=4, score_texts=4, draws=2, steps=2, device="cpu", out=tmp_path / "out.jsonl"
    )
    assert report.task == "language" and report.row("run").figures["nats_per_token"] > 0
    assert (tmp_path / "out.jsonl").read_text() and (run.folder / "metrics.jsonl").read_text() == before


def test_the_reference_lists_every_public_name():
    """The page is what the signatures and docstrings say today; `python -m benchmarks.assets.reference` writes it."""
    names = {*difflm.__all__} - {"__version__"}
    assert names == {*difflm._HOMES} == {name for group in reference.GROUPS for name in reference.names_of(group)}
    written = reference.PAGE.read_text(encoding="utf-8")
    assert written == reference.page()
    assert all(f"### {name}\n" in written for name in names) and all(f"| `{name}` |" in written for name in SETTINGS)
    methods = [name for name, one in vars(TextDiffusion).items() if callable(one) and not name.startswith("_")]
    assert all(f"TextDiffusion.{name}\n" in written or f"| `{name}` |" in written for name in methods)
