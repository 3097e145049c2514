"""Fine-tuning: a run that begins with another's weights and words."""

import json

import pytest
import torch
import yaml

from difflm.app.cli import main
from difflm.data.tokenizers import UNK, Tokenizer
from difflm.diffusion.base import Levels
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import METHODS
from difflm.methods.base import TextSpec
from difflm.models.autoregressive import Autoregressive
from difflm.models.diffusion import DiffusionModel
from difflm.runtime.tensors import load_tensors
from difflm.training.fit import begin_with_twin, train_run
from difflm.training.recipe import check, load_recipe, read_recipe
from difflm.training.run import load_run, read_config
from difflm.training.texts import Setup
from tests.support.tiny import MODEL, Silent, assert_resumed_to_the_bit, tiny_run, write_grammar

SHORT = ["steps=4", "batch_size=8", "warmup=0", "sample_every=0", "save_every=2", "tokenizer=words"]


@pytest.fixture
def texts(tmp_path):
    """Other texts of the same grammar, and a word in six that the first run has never seen."""
    path = tmp_path / "my.txt"
    known = write_grammar(path, 60, seed=9)
    path.write_text("".join(f"{text}\n" for text in known) + "Zebras graze near the river.\n" * 60)
    return path


def begun(out, init, data, lr=1e-3, **changes):
    """Train a run in `out` that begins with `init`; gives what was noted on the way."""
    recipe = read_recipe(init)
    recipe |= {"data": str(data), "init": str(init), "steps": 1, "lr": lr, "warmup": 0, "batch_size": 8, **changes}
    notes: list[str] = []
    train_run(Setup(check(recipe), out, torch.device("cpu"), lambda text, _: notes.append(text)), Silent())
    return notes


@pytest.mark.long
@pytest.mark.parametrize("method", ["difflm", "diffusion-lm", "autoregressive", "mdlm", "d3pm-nearest"])
def test_a_run_begins_with_the_weights_words_and_settings_of_another(tiny_runs, tmp_path, texts, method):
    """One step at a learning rate of nothing leaves all weights as they were, heads included."""
    init = tiny_runs[method]
    begun(tmp_path / "out", init, texts, lr=1e-30, ema=0.0)
    before, after = (load_tensors(run / "model.safetensors") for run in (init, tmp_path / "out"))
    own = {"lengths.counts", *(name for name in before if name.startswith("times."))}  # the warp has its own rate
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - own)
    assert (init / "tokenizer.json").read_bytes() == (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert read_config(tmp_path / "out")["sampling"] == read_config(init)["sampling"]


@pytest.mark.long
def test_lengths_follow_the_new_texts(tiny_runs, tmp_path, texts):
    begun(tmp_path / "out", tiny_runs["difflm"], texts)
    before, after = (load_run(run)[0].lengths.counts for run in (tiny_runs["difflm"], tmp_path / "out"))
    assert after.sum() < before.sum() and after[5] > 50  # "Zebras graze near the river." has six words


@pytest.mark.long
def test_a_fine_tuned_run_starts_at_the_loss_of_the_first(tmp_path):
    """A trained twin on its own texts, whose loss is its nats/token: to a tenth, since a batch is but eight texts."""
    init = tiny_run(tmp_path, "autoregressive", steps=150, ema=0.9)
    again, fresh = tmp_path / "again", tmp_path / "fresh"
    begun(again, init, tmp_path / "grammar.txt")
    tiny_run(fresh, "autoregressive", steps=1, batch_size=8)

    def first_loss(run):
        return json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["loss"]

    lm, sample = TextDiffusion.from_pretrained(init), (tmp_path / "grammar.txt").read_text().splitlines()[:200]
    nats = sum(lm.score(sample)) / sum(len(ids) + 1 for ids in lm.encode(sample))
    assert first_loss(again) == pytest.approx(nats, rel=0.1)
    assert nats < 0.6 * first_loss(fresh / "autoregressive")


@pytest.mark.long
def test_unknown_words_are_counted_and_told(tiny_runs, tmp_path, texts):
    *_, note = begun(tmp_path / "out", tiny_runs["difflm"], texts)  # after those that were held out and learned
    tokenizer = Tokenizer.load(tiny_runs["difflm"] / "tokenizer.json")
    ids = [i for text in texts.read_text().splitlines() for i in tokenizer.encode(text)]
    unknown, total = (int(n.replace(",", "")) for n in note.split(" words")[0].split(" of "))
    for count, everywhere in ((unknown, ids.count(UNK)), (total, len(ids))):
        assert 0.9 * everywhere <= count <= everywhere  # held-out texts are not counted
    assert "unknown to difflm" in note


def test_a_run_that_knows_no_word_is_no_beginning(tiny_runs, tmp_path, capsys):
    (tmp_path / "far.txt").write_text("ein ganz anderer Text\n" * 20)
    argv = ["train", "own-text", f"data={tmp_path}/far.txt", f"init={tiny_runs['difflm']}", *SHORT]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 1
    assert "knows no word" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.hidden=64", "has model.hidden=32, not 64: leave model.hidden out"),
        ("longest=30", "has longest=24, not 30"),
        ("tokenizer=bpe", "has tokenizer=words, not bpe"),
        ("more_than=3", "has more_than=0, not 3"),
        ("method=autoregressive", "is a difflm model; this recipe trains autoregressive"),
        ("method=classifier", "is a difflm model; this recipe trains classifier"),
    ],
)
def test_what_does_not_fit_is_named(tiny_runs, tmp_path, texts, capsys, change, said):
    argv = ["train", "own-text", f"data={texts}", f"init={tiny_runs['difflm']}", *SHORT, change]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_a_beginning_that_is_not_there(tmp_path, texts, capsys):
    argv = ["train", "own-text", f"data={texts}", f"init={tmp_path}/none", "--out", str(tmp_path / "out")]
    assert main(argv) == 2
    assert "neither a bundled model nor a directory" in capsys.readouterr().err


