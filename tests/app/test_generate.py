"""A request as people write it: what the command and a line of --input make of it, and what they refuse."""

import inspect
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from difflm.app.cli import main
from difflm.app.commands.generate import generate, split_requests
from difflm.app.commands.writing import Writer
from difflm.app.console import Bar
from difflm.app.studio.schemas import Asked
from difflm.controls import Avoid, Contains, Infill, Length
from difflm.controls.gaps import Edit
from difflm.errors import DifflmError, UsageError, speak_command
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import Request, read_requests
from difflm.models.sampling import SETTINGS, Sampling

TEXT = "The old pub near the river serves French food."


@pytest.fixture
def say(capsys):
    """Run `generate` in JSON and give its objects."""

    def run(model: Path, *argv: object) -> list[dict]:
        capsys.readouterr()
        assert main(["generate", str(model), "--steps", "3", "--json", *map(str, argv)]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.fixture
def refuse(capsys, tiny_runs, monkeypatch):
    """Run `generate`, expect exit code 2 and one clear line, with nothing printed and nothing sampled."""

    def run(said: str, *argv: object, model: str = "difflm") -> None:
        def sampled(*_, **__):
            raise AssertionError("something was sampled")

        capsys.readouterr()
        with monkeypatch.context() as context:
            context.setattr("difflm.fast.inference.Inference.stream", sampled)
            code = main(["generate", str(tiny_runs[model]), *map(str, argv)])
        out, err = capsys.readouterr()
        assert (code, out) == (2, ""), err
        assert err.startswith("difflm: ") and len(err.splitlines()) <= 2 and said in err, err

    return run


# -- from words to controls -------------------------------------------------------------------------------------------


def test_a_request_becomes_controls():
    request = Request(length=9, contains=["a b", "c"], avoid=["d"], infill="___ e")
    assert request.controls() == [Infill("___ e"), Length(9), Contains("a b"), Contains("c"), Avoid("d")]
    assert request.edited() is None
    assert Request(edit="a b", keep=["a"]).edited() == Edit("a b", None, ("a",))
    assert Request(edit="a b", strength=0.25).edited() == Edit("a b", 0.25)
    assert Request(length=0).controls() == [Length(0)]  # asked, and to be refused by the model


def test_every_setting_is_stated_once():
    """Options of the command, keys of a line of --input and the schema of the HTTP API follow `Sampling`."""
    options = inspect.signature(generate).parameters
    schema = Asked.model_json_schema()["properties"]
    for name, setting in SETTINGS.items():
        if name == "draw":  # an experiment without a gain: Python alone has it
            continue
        (option,) = options[name].annotation.__metadata__
        ends = setting.json_schema_extra
        assert option.help == schema[name]["description"] == setting.description
        assert (schema[name].get("minimum"), schema[name].get("maximum")) == (ends["low"], ends["high"])
        assert Request(**{name: setting.default}).settings() == {name: setting.default}


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("top_p", 0.0), ("beams", 1001), ("contrast", float("nan"))])
@speak_command()
def test_a_value_out_of_range_is_refused_by_the_name_of_its_option(name, value):
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} must be .*not {value}"):
        Sampling().change({name: value})


