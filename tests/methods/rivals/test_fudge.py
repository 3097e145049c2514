"""Decoders that make left-to-right models obey: FUDGE against enumeration of a hidden Markov model, and refusals."""

import copy
import itertools
import json
from functools import cached_property
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from difflm.app.cli import main
from difflm.controls import Avoid, Contains, Infill, Label, Length, ModelInfo, Span, Tags, Tree
from difflm.controls.guidance import GuidanceSettings
from difflm.data.batches import Batch
from difflm.data.labels import NOTHING, Labelling
from difflm.data.tokenizers import END, PAD, START, Words
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.left_to_right import left_to_right
from difflm.diffusion.samplers.loop import Frame, Steering
from difflm.errors import UsageError
from difflm.fast.master_weights import MasterWeights
from difflm.generation.pipeline import TextDiffusion
from difflm.machine import avoid_onednn
from difflm.methods.rivals import DECODERS, ControlDecoder, register
from difflm.methods.rivals.fudge import Fudge
from difflm.methods.rivals.prefix_classifier import LENGTH, PrefixClassifier, with_ends
from difflm.models.autoregressive import Autoregressive
from difflm.models.base import Sampling
from difflm.networks import Sizes
from difflm.training.classifier import PrefixLearner
from tests.support.tiny import tiny_run, write_grammar

WORDS = Words(["START", "END", "UNK", "PAD", "a", "b", "c"])
PHRASES = ("-", "NP", "VP", "S", "S::VP")
FIRST, KINDS, LONG = 4, 3, 4  # the id of "a", words, words of a text
TOPIC = Labelling("topic", "text", ("-", "no", "yes"))
TEXTS = torch.tensor(list(itertools.product(range(FIRST, FIRST + KINDS), repeat=LONG)))


class Markov:
    """A hidden Markov model of three states and three words, whose texts have four words. Its cache is its belief."""

    longest, start, end, pad = LONG, START, END, PAD

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.first, self.move, self.emit = (torch.randn(*s).softmax(-1).double() for s in ((3,), (3, 3), (3, KINDS)))
        self.emit = (self.emit + 4 * torch.eye(KINDS)).softmax(-1)
        self.banned = torch.tensor([True, False, True, True, False, False, False])

    def read(self, words: Tensor, caches=None, memory=None):
        """log p(next word) after one word each."""
        if not caches:
            ahead = self.first.expand(len(words), -1)
        else:
            seen = self.emit[:, words[:, 0] - FIRST].T * caches[0][0]
            ahead = (seen / seen.sum(-1, keepdim=True)) @ self.move
        logits = torch.full((len(words), 1, len(self.banned)), float("-inf"))
        logits[:, 0, FIRST:] = (ahead @ self.emit).log().float()
        return logits, [(ahead, ahead)]

    def view(self, words: Tensor) -> Tensor:
        return words.unsqueeze(-1)

    @cached_property
    def chances(self) -> Tensor:
        """p(text), by the forward algorithm over every text."""
        belief, total = self.first.expand(len(TEXTS), -1), torch.ones(len(TEXTS), dtype=torch.float64)
        for k in range(LONG):
            seen = belief * self.emit[:, TEXTS[:, k] - FIRST].T
            total, belief = total * seen.sum(-1), seen / seen.sum(-1, keepdim=True) @ self.move
        return total


