"""The page that runs a model in the browser: the same numbers, words and texts as Python's, in plain files alone."""

import hashlib
import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from browser.export import HERE, main, pack_weights, write_page
from difflm.controls import Control, Infill, Length
from difflm.data.tokenizers import SPECIALS, Words
from difflm.data.words import join_words, split_words
from difflm.diffusion.noise import Noise
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.methods.base import TextSpec
from difflm.methods.difflm import DiffLM
from difflm.runtime.tensors import dequantise, load_tensors
from tests.support.browsing import axe_faults, load_axe
from tests.support.tiny import tiny_run

WEIRD = [
    "isn't it? The customers' rating is \"high\", it's £30.50-ish (more or less) at St. John's, 5 pm.",
    "family-friendly coffee shop -- 20- 30 e.g. U.K. a.m. 3lb that's thats cannot I'd I've d'oeuvre o'clock",
    "„Hallo“ sagte er… 日本語のテキスト。 नमस्ते, naïve—yes/no a@b.c #1 50% 1,000.5 10:30 x&y _under_score_ ..",
    "one\ntwo \n three ''quoted' words'' “nice” ‘so’ Ph.D. .The -25 $5-$6 --5 +1 A+ 5+ 3–4",
]


# -- without a browser ------------------------------------------------------------------------------------------------


def test_the_kernels_are_those_of_their_source():
    """A section of the file says which source it was compiled of."""
    digest = hashlib.sha256((HERE / "kernels.c").read_bytes()).digest()
    assert (HERE / "kernels.wasm").read_bytes().endswith(b"\x06source" + digest), "python -m browser.compile_kernels"


def test_the_folder_is_whole_and_refers_to_nothing_outside(tmp_path):
    words = Words([*SPECIALS, "one", "two", "three"])
    model = DiffLM(embedding_dim=16, hidden=32, layers=2, heads=2).build(TextSpec(words.size, 24))
    lm = TextDiffusion(model, words, {"method": "difflm", "parameters": 1})
    folder = tmp_path / "new" / "page"
    assert write_page(lm, "tiny", folder) == sum(path.stat().st_size for path in folder.iterdir())
    assert [path.name for path in folder.parent.iterdir()] == ["page"]
    paths = [path for path in folder.iterdir() if path.suffix not in (".wasm", ".safetensors")]
    read = {path.name: path.read_text(encoding="utf-8") for path in paths}
    assert not [name for name, text in read.items() if re.search(r"https?://(?!www\.w3\.org)|@import|url\(", text)]
    named = {
        name for text in read.values() for name in re.findall(r'(?:from|src=|href=|URL\()\s*"(?:\./)?([^"#]+)"', text)
    }
    assert named <= {path.name for path in folder.iterdir()} and {"demo.js", "worker.js", "look.css"} <= named
    assert json.loads(read["model.json"])["bytes"] == (folder / "model.safetensors").stat().st_size
    back, own = load_tensors(folder / "model.safetensors"), lm.model.state_dict()
    assert {name for name in own if name.startswith("denoiser.network.")} <= back.keys() <= own.keys()
    for name, weight in back.items():  # at most half of a step of the row's scale
        if weight.dim() == 2 and name != "denoiser.codec.raw":
            assert ((weight - own[name]).abs() <= own[name].abs().amax(1, keepdim=True) / 127 * 0.501).all()


@pytest.mark.long
def test_what_a_page_cannot_run_is_refused_in_a_line(tiny_runs, tmp_path, capsys):
    page = tmp_path / "page"
    for method, said in (("diffusion-lm", "diffusion-lm"), ("autoregressive", "autoregressive"), ("udlm", "udlm")):
        with pytest.raises(UsageError, match=said):
            write_page(TextDiffusion.from_pretrained(tiny_runs[method]), "tiny", page)
    run = str(tiny_runs["difflm"])
    page.mkdir()
    (page / "mine.txt").write_text("mine")
    for asked in ([run, str(page)], ["nobody", str(tmp_path / "other")]):
        assert main(asked) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["page"] and [path.name for path in page.iterdir()] == [
        "mine.txt"
    ]


