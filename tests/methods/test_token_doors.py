"""Discrete methods through the front doors: asked for gaps and lengths, scored, told about, read by characters."""

import json

import pytest
import torch

from difflm.app.cli import main
from difflm.controls import Length
from difflm.controls.guidance import ORIGINAL, STANDARD, TOKENS
from difflm.data.texts import read_chunks
from difflm.data.tokenizers import SPECIALS, UNK, Characters, Tokenizer
from difflm.errors import UsageError
from difflm.evaluation.control import System, evaluate_control
from difflm.evaluation.corpora import corpus_for
from difflm.evaluation.language import evaluate_language
from difflm.evaluation.options import Options
from difflm.evaluation.targets import Target
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import Request
from difflm.methods import METHODS
from difflm.methods.d3pm import Matrix, nearest_rate
from tests.support.tiny import train_quietly

FAMILIES = ("masked", "uniform", "hybrid", "matrix")
DISCRETE = [
    k for k, one in METHODS.items() if one.family in FAMILIES and one.kind != "adapter" and one.task != "seq2seq"
]


QUICK = ("bert-mouth", "d3pm-absorbing", "mdlm", "udlm", "gidd", "block-diffusion")  # one of each family


@pytest.mark.parametrize(
    "method", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in DISCRETE]
)
def test_gaps_and_lengths_are_obeyed(method, tiny_runs, capsys):
    run = str(tiny_runs[method])
    for argv in (["--infill", "The ___:2 pub near ___."], ["--length", "9", "--contains", "coffee shop"]):
        assert main(["generate", run, "-n", "3", "--json", *argv]) == 0
        made = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert len(made) == 3 and all(control["satisfied"] for one in made for control in one["controls"])


@pytest.mark.parametrize("sampler", ["first-hitting", "confidence", "threshold", "ancestral", "remask"])
def test_known_words_in_blocks_that_are_never_reached_are_kept(sampler, tiny_runs):
    """Nothing is left to write after the gap, and several blocks are known to the end."""
    lm = TextDiffusion.from_pretrained(tiny_runs["block-diffusion"])
    suffix = "near the river serves Italian food, and is cheap."
    for text in lm.infill(f"The ___:2 pub {suffix}", 4, sampler=sampler) + lm.infill(f"The ___ {suffix}", 4):
        assert text.tokens[0] == "The" and text.text.endswith(suffix), text.text


@pytest.mark.long
@pytest.mark.parametrize("method", [name for name in DISCRETE if METHODS[name].bound])
def test_a_bound_does_not_depend_on_the_batch(method, tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs[method])
    texts = ["The old pub near the river serves Italian food.", "A red inn beside Café Sicilia sells French wine."]
    together, alone = (
        lm.score(texts, draws=4),
        [lm.score_ids(lm.encode([t]), draws=4, numbers=[i])[0] for i, t in enumerate(texts)],
    )
    assert together == pytest.approx([float(value) for value in alone], rel=1e-4)
    assert all(10 < value < 120 for value in together)


@pytest.mark.parametrize("asked", [{}, {"length": 40}, {"infill": "The ___:30 pub near the river."}])
def test_every_block_is_watched_and_counted(tiny_runs, asked):
    """Frames are those of training's longest texts, or of what is asked; the last one spells the text."""
    lm, request, seen = TextDiffusion.from_pretrained(tiny_runs["block-diffusion"]), Request(**asked), []
    (text,) = lm.generate(controls=request.controls(), watch=lambda drafts: seen.extend(drafts))
    frames = lm.frames(request.controls())
    # What is known at the end needs no frames of its own; a text that may end does so somewhere.
    assert frames - 12 <= len(seen) <= frames if asked else 4 < len(seen) <= frames == 28
    assert [token for token in seen[-1].tokens if token] == text.tokens


def test_what_is_no_bound_prints_no_perplexity(tiny_runs, capsys, tmp_path):
    run = tiny_runs["bert-mouth"]
    (tmp_path / "my.txt").write_text("The old pub.\n")
    assert main(["score", str(run), str(tmp_path / "my.txt")]) == 2
    assert "no likelihood and no bound" in capsys.readouterr().err
    assert main(["info", str(run)]) == 0
    said = capsys.readouterr().out + (run / "metrics.jsonl").read_text() + (run / "config.json").read_text()
    assert "nats_per_token" not in said and "nats/token" not in said and "erplexity" not in said


@pytest.mark.long
def test_one_report_of_both_worlds(tiny_runs):
    """A bound where there is one, the network's calls as they were made, and no likelihood for BERT-Mouth."""
    names = ("difflm", "mdlm", "block-diffusion", "bert-mouth")
    lms = {name: TextDiffusion.from_pretrained(tiny_runs[name]) for name in names}
    judge = TextDiffusion.from_pretrained(tiny_runs["autoregressive"])
    report = evaluate_language(lms, corpus_for(lms["mdlm"], None), judge, Options(samples=4, draws=2))
    rows = {name: report.row(name) for name in names}
    assert [row.notes.get("likelihood") for row in rows.values()] == ["bound", "bound", "bound", None]
    assert rows["bert-mouth"].figures["nats_per_token"] is None and rows["mdlm"].figures["denoiser_calls"] == 50
    calls = [g.denoiser_calls for g in lms["block-diffusion"].generate(4, seed=0)]
    assert rows["block-diffusion"].figures["denoiser_calls"] == sum(calls) / 4


@pytest.mark.parametrize(
    "setting", [{"clamp": True}, {"noise_temperature": 0.5}, {"noise_top_p": 0.9}, {"sampler": "ddim"}]
)
def test_what_only_vectors_understand_is_refused(setting, tiny_runs):
    with pytest.raises(UsageError, match=r"vectors|unknown sampler"):
        TextDiffusion.from_pretrained(tiny_runs["udlm"]).generate(**setting)


