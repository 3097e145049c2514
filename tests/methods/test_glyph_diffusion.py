"""Texts as pixels: the font, what a picture shows and how it is read, and GlyphDiffusion at the front doors."""

import base64
import json
import math
import struct
import zlib
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from difflm.app.cli import main
from difflm.data.batches import Batch
from difflm.data.tokenizers import UNK, Bpe, Characters, Tokenizer, Words
from difflm.data.words import split_words
from difflm.diffusion.condition import Condition
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import BoundDenoiser, ClipPixels, Steering
from difflm.evaluation.corpora import corpus_for
from difflm.evaluation.language import evaluate_language
from difflm.evaluation.options import Options
from difflm.fast.inference import Inference
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.watching import picture_url
from difflm.methods import METHODS, TextSpec
from difflm.methods.glyph_diffusion import Glyphs, PictureLengths
from difflm.methods.glyph_diffusion.glyphs import BYTES, UNKNOWN, Spelling, builtin_font, draw_byte
from difflm.models.batching import pad_token_rows
from difflm.models.diffusion import DiffusionModel
from difflm.player.page import Recording
from difflm.training.run import load_run
from tests.support.tiny import assert_resumed_to_the_bit, tiny_run, write_grammar

SMALL = {"hidden": 16, "heads": 2, "layers": 1, "encoder_layers": 1, "dropout": 0.0}
TEXTS = ["The pub serves food for £30.", "Café Sicilia is family-friendly.", "„Weiße Männer“ – 中文 und Öl"]


def build(tokenizer: Tokenizer, longest: int, source: int = 0, **changes) -> DiffusionModel:
    torch.manual_seed(0)
    sizes = {**SMALL, **changes}
    return METHODS["glyph-diffusion"](**sizes).build(TextSpec(tokenizer.size, longest, source, tokenizer=tokenizer))


def read_back(model: DiffusionModel, rows: list[list[int]]) -> list[list[int]]:
    """The tokens that are read off the clean pictures of these texts."""
    return [model.lengths.words(row) for row in model.reconstruct(Batch(*pad_token_rows(rows))).tolist()]


# -- the font and the reader ------------------------------------------------------------------------------------------


def test_every_sign_of_the_font_is_read_off_its_own_picture():
    """All characters of the built-in font, all bytes, the blank and the unknown word: no two look alike."""
    signs = [*builtin_font(), *(chr(BYTES + byte) for byte in range(256)), UNKNOWN]
    spelling = Spelling(signs, "")
    pictures = torch.from_numpy(spelling.draw(8, 6))
    assert {*map(chr, range(32, 127)), *"äöüßÄÖÜéè£€„“”‘’–—"} <= builtin_font().keys()
    assert pictures.shape == (len(signs), 8, 6) and not pictures[0].any()
    codec, ids = Glyphs(pictures), torch.arange(len(signs))
    assert torch.equal(codec.nearest(codec.encode(ids)), ids)
    assert torch.equal(codec.readout(codec.encode(ids)).argmax(-1), ids)


def test_a_byte_is_dots_behind_a_line():
    assert draw_byte(0b10000001, 8, 5).tolist() == [[1, 1, 1, 0, 0]] * 2 + [[1, 0, 0, 0, 0]] * 4 + [[1, 0, 0, 1, 1]] * 2


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=4))
def test_any_text_comes_back_from_its_clean_picture(texts):
    """Words, characters and byte pairs of any script, exactly. Blanks at the end are the end."""
    for tokenizer in (Words.build([*texts, "a"], 0), Characters.build([*texts, "a"]), BYTE_PAIRS):
        rows = [row for text in texts if (row := tokenizer.encode(text.rstrip(" ")))]
        lengths = picture_lengths(tokenizer)
        found = [lengths.words(row) for row in lengths.canvas(*pad_token_rows(rows))[0].tolist()] if rows else []
        assert found == rows


@cache
def picture_lengths(tokenizer: Tokenizer) -> PictureLengths:
    return PictureLengths(Spelling.of(tokenizer, tokenizer.size, False), 600, 40)


BYTE_PAIRS = Bpe.build(TEXTS * 3, 320)


