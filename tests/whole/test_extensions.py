"""Methods, controls and codecs of other packages work like our own: found by entry points or by a `register` call,
trained, asked for and checked through every front door. The method and the control are those of the docs."""

import json
import os
import re
import subprocess
import sysconfig
import venv
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import difflm
from difflm.app.cli import main
from difflm.controls import CONTROLS, Check, Control, Length
from difflm.diffusion.codecs import LearnedEmbedding
from difflm.diffusion.objectives import Objective
from difflm.diffusion.processes import DiscreteProcess, Uniform
from difflm.errors import DifflmError, UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import parse_request
from difflm.methods import METHODS, Method
from difflm.methods.mdlm import Mdlm
from difflm.models.base import Sampling
from difflm.models.codecs import CODECS
from difflm.runtime import registry
from difflm.runtime.registry import Registry
from difflm.training.run import load_run
from tests.support.serving import PATIENCE, need, running
from tests.support.tiny import MODEL, tiny_run, write_grammar

DOCS = Path(__file__).resolve().parents[2] / "docs"


def shown_in(page: str) -> str:
    """The Python of a page that registers something."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if "@register" in block]
    return str(found)


def run_shown(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "shown"}
    exec(compile(shown_in(page), page, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    for names in (METHODS, CONTROLS, CODECS):
        monkeypatch.setattr(names, "_parts", dict(names._parts))
    monkeypatch.setattr(registry, "_foreign", {})


# -- by a call --------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of the method in docs/add-a-method.md."""
    assert run_shown("add-a-method.md")["MaskGit"] is METHODS["maskgit"]
    return tiny_run(tmp_path, "maskgit", steps=10)


def test_a_registered_method_is_listed_trains_and_generates(run: Path, capsys: Any) -> None:
    assert main(["methods", "--json"]) == 0
    (row,) = [row for row in map(json.loads, capsys.readouterr().out.splitlines()) if row["name"] == "maskgit"]
    assert (row["paper"], row["kind"], row["bound"]) == ("Chang et al. 2022", "method", False)
    assert main(["generate", str(run), "-n", "2", "--length", "6", "--json"]) == 0
    texts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [text["controls"][0]["satisfied"] for text in texts] == [True, True]
    assert load_run(run)[0].sampling.sampler == "confidence"


