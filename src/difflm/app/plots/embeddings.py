"""A map of a model's word vectors, coloured by part of speech."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from difflm.app.plots.canvas import open_figure
from difflm.controls.learned import checking_tagger
from difflm.data.texts import MOST_TOKENS
from difflm.data.tokenfile import TokenFile
from difflm.data.tokenizers import SPECIALS
from difflm.data.words import split_words
from difflm.errors import DifflmError, UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.runtime.files import read_checked
from difflm.training.run import find_run

Method = Literal["tsne", "pca"]
Floats = NDArray[np.float64]

MAX_WORDS = 2000  # t-SNE of more takes minutes, and the dots overlap
TEXTS_TO_TAG = 2000
MAX_LABELS = 170
DOT, GAP = 4.0, 6.0  # pixels: the radius of a dot, and the distance from its centre to its label
GROUPS = {
    "nouns": ("NOUN",),
    "names": ("PROPN",),
    "verbs": ("VERB", "AUX"),
    "adjectives": ("ADJ",),
    "adverbs": ("ADV",),
    "prepositions, conjunctions": ("ADP", "CCONJ", "SCONJ", "PART"),
    "determiners, pronouns": ("DET", "PRON"),
}
REST = "numbers, signs, others"
GROUP = {tag: name for name, tags in GROUPS.items() for tag in tags}
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Tags:
    """The most frequent Universal tag of each word, and the name of the tagger."""

    by_word: dict[str, str]
    tagger: str


def word_vectors(name: str, lm: TextDiffusion) -> tuple[list[str], Floats]:
    """Return a model's words and their vectors [V, D] as they diffuse, without specials, blanks and single bytes."""
    if not lm.model.capabilities.position_beliefs:
        raise UsageError(f"{name} ({lm.config['method']}) does not diffuse word vectors. Give a diffusion model.")
    table = lm.model.denoiser.codec.table().detach().double().cpu().numpy()
    words = {i: "".join(lm.tokenizer.tokens([i])).strip() for i in range(len(SPECIALS), lm.tokenizer.size)}
    shortest = 2 if lm.tokenizer.byte_level else 1
    shown = [i for i, word in words.items() if len(word) >= shortest and word.isprintable() and "\ufffd" not in word]
    shown = shown[:MAX_WORDS]
    if len(shown) < 3:
        raise UsageError(f"{name} has {len(shown)} words: too few for a map.")
    return [words[i] for i in shown], table[shown]