def test_lines_become_requests(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text('\ufeff{"length": 5, "n": 2}\r\n\n{"infill": "One\u2028two ___", "contains": ["x"]}\n')
    first, second = read_requests(path)
    assert first == Request(length=5, n=2) and first.model_fields_set == {"length", "n"}
    assert second == Request(infill="One\u2028two ___", contains=["x"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"length": 5', "line 2 is not JSON"),
        ("[5]", "line 2 is not a JSON object"),
        ('{"lenght": 5}', "line 2: unknown key 'lenght'. Did you mean 'length'?"),
        ('{"length": "five"}', "line 2: length"),
        ('{"length": true}', "line 2: length: input should not be true or false."),
        ('{"temperature": false}', "line 2: temperature: input should not be true or false."),
        ('{"contains": "pub"}', "line 2: contains: input should be a valid list."),
        ('{"length": ' + "9" * 5000 + "}", "line 2"),
        ("[" * 100_000, "line 2 is not JSON"),
    ],
)
def test_a_bad_line_is_told_by_its_number(tmp_path, line, said):
    path = tmp_path / "many.jsonl"
    path.write_text('{"length": 5}\n' + line + "\n")
    with pytest.raises(UsageError) as told:
        read_requests(path)
    assert said in str(told.value) and str(path) in str(told.value) and len(str(told.value)) < 400


def test_a_file_without_requests(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        read_requests(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(UsageError, match="holds no request"):
        read_requests(tmp_path / "empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes('{"infill": "Café ___"}'.encode("latin-1"))
    with pytest.raises(DifflmError, match="not UTF-8"):
        read_requests(tmp_path / "latin.jsonl")
    with pytest.raises(DifflmError, match="is a directory"):
        read_requests(tmp_path)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [pytest.param("difflm", marks=pytest.mark.long), "diffusion-lm", "mdlm", "gidd"])
def test_controls_from_the_command(say, tiny_runs, method):
    argv = ["--length", 12, "--contains", "coffee shop", "--contains", "£30", "--avoid", "the", "--avoid", "wine"]
    objects = say(tiny_runs[method], "-n", 5, *argv)
    for o in objects:
        assert len(o["tokens"]) == 12 and "coffee shop" in o["text"] and "£30" in o["text"]
        assert not {"the", "wine"} & {word.lower() for word in o["tokens"]}
        assert [c["name"] for c in o["controls"]] == ["length", "contains", "contains", "avoid", "avoid"]
        assert all(list(c) == ["name", "target", "satisfied", "score", "checker", "guarantee"] for c in o["controls"])
        assert all(c["satisfied"] is True for c in o["controls"])
    (first,) = say(tiny_runs[method], *argv)
    assert first["text"] == objects[0]["text"]


@pytest.mark.long
@pytest.mark.parametrize("method", ["difflm", "diffusion-lm", "mdlm", "gidd"])
def test_gaps_and_edits_from_the_command(say, tiny_runs, method):
    for o in say(tiny_runs[method], "-n", 3, "--infill", "Zoë's ___:2 near ___."):
        assert o["tokens"][:2] == ["Zoë", "'s"] and o["tokens"][4] == "near" and o["text"].endswith(".")
    for o in say(tiny_runs[method], "-n", 3, "--edit", TEXT, "--keep", "French food", "--strength", "0.7"):
        assert o["tokens"][7:9] == ["French", "food"] and len(o["tokens"]) == 10


@pytest.mark.long
def test_many_requests_at_once(say, tiny_runs, tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text('{"length": 4, "n": 3}\n{"infill": "A ___:2 pub", "seed": 7}\n{"length": 6, "steps": 2}\n')
    objects = say(tiny_runs["difflm"], "-n", 2, "--seed", 1, "--input", path)
    assert [(o["request"], len(o["tokens"]), o["seed"], o["steps"]) for o in objects] == [
        *[(0, 4, 1, 3)] * 3,
        *[(1, 4, 7, 3)] * 2,
        *[(2, 6, 1, 2)] * 2,
    ]
    alone = say(tiny_runs["difflm"], "--seed", 7, "--infill", "A ___:2 pub")
    assert alone[0]["text"] == objects[3]["text"] and "request" not in alone[0]


def test_requests_share_batches_and_resume_in_the_middle_of_one(tiny_runs, tmp_path, monkeypatch, capsys):
    lines = [{"length": 4, "n": 3}, {"infill": "A ___:2 pub", "seed": 7}, {"length": 6, "n": 2}, {"length": 5}]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["generate", str(tiny_runs["difflm"]), "--steps", "2", "--input", str(tmp_path / "many.jsonl")]
    run, together = TextDiffusion.run_jobs, []

    def counted(lm, jobs):
        together.append([(job.first, job.n) for job in jobs])
        return run(lm, jobs)

    monkeypatch.setattr(TextDiffusion, "run_jobs", counted)
    monkeypatch.setattr("difflm.app.commands.generate.AT_ONCE_CPU", 4)
    assert main([*argv, "--out", str(tmp_path / "all.txt")]) == 0
    assert together == [[(0, 3), (0, 1)], [(0, 2), (0, 1)]]
    texts = (tmp_path / "all.txt").read_text().splitlines()
    assert len(texts) == 7 and texts[3].startswith("A ") and texts[3].endswith(" pub")
    together.clear()
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], device="cpu")
    writer, found = Writer(lm, [Request(**line, steps=2) for line in lines], {}), list[str]()
    rows, pieces = range(1, 6), [range(4), range(4, 7)]  # what a killed command, or one process of several, makes
    monkeypatch.setattr("difflm.app.commands.writing.open_output", lambda *_: nullcontext((found.append, rows)))
    writer.write(None, {}, pieces, lambda number, text, put: put(str(text)), Bar("", 1))
    assert found == texts[1:6] and together == [[(1, 2), (0, 1)], [(0, 2)]]


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 12))
def test_requests_are_split_in_order(sizes, most):
    groups = list(split_requests(sizes, most))
    assert [number for group in groups for number in group] == list(range(len(sizes)))
    assert all(sum(sizes[n] for n in group) <= most or len(group) == 1 for group in groups)