# -- in a browser -----------------------------------------------------------------------------------------------------


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A static web server, below whose root the page lies in a folder of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/{folder.name}/"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def opened(browser: Any, folder: Path, width: int = 1200) -> Iterator[Any]:
    """The page, ready; there may be no word in the console, and no request outside its folder."""
    from playwright.sync_api import expect

    wrong: list[str] = []
    with served(folder) as url:
        context = browser.new_context(viewport={"width": width, "height": 800}, reduced_motion="reduce")
        context.set_default_timeout(120_000)
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda request: request.url.startswith(url) or wrong.append(request.url))
        tab.goto(url)
        expect(tab.locator("#write")).to_be_enabled(timeout=120_000)
        yield tab
        context.close()
    assert wrong == []


def as_packed(lm: TextDiffusion) -> TextDiffusion:
    """The model with the weights that its page has."""
    lm.model.load_state_dict({**lm.model.state_dict(), **dequantise(pack_weights(lm))})
    return lm


def written(tab: Any, pattern: str = " in ") -> str:
    from playwright.sync_api import expect

    expect(tab.locator("#status")).to_have_text(re.compile(pattern), timeout=120_000)
    return tab.evaluate("document.getElementById('text').textContent")


def ask(tab: Any, template: str = "", length: int | None = None, seed: int = 0, steps: int = 4) -> str:
    tab.evaluate("document.getElementById('status').textContent = ''")
    for name, value in {"template": template, "length": length or "", "seed": seed, "steps": steps}.items():
        tab.fill(f"#{name}", str(value))
    tab.click("#write")
    return written(tab)


@pytest.fixture(scope="module")
def pages(
    tiny_runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[TextDiffusion, Path]]:
    """Small models of vectors, of masks, and of masks over pieces of words, each with its page. Trained for long enough
    that words differ in what they are believed to be."""
    folder = tmp_path_factory.mktemp("pages")
    changes: dict[str, Any] = {"tokenizer": "bpe", "vocabulary": 400, "longest": 48}
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "dropout": 0.0, "context": 0.5}
    pieces = tiny_run(folder / "runs", "mdlm", model=sizes, steps=60, **changes)
    runs: dict[str, tuple[Path, dict[str, Any]]] = {
        "vectors": (tiny_runs["difflm"], {"noise_temperature": 0.9}),
        "ddim": (tiny_runs["difflm"], {"sampler": "ddim", "temperature": 0.8, "noise_temperature": 0.95}),
        "masks": (tiny_runs["mdlm"], {"temperature": 0.8}),
        "confidence": (tiny_runs["mdlm"], {"sampler": "confidence"}),
        "pieces": (pieces, {"sampler": "first-hitting"}),
    }
    made = {}
    for name, (run, sampling) in runs.items():
        lm = TextDiffusion.from_pretrained(run, dtype=torch.float32)
        lm.model.sampling = replace(lm.model.sampling, **sampling)
        if name == "pieces":  # gaps between words are filled otherwise than whole texts are written
            lm.config["gaps"] = lm.gaps = {"sampler": "confidence", "temperature": 0.5}
        write_page(lm, name, folder / name)
        made[name] = as_packed(lm), folder / name
    return made


LOAD = """
const { fetchModel } = await import("./network.js"), sampling = await import("./sampling.js");
const model = await fetchModel(), { vocabulary } = model.config;
"""


