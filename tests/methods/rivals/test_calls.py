"""What decoders cost and how often: calls of models and classifiers, several texts of one search, ends of texts."""

from collections import Counter
from functools import partial

import pytest
import torch

from difflm.app.cli import main
from difflm.controls import Contains, Field, Infill, Label, Length
from difflm.controls.guidance import Classifier, GuidanceSettings
from difflm.data.labels import Labelling
from difflm.data.tokenizers import END, PAD, Words
from difflm.diffusion.condition import FREE
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import generation_to_json
from difflm.methods.rivals.delorean import DeloreanSearch
from difflm.methods.rivals.gaps import SoftTexts
from difflm.methods.rivals.prefix_classifier import PrefixClassifier
from difflm.models.autoregressive import Autoregressive
from difflm.models.base import Sampling
from difflm.networks import Sizes
from tests.support.tiny import tiny_run, write_grammar

WORDS = Words(["START", "END", "UNK", "PAD", "a", "b", "c", "d", "."])
B, C, D = 5, 6, 7


@pytest.fixture(scope="module")
def twin() -> Autoregressive:
    torch.manual_seed(0)
    model = Autoregressive(9, 8, Sizes(32, 2, 2, 0.0), Sampling("autoregressive", steps=8))
    for weight in model.parameters():
        weight.data.mul_(3)
    return model.eval()


def lm_of(model: Autoregressive) -> TextDiffusion:
    return TextDiffusion(model, WORDS, {"method": "autoregressive"})


@pytest.fixture(scope="module")
def judge() -> TextDiffusion:
    """A left-to-right model that has learned something: of an untrained one all passes find the same."""
    return TextDiffusion.from_pretrained("judge")


@pytest.mark.long
def test_delorean_gives_its_candidates_in_turn_and_repeats_come_last(judge):
    """The best come first by −log p of whole texts, computed anew; given words are the same in all."""
    plans = [judge.plan_controls([Infill(text)], method="delorean") for text in ("The Mill ___:3 pub.", "___:2 cheap.")]
    known = torch.tensor([plan.canvas + [PAD] * (len(plans[0].canvas) - len(plan.canvas)) for plan in plans])
    gaps, search = SoftTexts(judge.model, known), DeloreanSearch(passes=4, iterations=2, step_size=0.1)
    found = search.candidates(gaps)
    assert torch.equal(found[0], search.decode(gaps))
    assert torch.equal(found.where(known != FREE, FREE), known.expand(4, -1, -1))
    for row in range(2):
        texts = [judge.model.lengths.words(ids) for ids in found[:, row].tolist()]
        distinct = list(dict.fromkeys(map(tuple, texts)))
        assert list(map(tuple, texts))[: len(distinct)] == distinct and len(distinct) > 1
        assert (judge.score_ids([list(one) for one in distinct]).diff() > -1e-3).all()


@pytest.mark.long
def test_texts_of_one_gap_differ_and_do_not_depend_on_their_number(judge, monkeypatch):
    quick = partial(DeloreanSearch, passes=3, iterations=2)
    monkeypatch.setattr("difflm.methods.rivals.delorean.DeloreanSearch", quick)
    asked = {"method": "delorean", "guidance": GuidanceSettings(size=0.1)}
    wanted = [("The Mill ___:3 cheap pub.", 1), ("The Mill ___:3 pub.", 3)]
    jobs = [judge.make_job(n, controls=[Infill(text)], **asked) for text, n in wanted]
    together = dict(judge.run_jobs(jobs))
    assert len({text.text for text in together[1].values()}) > 1
    assert all(text.controls[0]["satisfied"] for made in together.values() for text in made.values())
    for owner, (text, _) in enumerate(wanted):
        (alone,) = judge.generate(1, controls=[Infill(text)], **asked)
        assert alone.text == together[owner][0].text


@pytest.mark.parametrize("controls", [[Length(5), Contains("b c")], [Contains("d")], [Length(3)]])
def test_a_text_ends_where_its_room_does(twin, controls):
    """Behind the last word there is nothing but END, though words that must appear need no room there."""
    plan = lm_of(twin).plan_controls(controls, method="fudge")
    full = torch.tensor([[D, B, C, D, D, D, D, D][: plan.room]])
    assert plan.possible(full).nonzero()[:, 1].tolist() == [END]
    assert END not in plan.possible(full[:, :-1]).nonzero()[:, 1].tolist() or plan.words is None


@pytest.fixture
def counted(monkeypatch):
    """Calls of classifiers, by their class."""
    calls = Counter()

    def count(owner, name):
        before = getattr(owner, name)

        def counting(self, *args, **kwargs):
            calls[owner.__name__] += 1
            return before(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(PrefixClassifier, "read")
    count(Classifier, "forward")
    return calls


@pytest.mark.parametrize("method", ["fudge", "pplm"])
def test_calls_of_classifiers_of_prefixes_are_counted(twin, counted, method):
    torch.manual_seed(0)
    topic = Labelling("topic", "text", ("-", "no", "yes"))
    classifier = PrefixClassifier([topic], 32, 8, 9, Sizes(16, 1, 2, 0.0)).eval().requires_grad_(False)
    lm = lm_of(twin)
    lm.guides, lm._classifiers = ["topic"], {"topic": classifier}
    (text,) = lm.generate(1, controls=[Length(5), Label("topic", "yes")], method=method)
    # After END the loop goes on to the next check, every eighth word: of a canvas of 8 words two more are read.
    spare = {"fudge": 2, "pplm": 4}[method] * (8 - len(text.tokens) - 1)
    assert text.classifier_calls == counted["PrefixClassifier"] - spare > 0
    assert generation_to_json(text)["classifier_calls"] == text.classifier_calls
    assert lm.generate(1, controls=[Length(5)], method="left-only")[0].classifier_calls == 0


def count_guided(lm, control, counted, steps):
    """Calls of classifiers at four steps, and one for each candidate that is chosen among."""
    for candidates in (1, 2):
        counted.clear()
        (text,) = lm.generate(1, controls=[control, Length(9)], candidates=candidates, steps=4)
        # A batch of two candidates is one call, which counts for each of them.
        batches = candidates if lm.model.capabilities.one_by_one else 1
        assert text.classifier_calls == candidates * (steps + candidates - 1)
        assert counted["Classifier"] == batches * steps + candidates - 1


@pytest.mark.long
def test_calls_of_guiding_classifiers_are_counted(counted):
    """Vectors are moved after every step but the last; the classifier of trees has no part in it."""
    count_guided(TextDiffusion.from_pretrained("e2e"), Field("food", "French"), counted, 3)


@pytest.mark.long
def test_calls_of_classifiers_that_tilt_beliefs_are_counted(tmp_path, counted):
    texts = write_grammar(tmp_path / "grammar.txt", 100)
    lines = [f'{{"text": "{text}", "old": "{"yes" if "old" in text else "no"}"}}' for text in texts]
    (tmp_path / "words.jsonl").write_text("\n".join(lines) + "\n")
    run = tiny_run(tmp_path, "mdlm", steps=2)
    argv = f"data={tmp_path / 'words.jsonl'} model.guides={run} model.hidden=16 model.layers=1 model.heads=2"
    argv = [*argv.split(), "steps=1", "batch_size=8", "--out", str(run / "guide")]
    assert main(["train", "classifier", *argv]) == 0
    count_guided(TextDiffusion.from_pretrained(run), Label("old", "yes"), counted, 4)