class Exact:
    """The future discriminator by enumeration: p(property | prefix) of a text's topic, and of words that follow."""

    labellings: ClassVar = {"topic": TOPIC}

    def __init__(self, chances: Tensor, topic: Tensor, features: Tensor | None = None) -> None:
        self.chances, self.topic, self.prefixes = chances, topic, features

    def read(self, view: Tensor, caches, alternatives: bool = False):
        """Its cache is the words before; its features are prefixes [B, k, i]."""
        words = view.squeeze(-1)
        if not alternatives:
            before = torch.cat([caches[0][0], words], 1) if caches else words[:, :0]
            return self, [(before, before)]
        before = caches[0][0].unsqueeze(1).expand(-1, words.shape[1], -1)
        return Exact(self.chances, self.topic, torch.cat([before, words.unsqueeze(-1)], -1)), caches

    def rows(self, part: slice) -> "Exact":
        return Exact(self.chances, self.topic, self.prefixes[part])

    def chance(self, holds: Tensor) -> Tensor:
        """log p(holds | prefix) [B, k] for a property of each text; of what is no prefix of any text, 0."""
        size = self.prefixes.shape[-1]
        digits = 8 ** torch.arange(size)
        texts = (TEXTS[:, :size] * digits).sum(-1)
        mass, held = (
            torch.zeros(8**size, dtype=torch.float64).index_add(0, texts, self.chances * one) for one in (1.0, holds)
        )
        return torch.where(mass > 0, held / mass, 1.0).log().float()[(self.prefixes * digits).sum(-1)]

    def text(self, name: str) -> Tensor:
        return torch.stack([self.chance(self.topic == k) for k in range(3)], -1)

    def follows(self, words: Tensor) -> Tensor:
        size = self.prefixes.shape[-1]
        return torch.stack([self.chance((TEXTS[:, size:] == word).any(-1)) for word in words], -1)


@pytest.fixture(scope="module")
def markov() -> Markov:
    return Markov()


INFO = ModelInfo(WORDS, LONG, 0, {"topic": TOPIC})
ODD = torch.where(
    (TEXTS == FIRST).sum(-1) % 2 == 1, 2, 1
)  # the topic is "yes" where the first word stands once or thrice


def draw(markov: Markov, rows: int, *parts: tuple[ControlDecoder, slice], seed: int = 0) -> Tensor:
    rules = type(parts[0][0]).rules(parts) if parts else []
    *_, last = left_to_right(markov, Noise(seed, torch.arange(rows)), LONG, Sampling("autoregressive"), rules)
    return last.tokens


def shares(drawn: Tensor) -> Tensor:
    number = ((drawn - FIRST) * 3 ** torch.arange(LONG - 1, -1, -1)).sum(-1)  # of a text in TEXTS
    return torch.bincount(number, minlength=len(TEXTS)).double() / len(drawn)


# -- FUDGE ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("control", "holds"),
    [
        (Label("topic", "yes"), ODD == 2),
        (Contains("c"), (TEXTS == FIRST + 2).any(-1)),
    ],
    ids=["label", "contains"],
)
def test_fudge_with_exact_futures_draws_the_exact_conditional(markov, control, holds):
    """Total variation of 2·10⁵ draws to p(text | property): that of exact draws is about 0.006 for 40 texts."""
    rows = 200_000
    plan = Fudge(markov, INFO, [control], [Exact(markov.chances, ODD)])
    found = shares(draw(markov, rows, (plan, slice(0, rows))))
    asked = markov.chances * holds
    asked /= asked.sum()
    assert float((markov.chances - asked).abs().sum() / 2) > 0.2  # the model itself is far from it
    assert float((found - asked).abs().sum() / 2) < 0.01


def test_a_strength_of_zero_draws_as_the_model_does(markov):
    plan = Fudge(markov, INFO, [Label("topic", "yes")], [Exact(markov.chances, ODD)], strength=0.0)
    assert torch.equal(draw(markov, 500, (plan, slice(0, 500))), draw(markov, 500))


def test_requests_of_one_batch_obey_their_own_controls(markov):
    exact = Exact(markov.chances, ODD)
    plans = [Fudge(markov, INFO, [Label("topic", value)], [exact]) for value in ("yes", "no")]
    both = draw(markov, 600, (plans[0], slice(0, 300)), (plans[1], slice(300, 600)))
    odd = (both == FIRST).sum(-1) % 2 == 1
    assert bool(odd[:300].all()) and not bool(odd[300:].any())
    assert torch.equal(both[:300], draw(markov, 300, (plans[0], slice(0, 300))))


# -- the classifier of prefixes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twin() -> Autoregressive:
    torch.manual_seed(1)
    model = Autoregressive(WORDS.size, 6, Sizes(16, 1, 2, 0.0), Sampling("autoregressive", steps=6))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model.eval()