@pytest.mark.parametrize("kind", ["words", "bpe", "characters"])
def test_every_token_of_a_vocabulary_comes_back_through_pixels(kind):
    tokenizer = {"words": Words.build(TEXTS, 0), "bpe": BYTE_PAIRS, "characters": Characters.build(TEXTS)}[kind]
    model = build(tokenizer, 8)
    # A byte that is no text by itself occurs in none; what ends in a blank ends before it.
    whole = [k for k, one in enumerate(tokenizer.spellings(), 4) if one.isprintable() and one == one.rstrip(" ")]
    alone = [[token] for token in whole] + [[UNK]] * (kind != "bpe")
    assert len(whole) > 15 and read_back(model, alone) == alone
    texts = tokenizer.encode_batch(TEXTS)
    assert read_back(build(tokenizer, max(map(len, texts)), token_cells=20), texts) == texts


def test_a_picture_has_whole_tokens_or_none_and_needs_no_blank_behind_the_last():
    model = build(Words.build(["ab cde f"], 0), 3, token_cells=2)  # six cells
    ids, lengths = pad_token_rows([[4, 5, 6], [5, 4, 6], [4, 4, 6], [6, 6, 6]])
    canvas, mask = model.lengths.canvas(ids, lengths)
    shown = ["".join(model.lengths.pieces[k] for k in row) for row in canvas.tolist()]
    assert shown == ["ab cde", "cde ab", "ab ab ", "f f f "] and mask.all() and model.longest == 6
    assert [model.lengths.words(row) for row in canvas.tolist()] == [[4, 5], [5, 4], [4, 4], [6, 6, 6]]


def test_texts_that_are_wider_than_a_picture_are_left_out_and_counted(tmp_path, capsys, complaint):
    (tmp_path / "my.txt").write_text("ab cd\nabc cd\nabc abc\n" * 4)
    sizes = [f"model.{key}={value}" for key, value in SMALL.items()]
    argv = ["train", "e2e-glyph-diffusion-laptop", f"data={tmp_path / 'my.txt'}", "licence=mine", "more_than=0", *sizes]
    argv += ["steps=1", "distinct=false", "--device", "cpu", "longest=2", "--out", str(tmp_path / "run")]
    assert "none of 12 texts fits into a picture" in complaint(1, *argv, "model.token_cells=2")
    assert main([*argv, "model.token_cells=3"]) == 0
    said = capsys.readouterr()
    assert "4 of 12 texts have more than 2 tokens or are wider than a picture and are left out" in said.out + said.err
    assert len(load_run(tmp_path / "run")[0].lengths.pieces) == 7  # blank, abcd, the unknown word and the end of a line


def test_a_word_that_nobody_knows_is_read_as_the_nearest_of_its_length():
    lengths = picture_lengths(Words.build(["food good wine a"], 0))
    assert [lengths.read_word(word) for word in ("food", "gxod", "winx", "b", "foods")] == [4, 5, 6, UNK, UNK]


def test_two_signs_are_misread_as_often_as_their_distance_says():
    """Φ(−√k α/σ) of two pictures that differ in k pixels: the noise along their difference decides alone."""
    codec = Glyphs(torch.from_numpy(Spelling(["c"], "").draw(8, 6)))
    blank, letter = codec.table()
    k = int((blank != letter).sum())
    for log_snr in (-4.0, -2.5, -1.5):
        ratio, count = math.exp(log_snr / 2), 20_000
        x = blank + torch.randn(count, 48, generator=torch.Generator().manual_seed(1)) / ratio
        chance = 0.5 * math.erfc(math.sqrt(k / 2) * ratio)
        found = codec.nearest(x).float().mean().item()
        assert abs(found - chance) < 4 * math.sqrt(chance * (1 - chance) / count)


