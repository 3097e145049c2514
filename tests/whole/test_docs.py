"""README and docs tell the truth: every command in them runs, every Python block works, every link leads somewhere.

A command runs in a folder that holds what the pages speak of (`FILES`, `RUNS`, and small corpora in `DIR` and `data`),
with smaller numbers than written: few steps, few texts, tiny networks. Texts are made as written in `make test-slow`.
What is only parsed stands in `PARSED_ONLY` with its reason; nothing else is left out. Where a page shows a complaint
(`difflm: …`) below a command, that is what the command must say.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.assets.command_reference import PAGE as REFERENCE
from benchmarks.assets.command_reference import write_reference
from difflm.annotators.parser import own_parser, parse_texts
from difflm.annotators.trees import phrases, shapes
from difflm.app.cli import app, main
from difflm.controls import CONTROLS
from difflm.controls.learned import checking_tagger
from difflm.data.corpora import read_e2e
from difflm.data.words import split_words
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import METHODS
from difflm.training.run import bundled_runs
from tests.support.pages import COMMANDS, PAGES, PYTHON, ROOT, YAML, Shown, commands_in, links_in
from tests.support.pretrained import make_classifier
from tests.support.tiny import write_grammar, write_stories

IMAGES = ROOT / "docs" / "images"

PARSED_ONLY = {
    "difflm data fetch": "needs the internet; tests/data/test_fetch.py fetches from a server of its own",
    "difflm bench": "measures for half a minute; tests/app/test_bench.py runs its parts",
    "difflm studio": "serves until Ctrl-C; tests/app/studio/test_api.py starts and ends one",
    "make": "installs, or runs this suite; `make -n` says whether the target exists",
    "pip": "would install into this environment, from the internet",
    "torchrun": "starts several processes; tests/runtime/test_distributed.py does",
}
EXTRAS = {"plot": "matplotlib"}  # what a verb needs beyond the core; without it its commands are only parsed

FILES = {
    "requests.jsonl": '{"length": 8}\n{"infill": "The ___ pub ___", "n": 2}\n{"contains": ["Japanese"], "seed": 3}\n',
    "texts.csv": "id,said\n1,The Mill is a cheap pub near the river.\n",
    "labelled.jsonl": '{"text": "The Mill is a pub.", "sentences": "one"}\n' * 6
    + '{"text": "Cotto is cheap. It serves French food.", "sentences": "several"}\n' * 6,
    "pairs.jsonl": '{"text": "The Mill is a pub.", "seed": 1}\n' * 12,
    "pairs-2.jsonl": '{"text": "The Mill is a pub.", "seed": 1}\n' * 12,
    "told.txt": "French : The Mill is a pub.\n" * 6 + "Any : Cotto is cheap.\n" * 6,
    "documents.jsonl": '{"text": "The Mill is a pub. It is cheap.\\n\\nIt serves wine."}\n' * 12,
    "sources.txt": "a cheap pub\na family restaurant\n",
    "table.csv": "id,said\n1,a cheap pub\n",
    "test.jsonl": '{"src": "a cheap pub", "trg": "eine billige Kneipe"}\n',
    "test.en": "a cheap pub\n",
    "test.de": "eine billige Kneipe\n",
    "test.de2": "eine günstige Kneipe\n",
    "test.txt": "eine billige Kneipe\n",
    "train.en": "".join(f"a cheap pub {k}\na family restaurant {k}\n" for k in range(6)),
    "train.de": "".join(f"eine billige Kneipe {k}\nein Familienrestaurant {k}\n" for k in range(6)),
    "answers.de": "".join(f"eine Kneipe {k}\nein Restaurant {k}\n" for k in range(6)),
    "menu.json": '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}}',
    "target_attribute.json": '["food", ":", "Japanese"]\n["area", ":", "riverside"]\n',
}
RUNS = {  # every run that a page asks something of, and what trained it
    "my-run": "own-text data=my.txt",
    "run": "own-text data=my.txt",
    "shakespeare": "own-text data=my.txt",
    "my-few": "e2e-few init=my-run data=pairs.jsonl",
    "my-fewer": "e2e-few init=my-few data=pairs-2.jsonl",
    "my-map": "e2e-flow-map init=my-run data=my.txt",
    "my-twin": "own-text-autoregressive data=my.txt",
    "runs/e2e": "e2e",
    "runs/diffusion-lm": "e2e-diffusion-lm",
    "runs/longer": "e2e-diffusion-lm",
    "runs/twin": "e2e-autoregressive",
    "runs/fine-tuned": "e2e-fine-tuning data=prompts.jsonl",
    "runs/mouth": "e2e-mdlm method=bert-mouth",
    "runs/twin-guide": "e2e-guide data=words.jsonl model.guides=runs/twin",
    "runs/roc": "roc",
    "runs/roc-twin": "roc-twin",
    "runs/roc-infill-twin": "roc-infill-twin",
    "runs/roc-judge": "roc-twin",
    "runs/en-de": "multi30k data=train.en,train.de tokenizer=words",
    "runs/second": "multi30k data=train.en,train.de tokenizer=words",
    "runs/en-de-twin": "multi30k-encoder-decoder data=train.en,train.de tokenizer=words",
    "runs/student": "multi30k method=cmlm tokenizer=runs/en-de-twin data=train.en,answers.de",
    "pre": "multi30k-genie task=span-denoising",
    "my-guide": "classifier data=labelled.jsonl model.guides=e2e",
    "runs/mdlm": "e2e-mdlm",
    "runs/mdlm/guide": "e2e-guide data=words.jsonl model.guides=runs/mdlm",
    "runs/prism": "own-text data=my.txt method=mdlm model.quality_head=true",
    "runs/blocks": "e2e-block-diffusion",
    "runs/flow-map": "e2e-flow-map",
    "runs/ssd": "e2e-ssd-lm",
    "runs/ld4lg": "e2e-ld4lg",
    "runs/gpvae": "e2e-gpvae",
    "runs/glyph": "e2e-glyph-diffusion",
    "runs/diff-glat": "multi30k-diff-glat data=train.en,train.de tokenizer=words",
    "runs/edits": "e2e-mdlm method=diffuser",
    "runs/diffuser": "multi30k-diffuser data=train.en,train.de tokenizer=words",
    "runs/told": "e2e-mdlm data=told.txt",
    "runs/discrete/gidd": "e2e-mdlm method=gidd",
    "runs/dlm-guide": "classifier data=words.jsonl model.guides=runs/diffusion-lm",
    "runs/dlm-guide-trees": "classifier data=words.jsonl model.guides=runs/diffusion-lm",
}
BRIEF = "steps=2 batch_size=8 warmup=0 widths=[] sample_every=0"
TINY = "model.hidden=16 model.layers=1 model.heads=2"
FEW = "--samples 4 --score-texts 4 --draws 1"
MOST_STEPS, MOST_TEXTS = 2, 4


def tiny(argv: list[str]) -> list[str]:
    """Changes to a recipe. A classifier has the words of the model that it guides, and what begins with a bundled model
    its sizes too."""
    if argv[0] in ("e2e-few", "e2e-flow-map") and not any(word.startswith("init=") for word in argv):
        return BRIEF.split()
    return [*BRIEF.split(), *TINY.split(), *["more_than=0"] * (argv[0] not in ("classifier", "e2e-guide"))]


# -- reading the pages ------------------------------------------------------------------------------------------------


PART = "# src/"  # the first line of a block that shows a part of a file


def why_parsed(command: Shown) -> str | None:
    """The reason why a command is only parsed, if there is one."""
    argv = command.argv
    for start, reason in PARSED_ONLY.items():
        if argv[: len(start.split())] == start.split():
            return reason
    extra = "transformers" if "tone" in argv else EXTRAS.get(argv[1])
    return f"{extra} is not installed" if extra and importlib.util.find_spec(extra) is None else None


def parse(argv: list[str]) -> None:
    """Raise what the command would say to unknown verbs, unknown options and values of the wrong kind."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("difflm", list(argv), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def parsed(command: Shown) -> None:
    argv = command.argv
    if argv[0] == "make":
        if shutil.which("make"):
            done = subprocess.run(["make", "-n", *argv[1:]], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    elif argv[0] == "pip":
        assert argv[1] == "install"
    elif argv[0] == "torchrun":
        assert argv[argv.index("difflm") - 1] == "-m"
        parse(argv[argv.index("difflm") + 1 :])
    else:
        parse(argv[1:])


# -- a folder with everything the pages speak of ----------------------------------------------------------------------


def write_e2e(folder: Path) -> None:
    folder.mkdir(parents=True)
    for split, n in (("train", 24), ("valid", 8)):
        lines = [f"name : The Mill | food : French||{text[:-1]} . " for text in write_grammar(folder / "texts", n)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "texts").unlink()


def write_labels(folder: Path, home: Path) -> None:
    """Labels of the texts in `folder`, by those who check: what `benchmarks/assets/label_e2e.py` makes, in one file."""
    pairs = [pair for split in ("train", "valid") for pair in read_e2e(folder / f"{split}.txt")]
    words = [split_words(pair.text) for pair in pairs]
    tags, trees = checking_tagger().tags(words), parse_texts(own_parser(), words)
    lines = [
        {"text": p.text, **p.fields, "pos": own, "tree": [list(span) for span in phrases(tree)], "shape": shapes(tree)}
        for p, own, tree in zip(pairs, tags, trees, strict=True)
    ]
    for name in ("words.jsonl", "trees.jsonl", "syntax.jsonl", "prompts.jsonl"):
        (home / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared once; every command gets a copy."""
    home = tmp_path_factory.mktemp("docs")
    for name in ("my.txt", "grammar.txt"):
        write_grammar(home / name, 24)
    for name, content in FILES.items():
        (home / name).write_text(content, encoding="utf-8")
    write_e2e(home / "DIR" / "e2e")
    write_labels(home / "DIR" / "e2e", home)
    shutil.copytree(Path(str(resources.files("difflm"))) / "pretrained" / "parser", home / "PTB")
    if importlib.util.find_spec("transformers"):
        make_classifier(home / "tone")
    write_stories(home / "DIR", 24, 8)
    (home / "DIR" / "multi30k").mkdir()
    for side in ("en", "de"):
        for split in ("train", "val"):
            (home / "DIR" / "multi30k" / f"task1.{split}.{side}").write_text(FILES[f"train.{side}"], encoding="utf-8")
    shutil.copytree(home / "DIR", home / "data")
    (home / "data" / "tinyshakespeare").mkdir()
    write_grammar(home / "data" / "tinyshakespeare" / "tinyshakespeare.txt", 24)
    return home


def runs_named(text: str) -> list[str]:
    """The runs that a text names, with what they were made from and what stands in their folders."""
    found: set[str] = set()
    while True:
        told = "\n".join([text, *(RUNS[one] for one in found)])
        named = {name for name in RUNS if re.search(rf"(?<![\w/-]){re.escape(name)}(?![\w-])", told)}
        inside = {
            name for name in RUNS for one in named if f"{name}/".startswith(f"{one}/") or one.startswith(f"{name}/")
        }
        if named | inside == found:
            return [name for name in RUNS if name in found]
        found = named | inside


def make_runs(home: Path, names: list[str]) -> None:
    """Train those that are not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr("difflm.training.validation.VALIDATION_DRAWS", 8)
        for name in names:
            alike = [one for one, recipe in RUNS.items() if recipe == RUNS[name] and Path(one).exists()]
            if alike and name not in alike:
                shutil.copytree(alike[0], name)
            elif not alike:
                recipe = RUNS[name].split()
                argv = ["train", *recipe, *tiny(recipe), "--data", "DIR", "--out", name]
                assert main([*argv, "--device", "cpu"]) == 0


@pytest.fixture
def there(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A copy of the home with the runs that a command or a block names."""
    shown = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    texts = [re.sub(r"\bRUN\b", "run", one.text) for one in shown.values() if isinstance(one, Shown)]
    make_runs(home, runs_named("\n".join(texts)))
    folder = tmp_path / "there"
    shutil.copytree(home, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DIFFLM_DATA", str(folder / "DIR"))
    return folder


@pytest.fixture(scope="module")
def bundled() -> dict[tuple[Any, ...], TextDiffusion]:
    return {}


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch, bundled: dict[tuple[Any, ...], TextDiffusion]) -> None:
    """Few denoising steps, few draws for a bound, small models, and a bundled model is loaded once."""
    load, sampling = TextDiffusion.from_pretrained.__func__, TextDiffusion.sampling  # type: ignore[attr-defined]

    def cached(cls: type[TextDiffusion], name: Any, *args: Any, **kwargs: Any) -> TextDiffusion:
        name = "english-small" if name == "english" else name  # a quarter as large
        key = (name, *map(str, (*args, *kwargs.values())))
        made = bundled.get(key) or load(cls, name, *args, **kwargs)
        made.model.sampling = replace(made.model.sampling, steps=min(made.model.sampling.steps, MOST_STEPS))
        if name in bundled_runs():
            bundled[key] = made
        return made

    def short(self: TextDiffusion, **changes: Any) -> Any:
        asked = sampling(self, **changes)
        return replace(asked, steps=min(asked.steps, MOST_STEPS))

    monkeypatch.setattr("difflm.training.validation.VALIDATION_DRAWS", 8)
    monkeypatch.setattr(TextDiffusion, "from_pretrained", classmethod(cached))
    monkeypatch.setattr(TextDiffusion, "sampling", short)


@pytest.fixture(autouse=True)
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page registers is forgotten after its test."""
    for names in (METHODS, CONTROLS):
        monkeypatch.setattr(names, "_parts", dict(names._parts))


def register_as_shown(page: str) -> None:
    """Define what a page adds to difflm: its commands are for those who have installed that."""
    for block in PYTHON:
        if block.page == page and "@register" in block.text:
            exec(compile(block.text, str(block), "exec"), {"__name__": page})


def smaller(argv: list[str]) -> list[str]:
    """The same command on a CPU, with few texts, a tiny network or a quick map; what was written was parsed before."""
    verb = argv[0]
    argv = ["cpu" if word.startswith("cuda") else word for word in argv]
    if verb == "train" and "--dry-run" not in argv:
        return [*(word for word in argv if not word.startswith("minutes=")), *tiny(argv[1:])]  # of two steps
    if "--methods" in argv:
        return [*argv, *tiny(argv), *FEW.split()]
    if verb in ("evaluate", "compare") and "control" in argv:
        return [*argv, "--samples", "1", "--each", "1"]
    if verb in ("evaluate", "compare") and "infill" in argv:
        return [*argv, *["--samples", "2", "--mbr", "2", "--beams", "2", "--draws", "1", "--skip", "0"]]
    if verb == "evaluate" and "seq2seq" in argv:
        return [*argv, "--mbr", "3"]
    if verb in ("evaluate", "compare"):
        return [*argv, *FEW.split()]
    if verb == "score":
        return [*argv, "--draws", "1"]
    if argv[:2] == ["plot", "embeddings"]:
        return [*argv, "--method", "pca"]
    return fewer(argv)


def fewer(argv: list[str]) -> list[str]:
    """The same command for few texts."""
    before = ["", *argv[:-1]]
    return [str(min(int(word), MOST_TEXTS)) if k == "-n" else word for k, word in zip(before, argv, strict=True)]


def perform(argv: list[str]) -> None:
    """Run a command where its `--out` is free, or, to resume, where it was run before."""
    if argv[0] in ("train", "translate") and "--out" in argv:
        out = Path(argv[argv.index("--out") + 1])
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
        if "--resume" in argv:
            assert main([word for word in argv if word != "--resume"]) == 0
    assert main(argv) == 0


# -- what must hold ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.complaint], ids=str)
def test_a_command_of_the_docs_is_understood(command: Shown) -> None:
    parsed(command)


# The README's commands run in `make test`, those of the other pages in `make test-ci`.
RUNNING = [
    pytest.param(c, id=str(c), marks=[] if c.page == "README.md" else pytest.mark.long)
    for c in COMMANDS
    if not c.complaint and why_parsed(c) is None
]


@pytest.mark.parametrize("command", RUNNING)
def test_a_command_of_the_docs_runs(command: Shown, brief: None, there: Path) -> None:
    register_as_shown(command.page)
    perform(smaller(command.argv[1:]))


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.complaint], ids=str)
def test_a_command_of_the_docs_complains_as_shown(command: Shown, there: Path, capsys: Any) -> None:
    assert main(command.argv[1:]) != 0
    assert command.complaint in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.argv[:2] == ["difflm", "generate"] and not c.complaint], ids=str
)
def test_a_command_of_the_docs_runs_as_written(command: Shown, there: Path) -> None:
    """With all of its steps; of many texts the first four, which are the same however many are asked for."""
    register_as_shown(command.page)
    perform(fewer(command.argv[1:]))