@pytest.fixture(scope="module")
def classifier() -> PrefixClassifier:
    torch.manual_seed(2)
    labels = [TOPIC, Labelling("pos", "tags", ("-", "NOUN", "VERB")), Labelling("tree", "spans", PHRASES)]
    labels.append(Labelling(LENGTH, "text", ("-", *"123456")))
    made = PrefixClassifier(labels, 16, 6, WORDS.size, Sizes(16, 2, 2, 0.0))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.4)
    return made.eval().requires_grad_(False)


TAGGED, PARSED = Labelling("pos", "tags", ("-", "NOUN", "VERB")), Labelling("tree", "spans", PHRASES)
FULL = ModelInfo(WORDS, 6, 0, {one.name: one for one in (TOPIC, TAGGED, PARSED)})


@torch.no_grad()
def test_cached_futures_are_those_of_whole_prefixes(twin, classifier):
    """Also the candidates do not see each other, though they are read together."""
    plan = Fudge(twin, FULL, [Label("topic", "yes"), Length(5), Contains("b c")], [classifier], strength=1.5)
    (_, rule), words = Fudge.rules([(plan, slice(0, 2))]), torch.tensor([[4, 5, 5, 6], [6, 4, 4, 5]])
    for size in range(5):
        prefix, logits = words[:, :size], torch.randn(2, WORDS.size)
        scores = rule(prefix, logits, [])
        for word in range(WORDS.size):
            text = torch.cat([torch.tensor([[START], [START]]), prefix, torch.tensor([[word], [word]])], 1)
            whole = classifier(twin.view(text))
            expected = whole.text("topic")[:, -1, 2] + whole.text(LENGTH)[:, -1, 5]
            ahead = whole.follows(torch.tensor([5, 6]))[:, -1]
            for row, tokens in enumerate(text.tolist()):
                if not any(pair == (5, 6) for pair in itertools.pairwise(tokens)):
                    expected[row] += ahead[row, 1] if word == 5 else ahead[row].min()
            assert torch.allclose(scores[:, word], logits[:, word] + 1.5 * expected, atol=1e-4)


def test_an_answer_does_not_know_later_words(twin, classifier):
    texts = torch.tensor([[START, 4, 5, 6], [START, 4, 6, 5]])
    answers = classifier(twin.view(texts)).text("topic")
    assert torch.allclose(answers[0, :2], answers[1, :2], atol=1e-6)
    assert not torch.allclose(answers[0, 2:], answers[1, 2:], atol=1e-3)


@torch.no_grad()
def test_a_tag_is_asked_of_its_own_word(twin, classifier):
    plan = Fudge(twin, FULL, [Tags(("NOUN", "VERB"))], [classifier])
    rule, prefix = Fudge.rules([(plan, slice(0, 1))])[1], torch.zeros(1, 0, dtype=torch.int64)
    for tag, label in enumerate((1, 2)):
        scores = rule(prefix, torch.zeros(1, WORDS.size), [])
        texts = torch.tensor([[START, *prefix[0].tolist(), word] for word in range(WORDS.size)])
        answers = classifier(twin.view(texts))  # two tags are two words
        expected = answers.tags("pos")[:, tag + 1, label] + answers.text(LENGTH)[:, tag + 1, 2]
        assert torch.allclose(scores[0], expected, atol=1e-4)
        prefix = torch.tensor([[5]])


@torch.no_grad()
def test_a_span_may_have_any_of_its_labels_and_a_tree_is_asked_where_it_is_near(twin, classifier):
    tree = Tree("(S (NP * *) (VP * *))")
    for control, cells in ((Span(2, 3, "VP"), [(2, 3, (2, 4))] * 5), (tree, [[(0, 3, (3,)), (0, 1, (1,))]])):
        plan = Fudge(twin, FULL, [control], [classifier])
        rule, prefix = Fudge.rules([(plan, slice(0, 1))])[1], torch.zeros(1, 0, dtype=torch.int64)
        for position, cell in enumerate(cells):
            scores = rule(prefix, torch.zeros(1, WORDS.size), [])
            texts = torch.tensor([[START, *prefix[0].tolist(), word] for word in range(WORDS.size)])
            answers = classifier(twin.view(texts))
            features = answers.features[:, -1]
            expected = answers.text(LENGTH)[:, -1, 4] if control is tree else torch.zeros(WORDS.size)
            for first, last, labels in cell if isinstance(cell, list) else [cell]:
                ends = torch.tensor(first - position), torch.tensor(last - position)
                expected += classifier.label_spans("tree", features, *ends)[:, list(labels)].logsumexp(-1)
            assert torch.allclose(scores[0], expected, atol=1e-4)
            prefix = torch.cat([prefix, torch.tensor([[5]])], 1)


