"""Few steps: texts learned from the noise they were made of, and estimates that lag behind."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from difflm.app.cli import main
from difflm.data.batches import Batches
from difflm.data.labels import read_noise
from difflm.data.tokenfile import Limits, select_texts
from difflm.diffusion.condition import UNCONDITIONAL
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.timesteps import LearnedWarp, Uniform
from difflm.errors import UsageError
from difflm.evaluation.corpora import corpus_for
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import TextSpec
from difflm.methods.difflm import DiffLM
from difflm.models.diffusion import TrainedTexts
from difflm.training.recipe import check, load_recipe, read_recipe
from difflm.training.run import load_run, read_config
from difflm.training.texts import Setup, read_tokens
from tests.support.tiny import PARTS, assert_resumed_to_the_bit, tiny_run, train_quietly

SHORT = ["steps=4", "batch_size=8", "warmup=0", "save_every=2", "validate_every=2", "widths=[]"]


@pytest.fixture(scope="module")
def pairs(tiny_runs, tmp_path_factory):
    """What a teacher wrote, as the command writes it: 40 texts of one seed, 20 of another."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    with path.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", file)
        for seed, n in ((7, "40"), (8, "20")):
            argv = ["generate", str(tiny_runs["difflm"]), "-n", n, "--seed", str(seed), "--sampler", "ddim"]
            assert main([*argv, "--steps", "3", "--json"]) == 0
    return path


def heard(monkeypatch):
    """(x, t, previous) of every question that is asked of a denoiser from now on."""
    asked, forward = [], Denoiser.forward

    def listening(self, x, t, mask=None, condition=UNCONDITIONAL, previous=None):
        asked.append((x, t.t, previous))
        return forward(self, x, t, mask, condition, previous)

    monkeypatch.setattr(Denoiser, "forward", listening)
    return asked


def built(**changes):
    torch.manual_seed(0)
    return DiffLM(hidden=32, layers=2, heads=2, dropout=0.0, embedding_dim=16, **changes).build(TextSpec(30, 12)).eval()


# -- the noise --------------------------------------------------------------------------------------------------------


def test_a_student_begins_where_its_teacher_began(monkeypatch):
    """At t = 1 all signal is gone: what the student is shown of a text is the very noise that the teacher was given,
    of several seeds, on canvases of any width."""
    model = built()
    seeds, samples, lengths = torch.tensor([7, 7, 8]), torch.tensor([0, 5, 5]), torch.tensor([4, 9, 6])
    asked = heard(monkeypatch)
    *_, last = model.stream(Noise(seeds, samples), lengths, 12, model.sampling)
    begins, ids = asked[0][0], last.tokens[:, :9]
    asked.clear()
    mask, noise = torch.arange(9) < lengths[:, None], Noise(0, torch.arange(3))
    batch = model.corrupt_batch(TrainedTexts(ids, mask, UNCONDITIONAL, noise, (seeds, samples)), torch.ones(3))
    signal = float(model.process.at(torch.ones(())).alpha)
    assert signal < 1e-3
    assert (batch.x_t - begins[:, :9]).abs().max() <= signal * batch.clean.abs().max() + 1e-6
    assert not torch.allclose(batch.noise[1], batch.noise[2])