@pytest.mark.long
def test_one_line_of_input_is_numbered_too(say, tiny_runs, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"length": 4}\n')
    assert [o["request"] for o in say(tiny_runs["difflm"], "--input", tmp_path / "one.jsonl")] == [0]


def test_a_player_and_the_arithmetic(say, tiny_runs, tmp_path):
    page = tmp_path / "player.html"
    (o,) = say(tiny_runs["difflm"], "--infill", "The ___:2 pub", "--html", page, "--dtype", "bfloat16")
    assert o["tokens"][0] == "The" and o["tokens"][3:] == ["pub"]
    assert page.read_text().lower().startswith("<!doctype html>")


def test_watching_prints_the_text(capsys, tiny_runs):
    argv = ["generate", str(tiny_runs["difflm"]), "--steps", "3", "--length", "5"]
    assert main(argv) == 0
    plain = capsys.readouterr().out
    assert main([*argv, "--show"]) == 0
    assert plain.strip() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--length", "0"], "at least 1"),
        (["--length", "25"], "between 1 and 24"),
        (["--length", "3", "--infill", "The ___:4 pub"], "infill asks for 6 words, length for 3"),
        (["--length", "2", "--contains", "coffee shop", "--contains", "wine"], "3 words must appear"),
        (["--contains", "wine", "--avoid", "Wine"], "contradicts"),
        (["--contains", "frendly"], "Near: friendly"),
        (["--contains", ""], "give a word"),
        (["--avoid", "two words"], "one word"),
        (["--infill", "The pub."], "mark at least one gap"),
        (["--infill", "The ___ ___ pub."], "two gaps are adjacent"),
        (["--infill", "The ___:0 pub."], "at least one word"),
        (["--infill", "The ___ pub.", "--edit", TEXT], "cannot be combined"),
        (["--edit", TEXT, "--keep", "zebra"], "is not in the text"),
        (["--edit", TEXT, "--strength", "0"], "greater than 0 and at most 1"),
        (["--edit", TEXT, "--strength", "2"], "greater than 0 and at most 1"),
        (["--edit", ""], "the text is empty"),
        (["--keep", "pub"], "give --edit TEXT"),
        (["--strength", "0"], "give --edit TEXT"),
        (["--show", "--json"], "choose one"),
        (["--show", "--length", "0"], "at least 1"),
        (["--html", "never.html", "--length", "0"], "at least 1"),
        (["--html", "."], ". is a directory. Give --html the name of a file."),
        (["--svg", "/dev/null/never.svg"], "/dev/null is a file, so /dev/null/never.svg cannot be in it."),
        (["--dtype", "float16", "--device", "cpu"], "not float16"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is(refuse, tmp_path, monkeypatch, argv, said):
    monkeypatch.chdir(tmp_path)
    refuse(said, *argv)
    assert list(tmp_path.iterdir()) == []


def test_the_twin_takes_no_controls(refuse, tmp_path):
    refuse("controls are for diffusion models", "--length", "5", model="autoregressive")
    (tmp_path / "steps.jsonl").write_text('{"n": 1}\n{"steps": 5}\n')
    refuse("--steps is for diffusion models", "--input", tmp_path / "steps.jsonl", model="autoregressive")


@pytest.mark.parametrize(
    "argv",
    [["--length", "0"], ["--length", "5"], ["--contains", "a"], ["--strength", "0"], ["--keep", "a"], ["--show"]],
)
def test_a_request_beside_many_is_refused(refuse, tmp_path, argv):
    (tmp_path / "many.jsonl").write_text('{"length": 5}\n')
    refuse(f"{argv[0]} cannot be combined with --input", "--input", tmp_path / "many.jsonl", *argv)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"length": 0}', "request 1: length must be"),
        ('{"n": 0}', "request 1: -n must be"),
        ('{"seed": -1}', "request 1: --seed must be"),
        ('{"steps": 0}', "request 1: --steps must be"),
        ('{"strength": 0.5}', "request 1: --keep and --strength are for rewriting"),
        ('{"edit": "a pub", "strength": NaN}', "request 1: --strength must be"),
        ('{"nn": 0}', "line 2: unknown key"),
    ],
)
def test_a_wrong_request_among_many_stops_them_all(refuse, tmp_path, line, said):
    """The first line is right, and yet nothing is made of it."""
    (tmp_path / "many.jsonl").write_text('{"length": 5}\n' + line + "\n")
    refuse(said, "--input", tmp_path / "many.jsonl")