@pytest.mark.long
def test_requests_of_several_kinds_are_made_as_alone(tiny_runs, tmp_path, capsys):
    lines = [{"length": 8}, {"infill": "The ___ pub"}, {"steps": 3, "seed": 4}]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = str(tiny_runs["mdlm"])
    assert main(["generate", run, "--json", "--input", str(tmp_path / "many.jsonl")]) == 0
    together = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    alone = []
    for argv in (["--length", "8"], ["--infill", "The ___ pub"], ["--steps", "3", "--seed", "4"]):
        assert main(["generate", run, "--json", *argv]) == 0
        alone.append(json.loads(capsys.readouterr().out)["text"])
    assert together == alone


# -- characters -----------------------------------------------------------------------------------------------------


def test_characters_come_back_and_unknown_ones_are_unknown(tmp_path):
    tokenizer = Characters.build(["to be\n", "or not"])
    assert tokenizer.decode(tokenizer.encode("not to be\n")) == "not to be\n"
    assert tokenizer.encode("é") == [UNK] and tokenizer.size == len(SPECIALS) + len(set("to be\nor not"))
    tokenizer.save(tmp_path / "t.json")
    assert Tokenizer.load(tmp_path / "t.json").fingerprint() == tokenizer.fingerprint()


def test_a_file_is_cut_into_pieces_that_make_it_up(tmp_path):
    path = tmp_path / "play.txt"
    path.write_text("To be,\n\nor not to be.\n  That is it\n")
    pieces = list(read_chunks(path, 7))
    assert "".join(pieces) == path.read_text() and {len(piece) for piece in pieces[:-1]} == {7}
    with pytest.raises(UsageError, match="only a file of lines"):
        list(read_chunks(tmp_path / "my.csv", 7))


def of_characters(folder, method):
    """Trained for two steps on texts of 32."""
    (folder / "play.txt").write_text("To be or not to be, that is it.\n" * 400)
    values = {"method": method, "model": {"hidden": 16, "layers": 1, "heads": 2}, "data": str(folder / "play.txt")}
    values |= {"chunk": 32, "tokenizer": "characters", "more_than": 0, "longest": 32, "steps": 2, "batch_size": 8}
    return TextDiffusion.from_pretrained(train_quietly(values, folder / "run"))


def test_blocks_of_characters_are_as_many_as_asked(tmp_path, capsys):
    """More than in any text of training; a length counts characters, and says so."""
    lm = of_characters(tmp_path, "block-diffusion")
    (text,) = lm.generate(controls=[Length(90)])
    assert len(text.text) == 90
    assert text.controls[0]["satisfied"] and text.controls[0]["checker"] == "characters of the printed text"
    assert main(["generate", str(tmp_path / "run"), "--length", "600"]) == 2
    assert "between 1 and 512 characters" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "run"), "--infill", "Tü be ___"]) == 2
    assert "no character 'ü'" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "run"), "--infill", "To be ___", "--length", "3"]) == 2
    assert "needs 7 characters" in capsys.readouterr().err
    with pytest.raises(UsageError, match="counted in words"):
        evaluate_control([System(lm, each=1)], [Target("length", Request(length=20))], None)


def test_a_model_of_characters_writes_and_is_measured_on_what_it_held_out(tmp_path):
    lm = of_characters(tmp_path, "mdlm")
    (text,) = lm.generate(steps=4)
    assert len(text.text) == 32
    held_out = corpus_for(lm, None)
    assert held_out.texts and all(len(one) == 32 for one in held_out.texts)


@pytest.mark.parametrize("method", ["mdlm", "block-diffusion"])
def test_calls_of_several_requests_are_their_own(method, tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs[method])
    settings = {"sampler": "first-hitting"} if method == "mdlm" else {}
    works = [lm.make_job(1, 3, controls=[Length(n)], **settings) for n in (3, 9)]
    together = {number: made[0].denoiser_calls for number, made in lm.run_jobs(works)}
    alone = [lm.generate(1, 3, controls=[Length(n)], **settings)[0].denoiser_calls for n in (3, 9)]
    assert [together[0], together[1]] == alone and alone[0] < alone[1]


def test_a_contrast_without_known_words_and_a_climb_of_vectors_are_refused(tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["mdlm"])
    with pytest.raises(UsageError, match="known words"):
        lm.make_job(1, controls=[Length(5)], contrast=1.0)
    with pytest.raises(UsageError, match="diffuses tokens"):
        lm.guidance_settings(ORIGINAL)
    assert (
        lm.guidance_settings(None) == TOKENS and lm.guidance_settings(STANDARD) == STANDARD
    )  # 10 is asked for: 10 it is


@pytest.mark.parametrize(
    ("method", "change"),
    [("gidd", "random_words"), ("diffusionbert", "spindle"), ("bert-mouth", "masked")],
)
def test_shares_lie_between_nothing_and_all(method, change):
    for wrong in (-0.5, 1.5):
        with pytest.raises(ValueError, match=change):
            METHODS[method](**{change: wrong})


def test_rare_jumps_of_a_short_step_are_not_lost():
    """In float32 as in float64: one step of a thousand leads anywhere with a chance of some 1e-9."""
    vectors = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    process = Matrix(nearest_rate(vectors, 5))
    z, x = torch.arange(300).view(1, -1), torch.eye(300).roll(1, 0).unsqueeze(0)
    s, t = torch.tensor([0.5]), torch.tensor([0.501])
    found, exact = (process.back(z, x.to(kind), t.to(kind), s.to(kind)) for kind in (torch.float32, torch.float64))
    assert (found > 0).all() and torch.allclose(found.double(), exact, rtol=2e-2, atol=1e-12)