def test_the_more_noise_the_more_letters_are_misread():
    model = build(Characters.build(["abcdefghijklmnopqrstuvwxyz"]), 4)
    codec, process = model.denoiser.codec, model.process
    ids = 1 + torch.arange(2600).view(-1, 4) % 26
    noise = torch.randn(650, 4, 48, generator=torch.Generator().manual_seed(2))
    errors = []
    for t in (0.0, 0.2, 0.35, 0.45, 0.5, 0.6, 0.75, 1.0):
        level = process.at(torch.full((650,), t))
        x_t = process.corrupt(codec.encode(ids), level, noise)
        errors.append((codec.nearest(x_t / level.alpha.view(-1, 1, 1)) != ids).float().mean().item())
    assert errors[0] == 0 and all(a <= b for a, b in pairwise(errors))
    assert 0.01 < errors[4] < 0.05 and errors[-1] > 0.9  # one in thirty at the middle time


def test_font_files_draw_in_greys_and_a_run_keeps_what_they_drew(tmp_path):
    (tmp_path / "font.ttf").write_bytes(font_file().read_bytes())
    sizes = {**SMALL, "font": str(tmp_path / "font.ttf"), "height": 14, "width": 9}
    run = tiny_run(tmp_path, "glyph-diffusion", model=sizes, steps=1, batch_size=4)
    (tmp_path / "font.ttf").unlink()
    model, tokenizer, _ = load_run(run)
    assert model.denoiser.codec.cell == (14, 9) and len(model.denoiser.codec.table().unique()) > 8
    rows = tokenizer.encode_batch(["The old pub near Café Sicilia sells food for £30."])
    assert read_back(model, rows) == rows and len(TextDiffusion.from_pretrained(run).generate(1, steps=2)) == 1