def test_only_the_likeliest_words_are_asked_about(twin, classifier, monkeypatch):
    monkeypatch.setattr("difflm.methods.rivals.fudge.CANDIDATES", 2)
    plan = Fudge(twin, FULL, [Label("topic", "yes")], [classifier])
    logits = torch.randn(3, WORDS.size)
    scores = Fudge.rules([(plan, slice(0, 3))])[1](torch.zeros(3, 0, dtype=torch.int64), logits, [])
    likeliest = logits >= logits.topk(2).values[:, -1:]
    assert torch.equal(scores > float("-inf"), likeliest)


@pytest.mark.long
def test_it_learns_the_label_as_soon_as_a_word_tells_it(twin):
    """The label is that of the first word: before it the classifier knows the frequencies, behind it the label. The
    span of the last two words has it too, as soon as it is known, before they are there; other pairs are none."""
    torch.manual_seed(0)
    labels = [TOPIC, Labelling("tree", "spans", TOPIC.values), Labelling(LENGTH, "text", ("-", *"123456"))]
    made = PrefixClassifier(labels, 16, 6, WORDS.size, Sizes(16, 1, 2, 0.0))
    learner = PrefixLearner(made, twin)
    optimiser = torch.optim.Adam(learner.parameters(), 2e-2)
    decay = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, 100)
    for step in range(100):
        ids = torch.randint(FIRST, FIRST + 2, (128, 3))
        topic = ids[:, 0] - FIRST + 1
        spans = torch.stack([torch.full((128,), 1), torch.full((128,), 2), topic], -1).unsqueeze(1)
        spans = torch.cat([spans, torch.full((128, 5, 3), NOTHING)], 1)
        told = {"topic": topic, "tree": spans, LENGTH: torch.full((128,), 3)}
        losses = learner(Batch(ids, torch.full((128,), 3), labels=told, index=torch.arange(128) + 128 * step))
        optimiser.zero_grad()
        losses.means()["loss"].backward()
        optimiser.step()
        decay.step()
    texts = torch.tensor([[4, 5, 5], [5, 4, 5]])
    output = made.requires_grad_(False)(twin.view(with_ends(texts, torch.tensor([3, 3]))))
    found = output.text("topic").exp()
    assert float((found[:, 0, 1] - 0.5).abs().max()) < 0.15
    assert float(found[0, 1:, 1].min()) > 0.9 and float(found[1, 1:, 2].min()) > 0.9
    for word in range(3):  # the last of a prefix
        ends = torch.tensor(1 - word), torch.tensor(2 - word)
        spans = made.label_spans("tree", output.features[:, word + 1], *ends).exp()
        assert float(spans[0, 1]) > 0.8 and float(spans[1, 2]) > 0.8
        assert (
            float(made.label_spans("tree", output.features[:, word + 1], ends[0] - 1, ends[1]).exp()[:, 0].min()) > 0.6
        )
    follows = output.follows(torch.tensor([4])).exp()[..., 0]
    assert float(follows[0, 0]) == pytest.approx(1 - 0.5**3, abs=0.15) and float(follows[0, 3]) < 0.1