def project(vectors: Floats, method: Method, seed: int = 0) -> Floats:
    """Project vectors [V, D] to [V, 2], deterministically for a seed."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    how = {"perplexity": min(30.0, (len(vectors) - 1) / 3), "metric": "cosine", "init": "random"}
    projection = PCA(2, random_state=seed) if method == "pca" else TSNE(2, random_state=seed, **how)
    return np.asarray(projection.fit_transform(vectors), dtype=np.float64)


def word_tags(name_or_path: str, lm: TextDiffusion, words: Sequence[str]) -> Tags | None:
    """Read the tags stored with the bundled model, or tag the training texts of a run where it still has them, or its
    words one by one (not byte pairs). None: there is nothing to tag."""
    folder = find_run(name_or_path)
    if (folder / "tags.json").exists():
        kept = read_checked(folder / "tags.json")
        return Tags(kept["tags"], kept["tagger"])
    try:
        tokens = TokenFile.open(folder / "data" / "train")
        fitting = np.flatnonzero(tokens.lengths <= MOST_TOKENS)
        chosen = fitting[np.linspace(0, len(fitting) - 1, min(len(fitting), TEXTS_TO_TAG)).astype(np.int64)]
        ids, lengths = tokens.rows(chosen, MOST_TOKENS)
        texts = [lm.tokenizer.decode(row[:length].tolist()) for row, length in zip(ids, lengths, strict=True)]
    except DifflmError:
        texts = []
    sentences = [found for found in map(split_words, texts) if found]
    if not sentences and lm.tokenizer.byte_level:
        return None
    sentences, tagger = sentences or [[word] for word in words], checking_tagger()
    return Tags(most_frequent(sentences, tagger.tags(sentences)), tagger.name)


def most_frequent(sentences: Iterable[Sequence[str]], tags: Iterable[Sequence[str]]) -> dict[str, str]:
    counts: dict[str, Counter[str]] = {}
    for words, found in zip(sentences, tags, strict=True):
        for word, tag in zip(words, found, strict=True):
            counts.setdefault(word, Counter())[tag] += 1
    return {word: max(sorted(seen), key=lambda tag: seen[tag]) for word, seen in counts.items()}


def place_labels(
    points: Floats, sizes: Floats, frame: Floats, max_labels: int = MAX_LABELS
) -> dict[int, tuple[float, float]]:
    """Find lower left corners for the labels that fit, by the number of their point; all in pixels.

    Points come in order of importance. A label is placed right, left, above or below its dot, where it overlaps no
    other label, covers no dot and stays inside `frame` (x0, y0, x1, y1); if it cannot be placed, it is left out."""
    placed: dict[int, tuple[float, float]] = {}
    boxes = np.zeros((0, 4))
    for number, (point, size) in enumerate(zip(points, sizes, strict=True)):
        width, height = size
        beside = [(GAP, -height / 2), (-GAP - width, -height / 2), (-width / 2, GAP), (-width / 2, -GAP - height)]
        for low in point + np.array(beside) if len(placed) < max_labels else ():
            high = low + size
            apart = (boxes[:, 2:] <= low).any(1) | (boxes[:, :2] >= high).any(1)
            covers = ((points > low - DOT) & (points < high + DOT)).all(1)
            if (low >= frame[:2]).all() and (high <= frame[2:]).all() and apart.all() and not covers.any():
                placed[number] = tuple(low)
                boxes = np.vstack([boxes, [*low, *high]])
                break
    return placed


def draw_embeddings(
    out: Path, words: list[str], points: Floats, tags: Tags | None, title: str, dark: bool = False
) -> None:
    """Draw words at `points` [V, 2]."""
    groups = [GROUP.get(tags.by_word.get(word, "X"), REST) if tags else "" for word in words]
    looks = {group: (f"C{k}", MARKERS[k]) for k, group in enumerate(GROUPS)} | {REST: ("#8c8c8c", "o"), "": ("C0", "o")}
    with open_figure(out, 7.4, dark) as figure:
        panel = figure.subplots()
        for group, (colour, marker) in looks.items():
            if (at := np.array([found == group for found in groups])).any():
                x, y = points[at].T
                panel.scatter(x, y, alpha=0.85, label=group, s=16, c=colour, marker=marker, linewidths=0)
        panel.set(title=title, xticks=[], yticks=[])
        panel.margins(0.02)
        panel.spines[["left", "bottom"]].set_visible(False)
        if tags:
            heading = f"most frequent part of speech ({tags.tagger})"
            spacing = {"handletextpad": 0.1, "columnspacing": 1.2}
            figure.legend(loc="outside lower center", ncols=4, title=heading, title_fontsize=8, **spacing)
        figure.draw_without_rendering()  # computes the layout, on which pixel positions depend
        figure.set_layout_engine("none")
        texts = [panel.text(0, 0, word, fontsize=7.5, va="bottom", ha="left") for word in words]
        boxes = [text.get_window_extent(figure.canvas.get_renderer()) for text in texts]
        sizes = np.array([(box.width, box.height) for box in boxes])
        frame, to_pixels = np.array(panel.get_window_extent().extents), panel.transData
        placed = place_labels(to_pixels.transform(points), sizes, frame)
        for number, (text, group) in enumerate(zip(texts, groups, strict=True)):
            if number in placed:
                text.set(position=to_pixels.inverted().transform(placed[number]), color=looks[group][0])
            else:
                text.remove()
