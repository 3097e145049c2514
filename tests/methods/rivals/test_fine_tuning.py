"""Fine-tuning: texts behind prompts, the product of experts and its beam search against enumeration; and the masked-LM
floor."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from difflm.app.cli import main
from difflm.controls import Field, Infill, Label, Length, Span, Tags, Tree
from difflm.data.batches import Batch, split
from difflm.data.labels import Labelling
from difflm.data.prompts import BESIDE, check_places, cut_gap, read_prompted, tell_all, tell_tree
from difflm.data.tokenfile import TokenFile
from difflm.data.tokenizers import END, PAD, START
from difflm.data.tokenizers import Words as WordTokens
from difflm.data.words import split_words
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.left_to_right import left_to_right
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.methods.rivals.fine_tuning import NOTHING_TOLD, Experts, tell_control, tell_controls
from difflm.models.autoregressive import Autoregressive, join_rows
from difflm.models.base import Sampling
from difflm.networks import Sizes
from tests.support.corpora import write_labels
from tests.support.tiny import tiny_run
from tests.support.twins import VOCABULARY, WORDS, padded, random_twin, ruled


@pytest.fixture(scope="module")
def twin() -> Autoregressive:
    return random_twin(11, 0.35)


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_a_prompt_of_a_gap_and_its_words_are_the_text():
    for number in range(50):
        ids = list(range(4, 4 + number % 7 + 1))
        (*prompt, end), gap = cut_gap(ids, number)
        place = prompt.index(START)
        assert end == START and gap and [*prompt[:place], *gap, *prompt[place + 1 :]] == ids


def test_a_control_is_told_as_the_labels_of_a_text_that_obeys():
    """Each control's prompt is among those that such a text is learned behind."""
    phrases = Labelling("tree", "spans", ("-", "NP", "S", "S::VP"))
    tree = Tree("(S (NP * *) (S (VP *)))")
    told = tell_all(phrases, [(0, 2, 2), (0, 1, 1), (2, 2, 3)], 3, random.Random(0))
    assert told[0] == tell_control(tree) == "tree S NP * * ) S VP * ) ) )"
    spans = {f"tree {first} {last} {label}" for first, last, label in ((0, 2, "S"), (0, 1, "NP"), (2, 2, "S"))}
    assert set(told[1:]) <= {*spans, tell_control(Span(2, 2, "VP"))} and len(told) == 3
    tags = Labelling("pos", "tags", ("-", "DET", "NOUN"))
    assert tell_all(tags, [1, 2], 2, random.Random(0)) == [tell_control(Tags(("DET", "NOUN")))] == ["pos DET NOUN"]
    food = Labelling("food", "text", ("-", "French"))
    assert tell_all(food, 1, 2, random.Random(0)) == [tell_control(Field("food", "French"))] == ["food = French"]
    assert tell_control(Length(7)) == "length 7"
    assert len(tell_all(phrases, [], 2, random.Random(0))) == 3  # as many prompts as of any text
    with pytest.raises(UsageError, match="text 1 has 3 words; under 'pos' there are 2 labels"):
        check_places(tags, [1, 2], 3, "text 1 has 3 words")


