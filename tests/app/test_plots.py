"""Pictures: the numbers behind them against hand-made cases, the files as valid images that hold those numbers."""

import importlib.util
import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from typer.testing import CliRunner

from difflm.annotators.tagger import TAGS
from difflm.app.commands import plot
from difflm.app.plots import denoising, embeddings, schedules, training
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import Cosine, Sqrt
from difflm.errors import DifflmError, UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.player.frames import Draft
from difflm.training.run import bundled_runs

pytestmark = pytest.mark.long  # a few seconds of setup

missing = [name for name in ("matplotlib", "sklearn") if importlib.util.find_spec(name) is None]
drawing = pytest.mark.skipif(bool(missing), reason=f"needs the extra [plot]: {', '.join(missing)} is not installed")


def pixels(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return (imread(path)[..., :3] * 255).round().astype(int)


def share_of(image: np.ndarray, colour: str) -> float:
    """Of the pixels, those within 3 of 255 of a colour."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return float((np.abs(image - wanted).max(-1) <= 3).mean())


def drafts(*rows: str, sure: float = 0.5) -> list[Draft]:
    """One a step; `_` is a place without a word. Everything is new in the first."""
    tokens = [["" if word == "_" else word for word in row.split()] for row in rows]
    changed = [[True] * len(tokens[0])] + [[a != b for a, b in zip(*pair, strict=True)] for pair in pairwise(tokens)]
    return [
        Draft(0, step, 1 - (step + 1) / len(rows), words, [sure] * len(words), new)
        for step, (words, new) in enumerate(zip(tokens, changed, strict=True))
    ]


# -- schedules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", schedules.known_curves(), ids=lambda curve: curve.name)
def test_curves_preserve_variance_and_lose_signal(curve):
    np.testing.assert_allclose(curve.alpha**2 + curve.sigma**2, 1, atol=1e-12)
    np.testing.assert_allclose(curve.log_snr, 2 * np.log(curve.alpha / curve.sigma), atol=1e-6)
    assert (np.diff(curve.alpha) <= 0).all() and curve.alpha[0] > 0.9 and curve.alpha[-1] < 0.2


def test_the_sqrt_curve_is_its_formula():
    t = np.linspace(0, 1, schedules.POINTS)
    found = schedules.sample_curve("sqrt", Gaussian(Sqrt())).alpha[1:-1]
    np.testing.assert_allclose(found, np.sqrt(1 - np.sqrt(t[1:-1] + 1e-4)), atol=1e-6)


def test_a_learned_warp_is_read_along_u(tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    with torch.no_grad():
        lm.model.times.loss_widths[:50] += 2.0
    found = schedules.learned_curve("tiny", lm)
    t = lm.model.times.time_of(torch.tensor([0.25, 0.5, 0.75]))
    expected = torch.sigmoid(Cosine().log_snr(t) - 4.0).sqrt()
    np.testing.assert_allclose(found.alpha[[125, 250, 375]], expected.numpy(), atol=1e-4)
    assert "warp" in found.name


def test_models_without_a_schedule_or_vectors_are_refused(tiny_runs):
    twin = TextDiffusion.from_pretrained(tiny_runs["autoregressive"])
    with pytest.raises(UsageError, match="no noise schedule"):
        schedules.learned_curve("twin", twin)
    with pytest.raises(UsageError, match="does not diffuse"):
        embeddings.word_vectors("twin", twin)


# -- denoising ---------------------------------------------------------------------------------------------------


def test_the_last_change_is_the_step_that_set_the_final_word():
    found = denoising.read_denoising(drafts("a x _ p", "a y _ p", "a y . q", "a y . _"))
    assert found.words == ["a", "y", "."]  # behind the last word nothing is shown
    assert found.last_changed.tolist() == [1, 2, 3]
    assert np.argwhere(found.revised).tolist() == [[1, 1], [2, 2]]  # place and step, both from 0
    assert found.confidence.shape == (3, 4) and not np.isnan(found.confidence).any()


def test_places_that_are_not_written_yet_have_no_confidence():
    """The twin's frames: one word after the other, and none is a change of mind."""
    rows = drafts("a _ _", "a b _", "a b c")
    rows[0] = replace(rows[0], changed=[True, False, False])
    found = denoising.read_denoising(rows)
    assert np.isnan(found.confidence).tolist() == [[False] * 3, [True, False, False], [True, True, False]]
    assert found.last_changed.tolist() == [1, 2, 3] and not found.revised.any()


def test_an_empty_place_between_words_stays():
    assert denoising.read_denoising(drafts("_ a", "_ b")).words == ["·", "b"]


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=4, max_size=4), min_size=1, max_size=8))
def test_nothing_changes_after_a_word_settled(rows):
    found = denoising.read_denoising(drafts(*(" ".join(row) for row in rows)))
    for place, settled in enumerate(found.last_changed):
        column = [row[place] for row in rows]
        assert set(column[settled - 1 :]) == {column[-1]}
        assert settled == 1 or column[settled - 2] != column[-1]


