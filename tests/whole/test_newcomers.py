"""What stopped people in their first hour: the model that is meant, texts in other languages, mistakes that are told
before a model is loaded, texts in place of files, help that fits on a screen, and other people's models."""

import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from difflm.app.cli import app, main
from difflm.data.meaning import is_other_language
from difflm.data.tokenizers import Bpe, Tokenizer
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import METHODS, TextSpec
from difflm.methods.base import LISTED
from difflm.models.sampling import KNOWN, STEP_RULES
from difflm.training.run import find_run
from tests.support.open_checkpoints import CHAT, MODELS, write_model, write_tokenizer
from tests.support.serving import need, running
from tests.support.tiny import MODEL

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIFFLM_DATA", raising=False)
    (tmp_path / "my.txt").write_text("A pub.\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd.json").write_text('{"type": "objekt"}')
    (tmp_path / "gaps.jsonl").write_text('{"infill": "no gap"}\n')
    (tmp_path / "pairs.jsonl").write_text('{"n": 1}\n{"contains": ["x"], "avoid": ["x"]}\n')
    return tmp_path


# -- the model that is meant ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["generate", "info", "plot denoising"])
def test_without_a_model_english_is_meant(verb: str) -> None:
    command: Any = typer.main.get_command(app)
    for name in verb.split():
        command = command.commands[name]
    assert next(p.default for p in command.params if p.param_type_name == "argument") == "english"


def test_what_english_has_no_classifiers_for_names_the_model_that_has(capsys: Any) -> None:
    assert main(["generate", "--field", "food=Japanese"]) == 2
    assert "Try: difflm generate e2e --field" in capsys.readouterr().err


# -- other languages --------------------------------------------------------------------------------------------------

OTHER_LANGUAGES = {
    "de": ["Ein Mann mit Hut geht über die Straße.", "Der Hund schläft.", "Ich gehe ___ nach Hause."],
    "fr": ["Un homme marche dans la rue.", "Le chien dort.", "Je voudrais ___ s'il vous plaît."],
    "es": ["Nos quedamos en casa porque estaba lloviendo.", "El perro duerme."],
    "it": ["Siamo rimasti a casa perché pioveva.", "Il cane dorme."],
    "nl": ["We bleven thuis omdat het regende.", "De hond slaapt."],
    "pt": ["Um homem anda na rua.", "Ficamos em casa porque estava chovendo."],
}
OTHER_LETTERS = [
    "Собака спит.",
    "一个男人走在街上。",
    "رجل يمشي في الشارع",
    "एक आदमी सड़क पर चल रहा है।",
    "남자가 걷고 있다.",
]


@pytest.mark.parametrize("language", OTHER_LANGUAGES)
def test_sentences_of_other_languages_are_told_from_english(language: str) -> None:
    assert all(map(is_other_language, OTHER_LANGUAGES[language]))