def test_a_run_of_a_method_that_is_gone_is_refused_in_a_line(run: Path, capsys: Any) -> None:
    del METHODS._parts["maskgit"]
    assert main(["generate", str(run)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.long
def test_a_registered_control_is_asked_and_checked_everywhere(run: Path, tmp_path: Path, capsys: Any) -> None:
    acrostic = run_shown("add-a-control.md")["Acrostic"]
    assert CONTROLS["acrostic"] is acrostic
    lm = TextDiffusion.from_pretrained(run)
    from_python = lm.generate(3, controls=[acrostic("TO")])
    initials = ["".join(word[0] for word in text.tokens[:2]).lower() for text in from_python]
    assert initials == ["to"] * 3 and all(text.controls[0]["satisfied"] for text in from_python)

    (tmp_path / "requests.jsonl").write_text('{"control": ["acrostic=TO"], "n": 3}\n')
    ways = [["--control", "acrostic=TO", "-n", "3"], ["--input", str(tmp_path / "requests.jsonl")]]
    for asked in ways:
        assert main(["generate", str(run), *asked, "--json"]) == 0
        texts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [text["text"] for text in texts] == [str(text) for text in from_python]
        assert [text["controls"][0]["name"] for text in texts] == ["acrostic"] * 3

    httpx = need("httpx2", "fastapi", "uvicorn")
    with running(lm) as server:
        answer = httpx.post(
            f"{server.url}/api/generate", json={"control": ["acrostic=TO"], "n": 3}, timeout=PATIENCE
        ).json()
        assert [text["text"] for text in answer["texts"]] == [str(text) for text in from_python]
        wrong = httpx.post(f"{server.url}/api/generate", json={"control": ["acrostik=TO"]}, timeout=PATIENCE)
        assert wrong.status_code == 422 and "Did you mean acrostic?" in wrong.json()["error"]["message"]


def test_an_energy_steers(run: Path) -> None:
    """The control of the docs that has an energy alone: more words begin with its letter than without it."""
    page = (DOCS / "add-a-control.md").read_text(encoding="utf-8")
    names = run_shown("add-a-control.md")
    exec(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1], names)
    initial, lm = names["Initial"]("t"), TextDiffusion.from_pretrained(run)
    plain, steered = (lm.generate(6, seed=1, controls=own) for own in ([], [initial]))
    assert {text.controls[0]["guarantee"] for text in steered} == {"steered"}
    shares = [sum(initial.check(text.tokens).score for text in texts) for texts in (plain, steered)]
    assert shares[0] < shares[1]


def test_the_check_of_a_registered_control_can_fail() -> None:
    check = run_shown("add-a-control.md")["Acrostic"]("tea").check
    assert check(["The", "Eagle", "ate"]).satisfied is True
    assert check(["The", "Eagle", "is"]).score == pytest.approx(2 / 3)
    assert check(["The"]).satisfied is False


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ("acrostic", "is not of the form NAME=VALUE"),
        ("acrostc=tea", "unknown control 'acrostc'. Did you mean acrostic? Installed: acrostic."),
        ("acrostic=7", "acrostic: give letters, such as acrostic=fin."),
        ("length=14", "length cannot be given as NAME=VALUE: use its own option, or Python."),
        ("picky=many", "control picky: invalid literal for int() with base 10: 'many'."),
    ],
)
def test_a_wrong_control_is_refused_in_a_line(asked: str, complaint: str, run: Path, capsys: Any) -> None:
    run_shown("add-a-control.md")

    class Picky(Length):
        name = "picky"

        @classmethod
        def parse(cls, value: str) -> "Control":
            return cls(int(value))

    if asked.startswith("picky"):
        CONTROLS.register(Picky)
    assert main(["generate", str(run), "--control", asked]) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1


def test_without_any_package_the_command_says_so(run: Path) -> None:
    with pytest.raises(UsageError, match="No package with further controls is installed"):
        parse_request('{"control": ["rhyme=yes"]}', "line 1").controls()


@pytest.mark.long
def test_a_method_can_choose_a_codec_of_another_package_by_name(tmp_path: Path) -> None:
    class Doubled(LearnedEmbedding):
        """Vectors of twice the length."""

        def table(self) -> Any:
            return 2 * super().table()

    class Choosing(METHODS["difflm"]):
        name = "choosing"
        codec: str = "doubled"

        def build(self, *texts: Any) -> Any:
            model = super().build(*texts)
            made = CODECS[self.codec](model.vocabulary, self.embedding_dim, prediction=model.denoiser.codec.prediction)
            model.denoiser.codec = made
            return model

    CODECS.register(Doubled, "doubled")
    METHODS.register(Choosing)
    run = tiny_run(tmp_path, "choosing", steps=3, model={**MODEL, "embedding_dim": 8})
    model, _, config = load_run(run)
    assert isinstance(model.denoiser.codec, Doubled) and config["model"]["codec"] == "doubled"
    assert CODECS["embedding"] is LearnedEmbedding


# -- mistakes of a package --------------------------------------------------------------------------------------------


class Wish(Control):
    """A control of another package."""

    name = "wish"

    @classmethod
    def parse(cls, value: str) -> "Control":
        return cls()

    def check(self, words: Any) -> Any:
        return Check(True, 1.0, "nobody")


class RaisingCheck(Wish):
    def check(self, words: Any) -> Any:
        return words[999]


class BareCheck(Wish):
    def check(self, words: Any) -> Any:
        return True