@given(st.integers(1, 10_000))
def test_step_ticks_hold_both_ends(steps):
    ticks = denoising.step_ticks(steps)
    assert ticks[0] == 1 and ticks[-1] == steps and ticks == sorted(set(ticks))


@pytest.mark.long
@drawing
@pytest.mark.parametrize(("sure", "colour"), [(0.0, "#00224e"), (1.0, "#fee838")])
def test_the_heat_map_shows_the_confidence(tmp_path, sure, colour):
    """Both ends of cividis: the map and its scale are a third of the picture, without the dots."""
    text = denoising.read_denoising(drafts(*["The pub serves cheap food ."] * 9, sure=sure))
    denoising.draw_denoising(tmp_path / "a.png", text, "title")
    assert share_of(pixels(tmp_path / "a.png"), colour) > 0.3


@pytest.mark.long
@drawing
def test_a_text_of_dollar_signs_and_no_font_is_drawn_all_the_same(tmp_path, recwarn):
    """Signs of mathtext are words like any other; a sign that no font has is a box, not a warning."""
    text = denoising.read_denoising(drafts("$x^ $ \U0001f9ff _ 食", "$x^ $ \\frac _ 食"))
    denoising.draw_denoising(tmp_path / "a.png", text, "$")
    assert pixels(tmp_path / "a.png").shape[1] == 1200 and not recwarn.list


@drawing
def test_a_text_too_long_for_a_picture_is_refused(tmp_path):
    with pytest.raises(UsageError, match="too long"):
        denoising.draw_denoising(tmp_path / "a.png", denoising.read_denoising(drafts("a " * 200)), "title")
    assert not list(tmp_path.iterdir())


# -- embeddings --------------------------------------------------------------------------------------------------


@given(
    arrays(np.float64, (12, 2), elements=st.floats(0, 300, width=32)),
    arrays(np.float64, (12, 2), elements=st.floats(5, 60, width=32)),
)
def test_labels_touch_no_label_and_cover_no_dot(points, sizes):
    frame = np.array([0.0, 0.0, 300.0, 300.0])
    placed = embeddings.place_labels(points, sizes, frame, max_labels=6)
    assert len(placed) <= 6
    boxes = [(x, y, x + sizes[i, 0], y + sizes[i, 1]) for i, (x, y) in placed.items()]
    for number, (left, low, right, high) in enumerate(boxes):
        assert left >= 0 and low >= 0 and right <= 300 and high <= 300
        assert not any(left < x < right and low < y < high for x, y in points)
        for a, b, c, d in boxes[:number]:
            assert c <= left or right <= a or d <= low or high <= b


def test_a_lonely_label_stands_to_the_right_of_its_dot():
    placed = embeddings.place_labels(np.array([[50.0, 50.0]]), np.array([[20.0, 10.0]]), np.array([0, 0, 100.0, 100.0]))
    assert placed == {0: (50 + embeddings.GAP, 45.0)}


def test_a_word_has_the_tag_it_has_most_often():
    sentences = [["close", "to", "close"], ["close"], ["to"]]
    tags = [["ADV", "ADP", "VERB"], ["ADV"], ["PART"]]
    assert embeddings.most_frequent(sentences, tags) == {"close": "ADV", "to": "ADP"}


def test_the_bundled_tags_cover_the_bundled_words():
    lm = TextDiffusion.from_pretrained("e2e")
    words, vectors = embeddings.word_vectors("e2e", lm)
    tags = embeddings.word_tags("e2e", lm, words)
    assert vectors.shape == (816, 64)  # 821, less four specials and the newline
    np.testing.assert_allclose((vectors**2).sum(1), 64, rtol=1e-4)  # on the sphere
    assert set(words) == set(tags.by_word) and set(tags.by_word.values()) <= set(TAGS)
    known = {"food": "NOUN", "serves": "VERB", "the": "DET", "Italian": "ADJ", "near": "ADP"}
    assert known.items() <= tags.by_word.items()
    assert "spacy" in tags.tagger


class ByLetter:
    name = "letters"

    def tags(self, sentences):
        return [["PROPN" if word[0].isupper() else "NOUN" for word in words] for words in sentences]