def font_file() -> Path:
    """One that matplotlib brings along."""
    pytest.importorskip("PIL")
    found = find_spec("matplotlib")
    if found is None or found.origin is None:
        pytest.skip("there is no font file")
    return Path(found.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSansMono.ttf"


def test_fonts_that_cannot_draw_the_texts_are_refused_in_one_line(tmp_path, complaint, monkeypatch):
    text = tmp_path / "my.txt"

    def refuse(font: object, *changes: str, words: str = "A pub.\n") -> str:
        text.write_text(words * 20, encoding="utf-8")
        sizes = [f"model.{key}={value}" for key, value in SMALL.items()]
        own = [f"data={text}", "tokenizer=characters", "more_than=0", "licence=mine", "steps=1", *sizes]
        own += [f"model.font={font}"] if font else []
        said = complaint(
            2, "train", "e2e-glyph-diffusion-laptop", *own, *changes, "--out", tmp_path / "run", "--device", "cpu"
        )
        assert not (tmp_path / "run" / "config.json").exists()
        return said

    assert "8 by 6 pixels; others need model.font" in refuse("", "model.height=9")
    with monkeypatch.context() as context:
        context.setattr("difflm.methods.glyph_diffusion.glyphs.ImageFont", None)
        assert ".[font]" in refuse(text)
    font = font_file()
    assert "is not a font file" in refuse(text) and "is not a font file" in refuse(tmp_path / "none.ttf")
    assert "lacks '中' and 1 more" in refuse(font, "model.height=20", "model.width=14", words="中文\n")
    assert "alike in 9 by 5 pixels" in refuse(font, "model.height=9", "model.width=5", words="ΑA\n")  # a Greek one


# -- denoising --------------------------------------------------------------------------------------------------------


def test_guidance_moves_the_picture_and_what_is_read_off_it_alike():
    """x̂ + w (x̂ − x̂∅); templates are compared by a linear function, so that logits move as the picture does. Nothing is
    whiter than paper or darker than ink."""
    model = build(Characters("abcd"), 4, source=3).eval()
    nn.init.normal_(model.denoiser.network.head.weight, std=0.5)
    x, level = torch.randn(2, 4, 48), model.process.at(torch.tensor([0.5, 0.5]))
    told = Condition(torch.tensor([[4, 5, 6], [7, 7, 7]]), torch.ones(2, 3, dtype=torch.bool))
    told = model.denoiser.prepare(told)
    mask = torch.ones(2, 4, dtype=torch.bool)
    with torch.no_grad():
        own, free = (model.denoiser(x, level, mask, condition).clean for condition in (told, told.null()))
        belief = BoundDenoiser(model.denoiser, mask, told, contrast=2.0)(x, level, None)
    assert not torch.allclose(own, free, atol=1e-3)
    assert torch.allclose(belief.clean, own + 2 * (own - free), atol=1e-5)
    expected = model.denoiser.codec.readout(belief.clean).log_softmax(-1)
    assert torch.allclose(belief.logits.log_softmax(-1), expected, atol=1e-3)
    assert ClipPixels()(belief, x, level.t).clean.abs().max() <= 1 < belief.clean.abs().max()
    assert model.sampling.contrast == 1 and build(Characters("ab"), 4).sampling.contrast == 0


def test_captured_steps_draw_the_same():
    """A GPU's way, on the CPU: guided steps that are recorded."""
    model = build(Characters("abcd"), 8, source=3).eval()
    nn.init.normal_(model.denoiser.network.head.weight, std=0.5)
    told = Steering(source=torch.tensor([[4, 5, 6], [7, 7, 7]]), source_mask=torch.ones(2, 3, dtype=torch.bool))
    made = []
    for record in (False, True):
        frames = Inference(model, record=record).stream(
            Noise(3, torch.arange(2)), torch.full((2,), 8), 8, replace(model.sampling, steps=4), told
        )
        made.append([(frame.tokens, model.draw_pictures(frame)) for frame in frames])
    assert len(made[0]) == 4 and made[0][-1][0].unique().numel() > 1
    assert all(torch.equal(a, b) for one, other in zip(*made, strict=True) for a, b in zip(one, other, strict=True))


def test_the_blanks_behind_a_text_are_learned_with_it():
    """Every cell counts, whatever the batch is padded to: the picture has no other way to say where a text ends."""
    model = build(Characters("abcd"), 8)
    short, wide = Batch(*pad_token_rows([[4, 5]])), Batch(torch.tensor([[4, 5, 3, 3, 3]]), torch.tensor([2]))
    losses = [model(replace(one, index=torch.arange(1))) for one in (short, wide)]
    assert [loss.count.item() for loss in losses] == [8, 8] and losses[0].total == losses[1].total


def numbers(count: int, generator: torch.Generator) -> Batch:
    """Numbers of three digits, and the same from right to left."""
    source = torch.randint(4, 14, (count, 3), generator=generator)
    lengths = torch.full((count,), 3)
    return Batch(source.flip(1), lengths, source, lengths)


def train(model: DiffusionModel, make_batch, steps: int, rate: float) -> None:
    generator, optimiser = torch.Generator().manual_seed(0), torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.1)
    torch.manual_seed(0)
    for _ in range(steps):
        losses = model.train()(make_batch(generator))
        optimiser.zero_grad()
        (losses.total / losses.count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    model.eval()


@pytest.mark.long
def test_numbers_are_drawn_from_right_to_left():
    """The smallest proof: pictures of numbers, given the digits of others; 64 of a thousand, read by templates."""
    model = build(Characters("0123456789"), 4, 4, hidden=64, layers=2, encoder_layers=2, heads=4)
    train(model, lambda generator: numbers(48, generator), 250, 5e-3)
    pairs = numbers(64, torch.Generator().manual_seed(9))

    def write(source: torch.Tensor, **changes) -> list[list[int]]:
        steering = Steering(source=source, source_mask=torch.ones_like(source, dtype=torch.bool))
        noise, sampling = Noise(3, torch.arange(64)), replace(model.sampling, steps=10, **changes)
        with torch.no_grad():
            *_, last = model.stream(noise, torch.full((64,), 4), 4, sampling, steering)
        return [model.lengths.words(row) for row in last.tokens.tolist()]

    assert pairs.source is not None
    for contrast in (0.0, 1.0):
        made = write(pairs.source, contrast=contrast)
        assert sum(a == b for a, b in zip(made, pairs.ids.tolist(), strict=True)) >= 62
    made = write(pairs.source.roll(1, 0))
    assert sum(a == b for a, b in zip(made, pairs.ids.tolist(), strict=True)) <= 4


# -- front doors ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return tiny_run(
        tmp_path_factory.mktemp("glyphs"), "glyph-diffusion", model=SMALL, steps=2, batch_size=4, longest=12
    )