def test_a_prompt_tells_things_of_its_text_in_any_number(tmp_path):
    """What leads a prompt is there, and beside it none, some or all of what is short, each once and all true."""
    write_labels(tmp_path / "labels.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    examples, sizes = list(read_prompted(tmp_path / "labels.jsonl", None)), set()
    for number, row in enumerate(rows):
        of_length, of_food, *long = (set(one.source.split(BESIDE)) for one in examples[8 * number + 2 : 8 * number + 8])
        short = {f"length {len(row['pos'])}", f"food = {row['food']}"}
        spans = [(0, len(row["pos"]) - 1, "S"), (0, 2, "NP")]
        known = {" ".join(["pos", *row["pos"]]), tell_tree("tree", spans, len(row["pos"]))}
        known |= {f"tree {first} {last} {label}" for first, last, label in spans}
        assert f"length {len(row['pos'])}" in of_length and f"food = {row['food']}" in of_food
        assert of_length <= short and of_food <= short
        assert all(len(told - short) == 1 and told - short <= known for told in long)
        sizes |= {len(told) for told in long}
    assert sizes == {1, 2, 3}


def test_controls_are_told_together_as_they_were_learned():
    """One prompt for all, unless two of a kind are asked, of which no text was told."""
    controls = [Field("food", "French"), Length(3), Tags(("DET", "NOUN", "PUNCT"))]
    assert tell_controls(controls) == ["food = French ; length 3 ; pos DET NOUN PUNCT"]
    assert split_words(tell_controls(controls)[0]) == tell_controls(controls)[0].split()
    assert tell_controls([Span(0, 1, "NP"), controls[0], Span(2, 3, "VP")]) == [
        "tree 0 1 NP ; food = French",
        "tree 2 3 VP",
    ]


def test_every_word_of_a_tree_is_one_token():
    told = tell_tree("tree", [(0, 1, "NP"), (1, 1, "S::VP")], 2)
    assert " ".join(split_words(told)) == told == "tree NP * S VP * ) ) )"


def test_all_examples_of_a_text_are_held_out_or_none(tmp_path):
    write_labels(tmp_path / "labels.jsonl")
    examples = list(read_prompted(tmp_path / "labels.jsonl", None))
    assert len(examples) == 60 * 8  # nothing, a gap, a length, a food, tags, a tree, two spans
    tokenizer = WordTokens.build((one.source or one.target for one in examples), 0)
    tokens = TokenFile.build(tmp_path / "tokens", examples, tokenizer, {"task": "prompts"})
    texts = np.repeat(np.arange(60), 8)
    assert tokens.texts is not None and np.array_equal(tokens.texts, texts)
    training, held = split(np.arange(480), 480, 0, tokens.texts)
    assert len(held) == 8 and len(set(texts[held])) == 1 and not set(texts[held]) & set(texts[training])
    ids, _ = tokens.sources.rows(np.arange(8), 64)
    assert (ids == START).sum(1).tolist() == [1, 2, 1, 1, 1, 1, 1, 1]


# -- the model --------------------------------------------------------------------------------------------------------


def prompted(prompts: list[list[int]], texts: list[tuple[int, ...]]) -> Batch:
    texts_, told = padded(texts), padded([tuple(prompt) for prompt in prompts])
    return Batch(texts_.ids, texts_.lengths, told.ids, told.lengths)


def behind(twin: Autoregressive, prompt: list[int], text: tuple[int, ...]) -> Tensor:
    """log p(next word) after a prompt and a text, by one pass over both."""
    with torch.no_grad():
        return twin.read(torch.tensor([[*prompt, *text]]))[0][0, -1].log_softmax(-1)


def test_a_text_follows_its_prompt_without_a_gap():
    first, second = torch.tensor([[7, 8, 9], [7, PAD, PAD]]), torch.tensor([[4, 5], [6, PAD]])
    assert join_rows(first, torch.tensor([3, 1]), second)[0].tolist() == [7, 8, 9, 4, 5]
    assert join_rows(first, torch.tensor([3, 1]), second)[1, :3].tolist() == [7, 6, PAD]


def test_likelihoods_behind_prompts_are_the_chain_rule(twin):
    """What the prompt itself costs is not counted; behind nothing, a text is as likely as without prompts."""
    prompts, texts = [[5, 6, START], NOTHING_TOLD, [4, START, 6, START]], [(4, 5), (6, 5, 4), (5,)]
    nats = twin.nats(prompted(prompts, texts))
    for found, prompt, text in zip(nats.tolist(), prompts, texts, strict=True):
        steps = (-float(behind(twin, prompt, text[:i])[word]) for i, word in enumerate((*text, END)))
        assert found == pytest.approx(sum(steps), rel=1e-4)
    assert float(nats[1]) == pytest.approx(float(twin.nats(padded([texts[1]]))), rel=1e-5)
    count = twin(prompted(prompts, texts)).count
    assert int(count) == sum(len(text) + 1 for text in texts)


def test_it_learns_to_obey_a_prompt():
    """Of two words, the one that the prompt names comes next."""
    torch.manual_seed(0)
    model = Autoregressive(VOCABULARY, 5, Sizes(32, 2, 2, 0.0), Sampling("autoregressive", steps=5))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        asked = torch.randint(5, 7, (32, 1))
        told = torch.cat([torch.full_like(asked, 4), asked, torch.full_like(asked, START)], 1)
        losses = model(Batch(asked, torch.ones(32, dtype=torch.int64), told, torch.full((32,), 3)))
        optimiser.zero_grad()
        losses.means()["loss"].backward()
        optimiser.step()
    model.eval()
    for word in (5, 6):
        experts = Experts(model, [[[4, word, START]]], [1.0])
        *_, last = left_to_right(experts, Noise(0, torch.arange(50)), 5, Sampling("autoregressive"))
        obeyed = (last.tokens[:, :2] == torch.tensor([word, END])).all(1)
        assert int(obeyed.sum()) >= 48


# -- the product of experts -------------------------------------------------------------------------------------------


class Independent:
    """Texts of three words that do not depend on each other, each of which makes two properties likelier or less so.
    Its prompts are properties: 4 and 5 ask for one each. The cache is the number of words so far, and the prompt."""

    longest, start, end, pad = 3, START, END, PAD

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.words = torch.randn(3, 3).softmax(-1).double()  # p(word at a place)
        self.says = {4: torch.rand(3, 3).double(), 5: torch.rand(3, 3).double()}  # a factor of p(property | text)
        self.banned = torch.tensor([True, False, True, True, False, False, False])

    def read(self, words, caches=None, memory=None):
        place = int(caches[0][1][0, 0]) if caches else 0
        asked = int(caches[0][0][0, 0]) if caches else int(words[0, 0])
        logits = torch.full((len(words), 1, VOCABULARY), float("-inf"), dtype=torch.float64)
        p = self.words[place] * self.says.get(asked, torch.ones(3, 3))[place]
        logits[:, 0, WORDS] = p.log()
        return logits.nan_to_num(neginf=-1e4), [
            (torch.full((len(words), 1), asked), torch.full((len(words), 1), place + 1))
        ]


def test_the_product_of_experts_is_the_exact_conditional_of_independent_words():
    """p(text | a, b) by Bayes' rule over all 27 texts, and the chain of the product; one expert is far from it."""
    model = Independent()
    texts = torch.tensor(list(itertools.product(range(3), repeat=3)))
    place = torch.arange(3)
    prior, a, b = (table[place, texts].prod(-1) for table in (model.words, model.words * model.says[4], model.says[5]))
    bayes = a * b / (a * b).sum()
    assert float((prior / prior.sum() - bayes).abs().sum()) > 0.2

    def chain(experts: Experts) -> Tensor:
        total, caches, last = torch.zeros(len(texts), dtype=torch.float64), [], torch.full((len(texts), 1), START)
        for k in range(3):
            logits, caches = experts.read(last, caches)
            last = texts[:, k : k + 1] + WORDS[0]
            total += logits[:, -1].log_softmax(-1).gather(1, last).squeeze(1)
        return total.exp()

    product = chain(Experts(model, [[[4, START]], [[5, START]], [NOTHING_TOLD]], [1.0, 1.0, -1.0]))
    assert torch.allclose(product, bayes, atol=1e-9)
    assert float((chain(Experts(model, [[[4, START]]], [1.0])) - bayes).abs().sum()) > 0.1


@torch.no_grad()
def test_cached_experts_answer_as_whole_texts_do(twin):
    prompts, weights = [[5, 6, START], [4, START], NOTHING_TOLD], [1.5, 1.5, -2.0]
    experts, caches, last = Experts(twin, [[prompt] for prompt in prompts], weights), [], torch.tensor([[START]])
    for k, word in enumerate((4, 6, 5)):
        found, caches = experts.read(last, caches)
        whole = sum(w * behind(twin, prompt, (4, 6, 5)[:k]) for w, prompt in zip(weights, prompts, strict=True))
        assert torch.allclose(found[0, -1], whole, atol=1e-4)
        last = torch.tensor([[word]])


@torch.no_grad()
def likeliest(twin: Autoregressive, prompts: list[list[int]], weights: list[float]) -> list[int]:
    """Of all texts of one to three words, by enumeration; each word is normalised over those that may follow."""
    longest, total = torch.tensor(list(itertools.product(WORDS, repeat=3))), 0.0
    for prompt, weight in zip(prompts, weights, strict=True):
        logits, _ = twin.read(torch.cat([torch.tensor(prompt).expand(len(longest), -1), longest], 1))
        total += weight * logits[:, len(prompt) - 1 :].log_softmax(-1)
    steps = torch.stack([ruled_rows(total[:, k], first=not k) for k in range(4)], 1).log_softmax(-1)
    words = steps[:, :3].gather(-1, longest.unsqueeze(-1)).squeeze(-1).cumsum(1)
    scores = words + steps[:, 1:, END]  # of the first one, two and three words of each
    row, size = divmod(int(scores.argmax()), 3)
    return longest[row, : size + 1].tolist()


def ruled_rows(logits: Tensor, first: bool) -> Tensor:
    return torch.stack([ruled(row, first) for row in logits])


def test_a_wide_beam_finds_the_likeliest_text_of_the_product():
    """39 beams hold every partial text of three words; without its prompts the likeliest text is another one."""
    twin = random_twin(4, 1.0)
    with torch.no_grad():
        twin.network.head.bias[END] = -20.0  # so that the likeliest texts are long
    prompts, weights = [[5, 6, START], [4, START], NOTHING_TOLD], [1.0, 1.0, -1.0]
    best = likeliest(twin, prompts, weights)
    assert len(best) > 1 and best != likeliest(twin, [NOTHING_TOLD], [1.0])
    experts = Experts(twin, [[prompt] for prompt in prompts], weights)
    *_, last = left_to_right(experts, Noise(0, torch.arange(2)), 4, Sampling(beams=39))
    assert [twin.lengths.words(row) for row in last.tokens.tolist()] == [best] * 2


# -- the front doors --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A model behind prompts, hardly trained."""
    folder = tmp_path_factory.mktemp("tuned")
    write_labels(folder / "labels.jsonl")
    sizes = "model.hidden=16 model.layers=1 model.heads=2 steps=2 batch_size=8 more_than=0 widths=[] longest=24"
    argv = ["train", "e2e-fine-tuning", f"data={folder / 'labels.jsonl'}", *sizes.split()]
    assert main([*argv, "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_a_recipe_trains_it_and_the_run_knows_its_labels(tuned):
    config = json.loads((tuned / "config.json").read_text())
    assert [one["name"] for one in config["labels"]] == ["food", "pos", "tree"]
    assert config["held_out"] > 1 and config["held_out_seen"] == 0
    assert config["trained"]["validation"]["likelihood"] == "exact"
    assert TextDiffusion.from_pretrained(tuned).generate(1)[0].text  # behind nothing


@pytest.mark.parametrize(
    ("asked", "calls"),
    [
        ("--field food=French --length 7", 8),
        ("--field food=French --length 7 --avoid the", 8),
        ("--length 7", 8),
        ("--length 7 --guidance 2", 2 * 8),
        ("--pos NOUN#NOUN#PUNCT", 4),
        ("--tree (S#(NP#*#*)#*)", 4),
        ("--span 0,2,NP --span 3,4,S --length 7", 3 * 8),
        ("--infill The#old#___:2#serves#French#zebra.", 3),
        ("--infill ___#serves#food. --length 6", 4),
    ],
)
def test_the_command_decodes_behind_prompts(tuned, capsys, asked, calls):
    capsys.readouterr()
    argv = ["generate", str(tuned), "--method", "fine-tuning", "-n", "3", "--json"]
    assert main([*argv, *(part.replace("#", " ") for part in asked.split())]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {text["denoiser_calls"] for text in found} == {calls}
    for check in (check for text in found for check in text["controls"]):
        if check["name"] in ("length", "avoid") or (check["name"] == "infill" and "zebra" not in asked):
            assert check["satisfied"], check
        if "zebra" in asked:
            assert all(text["text"].endswith("serves French zebra.") and text["warnings"] for text in found)


@pytest.mark.parametrize("search", [{}, {"beams": 3}])
def test_other_prompts_of_its_batch_change_no_text(tuned, search, monkeypatch):
    """Of three prompts, two are equally long. Weights are random, so that prompts matter."""
    lm, read_words = TextDiffusion.from_pretrained(tuned), []
    torch.manual_seed(0)
    for weight in lm.model.parameters():
        weight.data.normal_(0, 0.5)
    read = lm.model.read
    monkeypatch.setattr(lm.model, "read", lambda words, *more: (read_words.append(words), read(words, *more))[1])
    controls = [[Label("food", "French"), Length(8)], [Label("food", "Italian"), Length(7)], [Length(8)]]
    how = {"method": "fine-tuning", **search}
    apart = [[text.tokens for text in lm.generate(2, controls=own, **how)] for own in controls]
    assert apart[0] != apart[1]
    assert not search or all(first == second for first, second in apart)
    read_words.clear()
    jobs = [lm.make_job(2, controls=own, **how) for own in controls]
    together = {owner: [texts[k].tokens for k in sorted(texts)] for owner, texts in lm.run_jobs(jobs)}
    assert [together[k] for k in range(3)] == apart
    prompts = [words.unique(dim=0) for words in read_words if words.shape[1] > 1]
    assert sorted(map(len, prompts)) == [1, 2]  # of each batch


def test_candidates_are_chosen_by_how_much_a_prompt_tells_of_them(tuned):
    """log p(text) − log p(text | prompt), each by one pass over both; a candidate costs what any text does."""
    lm = TextDiffusion.from_pretrained(tuned)
    controls = [Label("food", "French"), Length(3)]
    plan = lm.plan_controls(controls, method="fine-tuning")
    rows = lm.tokenizer.encode_batch(["The old pub", "French food."])
    for row, found in zip(rows, plan.classifier_nats(rows), strict=True):
        costs = []
        for prompt in ("food = French ; length 3", ""):
            told = [*lm.tokenizer.encode(prompt), START]
            steps = (-behind(lm.model, told, tuple(row[:k]))[word] for k, word in enumerate((*row, END)))
            costs.append(float(sum(steps)))
        assert found == pytest.approx(costs[0] - costs[1], abs=1e-4)
    (text,) = lm.generate(1, controls=controls, method="fine-tuning", candidates=2)
    assert text.denoiser_calls == 2 * 4


def test_it_decodes_in_bfloat16(tuned):
    lm = TextDiffusion.from_pretrained(tuned, dtype=torch.bfloat16)
    (text,) = lm.generate(1, controls=[Label("food", "French"), Length(5)], method="fine-tuning")
    assert len(text.tokens) == 5


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--field food=Martian", "unknown value 'Martian'"),
        ("--field area=riverside", "this model has no prompt for 'area' (known: food, pos, tree)"),
        ("--contains pub", "fine-tuning cannot take contains: no prompt states it"),
        ("--infill The___pub --field food=French", "fine-tuning cannot take field with a gap"),
        ("--infill The___pub___inn", "fills one gap"),
        ("--length 99", "between 1 and 24"),
    ],
)
def test_what_no_prompt_tells_is_said_in_a_line(tuned, capsys, argv, said):
    capsys.readouterr()
    assert main(["generate", str(tuned), "--method", "fine-tuning", *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and said in err, err


def test_a_model_without_prompts_is_refused(tiny_runs, capsys):
    assert main(["generate", str(tiny_runs["autoregressive"]), "--length", "5", "--method", "fine-tuning"]) == 2
    assert "needs a model that has learned prompts: difflm train e2e-fine-tuning" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["method=mdlm"], "mdlm reads no prompts; autoregressive does"),
        (["tokenizer=bpe"], "give tokenizer=words"),
        (["data=grammar.txt"], "grammar.txt is not a .jsonl file of texts with labels"),
        (["source_words=own"], "autoregressive has one embedding for both sides"),
    ],
)
def test_recipes_of_prompts_are_checked(tmp_path, capsys, monkeypatch, changes, said):
    monkeypatch.chdir(tmp_path)
    write_labels(tmp_path / "labels.jsonl")
    argv = ["train", "e2e-fine-tuning", "data=labels.jsonl", *changes, "--out", str(tmp_path / "run")]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert said in err.splitlines()[-1] and not (tmp_path / "run").exists(), err


# -- the masked-LM floor ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["bert-mouth", pytest.param("mdlm", marks=pytest.mark.long)])
def test_a_masked_model_fills_a_gap_by_gibbs_steps(tiny_runs, method):
    """As many steps as are asked, whatever the model's own sampler is; the words around the gap stay."""
    lm = TextDiffusion.from_pretrained(tiny_runs[method])
    job = lm.make_job(3, controls=[Infill("The old ___:3 serves zebra food.")], method="masked-lm-gibbs", steps=12)
    assert job.sampling.sampler == "gibbs"
    texts = [text for _, made in lm.run_jobs([job]) for text in made.values()]
    for text in texts:
        assert text.text.startswith("The old ") and text.text.endswith(" serves zebra food.") and text.warnings
        assert len(text.tokens) == 9 and text.denoiser_calls == 12
    free = lm.generate(3, controls=[Infill("The old ___ food.")], method="masked-lm-gibbs", steps=6)
    assert all(text.controls[0]["satisfied"] for text in free)


@pytest.mark.parametrize(
    ("method", "argv", "said"),
    [
        ("autoregressive", "--length 5", "masked-lm-gibbs decodes masked language models, such as bert-mouth"),
        ("difflm", "--length 5", "such as bert-mouth; this one has no masks"),
        ("bert-mouth", "--contains old", "masked-lm-gibbs cannot take contains: it fills a gap from the text around"),
        ("bert-mouth", "--infill The___pub___inn", "fills one gap"),
    ],
)
def test_the_floor_says_what_it_cannot_do(tiny_runs, capsys, method, argv, said):
    capsys.readouterr()
    assert main(["generate", str(tiny_runs[method]), *argv.split(), "--method", "masked-lm-gibbs"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and said in err, err


@pytest.mark.long
def test_a_small_model_obeys_its_prompts(tmp_path):
    """Trained as a run is, on texts whose first word nobody asks for: a label and a length at once, and a gap."""
    draw, rows = random.Random(0), []
    for _ in range(300):
        mood, words = draw.choice(("good", "bad")), draw.choice((2, 3, 4))
        rows.append({"text": " ".join([draw.choice(("French", "Thai")), *[mood] * (words - 1)]), "mood": mood})
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"steps": 400, "lr": 1e-2, "batch_size": 32, "ema": 0.9, "longest": 6, "task": "prompts"}
    run = tiny_run(tmp_path, "autoregressive", data=str(tmp_path / "labels.jsonl"), **settings)
    lm = TextDiffusion.from_pretrained(run)
    asked = [Label("mood", "bad"), Length(3)]
    found = [str(text) for text in lm.generate(20, controls=asked, method="fine-tuning")]
    assert sum(text.endswith(" bad bad") for text in found) >= 16
    assert str(lm.generate(1, controls=asked, method="fine-tuning", beams=3)[0]).endswith(" bad bad")
    found = [str(text) for text in lm.generate(20, controls=[Infill("Thai ___ bad")], method="fine-tuning")]
    assert sum("good" not in text for text in found) >= 16