@pytest.mark.long
def test_beliefs_are_those_of_python(browser, pages):
    """To the rounding of float32, at every noise level: logits of vectors, shares of masks."""
    lm, folder = pages["vectors"]
    denoiser = lm.model.denoiser
    rows, dim = 9, denoiser.codec.dim
    x, previous = torch.randn(2, 1, rows, dim)
    script = f"""async ([x, previous, levels]) => {{ {LOAD}
      const vectors = new sampling.Vectors(model), places = [...Array({rows}).keys()], found = [];
      for (const level of levels) {{
        const {{ logits, evidence }} = vectors.believe(
          Float32Array.from(x), Float32Array.from(previous), level, {rows}, places);
        found.push(Array.from(logits, (value, k) => value + evidence[k]));
      }}
      return found;
    }}"""
    times = torch.tensor([0.02, 0.3, 0.7, 0.98])
    at = lm.model.process.at(times)
    levels = [
        {"t": float(t), "alpha": float(a), "sigma": float(s)} for t, a, s in zip(times, at.alpha, at.sigma, strict=True)
    ]
    with opened(browser, folder) as tab:
        found = torch.tensor(tab.evaluate(script, [x.flatten().tolist(), previous.flatten().tolist(), levels]))
    with torch.no_grad():
        true = torch.cat([denoiser(x, t.view(1), previous=previous).logits for t in times]).flatten(1)
    assert true.std() > 1 and ((found - true).abs() <= 1e-4 * (1 + true.abs())).all()

    lm, folder = pages["masks"]
    mask, ids = lm.model.process.mask_id, [7, 8, -1, 9, -1, -1, 5]
    state = torch.tensor([[mask if one < 0 else one for one in ids]])
    script = f"""async (x) => {{ {LOAD}
      const [shares] = sampling.believeMasks(model, Int32Array.from(x), () => [], 1);
      return Array.from(shares);
    }}"""
    with opened(browser, folder) as tab:
        found = torch.tensor(tab.evaluate(script, state[0].tolist())).view(3, -1)
    with torch.no_grad():
        logits = lm.model.denoiser(state, torch.zeros(1)).logits[0, [2, 4, 5]]
    logits[:, :4] = float("-inf")
    assert (found - logits.softmax(-1)).abs().max() < 1e-6


@pytest.mark.long
def test_noise_is_that_of_python(browser, pages):
    """Uniform numbers to the bit, normal ones to the rounding of float32."""
    script = f"""async () => {{ {LOAD}
      const numbers = [[0, 0, 0], [7, 4, 3]].map((asked) => [...model.uniform(...asked, 5, 4)]);
      return [numbers, numbers.map((some) => some.map(sampling.quantile)), [...model.uniform(5, 1, 0, 0, 0)]];
    }}"""
    with opened(browser, pages["vectors"][1]) as tab:
        uniform, normal, single = tab.evaluate(script)
    for found, bell, (seed, stream, step) in zip(uniform, normal, [(0, 0, 0), (7, 4, 3)], strict=True):
        noise = Noise(seed, torch.zeros(1, dtype=torch.int64))
        assert found == noise.uniform(step, 5, 4, stream=stream).flatten().tolist()
        assert torch.allclose(torch.tensor(bell), noise.normal(step, 5, 4, stream=stream).flatten(), atol=1e-6)
    assert single == Noise(5, torch.zeros(1, dtype=torch.int64)).uniform(0, stream=1).tolist()


@pytest.mark.long
def test_words_and_pieces_are_those_of_python(browser, pages):
    draw = random.Random(0)
    signs = [*"'\"-.£t’“,日()5A\n", "30", "isn", "St.", "pm", "the", "--"]
    texts = [*WEIRD, *(" ".join(draw.choice(signs) for _ in range(9)) for _ in range(300))]
    rows = [split_words(text) for text in texts] + [[draw.choice(signs) for _ in range(9)] for _ in range(300)]
    script = """async ([texts, rows]) => {
      const { splitWords, joinWords, readTokenizer } = await import("./texts.js");
      const { tokenizer } = await (await fetch("model.json")).json(), made = readTokenizer(tokenizer);
      const encoded = texts.map((text) => made.encode(text).ids);
      return [texts.map(splitWords), rows.map(joinWords), encoded, encoded.map((ids) => made.join([], ids))];
    }"""
    lm, folder = pages["pieces"]
    with opened(browser, folder) as tab:
        split, joined, encoded, back = tab.evaluate(script, [texts, rows])
    assert split == [split_words(text) for text in texts]
    assert joined == [join_words(row) for row in rows]
    assert encoded == lm.tokenizer.encode_batch(texts) and back == texts