@pytest.mark.parametrize("block", [b for b in PYTHON if not b.text.startswith(PART)], ids=str)
def test_a_python_block_runs(block: Shown, brief: None, there: Path) -> None:
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


@pytest.mark.slow
def test_own_text_from_an_empty_folder_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The page's own 2,000 lines, its training and its samples: most are sentences that could stand among them."""
    monkeypatch.chdir(tmp_path)
    page = "docs/own-text.md"
    exec(next(block.text for block in PYTHON if block.page == page), {})
    sentence = re.compile(r"\w+ over [\w ]+ on \w+day \w+: take \w+ \w+ and [\w ]+ with you\.")
    assert all(sentence.fullmatch(line) for line in Path("my.txt").read_text(encoding="utf-8").splitlines())
    train, generate, *_ = (c for c in COMMANDS if c.page == page and c.argv[1] in ("train", "generate"))
    assert main(train.argv[1:]) == 0
    assert main(generate.argv[1:]) == 0
    capsys.readouterr()
    assert main(["generate", "my-run", "-n", "60"]) == 0
    written = capsys.readouterr().out.splitlines()
    assert sum(bool(sentence.fullmatch(text)) for text in written) > 30  # 78 % were measured


@pytest.mark.parametrize("block", [b for b in (*PYTHON, *YAML) if b.text.startswith(PART)], ids=str)
def test_code_that_names_its_file_is_a_part_of_it(block: Shown) -> None:
    name, code = block.text.split("\n", 1)
    assert code.strip("\n") in (ROOT / name.removeprefix("# ")).read_text(encoding="utf-8")