def test_english_sentences_are_not_taken_for_another_language() -> None:
    """Two hundred of everyday life, of the gaps that the bundled model was measured on, and some that look odd."""
    lines = (ROOT / "tests" / "support" / "english_gaps.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [text for line in lines for text in json.loads(line).values() if isinstance(text, str)][:200]
    odd = [
        "Osvaldo Rodríguez is a Cuban musician.",
        "She flew to Los Angeles.",
        "Hyatt Hotel",
        "OK, die!",
        "I am a vegan.",
    ]
    assert len(texts) == 200 and [text for text in [*texts, *odd] if is_other_language(text)] == []


def test_letters_that_no_token_spells_are_counted() -> None:
    tokenizer = Tokenizer.load(find_run("english-small") / "tokenizer.json")
    assert all(tokenizer.foreign_share(text) == 1 for text in OTHER_LETTERS)
    assert (
        tokenizer.foreign_share("Dr. Müller paid 12 € for café au lait.") < 0.1 and tokenizer.foreign_share("12") == 0
    )
    russian = Bpe.build(["собака спит на улице"] * 9, 300)
    assert russian.foreign_share("Собака спит") < 0.2 and russian.foreign_share("一个男人") == 1


@pytest.mark.long
def test_every_door_warns_of_another_language(capsys: Any) -> None:
    lm = TextDiffusion.from_pretrained("english-small")
    for text in (*OTHER_LANGUAGES["de"], *OTHER_LETTERS[:2]):
        (made,) = lm.infill(text.replace("___", "") + " ___", steps=2)
        assert len(made.warnings) == 1 and text[:9] in made.warnings[0]
    assert "another language" in lm.edit("Der Hund schläft.", steps=2)[0].warnings[0]
    assert lm.infill("The dog ___ asleep.", steps=2)[0].warnings == []
    assert main(["generate", "--infill", "Der Hund ___ nicht.", "--steps", "2", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("difflm: warning: english was trained on English texts; 'Der Hund ___ nicht.'")
    assert json.loads(said.out)["warnings"]
    assert main(["score", "english-small", "Der Hund schläft nicht.", "--draws", "1"]) == 0
    assert "looks like another language" in capsys.readouterr().err


# -- mistakes are told before a model is loaded, by the option that was typed ------------------------------------------

MISTAKES = {
    'generate --infill "no gap"': "--infill: mark at least one gap",
    'generate --infill "a ___ ___ b"': "--infill: two gaps are adjacent",
    "generate --clamp": "--clamp is for models that diffuse word vectors",
    "generate --projection greedy": "--projection is for models that diffuse on a simplex",
    "generate e2e --block 4": "--block is for models of masks",
    "generate e2e --start nothing": "--start is for models that edit texts",
    "generate judge --block 4": "--block is for models of masks, but judge is autoregressive",
    "generate --guidance 5": "--guidance is how strongly classifiers steer",
    "generate e2e --guidance much --field food=Japanese": "--guidance must be a number",
    "generate --contains ''": "--contains: give a word",
    "generate --contains x --avoid X": "--avoid 'X' contradicts contains x",
    "generate --contains 'big cat' --avoid cat": "--avoid 'cat' contradicts contains big cat",
    "generate --infill 'It is ___.' --avoid is": "--avoid 'is' contradicts the words that stay",
    "generate --edit 'It is cold.' --keep cold --avoid cold": "--avoid 'cold' contradicts the words that stay",
    "generate --length 2 --contains a --contains b --contains c": "--contains: 3 different words must appear",
    "generate --words 1-2 --contains 'a b c'": "--contains: 3 different words must appear",
    "generate --length 900": "--length: a text of this model has at most 128 tokens",
    "generate --words 900": "--words: a text of this model has at most 128 tokens",
    "generate e2e --length 900": "--length must be between 1 and 6",
    "generate e2e --length 14 --pos 'NOUN VERB'": "length asks for 14 words, pos for 2",
    "generate e2e --length 3 --contains The --contains pub --contains near --contains river": "4 words must appear",
    "generate e2e --contains zzyzx": "--contains: this model does not know the word 'zzyzx'",
    "generate e2e --infill 'The ___:99 pub.'": "--infill: it has at least 102 tokens",
    "generate e2e --infill 'The ___:2 pub.' --length 9": "--infill asks for 5 words, length for 9",
    "generate english-small --input pairs.jsonl": "request 1: avoid 'x' contradicts contains x",
    "generate --avoid 'two words'": "--avoid: give one word",
    "generate --length 0": "--length must be at least 1",
    "generate --words 9-3": "--words: give a number such as 12 or 8-12",
    "generate --pattern '('": "--pattern, character 2",
    "generate --pattern ''": "--pattern: it is empty",
    "generate --json-schema odd.json": "--json-schema: the type 'objekt'",
    "generate e2e --pos FOO": "--pos: unknown tag 'FOO'",
    "generate e2e --tree '(S'": "--tree: 1 closing bracket is missing",
    "generate e2e --span 5,2,NP": "--span 5,2,NP: positions count from 0",
    "generate --edit ''": "--edit: the text is empty",
    "generate --edit 'A text.' --strength 2": "--strength must be greater than 0",
    "generate --edit 'A text.' --infill 'a ___'": "--edit and --infill cannot be combined",
    "generate --edit 'A text.' --keep word": "--keep: 'word' is not in the text",
    "generate --sampler confidnce": "Did you mean 'confidence'?",
    "generate --sampler ddim": "unknown --sampler 'ddim' for masked models",
    "generate judge --sampler ddim": "--sampler is for diffusion models, but judge is autoregressive",
    "generate somebody/else --sampler ddmi": "Did you mean 'ddim'?",
    "generate --top-k 5": "--top-k is for autoregressive models, but english is mdlm",
    "generate english-small --label food=Japanese": "knows the label 'food' (known: register)",
    "generate english-small --label register=storry": "register: unknown value 'storry'. Did you mean 'story'?",
    "generate e2e --label pos=NOUN": "'pos' is a tag for every word",
    "generate --candidates 4": "--candidates needs something to choose by",
    "generate --method foo": "unknown --method 'foo'",
    "generate --source 'A text.'": "trained on texts without sources",
    "generate --input gaps.jsonl": "request 0: infill: mark at least one gap",
    "generate --label a=b --guide empty": "--guide: empty holds no classifier",
    "generate --svg no/such/x.svg": "no/such does not exist",
    "generate --html no/such/x.html": "Make it, or give another --html",
    "plot denoising --steps 0": "--steps must be between 1 and 10,000",
    "plot denoising --out no/such/x.png": "no/such does not exist",
    "bench --temperature -1": "--temperature must be greater than 0",
    "score english-small my.txt --column c": "no columns",
    "score english-small 'A text.' --column c": "--column is for a .csv or .jsonl file",
    "score english-small 'A text.' --source b": "trained on texts without sources",
    "score english-small 'A text.' --seed -1": "--seed must be between 0",
    "score english-small ''": "there is no text to score",
    "translate e2e 'Ein Mann.'": "trained on texts without sources",
    "evaluate e2e --samples 0": "--samples must be between 1",
    "evaluate e2e --score-texts 0": "--score-texts must be between 1",
    "evaluate e2e --task control --each 0": "--each must be between 1",
    "evaluate e2e --on nowhere.txt": "nowhere.txt does not exist",
    "evaluate e2e --data nowhere": "no E2E in nowhere",
    "evaluate e2e --out empty": "empty is a directory",
    "evaluate e2e --steps 0": "--steps must be between 1 and 10,000",
    "evaluate e2e --task seq2seq": "trained on texts without sources",
    "compare --methods difflm data=nowhere.txt": "nowhere.txt does not exist",
    "compare --methods difflm data=my.txt --minutes 0": "--minutes must be greater than 0",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_told_before_a_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, line: str
) -> None:
    if line.startswith("plot"):
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(TextDiffusion, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    before = sorted(folder.rglob("*"))
    assert main(shlex.split(line)) == 2
    said = capsys.readouterr().err
    assert said.startswith("difflm: ") and len(said.splitlines()) <= 2
    assert MISTAKES[line] in said
    assert sorted(folder.rglob("*")) == before


def test_a_table_has_the_step_rules_of_every_method() -> None:
    """By it a wrong --sampler is refused, and none is that a model knows."""
    known: dict[str, set[str]] = {"masked": {"prism", "in-order"}}  # with a quality head, or read in order
    settings: dict[str, set[str]] = {"latent": {"masks"}}  # of a model that can hide what it knows
    for name in LISTED:
        method, sizes = METHODS[name], {**MODEL, "embedding_dim": 16} if METHODS[name].family == "gaussian" else MODEL
        if method.kind in ("method", "baseline"):
            model = method(**sizes).build(TextSpec(20, 16, 16 if method.task == "seq2seq" else 0))
            settings.setdefault(method.family, set()).update(model.capabilities.settings)
            if method.family != "autoregressive":
                known.setdefault(method.family, set()).update(model.capabilities.step_rules)
    assert settings == {family: {*families} for family, families in KNOWN.items()}
    assert known == {family: {*rules} for family, rules in STEP_RULES.items() if rules}


def test_texts_that_fail_leave_no_directory(
    tiny_runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TextDiffusion, "run_jobs", fail)
    assert main(["generate", str(tiny_runs["difflm"]), "--out", str(tmp_path / "a" / "b" / "out.txt")]) == 1
    assert list(tmp_path.iterdir()) == []


# -- texts in place of files ------------------------------------------------------------------------------------------


def test_score_takes_a_text_a_file_and_lines(
    tiny_runs: dict[str, Path], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def score(given: str) -> list[str]:
        assert main(["score", str(tiny_runs["autoregressive"]), given, "--json"]) == 0
        return [json.loads(line).get("text", "mean") for line in capsys.readouterr().out.splitlines()]

    assert score("The Mill is a pub.") == ["The Mill is a pub.", "mean"]
    assert score("my.txt") == ["A pub.", "mean"]
    (folder / "Mill").write_text("not read\n")
    assert score("Mills") == ["Mills", "mean"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"A pub.\n\nThe Mill.\n")))
    assert score("-") == ["A pub.", "The Mill.", "mean"]
    assert main(["score", str(tiny_runs["autoregressive"]), "me.txt"]) == 2
    assert "Did you mean 'my.txt'?" in capsys.readouterr().err


# -- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [name for name in typer.main.get_command(app).commands])  # type: ignore[attr-defined]
def test_help_fits_on_a_screen_and_a_half(verb: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 62
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    if hasattr(command, "commands"):
        return
    assert main([verb, "--help-all"]) == 0
    everything = capsys.readouterr().out
    names = [p.opts[0] for p in command.params if p.param_type_name == "option" and not p.hidden]
    assert [name for name in names if name not in everything] == []
    hidden = [name for name in names if not re.search(rf"{name}\b", shown)]
    assert ("--help-all" in shown) == bool(hidden)


# -- other people's models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_info_describes_other_peoples_models(name: str, tmp_path: Path, capsys: Any) -> None:
    folder = write_model(tmp_path / name, name)
    assert main(["info", str(folder)]) == 0
    said = capsys.readouterr().out
    assert all(row in said for row in ("family ", "parameters", "in the vocabulary", "tokenizer", "difflm generate"))
    assert main(["info", str(folder), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert said.startswith(f"family     {about['family']}") and about["tokenizer"] is None
    assert about["parameters"] == sum(math.prod(shape) for shape in MODELS[name]["keys"].values())


def test_info_says_what_an_open_model_can_do_as_it_then_does(tmp_path: Path, capsys: Any) -> None:
    for name, template in (("llada", CHAT), ("dream", None)):
        folder = write_model(tmp_path / name, name)
        write_tokenizer(folder, template=template)
        assert main(["info", str(folder), "--json"]) == 0
        about, lm = json.loads(capsys.readouterr().out), TextDiffusion.from_pretrained(folder)
        assert about["tokenizer"] == "BPE" and about["chat"] == (lm.chat is not None) == (template is not None)
        assert about["bound"] == (lm.model.capabilities.likelihood is not None)
        assert abs(about["parameters"] - lm.config["parameters"]) <= 0.2 * lm.config["parameters"]


def test_info_refuses_a_kind_that_it_does_not_know(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    assert main(["info", str(tmp_path)]) == 2
    assert "of the kind bloom are not supported" in capsys.readouterr().err


# -- installing -------------------------------------------------------------------------------------------------------


def test_the_demo_says_how_to_enter_its_environment() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    shown = subprocess.run(["make", "-n", "demo"], cwd=ROOT, env=environment, capture_output=True, text=True).stdout
    assert shown.strip().splitlines()[-1].startswith("echo") and "source .venv/bin/activate" in shown
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.index("make demo") < readme.index("source .venv/bin/activate") < readme.index("$ difflm generate")


def test_pip_install_has_one_form() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    found = [
        (path.name, call)
        for path in files
        if path.parent.name != "log"
        for call in re.findall(
            r"pip install (?:-\S+ )*([^\s`#]*difflm[^\s`]*|'\.[^\s`]*)", path.read_text(encoding="utf-8")
        )
    ]
    assert found == []


# -- serving ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_first_examples_of_serving_work_as_written(capsys: Any) -> None:
    need("openai", "fastapi", "uvicorn")
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    started, curl, python = re.findall(r"```(?:sh|py|text)?\n(.*?)```", page, re.DOTALL)[:3]
    assert started.startswith("difflm studio english")
    with running(TextDiffusion.from_pretrained("english-small"), name="english") as server:
        assert "http://127.0.0.1:8000" in curl and "http://127.0.0.1:8000" in python
        exec(python.replace("http://127.0.0.1:8000", server.url), {})
        written = capsys.readouterr().out.strip()
        assert written
        if shutil.which("curl"):
            asked = curl.replace("http://127.0.0.1:8000", server.url)
            answer = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True).stdout
            assert json.loads(answer)["choices"][0]["text"].strip() == written