def test_texts_keep_their_noise_whatever_is_left_out(tmp_path, tiny_runs):
    """A blank text, one that is too long and a second seed: what remains is still numbered by its line."""
    lines = [("The old pub", 3), (" ", 3), ("red " * 40, 3), ("A small inn", 3), ("One quiet pub", 4), ("The inn", 3)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"text": text, "seed": seed}) + "\n" for text, seed in lines))
    assert [column.tolist() for column in read_noise(path, "text")] == [[3, 3, 3, 4, 3], [0, 2, 3, 0, 4]]
    recipe = check({**read_recipe(tiny_runs["difflm"]), "data": str(path)})
    _, tokenizer, _ = load_run(tiny_runs["difflm"])
    setup = Setup(recipe, tmp_path / "out", torch.device("cpu"), lambda *_: None, None, False)
    tokens = read_tokens(setup, tokenizer, "train")
    kept = select_texts(tokens, Limits(24)).kept
    batch = Batches(tokens, 4, 0, (24,), kept, origin=read_noise(path, "text")).batch(0)
    rows = zip(batch.ids, batch.lengths, *batch.origin, strict=True)
    found = {tokenizer.decode(ids[:length]): (seed, sample) for ids, length, seed, sample in rows}
    assert found == {"The old pub": (3, 0), "A small inn": (3, 3), "One quiet pub": (4, 0), "The inn": (3, 4)}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"text": "The inn"}, "does not state its seed"),
        ({"text": "The inn", "seed": "7"}, "does not state its seed"),
        ({"text": "The inn", "seed": -1}, "does not state its seed"),
        ({"text": "The inn", "seed": 1, "steps": 5, "denoiser_calls": 20}, "without candidates"),
    ],
)
def test_texts_without_noise_are_refused(tmp_path, tiny_runs, capsys, line, said):
    path, out = tmp_path / "pairs.jsonl", tmp_path / "out"
    path.write_text((json.dumps(line) + "\n") * 9)
    assert main(["train", "e2e-few", f"init={tiny_runs['difflm']}", f"data={path}", *SHORT, "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert "line 1 of" in err and said in err and len(err.splitlines()) <= 2 and not out.exists()


def test_a_file_of_plain_texts_holds_no_noise(tmp_path):
    with pytest.raises(UsageError, match="has no noise"):
        read_noise(tmp_path / "my.txt", "text")


# -- estimates that lag behind ----------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=8))
def test_the_share_of_a_time_undoes_the_time_of_a_share(shares):
    warp = LearnedWarp(bins=10)
    with torch.no_grad():
        warp.loss_widths.normal_()
        warp.time_widths.normal_()
    for times in (warp, Uniform()):
        u = torch.tensor(shares)
        assert torch.allclose(times.share_of(times.time_of(u)), u, atol=1e-4)


@pytest.mark.parametrize("coupled", [False, True])
def test_the_last_estimate_comes_from_a_noisier_moment_of_the_same_path(monkeypatch, coupled):
    model = built(behind=0.3, coupled=coupled)
    ids, mask, t = torch.randint(4, 30, (6, 8)), torch.ones(6, 8, dtype=torch.bool), torch.linspace(0, 0.9, 6)
    origin = (torch.full((6,), 2), torch.arange(6)) if coupled else None
    asked = heard(monkeypatch)
    batch = model.corrupt_batch(TrainedTexts(ids, mask, UNCONDITIONAL, Noise(0, torch.arange(6)), origin), t)
    (x, before, none), (x_t, now, previous) = asked
    lag = model.times.share_of(before) - model.times.share_of(t[::2])
    assert before[0] == 0 and (lag[1:] > 0).all() and (lag <= 0.3 + 1e-4).all()
    assert torch.allclose(x, model.process.corrupt(batch.x0[::2], before, batch.noise[::2]))
    assert none is None and torch.equal(x_t, batch.x_t) and torch.equal(now, t)
    assert previous[::2].abs().sum() > 0 and previous[1::2].abs().sum() == 0


def test_clean_context_was_clean_before():
    t = torch.tensor([[0.0, 0.4, 0.4], [0.7, 0.0, 0.7]])
    before = built(behind=0.5).lagged_times(t, 0.5, Noise(0, torch.arange(2)))
    assert torch.equal(before == 0, t == 0) and (before[t > 0] > t[t > 0]).all()
    assert before[0, 1] == before[0, 2]  # places of one text go together


# -- the run ----------------------------------------------------------------------------------------------------------


def test_two_commands_make_a_student(tiny_runs, pairs, tmp_path, capsys):
    """It keeps the words and sizes of its teacher, writes in ten deterministic steps, and claims no likelihood."""
    out, teacher = tmp_path / "out", tiny_runs["difflm"]
    assert main(["train", "e2e-few", f"init={teacher}", f"data={pairs}", *SHORT, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "nats a word on its own path, no likelihood" in said and "nats/token" not in said
    assert "do not have the length" not in said  # every text is as long as its noise says: it is its own
    config = read_config(out)
    assert config["model"] == {**read_config(teacher)["model"], "coupled": True, "behind": 0.2, "dropout": 0.0}
    lm = TextDiffusion.from_pretrained(out)
    assert torch.equal(lm.model.denoiser.codec.table(), load_run(teacher)[0].denoiser.codec.table())
    assert (lm.model.sampling.sampler, lm.model.sampling.steps, lm.model.capabilities.likelihood) == ("ddim", 10, None)
    assert len(lm.generate(3)) == 3
    (tmp_path / "my.txt").write_text("The old pub near the river sells wine.\n")
    assert main(["score", str(out), str(tmp_path / "my.txt")]) == 2
    assert "has no likelihood" in capsys.readouterr().err


def test_a_student_needs_a_teacher(pairs, tmp_path, capsys):
    argv = ["train", "own-text", f"data={pairs}", "model.coupled=true", *SHORT, "--out", str(tmp_path / "out")]
    assert main(argv) == 2
    assert "starts from its teacher: give init=MODEL" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_noise_that_is_not_a_texts_own_is_noticed(tiny_runs, pairs, tmp_path, capsys):
    """Without the first line all numbers slip by one."""
    (tmp_path / "pairs.jsonl").write_text("".join(pairs.read_text().splitlines(keepends=True)[1:]))
    argv = ["train", "e2e-few", f"init={tiny_runs['difflm']}", f"data={tmp_path}/pairs.jsonl", *SHORT]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 0
    found = re.search(
        r"(\d+) of 59 texts do not have the length that difflm gives to their noise", capsys.readouterr().out
    )
    assert found and int(found[1]) > 10


def test_resuming_a_student_repeats_to_the_bit(tiny_runs, pairs, tmp_path, monkeypatch):
    argv = ["train", "e2e-few", f"init={tiny_runs['difflm']}", f"data={pairs}", *SHORT]
    assert_resumed_to_the_bit(argv, 3, tmp_path, monkeypatch)


def test_a_short_run_on_a_gpu_is_not_compiled(pairs):
    few, usual = load_recipe("e2e-few", [f"data={pairs}"]), load_recipe("own-text", [f"data={pairs}"])
    adapted = [recipe.adapt_to(device) for recipe in (few, usual) for device in ("cuda", "cpu")]
    assert [recipe.compile for recipe in adapted] == [False, False, True, False]


@pytest.mark.long
def test_the_benchmark_goes_on_where_it_stopped(tiny_runs, tmp_path, capsys):
    few_steps = pytest.importorskip("benchmarks.assets.few_steps", reason="run from the repository's root")
    argv = ["--out", str(tmp_path), "--device", "cpu", "--teacher", str(tiny_runs["difflm"]), "--no-measuring"]
    argv += ["--pairs", "20", "--pair-steps", "2", "--steps", "2", "batch_size=4", "warmup=0", "widths=[]"]
    argv += ["--students", "coupled-behind,again"]
    few_steps.main(argv)
    said = capsys.readouterr().out
    assert "coupled-behind: trained" in said and "again: trained" in said
    teacher = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    known = {"".join(text.split()) for text in corpus_for(teacher, None, "valid").training()}
    asked = [(tmp_path, teacher, {"steps": 2, "temperature": 0.95})]
    asked += [(tmp_path / "again-pairs", TextDiffusion.from_pretrained(tmp_path / "coupled-behind"), {"steps": 12})]
    for folder, writer, settings in asked:  # each line is of the noise of its number, and no text is a copy
        lines = [json.loads(line)["text"] for line in (folder / "pairs.jsonl").read_text().splitlines()]
        again = [text.text for text in writer.generate(20, 1, sampler="dpm-solver", **settings)]
        assert lines == [text if "".join(text.split()) not in known else "" for text in again]
    few_steps.main(argv)
    assert "trained" not in capsys.readouterr().out


# -- the promise ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_student_needs_fewer_steps_than_its_teacher(tmp_path, monkeypatch):
    """A teacher of the small grammar, 6,000 of its texts with their noise, and a student of 1,000 steps: in two steps
    from noise that neither has seen, more of the student's texts are sentences, and as many of them differ."""
    monkeypatch.setattr("difflm.models.batching.CPU_BATCH", 64)  # many texts at once, faster
    sizes = {"hidden": 64, "layers": 2, "heads": 2, "dropout": 0.0, "embedding_dim": 16}
    path = tiny_run(tmp_path, "difflm", steps=1500, batch_size=32, model=sizes)
    teacher = TextDiffusion.from_pretrained(path)
    grammar = re.compile(" ".join("(?:" + "|".join(map(re.escape, part)) + ")" for part in PARTS) + r"\.")

    def sentences(lm, steps):
        texts = [text.text for text in lm.generate(400, seed=1, sampler="ddim", steps=steps)]
        return sum(grammar.fullmatch(text) is not None for text in texts) / 400, len(set(texts))

    made = teacher.generate(6000, seed=7, sampler="ddim", steps=30)
    lines = (json.dumps({"text": text.text, "seed": text.seed}) + "\n" for text in made)
    (tmp_path / "pairs.jsonl").write_text("".join(lines))
    recipe = read_recipe(path)
    recipe |= {"init": str(path), "data": str(tmp_path / "pairs.jsonl"), "steps": 1000, "lr": 1e-3, "warmup": 20}
    recipe["model"] = {**sizes, "coupled": True, "behind": 0.3}
    train_quietly(recipe, tmp_path / "few")
    student = TextDiffusion.from_pretrained(tmp_path / "few")
    (before, _), (after, different), (many, _) = sentences(teacher, 2), sentences(student, 2), sentences(teacher, 30)
    print(f"two steps: teacher {before:.1%}, student {after:.1%}; teacher in thirty {many:.1%}")
    assert after > before + 0.05  # three standard errors of 400 texts each
    assert different > 380