def test_it_trains_and_answers_with_matrices_in_bfloat16_as_on_a_gpu(twin, classifier):
    ids, lengths = torch.randint(FIRST, FIRST + 3, (4, 6)), torch.tensor([6, 5, 4, 3])
    told = {"topic": torch.tensor([0, 1, 2, 1]), "pos": torch.ones(4, 6, dtype=torch.int64), LENGTH: lengths}
    told["tree"] = torch.tensor([[0, 1, 1], [1, 2, 3]] + [[NOTHING] * 3] * 10).expand(4, -1, -1)
    learner = PrefixLearner(copy.deepcopy(classifier).requires_grad_(True), twin)
    narrow = MasterWeights(learner, torch.bfloat16)
    with avoid_onednn(torch.device("cpu"), torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = narrow.model(Batch(ids, lengths, labels=told, index=torch.arange(4)))
        losses.total.backward()
    trained = {name: weight.used.grad for name, weight in narrow.weights.items() if "word_counts" not in name}
    assert all(grad is not None and torch.isfinite(grad).all() for grad in trained.values())
    whole = learner(Batch(ids, lengths, labels=told, index=torch.arange(4)))
    assert float(losses.total.detach()) == pytest.approx(float(whole.total.detach()), rel=0.05)
    guiding, view = copy.deepcopy(classifier).guiding(torch.bfloat16), twin.view(ids)
    answers, _ = guiding.read(view, guiding.read(view[:, :1], [])[1], alternatives=True)
    assert torch.allclose(
        answers.text("topic"),
        classifier.read(view, classifier.read(view[:, :1], [])[1], alternatives=True)[0].text("topic"),
        atol=0.3,
    )


# -- what is exact ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "controls", [[Length(5)], [Length(6), Contains("b c"), Contains("a a")], [Contains("c b a"), Avoid("d")]]
)
def test_what_is_exact_holds_in_every_text_without_a_classifier(twin, controls):
    lm = TextDiffusion(twin, WORDS, {"method": "autoregressive"})
    for text in lm.generate(40, controls=controls, method="fudge"):
        assert all(check["satisfied"] for check in text.controls), text
        assert len(text.tokens) <= 6


def test_left_only_appends_the_words_behind_the_gap(twin):
    lm = TextDiffusion(twin, WORDS, {"method": "autoregressive"})
    (plain,) = lm.generate(1, controls=[Infill("a ___:2 b")], method="left-only")
    assert plain.tokens[0] == "a" and plain.tokens[3:] == ["b"] and plain.controls[0]["satisfied"]
    # Unknown words stay where they are given; other words behind the gap change nothing before it.
    texts = lm.generate(8, controls=[Infill("a ___ x y")], method="left-only")
    others = lm.generate(8, controls=[Infill("a ___ c c")], method="left-only")
    assert all(text.tokens[-2:] == ["x", "y"] and text.warnings for text in texts)
    assert [text.tokens[:-2] for text in texts] == [text.tokens[:-2] for text in others]
    assert {len(text.tokens) for text in texts} <= {4, 5, 6}


def test_a_gap_of_byte_pairs_begins_with_a_word_of_its_own(tmp_path):
    write_grammar(tmp_path / "grammar.txt", 100)
    run = tiny_run(tmp_path, "autoregressive", tokenizer="bpe", vocabulary=300, longest=64, steps=2)
    lm = TextDiffusion.from_pretrained(run)
    for text in lm.generate(12, controls=[Infill("The old ___ serves food.")], method="left-only"):
        assert (
            text.text.startswith("The old ") and text.text.endswith(" serves food.") and text.controls[0]["satisfied"]
        )


# -- the front doors --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guided(tmp_path_factory):
    """A twin and a classifier of its prefixes, both hardly trained."""
    folder = tmp_path_factory.mktemp("rivals")
    texts = write_grammar(folder / "grammar.txt", 200)
    rows = [
        {"text": text, "food": next(f for f in ("Italian", "French", "Chinese", "English") if f in text)}
        for text in texts
    ]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    twin = tiny_run(folder, "autoregressive", steps=5)
    argv = f"data={folder / 'words.jsonl'} model.guides={twin} model.hidden=16 model.layers=1 model.heads=2 steps=3"
    assert main(["train", "e2e-guide", *argv.split(), "batch_size=8", "widths=[]", "--out", str(folder / "guide")]) == 0
    return twin, folder / "guide"


