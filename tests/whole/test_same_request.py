"""One request (a gap, two words that must appear, a length) to three kinds of models in four ways: the bundled English,
a run of one's own and somebody else's model, in Python, by the command, over HTTP and on the page."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from difflm import Contains, Infill, Length, TextDiffusion
from difflm.app.cli import main
from tests.support.browsing import Opener, asked, write
from tests.support.open_checkpoints import write_model, write_tokenizer
from tests.support.serving import PATIENCE, Running, need, running

pytestmark = pytest.mark.long  # the bundled model, a training and a browser

GAP, WORDS, LENGTH, SEED = "My dog ___ in the garden.", ["old", "house"], 16, 1
REQUEST = {"infill": GAP, "contains": WORDS, "length": LENGTH, "seed": SEED}
PARTS = (
    ("My dog", "The cat", "A small bird", "Your sister"),
    ("sleeps", "runs", "sings", "waits"),
    ("near", "behind", "beside"),
    ("the old", "a red", "your new", "the quiet"),
    ("house", "tree", "wall", "bench"),
    ("with a friend", "every morning", "and looks at the birds"),
)


def write_sentences(path: Path) -> None:
    """A text file as anybody may have one: 400 sentences, one per line."""
    lines = []
    for number in range(400):
        words = list[str]()
        for part in PARTS:
            number, chosen = divmod(number, len(part))
            words.append(part[chosen])
        lines.append(" ".join(words) + " in the garden.\n")
    path.write_text("".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each model is called at the command: a name, or its directory."""
    folder = tmp_path_factory.mktemp("models")
    write_sentences(folder / "my.txt")
    own, llada = folder / "own", write_model(folder / "llada", "llada")
    assert main(["train", str(folder / "my.txt"), "init=none", "steps=40", "sample_every=0", "--out", str(own)]) == 0
    write_tokenizer(llada)
    return {"english": "english-small", "own": str(own), "llada": str(llada)}


@pytest.fixture(scope="module")
def models(places: dict[str, str]) -> dict[str, TextDiffusion]:
    return {name: TextDiffusion.from_pretrained(place) for name, place in places.items()}


@pytest.fixture(scope="module")
def studio(models: dict[str, TextDiffusion]) -> Iterator[Running]:
    """One server for all three."""
    need("fastapi", "uvicorn")
    first, *others = models
    with running(models[first], name=first, others=[(models[name], name) for name in others]) as found:
        yield found


Counter = Callable[[str], int]


@pytest.fixture(scope="module")
def count(places: dict[str, str]) -> dict[str, Counter]:
    """What a length counts, by means of this test: words between spaces for subwords, words and punctuation marks for a
    vocabulary of words, and tokens for somebody else's model."""
    encoder = Tokenizer.from_file(str(Path(places["llada"]) / "tokenizer.json"))
    return {
        "english": lambda text: len(text.split()),
        "own": lambda text: len(re.findall(r"\w+|[^\w\s]", text)),
        "llada": lambda text: len(encoder.encode(text).ids),
    }


def check_text(text: str, count: Counter) -> None:
    assert re.fullmatch(r"My dog .+ in the garden\.", text), text
    inside = text.removeprefix("My dog ").removesuffix(" in the garden.")
    assert all(re.search(rf"\b{word}\b", inside) for word in WORDS), text
    assert count(text) == LENGTH, text


def by_python(model: TextDiffusion) -> str:
    (made,) = model.generate(1, SEED, controls=[Infill(GAP), *map(Contains, WORDS), Length(LENGTH)])
    assert all(check["satisfied"] for check in made.controls)
    return made.text


@pytest.fixture(scope="module")
def written(models: dict[str, TextDiffusion]) -> dict[str, str]:
    return {name: by_python(model) for name, model in models.items()}


KINDS = pytest.mark.parametrize("name", ["english", "own", "llada"])


@KINDS
def test_python(name, written, count):
    check_text(written[name], count[name])


@KINDS
def test_the_command(name, places, written, count, capsys):
    words = [part for word in WORDS for part in ("--contains", word)]
    argv = ["generate", places[name], "--infill", GAP, *words, "--length", str(LENGTH), "--seed", str(SEED), "--json"]
    assert main(argv) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    check_text(found["text"], count[name])
    assert found["text"] == written[name] and all(check["satisfied"] for check in found["controls"])


@KINDS
def test_http(name, studio, written, count):
    httpx = need("httpx2")
    answer = httpx.post(f"{studio.url}/api/generate?model={name}", json=REQUEST, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["texts"]
    check_text(found["text"], count[name])
    assert found["text"] == written[name] and all(check["satisfied"] for check in found["controls"])


@KINDS
def test_the_page(name, studio, browser, written, count):
    """As a person does it: choose the model, type the sentence, the words and the length, and press Write."""
    opener = Opener(browser, f"{studio.url}/")
    tab: Any = opener(f"#n=1&model={name}&seed={SEED}")
    tab.fill("#start", GAP)
    tab.fill("#contains", ", ".join(WORDS))
    tab.fill("#length", str(LENGTH))
    (text,) = write(tab)
    check_text(text, count[name])
    assert text == written[name] and tab.locator(".controls li.met").count() == 4
    assert tab.inner_text("#length-unit") == ("tokens" if name == "llada" else "words")
    assert asked(tab)["length"] == [str(LENGTH)]
    tab.context.close()
    assert opener.wrong == []