def named_in(text: str) -> list[tuple[str, str]]:
    """Every "`name` in [file](path)": what is said to stand in a file, and the path."""
    return [(name, path) for name, path in re.findall(r"`([\w.]+)` in\s+\[[^\]]+\]\(([^)#\s]+)\)", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_stand_in_the_files_that_pages_say(page: Path) -> None:
    for name, path in named_in(page.read_text(encoding="utf-8")):
        code = (page.parent / path).read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"(def|class) {part}\b|^{part}\b.* = ", code, re.MULTILINE), f"{name} is not in {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    missing = [t for t in links_in(page.read_text(encoding="utf-8")) if not (page.parent / t).exists()]
    assert not missing


def anchors_in(text: str) -> set[str]:
    """The names by which a page's headings are linked, as GitHub makes them."""
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_are_headings_of_the_page_they_lead_to(page: Path) -> None:
    for path, anchor in re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        target = page.parent / path if path else page
        if target.suffix == ".md":
            assert anchor in anchors_in(target.read_text(encoding="utf-8")), f"{path}#{anchor}"


def test_the_page_of_methods_shows_all_of_them(capsys: Any) -> None:
    assert main(["methods"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = [line.split() for line in (ROOT / "docs/verbs/methods.md").read_text(encoding="utf-8").splitlines()]
    assert [row for row in rows if row not in shown] == []


def test_every_page_and_every_picture_is_linked() -> None:
    linked = {(p.parent / t).resolve() for p in PAGES for t in links_in(p.read_text(encoding="utf-8"))}
    pictures = [path for path in IMAGES.rglob("*") if path.is_file()]
    assert pictures and [str(path) for path in (*pictures, *PAGES[1:]) if path not in linked] == []


def verbs() -> dict[str, Any]:
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def options(command: Any) -> Iterator[str]:
    for inner in getattr(command, "commands", {}).values():
        yield from options(inner)
    for parameter in command.params:
        yield from (name for name in parameter.opts if name.startswith("--") and not getattr(parameter, "hidden", 0))


def test_every_verb_has_a_page_and_every_option_is_told() -> None:
    said = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name, command in verbs().items():
        assert (ROOT / "docs" / "verbs" / f"{name}.md").is_file(), name
        untold = [option for option in options(command) if not re.search(rf"{option}(?![\w-])", said)]
        assert not untold, f"difflm {name}: {untold}"


def test_the_reference_says_what_the_command_says() -> None:
    """`python -m benchmarks.assets.command_reference` writes it again."""
    assert write_reference() == REFERENCE.read_text(encoding="utf-8")


def test_help_of_every_verb_leaves_torch_and_matplotlib_out() -> None:
    asked = [
        [],
        *([name] for name in verbs()),
        *([n, m] for n, c in verbs().items() for m in getattr(c, "commands", ())),
    ]
    code = (
        "import sys; from difflm.app.cli import main; "
        f"codes = [main([*argv, '--help']) for argv in {asked!r}] + [main(['methods']), main(['data', 'list'])]; "
        "sys.exit(any(codes) or bool({'torch', 'matplotlib', 'fastapi', 'spacy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- the checks see what they forbid ----------------------------------------------------------------------------------

PAGE = """
```
difflm generate -n 4 --no-such-option    # a comment
difflm train own-text data=my.txt \\
  --out run
$ difflm methods --json | head -1
make no-such-target
```

`difflm not fenced`

```python
difflm = 1
```
"""


def test_commands_are_found_with_their_lines() -> None:
    found = commands_in("page.md", PAGE)
    assert [(c.line, c.argv) for c in found] == [
        (3, ["difflm", "generate", "-n", "4", "--no-such-option"]),
        (4, ["difflm", "train", "own-text", "data=my.txt", "--out", "run"]),
        (6, ["difflm", "methods", "--json"]),
        (7, ["make", "no-such-target"]),
    ]
    (failing,) = commands_in("page.md", "```\n$ difflm info nothing\ndifflm: no run.\n```\n")
    assert failing.complaint == "difflm: no run."
    assert Shown("", 1, "difflm plot training RUN [RUN …]").argv == ["difflm", "plot", "training", "run"]


@pytest.mark.parametrize(
    "wrong",
    [
        "difflm generate --no-such-option",
        "difflm generate -n four",
        "difflm no-such-verb",
        "difflm data fetch e2e --no-such-option",
        "make no-such-target",
    ],
)
def test_a_wrong_command_in_a_page_fails(wrong: str) -> None:
    (command,) = commands_in("page.md", f"```\n{wrong}\n```\n")
    if wrong.startswith("make") and not shutil.which("make"):
        pytest.skip("make is not installed")
    with pytest.raises(Exception, match=r"[Nn]o such|valid integer|No rule"):
        parsed(command)


def test_a_command_that_fails_when_it_runs_fails_the_test(there: Path) -> None:
    (command,) = commands_in("page.md", "```\ndifflm generate no-such-run\n```\n")
    parsed(command)
    with pytest.raises(AssertionError):
        perform(smaller(command.argv[1:]))


def test_links_are_found_outside_code() -> None:
    text = '[a](b.md#c) ![d](e.png) [f](https://g) [h](#i) `[j](k)`\n```\n[l](m)\n```\n<img width=9 src="n.png">'
    assert links_in(text) == ["b.md", "e.png", "n.png"]
    assert named_in("`A.b` in\n[c.py](d/c.py), `e` in f") == [("A.b", "d/c.py")]


def test_the_table_of_what_is_only_parsed_has_no_dead_rows() -> None:
    for start in PARSED_ONLY:
        assert any(c.argv[: len(start.split())] == start.split() for c in COMMANDS), start