class FlatEnergy(Wish):
    def energy(self, words: Any, there: Any, model: Any) -> Any:
        return (words.argmax(-1) == 5).float().sum(-1)


class BrokenEnergy(Wish):
    def energy(self, words: Any, there: Any, model: Any) -> Any:
        return (words[..., 5] - 2).sqrt().sum(-1)


class UnknownHead(Wish):
    head = "mood"


@pytest.mark.parametrize(
    ("wish", "complaint"),
    [
        (
            RaisingCheck,
            rf"'wish' fails in check \({re.escape(__file__)}, line \d+\): IndexError: list index out of range",
        ),
        (BareCheck, "'wish' does not fit: AttributeError: 'bool' object has no attribute 'score'. Compare"),
        (FlatEnergy, "the energy of wish has no gradient"),
        (BrokenEnergy, "the gradient of the energy of wish is not a number"),
        (UnknownHead, "wish: no classifier knows the label 'mood'"),
    ],
)
def test_a_mistake_in_a_control_is_told_in_a_line(wish: type[Control], complaint: str, run: Path, capsys: Any) -> None:
    CONTROLS.register(wish)
    assert main(["generate", str(run), "--control", "wish=x"]) != 0
    said = capsys.readouterr().err
    assert re.search(complaint, said) and said.count("\n") == 1


def test_a_control_needs_no_fields_and_an_energy_may_be_a_mean(run: Path) -> None:
    """Before anything is written there are no words, and a mean of none is not a number."""

    class Mean(Wish):
        def energy(self, words: Any, there: Any, model: Any) -> Any:
            return (words[..., 5] * there).sum(-1) / there.sum(-1)

    (text,) = TextDiffusion.from_pretrained(run).generate(controls=[Mean()])
    assert text.controls[0]["target"] is None and text.controls[0]["guarantee"] == "steered"


class Foreign(METHODS["udlm"]):  # type: ignore[misc]
    name = "foreign"


class NoModel(Foreign):
    def build(self, texts: Any) -> Any:
        return None


class UnknownTerm(Foreign):
    def build(self, texts: Any) -> Any:
        return Objective({"cross_entropy": 1.0})


class UnknownStep(Foreign):
    def build(self, texts: Any) -> Any:
        return self.compose(Uniform(texts.vocabulary), texts, Objective({"ce": 1.0}), Sampling("confidence"))


class Shapeless(Uniform):
    back = DiscreteProcess.back


class NoStepBack(Foreign):
    def build(self, texts: Any) -> Any:
        return self.compose(Shapeless(texts.vocabulary), texts, Objective({"ce": 1.0}))


class Numberless(Uniform):
    def back(self, z: Any, x: Any, t: Any, s: Any) -> Any:
        return super().back(z, x, t, s) * float("nan")


class BrokenStepBack(Foreign):
    def build(self, texts: Any) -> Any:
        return self.compose(Numberless(texts.vocabulary), texts, Objective({"ce": 1.0}))


class WrongSize(Foreign):
    width: int = "wide"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        (NoModel, "'foreign' does not fit: AttributeError: 'NoneType'"),
        (UnknownTerm, "'foreign' fails in build .*unknown loss term 'cross_entropy'. Known: mse"),
        (UnknownStep, "'foreign' fails in build .*unknown sampler 'confidence'. The process knows ancestral"),
        (NoStepBack, "'foreign' fails in build .*abstract class Shapeless with abstract method back"),
        (BrokenStepBack, "Numberless.back gives no probabilities: they should be at least 0, and sum to 1"),
        (WrongSize, "model.width: input should be a valid integer"),
    ],
)
def test_a_mistake_in_a_method_is_told_in_a_line(
    method: type[Method], complaint: str, tmp_path: Path, capsys: Any
) -> None:
    METHODS.register(method)
    write_grammar(tmp_path / "my.txt", 24)
    sizes = [f"model.{key}={value}" for key, value in MODEL.items()]
    given = ["method=foreign", f"data={tmp_path / 'my.txt'}", "steps=2", "batch_size=8", *sizes]
    assert main(["train", "own-text", *given, "--out", str(tmp_path / "run")]) != 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("difflm: ")]
    assert len(said) == 1 and re.search(complaint, said[0])