def test_texts_depend_on_their_number_alone_and_frames_end_in_them(run):
    lm = TextDiffusion.from_pretrained(run)
    (one,), many = lm.generate(1, seed=5, steps=3), lm.generate(5, seed=5, steps=3)
    assert one.tokens == many[0].tokens and one.denoiser_calls == 3
    drafts = [drafts[0] for drafts in lm.stream(1, seed=5, steps=3)]
    ((row, *_),) = lm.run_unchecked([lm.make_job(1, 5, steps=3)])
    shown = "".join(drafts[-1].tokens).split()
    assert len(drafts) == 3 and len(shown) == len(row.ids)
    plain = [k for k, word in enumerate(shown) if "\ufffd" not in word]
    assert plain and all(lm.model.lengths.read_word(shown[k]) == row.ids[k] for k in plain)
    assert all(struct.unpack(">2I", png(draft.picture)[16:24]) == (192, 24) for draft in drafts)
    assert len(drafts[0].tokens) == lm.model.longest == 72


def png(address: str) -> bytes:
    return base64.b64decode(address.removeprefix("data:image/png;base64,"))


def test_a_picture_is_a_png_of_sixteen_greys():
    grey = torch.randint(0, 256, (5, 7), generator=torch.Generator().manual_seed(0)).to(torch.uint8).numpy()
    data = png(picture_url(grey))
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">2I5B", data[16:29]) == (7, 5, 4, 0, 0, 0, 0)
    at, chunks = 8, {}
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        chunks[name] = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + chunks[name])
        at += 12 + size
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(5, 5)
    pixels = np.stack([lines[:, 1:] >> 4, lines[:, 1:] & 15], -1).reshape(5, 8)
    assert [*chunks] == [b"IHDR", b"IDAT", b"IEND"] and not lines[:, 0].any()
    assert np.array_equal(pixels[:, :7], grey >> 4)


def test_the_pixels_of_a_clean_text_are_those_of_the_font_in_lines_of_32_cells():
    model = build(Characters("ab"), 40)
    codec = model.denoiser.codec
    canvas, _ = model.lengths.canvas(*pad_token_rows([[4] * 32 + [5]]))
    picture = codec.picture(codec.encode(canvas))[0].numpy()
    assert picture.shape == (16, 192)
    for row, column, sign in ((0, 0, "a"), (0, 31, "a"), (1, 0, "b"), (1, 1, " "), (1, 31, " ")):
        cell = picture[8 * row : 8 * row + 8, 6 * column : 6 * column + 6]
        assert np.array_equal(cell == 0, builtin_font()[sign] == 1) and {*cell.flat} <= {0, 255}