def test_a_run_is_tagged_from_its_own_training_texts(tiny_runs, monkeypatch):
    """Known from the grammar: "Sicilia" is always upper-case; words that no text holds have no tag."""
    monkeypatch.setattr(embeddings, "checking_tagger", ByLetter)
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    found = embeddings.word_tags(tiny_runs["difflm"], lm, ["never"])
    assert found.by_word["Sicilia"] == "PROPN" and found.by_word["river"] == "NOUN" and "never" not in found.by_word


@drawing
def test_pca_keeps_the_distances_of_points_in_a_plane():
    draw = np.random.default_rng(0)
    flat = draw.normal(size=(40, 2))
    turned = flat @ np.linalg.qr(draw.normal(size=(8, 2)))[0].T + 3.0
    found = embeddings.project(turned, "pca")
    np.testing.assert_allclose(
        np.linalg.norm(found[:, None] - found, axis=-1), np.linalg.norm(flat[:, None] - flat, axis=-1), atol=1e-9
    )


@drawing
def test_tsne_keeps_two_clusters_apart_and_repeats_itself():
    """Two balls of unit vectors at a right angle."""
    draw = np.random.default_rng(0)
    vectors = np.repeat(np.eye(2, 6), 15, axis=0) + 0.05 * draw.normal(size=(30, 6))
    found = embeddings.project(vectors, "tsne")
    centres = found[:15].mean(0), found[15:].mean(0)
    nearer = np.linalg.norm(found - centres[0], axis=1) < np.linalg.norm(found - centres[1], axis=1)
    assert nearer[:15].all() and not nearer[15:].any()
    assert (found == embeddings.project(vectors, "tsne")).all()


@drawing
def test_words_wear_the_colour_of_their_tag(tmp_path):
    places = np.random.default_rng(0).normal(size=(30, 2))
    words = [f"w{i}" for i in range(30)]
    tags = embeddings.Tags(dict.fromkeys(words, "ADJ"), "by hand")
    embeddings.draw_embeddings(tmp_path / "a.png", words, places, tags, "title")
    embeddings.draw_embeddings(tmp_path / "b.png", words, places, None, "title")
    adjectives, first = "#CC79A7", "#0072B2"
    coloured, plain = pixels(tmp_path / "a.png"), pixels(tmp_path / "b.png")
    # Dots are a little transparent, letters are not: their cores have the very colour.
    assert share_of(coloured, adjectives) > 0 and share_of(coloured, first) == 0
    assert share_of(plain, first) > 0 and share_of(plain, adjectives) == 0


# -- training ----------------------------------------------------------------------------------------------------


def with_metrics(run: Path, target: Path, lines: list[str]) -> str:
    target.mkdir()
    (target / "config.json").write_bytes((run / "config.json").read_bytes())
    (target / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(target)


def test_a_history_is_what_the_run_wrote_down(tiny_runs, tmp_path):
    lines = [
        json.dumps({"kind": "train", "step": 20, "ce": 3.0, "loss": 4.0, "lr": 0.1, "seconds": 1.0}),
        json.dumps({"kind": "train", "step": 10, "ce": 5.0, "loss": 6.0}),
        json.dumps({"kind": "validation", "step": 20, "nats_per_token": 2.5, "likelihood": "bound"}),
        json.dumps({"kind": "train", "step": 20, "ce": 2.0, "loss": 3.0}),
        json.dumps({"kind": "metric", "name": "self_bleu", "value": 0.5}),
        '{"kind": "train", "step": 3',
        "[1]",
    ]
    history = training.read_history(with_metrics(tiny_runs["difflm"], tmp_path / "mine", lines))
    assert history.label == "mine, difflm (bound)"
    assert set(history.curves) == {"validation, nats/token", "training loss", "loss part: ce"}
    assert [list(part) for part in history.curves["training loss"]] == [[10, 20], [6.0, 3.0]]  # the later line counts
    assert [list(part) for part in history.curves["validation, nats/token"]] == [[20], [2.5]]


def test_every_part_of_every_run_has_a_place(tiny_runs):
    runs = [tiny_runs[method] for method in ("difflm", "diffusion-lm", "autoregressive")]
    histories = [training.read_history(str(run)) for run in runs]
    panels = training.find_panels(histories)
    assert list(panels)[:2] == ["validation, nats/token", "training loss"]
    assert {f"loss part: {name}" for name in ("ce", "warp", "mse", "rounding_ce", "terminal_norm")} <= set(panels)
    assert sum(map(len, panels.values())) == sum(len(h.curves) for h in histories)


@pytest.mark.parametrize(
    ("values", "log"), [([1.0, 100.0], True), ([1.0, 2.0], False), ([0.0, 9.0], False), ([], False), ([np.nan], False)]
)
def test_a_log_axis_is_for_curves_that_fall_far(values, log):
    assert training.wants_log([np.array(values)]) is log


def test_runs_that_noted_nothing_are_refused(tiny_runs, tmp_path):
    with pytest.raises(DifflmError, match="no line about training steps"):
        training.read_history(with_metrics(tiny_runs["difflm"], tmp_path / "bare", ["{}", "", "x"]))
    (tmp_path / "bare" / "metrics.jsonl").unlink()
    with pytest.raises(DifflmError, match="does not exist"):
        training.read_history(str(tmp_path / "bare"))


# -- files and verbs ---------------------------------------------------------------------------------------------


@drawing
@pytest.mark.long
def test_every_schedule_is_in_the_picture_light_or_dark(tmp_path):
    looks = ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), ("#56B4E9", "#E69F00", "#009E73", "#CC79A7")
    for dark, look in zip((False, True), looks, strict=True):
        out = tmp_path / f"{dark}.png"
        assert plot.schedules(None, out, dark, False) == 0
        image = pixels(out)
        assert image.shape[1] == 1200 and (share_of(image, "#14161a") > 0.5) == dark
        assert all(share_of(image, colour) > 1e-3 for colour in look)


