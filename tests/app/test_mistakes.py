"""Typical mistakes on the command line: each is answered by a sentence that says what to do, without torch."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from difflm.app.cli import main

MISTAKES = {
    # verbs and options
    "generat e2e": "Did you mean 'generate'?",
    "generate e2e --stpes 10": "difflm generate has no option --stpes. Did you mean --steps?",
    "generate e2e --prompt hello": 'give it with a gap: --infill "TEXT ___"',
    "generate --model e2e": "give the model without an option, as the first argument",
    "generate e2e --gpu": "give --device cuda",
    "generate e2e --task control": "difflm evaluate and difflm compare have it",
    "generate e2e steps=10": "write --steps 10",
    "generate e2e --length": "--length needs a value",
    "evaluate": "difflm evaluate needs RUN: a bundled model",
    "train": "difflm train needs TEXTS|RECIPE: files or folders of texts, one per line",
    "train e2e --steps 100 --out run": "write steps=100 instead of --steps",
    "train e2e --layers 4 --out run": "write model.layers=4 instead of --layers",
    "train e2e --learning-rate 0.1 --out run": "write lr=0.1 instead of --learning-rate",
    # values
    "generate e2e -n four": "must be a whole number, not 'four'",
    "generate e2e --temperature hot": "--temperature must be a number, not 'hot'",
    "generate e2e --temperature 99": "--temperature must be greater than 0 and at most 10, not 99",
    "generate e2e --steps 0": "--steps must be between 1 and 10,000, not 0",
    "generate e2e --guidance strong": "--guidance must be a number or `original`, not 'strong'",
    "generate e2e --field food": "must have the form NAME=VALUE, such as food=Japanese",
    "generate e2e --field food=French --field food=Indian": "given twice",
    "generate e2e --span 1-3": "is not of the form FIRST,LAST,LABEL, such as 7,10,VP",
    "generate e2e --device gpu": "Did you mean cuda?",
    "generate e2e --dtype bf16": "--dtype must be one of float32, bfloat16, float16, int8, not 'bf16'",
    "generate e2e --keep pub": "give --edit TEXT as well",
    "generate e2e --show --json": "choose one",
    "evaluate e2e --task langauge": "not 'langauge'. Did you mean language?",
    "evaluate e2e --pairs my.txt": "--pairs is for --task seq2seq: leave it out, or change the task",
    "studio --port 99999": "--port must be between 0 and 65535, not 99999",
    # models, recipes, corpora, methods and keys
    "generate 'Once upon a time'": "difflm generate MODEL --infill 'Once upon a time ___'",
    "generate e2e 'Once upon a time'": "--infill 'Once upon a time ___'",
    f"generate '{'so it goes ' * 40}'": "is not a model",
    "generate e2": "Did you mean e2e?",
    "generate E2E": "Did you mean e2e?",
    "generate my.txt": "difflm train my.txt --out RUN",
    "score juge my.txt": "Did you mean judge?",
    "compare e2e nowhere": "give the directory of a run",
    "train own-txt --out run": "Did you mean own-text?",
    "train e2e stesp=9 --out run": "unknown key 'stesp'. Did you mean 'steps'?",
    "train e2e method=mdml --out run": "Did you mean mdlm?",
    "train e2e": "Give --out RUN, a new directory",
    "train own-text data=my.txt steps=9 minutes=3 --out run": "minutes=3 and steps=9 both say how long",
    "train e2e steps --out run": "is not of the form key=value, such as steps=2000",
    "train own-text --out run": "give data=FILE",
    "data fetch ptb": "the Linguistic Data Consortium hands it to its licensees",
    "data fetch e2ee": "Did you mean 'e2e'?",
    # files
    "train my.text.txt --out run": "my.text.txt does not exist. Did you mean 'my.txt'?",
    "score e2e me.txt": "me.txt does not exist. Did you mean 'my.txt'?",
    "translate e2e 'A cheap pub.'": "e2e was trained on texts without sources",
    "generate e2e --input many.jsonl": "many.jsonl does not exist",
    "generate e2e --guide my-guide --label a=b": "my-guide does not exist",
    "generate e2e --json-schema my.json": "cannot read my.json",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIFFLM_DATA", raising=False)
    (tmp_path / "my.txt").write_text("A pub.\n")
    return tmp_path


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_a_sentence_that_says_what_to_do(folder, capsys, line):
    assert main(shlex.split(line)) == 2
    said = capsys.readouterr().err
    assert MISTAKES[line] in said
    assert said.startswith("difflm: ") and len(said.splitlines()) <= 2
    assert [path.name for path in folder.iterdir()] == ["my.txt"]


@pytest.mark.long
def test_no_mistake_waits_for_torch(folder):
    """But for one in the keys of a recipe: the method that explains them is imported with its parts."""
    lines = [shlex.split(line) for line in MISTAKES if "stesp" not in line]
    code = (
        "import sys; from difflm.app.cli import main; "
        f"found = [argv for argv in {lines!r} if main(argv) != 2 "
        "or 'torch' in sys.modules]; print(found[:1]); sys.exit(bool(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