def test_the_terminal_shows_what_is_read_and_the_player_the_pixels(run, tmp_path, capsys):
    assert main(["generate", str(run), "--steps", "2", "--show", "--html", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert "step 1/2" in shown and all(len(line) < 200 for line in shown.splitlines())
    page = (tmp_path / "page.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    frames = data["texts"][0]["frames"]
    assert len(frames) == 2 and all(frame["p"].startswith("data:image/png;base64,") for frame in frames)
    assert "img-src data:" in page


def test_the_studio_streams_pictures_and_offers_no_control_of_words(run):
    pytest.importorskip("fastapi")
    from difflm.app.studio.api import streamed
    from difflm.app.studio.limits import Limits
    from difflm.app.studio.served import Served

    served = Served(TextDiffusion.from_pretrained(run), "glyphs")
    offered = served.controls(Limits())
    assert not any(
        offered[name] for name in ("length", "contains", "avoid", "infill", "edit", "field", "label", "tree")
    )
    assert offered["samplers"] and offered["avoid"] is None
    ((draft,),) = served.lm.stream(1, steps=1)
    frame = json.loads(json.dumps(streamed(draft, 1, pieces=not served.whole_words)))
    assert frame["picture"] == draft.picture and not any(frame["space"])


@pytest.mark.long
def test_a_browser_shows_the_pixels_of_every_step(open_player, run):
    recording, lm = Recording(1, 2), TextDiffusion.from_pretrained(run)
    tab = open_player(recording.texts(lm.generate(1, steps=2, watch=recording.frame)))
    assert tab.evaluate("document.querySelector('.card').children[1].className") == "picture"
    sizes = "(({naturalWidth, naturalHeight}) => [naturalWidth, naturalHeight])(document.querySelector('img'))"
    tab.wait_for_function("document.querySelector('img').complete")
    assert tab.evaluate(sizes) == [192, 24]
    last = tab.evaluate("document.querySelector('img').src")
    tab.keyboard.press("Home")
    assert tab.evaluate("document.querySelector('img').src") not in ("", last)
    assert tab.evaluate("document.querySelectorAll('img').length") == 1


def test_bfloat16_writes_texts(run):
    assert len(TextDiffusion.from_pretrained(run, dtype=torch.bfloat16).generate(2, steps=2)) == 2


def test_what_pixels_cannot_do_is_refused_in_one_line(run, tmp_path, complaint):
    (tmp_path / "my.jsonl").write_text('{"text": "A pub.", "mood": "calm"}\n' * 20)
    (tmp_path / "my.txt").write_text("A pub.\n")
    asked = ["--length", "4"], ["--infill", "A ___ pub."], ["--contains", "pub"], ["--method", "fudge", "--length", "4"]
    for argv in asked:
        assert "from pixels of a whole text" in complaint(2, "generate", run, *argv)
    argv = f"model.guides={run}", f"data={tmp_path / 'my.jsonl'}", "steps=1", "--out", tmp_path / "guide"
    assert "from pixels of a whole text" in complaint(2, "train", "classifier", *argv)
    assert "from pixels of a whole text" in complaint(2, "generate", run, "--field", "food=French")
    assert "no likelihood and no bound" in complaint(2, "score", run, tmp_path / "my.txt")
    assert "predicts words" in complaint(2, "generate", run, "--temperature", "0.5")
    assert "masks" in complaint(2, "generate", run, "--contrast", "2")  # there is no source


def test_the_report_says_that_all_words_come_back(run):
    lm = TextDiffusion.from_pretrained(run)
    corpus = corpus_for(lm, None)
    short = replace(corpus, texts=[text for text in corpus.texts if len(" ".join(split_words(text))) <= 72])
    report = evaluate_language(
        {"glyphs": lm}, short, options=Options(samples=2, draws=2, score_texts=4, settings={"steps": 2})
    )
    row = report.row("glyphs")
    assert row.figures["reconstructed"] == 1 and row.figures["nats_per_token"] is None


@pytest.mark.long
def test_a_resumed_run_has_the_weights_of_one_that_was_not_stopped(tmp_path, monkeypatch):
    write_grammar(tmp_path / "grammar.txt", 60)
    sizes = [f"model.{key}={value}" for key, value in SMALL.items()]
    argv = ["train", "e2e-glyph-diffusion-laptop", f"data={tmp_path / 'grammar.txt'}", *sizes, "steps=6"]
    argv += ["batch_size=4", "save_every=2", "warmup=0", "more_than=0", "--device", "cpu"]
    assert_resumed_to_the_bit(argv, 3, tmp_path, monkeypatch)


@pytest.mark.long
def test_a_run_on_a_few_texts_writes_them(tmp_path):
    """Eight texts of two words: most of what is drawn spells one of them, in full, and not always the same."""
    texts = [f"{one} {two}" for one in ("big", "red") for two in ("cat", "dog", "hat", "pub")]
    (tmp_path / "grammar.txt").write_text("".join(f"{text}\n" for text in texts * 40))
    sizes = {"hidden": 64, "layers": 2, "heads": 4, "dropout": 0.0}
    settings = {"steps": 300, "batch_size": 32, "lr": 4e-3, "longest": 8, "tokenizer": "characters"}
    run = tiny_run(tmp_path, "glyph-diffusion", model=sizes, **settings)
    made = [one.text for one in TextDiffusion.from_pretrained(run).generate(48, steps=20)]
    assert sum(text in texts for text in made) >= 44 and len({*made} & {*texts}) >= 5