def test_sizes_come_from_the_run(tiny_runs, tmp_path, texts):
    """Those of the recipe itself give way; a dropout may be asked for, since it has no weights."""
    init = str(tiny_runs["difflm"])
    recipe = load_recipe("own-text", [f"data={texts}", f"init={init}", "model.dropout=0.3", "longest=24"])
    assert recipe.model == {**read_config(tiny_runs["difflm"])["model"], "dropout": 0.3}
    assert (recipe.tokenizer, recipe.more_than, recipe.longest) == ("words", 0, 24)
    own = {"method": "difflm", "data": str(texts), "init": init, "steps": 3}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    assert load_recipe(str(tmp_path / "own.yaml")).model["hidden"] == MODEL["hidden"]
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**own, "model": {"hidden": 64}}))
    with pytest.raises(UsageError, match=r"model\.hidden=32, not 64"):
        load_recipe(str(tmp_path / "own.yaml"))
    assert load_recipe("own-text", [f"data={texts}", "init="]).init is None


@pytest.mark.long
def test_the_command_and_the_card(tiny_runs, tmp_path, texts, capsys, monkeypatch):
    monkeypatch.chdir(tiny_runs["difflm"].parent)
    out = tmp_path / "out"
    assert main(["train", "own-text", f"data={texts}", "init=difflm", *SHORT, "--out", str(out)]) == 0
    assert "words are unknown to difflm" in capsys.readouterr().out
    assert "| begins with | `difflm` |" in (out / "README.md").read_text()
    assert main(["generate", str(out), "--steps", "3", "--length", "5"]) == 0
    assert TextDiffusion.from_pretrained(out).config["recipe"]["init"] == str(tiny_runs["difflm"].resolve())


@pytest.mark.long
@pytest.mark.parametrize(
    "first", [pytest.param(1, marks=pytest.mark.long), 2], ids=["before a checkpoint", "from a checkpoint"]
)
def test_resuming_repeats_to_the_bit(tiny_runs, tmp_path, texts, first, monkeypatch):
    """Stopped by an error after `first` steps; checkpoints are saved every second."""
    argv = ["train", "own-text", f"data={texts}", f"init={tiny_runs['difflm']}", *SHORT]
    assert_resumed_to_the_bit(argv, first, tmp_path, monkeypatch)


def test_a_masked_model_begins_with_the_network_of_its_twin():
    """Words, layers and encoder are the twin's, what the twin has not is new: read with the twin's eyes, from left to
    right, its answers are the twin's."""
    sizes = {"hidden": 16, "layers": 2, "heads": 2, "encoder_layers": 1}
    spec = TextSpec(11, 8, 6, 11)
    torch.manual_seed(0)
    twin, model = METHODS["encoder-decoder"](**sizes).build(spec).eval(), METHODS["cmlm"](**sizes).build(spec).eval()
    assert isinstance(twin, Autoregressive) and isinstance(model, DiffusionModel)
    torch.nn.init.normal_(twin.network.head.weight)
    begin_with_twin(model, twin)
    words, source, there = torch.randint(5, 11, (3, 8)), torch.randint(5, 11, (3, 6)), torch.ones(3, 6).bool()
    expected, _ = twin.read(words, memory=twin.encode_source(source, there))
    network = model.denoiser.network
    network.causal = True
    inputs = model.denoiser.codec.inputs(words, Levels(torch.ones(3)), None)[0]
    assert torch.allclose(network(inputs, None, None, network.encode(source, there), there), expected, atol=1e-5)
    assert torch.allclose(model.denoiser.codec.raw[-1], twin.embedding.weight.mean(0))  # the mask


@pytest.mark.long
def test_a_masked_run_begins_with_a_twin(tiny_runs, tmp_path, texts, capsys):
    argv = ["train", "own-text", f"data={texts}", "method=mdlm", f"init={tiny_runs['autoregressive']}", *SHORT]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 0
    config = read_config(tmp_path / "out")
    assert config["method"] == "mdlm" and config["model"]["hidden"] == MODEL["hidden"]
    with pytest.raises(UsageError, match="is a autoregressive model; this recipe trains difflm"):
        load_recipe("own-text", [f"data={texts}", f"init={tiny_runs['autoregressive']}"])


def test_training_goes_on_with_other_shares_of_tasks():
    """How many gaps texts have, and how many are read in order, belongs to training, not to the weights."""
    recipe = load_recipe("english", ["data=texts.txt", "init=english", "model.in_order=0.3", "model.gaps=2"])
    assert (recipe.model["in_order"], recipe.model["gaps"]) == (0.3, 2)
    assert load_recipe("english", ["data=texts.txt", "init=english"]).model["in_order"] == 0.25