def test_the_noise_of_the_page_trains_and_generates(tmp_path: Path, capsys: Any) -> None:
    page = (DOCS / "add-a-method.md").read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE) if "Ring" in one]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(block, names)

    class Carousel(Foreign):
        bound = False

        def build(self, texts: Any) -> Any:
            return self.compose(names["Ring"](texts.vocabulary), texts, Objective({"ce": 1.0}), bound=None)

    METHODS.register(Carousel)
    run = tiny_run(tmp_path, "foreign", steps=3)
    assert main(["generate", str(run), "-n", "2", "--length", "6", "--json"]) == 0
    assert all(json.loads(line)["controls"][0]["satisfied"] for line in capsys.readouterr().out.splitlines())


def test_a_method_without_a_paper_leaves_the_table_alone(capsys: Any) -> None:
    class Unsigned(Method):
        name = "unsigned"

    METHODS.register(Unsigned)
    assert main(["methods"]) == 0 and "unsigned" in capsys.readouterr().out


# -- the registry -----------------------------------------------------------------------------------------------------


class Own(Method):
    name, paper, family = "own", "nobody", "masked"


class Other(Method):
    name, paper, family = "other", "nobody", "masked"


class Impostor(Method):
    name, paper, family = "own", "somebody else", "masked"


def declare(monkeypatch: pytest.MonkeyPatch, **found: str) -> Registry[Method]:
    """A registry that finds these entry points, and counts how often it looks for them."""
    points = [EntryPoint(name.replace("_", "-"), value, "tests.methods") for name, value in found.items()]
    looked: list[str] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: looked.append(group) or points)
    made: Registry[Method] = Registry("tests.methods", Method, {"own": Own})
    made.looked = looked
    return made


def test_entry_points_are_loaded_once_and_only_for_names_that_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    names = declare(monkeypatch, other=f"{__name__}:Other")
    assert names["own"] is Own and "own" in names
    assert names.looked == []
    assert names["other"] is Other and list(names) == ["own", "other"] and len(names) == 2
    assert names.looked == ["tests.methods"]


def test_a_name_that_is_taken_is_refused_and_the_same_class_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    names = declare(monkeypatch)
    with pytest.raises(DifflmError, match=r"the name 'own' is taken by .*Own"):
        names.register(Impostor)
    assert names.register(Own) is Own and names["own"] is Own
    with pytest.raises(DifflmError, match="'mdlm' is taken"):
        METHODS.register(Other, "mdlm")
    assert METHODS["mdlm"] is Mdlm