def test_the_command_decodes_by_a_name(guided, capsys):
    twin, guide = guided
    capsys.readouterr()
    argv = f"{twin} --guide {guide} --field food=Chinese --length 7 --method fudge --guidance 2 -n 3 --json"
    assert main(["generate", *argv.split()]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(text["tokens"]) for text in found] == [7, 7, 7]
    assert [check["name"] for check in found[0]["controls"]] == ["length", "field"]
    assert found[0]["denoiser_calls"] == 8
    lm = TextDiffusion.from_pretrained(twin).guided_by(guide)
    controls = [Length(7), Label("food", "Chinese")]
    again = lm.generate(3, controls=controls, method="fudge", guidance=GuidanceSettings(size=2.0))
    assert [text.text for text in again] == [text["text"] for text in found]
    assert lm.generate(1, controls=controls, method="fudge", candidates=2)[0].denoiser_calls == 16


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--length 5", "give --method fudge"),
        ("--length 5 --method fugde", "Did you mean fudge?"),
        ("--method fudge", "is a way to meet constraints"),
        ("--span 0,1,NP --method left-only", "left-only cannot take span"),
        ("--field food=Chinese --method left-only", "left-only cannot take field"),
        ("--field food=Martian --method fudge", "unknown value 'Martian'"),
        ("--field area=riverside --method fudge", "none of this model's classifiers knows the label 'area'"),
        ("--infill The___pub --method fudge", "words after a gap"),
        ("--infill The___pub___inn --method left-only", "one gap"),
        ("--length 5 --method fudge --beams 3", "leave --beams out"),
        ("--length 99 --method fudge", "between 1 and 24"),
        ("--edit pub --method fudge", "fudge cannot edit"),
        ("--contains old --length 1 --avoid old --method fudge", "contradicts"),
        ("--field food=Chinese --method fudge --guidance original", "give a number"),
    ],
)
def test_what_a_decoder_cannot_do_is_said_in_a_line(guided, capsys, argv, said):
    twin, guide = guided
    capsys.readouterr()
    assert main(["generate", str(twin), "--guide", str(guide), *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and said in err, err


def test_a_diffusion_model_has_no_decoder(tiny_runs, guided, capsys):
    assert main(["generate", str(tiny_runs["difflm"]), "--length", "5", "--method", "fudge"]) == 2
    assert "fudge decodes left-to-right models; this one is difflm" in capsys.readouterr().err
    assert main(["generate", str(tiny_runs["difflm"]), "--length", "5", "--guide", str(guided[1])]) == 2
    assert "made for another model" in capsys.readouterr().err


def test_no_label_may_be_called_length(guided, tmp_path, capsys):
    lines = [{"text": "The old pub.", "length": long} for long in ("no", "yes")] * 4
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["train", "classifier", f"data={tmp_path / 'labels.jsonl'}", f"model.guides={guided[0]}", "batch_size=2"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 2
    assert "may be called 'length'" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_decoder_of_another_package_may_decode_by_itself(twin, monkeypatch):
    """A registered class that overrides `steer` writes whatever it likes."""
    monkeypatch.setattr(DECODERS, "_parts", dict(DECODERS._parts))

    @register
    class Parrot(ControlDecoder):
        name, paper, takes, reason = "parrot", "none", (Contains,), "it repeats words."

        @classmethod
        def steer(cls, batch, parts):
            def decode(noise, width, sampling, steering):
                assert isinstance(steering, Steering) and isinstance(sampling, Sampling)
                tokens = torch.full((len(noise.samples), width), END)
                for plan, part in parts:
                    tokens[part, 0] = plan.phrases[0][0]
                yield Frame(0, torch.zeros(len(tokens)), tokens, torch.ones(tokens.shape), tokens != PAD)

            return Steering(decode=decode)

    lm = TextDiffusion(twin, WORDS, {"method": "autoregressive"})
    jobs = [lm.make_job(2, controls=[Contains(word)], method="parrot") for word in "bc"]
    assert {owner: [t.text for t in texts.values()] for owner, texts in lm.run_jobs(jobs)} == {
        0: ["b"] * 2,
        1: ["c"] * 2,
    }
    with pytest.raises(UsageError, match="parrot cannot take length: it repeats words"):
        lm.generate(1, controls=[Length(3)], method="parrot")