@drawing
def test_the_same_request_writes_the_same_svg(tmp_path):
    for name in ("a.svg", "b.svg"):
        assert plot.schedules(None, tmp_path / name, False, False) == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


@pytest.mark.long
@drawing
def test_each_verb_writes_a_picture_and_says_where(tiny_runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embeddings, "checking_tagger", ByLetter)
    run, twin = str(tiny_runs["difflm"]), str(tiny_runs["autoregressive"])
    assert plot.schedules(run, None, False, False) == 0
    assert plot.embeddings(run, "pca", 0, None, False, False) == 0
    assert plot.denoising(model=run, steps=4, seed=0, device="cpu") == 0
    assert plot.training([run, twin], None, True, False) == 0
    names = ["schedules.png", "embeddings.png", "denoising.png", "training.png"]
    assert capsys.readouterr().out.split() == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)  # and nothing half-written beside
    for name in names:
        assert len(np.unique(pixels(Path(name)) @ [1 << 16, 1 << 8, 1])) > 20  # colours
    assert plot.training([run], Path("losses.svg"), False, True) == 0
    assert json.loads(capsys.readouterr().out) == {"plot": "training", "file": "losses.svg"}


@drawing
def test_one_colour_is_said(tiny_runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(embeddings, "word_tags", lambda *_: None)
    assert plot.embeddings(str(tiny_runs["difflm"]), "pca", 0, tmp_path / "a.png", False, False) == 0
    assert "one colour" in capsys.readouterr().err


@drawing
def test_bad_requests_get_a_line(tiny_runs, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    good = tmp_path / "a.png"
    requests = [
        (2, ".png or .svg", lambda: plot.schedules(None, tmp_path / "a.gif", False, False)),
        (2, "is a directory", lambda: plot.schedules(None, tmp_path / "folder.png", False, False)),
        (2, "is a file", lambda: plot.schedules(None, tmp_path / "file" / "a.png", False, False)),
        (2, "no noise schedule", lambda: plot.schedules("judge", good, False, False)),
        (2, "neither a bundled model", lambda: plot.embeddings("nowhere", "pca", 0, good, False, False)),
        (2, "--seed", lambda: plot.embeddings("e2e", "tsne", -1, good, False, False)),
        (2, "--steps", lambda: plot.denoising(model="e2e", steps=0, out=good, device="cpu")),
        (1, "no line about training steps", lambda: plot.training(["e2e"], good, False, False)),
    ]
    for code, said, request in requests:
        assert request() == code, said
        told = capsys.readouterr()
        assert said in told.err and told.err.count("\n") <= 2 and not told.out
    assert not good.exists()


@drawing
def test_a_place_without_permission_gets_a_line_before_any_work(tmp_path, monkeypatch, capsys):
    """Asked of the system, since tests that run as root may write everywhere."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert plot.embeddings("e2e", "tsne", 0, tmp_path / "a.png", False, False) == 1
    assert "no permission" in capsys.readouterr().err and not (tmp_path / "a.png").exists()


def test_without_the_extra_there_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.schedules(None, tmp_path / "a.png", False, False) == 1
    assert capsys.readouterr().err.strip().endswith('pip install ".[plot]"')


def test_help_has_an_example():
    for name in ("schedules", "embeddings", "denoising", "training"):
        assert f"Example: difflm plot {name}" in CliRunner().invoke(plot.plot_app, [name, "--help"]).output
    assert CliRunner().invoke(plot.plot_app, []).exit_code == 2


def test_the_bundled_models_hold_what_pictures_need():
    assert (bundled_runs()["e2e"] / "tags.json").stat().st_size < 30_000