@pytest.mark.parametrize("wrong", [Check, 7, "own"])
def test_what_is_no_method_is_refused(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DifflmError, match="is not a subclass of"):
        declare(monkeypatch).register(wrong, "new")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_module:Thing", "No module named 'no_such_module'"),
        (f"{__name__}:Nothing", "has no attribute 'Nothing'"),
        (f"{__name__}:PATIENCE", "is not a subclass of"),
        (f"{__name__}:Impostor", "the class calls itself 'own'"),
    ],
)
def test_a_broken_package_is_one_line_and_leaves_the_others_alone(
    value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = declare(monkeypatch, broken=value, other=f"{__name__}:Other")
    assert list(names) == ["own", "other"]
    (line,) = names.broken.values()
    assert reason in line and "'broken'" in line and "\n" not in line
    with pytest.raises(DifflmError, match="cannot be loaded"):
        names["broken"]
    with pytest.raises(KeyError):
        names["nobody"]


def test_two_packages_with_one_name_do_not_replace_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    names = declare(monkeypatch, own=f"{__name__}:Impostor")
    assert names["own"] is Own and "taken" in names.broken["own"]


def test_a_control_whose_name_is_taken_is_refused_in_a_line(run: Path, capsys: Any, monkeypatch: Any) -> None:
    said = "difflm.controls 'length' of package other cannot be loaded: the name 'length' is taken."
    monkeypatch.setattr(CONTROLS, "_broken", {"length": said})
    assert main(["generate", str(run), "--control", "length=14"]) == 2
    assert capsys.readouterr().err == f"difflm: {said}\n"


# -- by installing a package ------------------------------------------------------------------------------------------


def write_wheel(folder: Path, name: str, code: str, groups: dict[str, str]) -> Path:
    """A package of one module; a wheel needs nothing to be built, so nothing has to be downloaded."""
    about = f"{name}-0.1.dist-info"
    points = "".join(f"[{group}]\n{line}\n" for group, line in groups.items())
    files = {
        f"{name}.py": code,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": points,
    }
    files[f"{about}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{about}/RECORD"])
    path = folder / f"{name}-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for inside, content in files.items():
            wheel.writestr(inside, content)
    return path


@pytest.mark.long
def test_an_installed_package_works_in_a_fresh_environment(tmp_path: Path) -> None:
    """Two packages with the code of the docs, and a third that cannot be imported."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    (site,) = {p for p in home.rglob("site-packages") if p.is_dir()}
    ours = [Path(difflm.__file__).parent.parent, *map(sysconfig.get_path, ("purelib", "platlib"))]
    (site / "everything_else.pth").write_text("".join(f"{path}\n" for path in dict.fromkeys(map(str, ours))))

    def ask(*argv: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [python, "-m", *map(str, argv)], cwd=tmp_path, capture_output=True, text=True, env=inherited
        )
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        return done

    wheels = [
        write_wheel(
            tmp_path,
            "difflm_maskgit",
            shown_in("add-a-method.md"),
            {"difflm.methods": "maskgit = difflm_maskgit:MaskGit"},
        ),
        write_wheel(
            tmp_path,
            "difflm_acrostic",
            shown_in("add-a-control.md"),
            {"difflm.controls": "acrostic = difflm_acrostic:Acrostic"},
        ),
        write_wheel(
            tmp_path, "difflm_broken", "import no_such_module\n", {"difflm.methods": "broken = difflm_broken:Broken"}
        ),
    ]
    assert "maskgit" not in ask("difflm", "methods").stdout
    ask("pip", "install", "--quiet", "--no-index", "--no-deps", *wheels)
    listed = ask("difflm", "methods")
    assert re.search(r"^maskgit +Chang et al. 2022", listed.stdout, re.MULTILINE)
    assert listed.stderr == (
        "difflm: warning: difflm.methods 'broken' of package difflm_broken cannot be loaded: "
        "No module named 'no_such_module'.\n"
    )
    write_grammar(tmp_path / "my.txt", 40)
    sizes = ["steps=4", "batch_size=8", "warmup=0", "tokenizer=words", "more_than=0", "longest=24", "sample_every=0"]
    small = [f"model.{key}={value}" for key, value in MODEL.items()]
    ask("difflm", "train", "own-text", "method=maskgit", "data=my.txt", *sizes, *small, "--out", "run")
    made = ask("difflm", "generate", "run", "--control", "acrostic=TO", "-n", "2", "--json").stdout.splitlines()
    assert [json.loads(line)["controls"][0]["satisfied"] for line in made] == [True, True]
    missing = ask("difflm", "train", "own-text", "method=broken", "data=my.txt", "--out", "other", code=1)
    assert "package difflm_broken cannot be loaded" in missing.stderr
    ask("pip", "uninstall", "--quiet", "--yes", "difflm_maskgit")
    assert "'maskgit', which this installation does not have" in ask("difflm", "generate", "run", code=1).stderr