@pytest.mark.long
@pytest.mark.parametrize("kind", ["vectors", "ddim", "masks", "confidence", "pieces"])
def test_the_same_seed_writes_the_same_text_as_in_python(browser, pages, kind):
    """At every step the same words, and as sure of each but for rounding: the evidence of vectors reaches 2,000 nats,
    of which float32 keeps three decimals, and errors add up over steps."""
    lm, folder = pages[kind]
    template = "The old pub ___ the river serves ___ food." if kind == "pieces" else "The old ___:2 near ___ food."
    asked: list[tuple[dict[str, Any], list[Control]]] = [({}, []), ({"template": template}, [Infill(template)])]
    asked += [({"length": 7}, [Length(7)])] if kind != "pieces" else []
    script = f"""async (requests) => {{ {LOAD}
      const {{ readTokenizer }} = await import("./texts.js"), {{ write }} = await import("./writing.js");
      const tokenizer = readTokenizer(model.config.tokenizer);
      return requests.map((request) => [...write(model, tokenizer, {{ template: "", length: null, ...request }})]);
    }}"""
    requests = [{**request, "seed": seed, "steps": 6} for request, _ in asked for seed in (0, 1, 2)]
    with opened(browser, folder) as tab:
        made = tab.evaluate(script, requests)
    for frames, request, (_, controls) in zip(made, requests, [one for one in asked for _ in range(3)], strict=True):
        settings: dict[str, Any] = {"seed": request["seed"], "steps": 6, "controls": controls}
        drafts = [draft for (draft,) in lm.stream(1, **settings)]
        assert frames[-1]["text"] == lm.generate(1, **settings)[0].text
        for draft, one in zip(drafts, frames, strict=False):  # some samplers end before their last step
            frame = one["frame"]
            assert (frame["tokens"], frame["step"]) == (draft.tokens, draft.step)
            assert abs(frame["t"] - draft.t) < 1e-5
            assert max(abs(a - b) for a, b in zip(frame["confidence"], draft.confidence, strict=True)) < 5e-3


@pytest.mark.long
def test_a_visitor_writes_fills_gaps_and_plays_it_again(browser, tmp_path):
    """With the bundled model, in its own folder of a plain server."""
    lm = TextDiffusion.from_pretrained("e2e")
    write_page(lm, "e2e", tmp_path / "page")
    as_packed(lm)
    with opened(browser, tmp_path / "page", width=360) as tab:
        said = tab.inner_text("#intro")
        assert "all words at once" in said and "817 words" in said and "40,766 restaurant descriptions" in said
        assert ask(tab, length=12, steps=8) == lm.generate(1, 0, controls=[Length(12)], steps=8)[0].text
        assert re.fullmatch(r"12 words in \d+\.\d s, 8 steps", tab.inner_text("#status"))
        tab.get_by_label("Step", exact=True).fill("0")
        first = tab.inner_text("#text")
        assert tab.inner_text("#step") == "1/8" and tab.locator(".word[data-level='0']").count() > 0
        tab.keyboard.press("End")
        assert tab.inner_text("#text") != first and tab.inner_text("#step") == "8/8"
        tab.click("#open")
        template = tab.input_value("#template")
        before, after = template.split("___")
        filled = ask(tab, template, steps=4)
        assert filled.startswith(before) and filled.endswith(after.strip()) and "___" not in filled
        tab.click("#next")
        assert tab.input_value("#seed") == "1" and written(tab).startswith(before)
        filled = ask(tab, "Zorbulon ___ pub.", length=6, steps=3)
        assert filled.startswith("Zorbulon") and filled.endswith("pub.") and len(split_words(filled)) == 6
        assert "“Zorbulon”" in tab.inner_text("#warning")
        tab.fill("#template", "___ ___")
        tab.click("#write")
        written(tab, "Not written")
        assert "Two gaps touch" in tab.inner_text("#warning")
        tab.fill("#steps", "200"), tab.fill("#template", ""), tab.fill("#length", "64")
        tab.click("#write")
        tab.click("#stop")
        written(tab, "Stopped")
        assert ask(tab, length=3, steps=2) and tab.locator("#warning").is_hidden()
        assert tab.evaluate("document.documentElement.scrollWidth") == 360


@pytest.mark.long
@pytest.mark.parametrize("width", [360, 1600])
def test_axe_finds_no_fault(browser, pages, width):
    with opened(browser, pages["vectors"][1], width) as tab:
        load_axe(tab)
        assert axe_faults(tab) == []
        ask(tab)
        assert axe_faults(tab) == []
        tab.click("#theme")
        tab.get_by_label("Step", exact=True).fill("0")
        assert axe_faults(tab) == []
        small = tab.evaluate(
            "[...document.querySelectorAll('button, select, textarea, input')].filter(e => e.checkVisibility())"
            ".map(e => [e.id, e.getBoundingClientRect()]).filter(([, box]) => box.height < 39.5).map(([id]) => id)"
        )
        assert width > 360 or small == []
