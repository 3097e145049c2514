"""Train the bundled part-of-speech tagger on UD English EWT: `python -m benchmarks.assets.train_tagger --data DIR`.

DIR contains parsing/en_ewt-ud-train.conllu[.gz] and en_ewt-ud-dev.conllu[.gz]. Sentences with contractions are trained
on twice, tokenized as in the treebank and as in `difflm.data.words`. Training takes a few minutes on one core and is
deterministic.
"""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save

import difflm
from difflm.annotators.tagger import BUCKETS, START, TAGS, WEIGHTS, LinearTagger, Tagger, extract_features, tag_features
from difflm.data.texts import read_lines
from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import write_atomic, write_checked

Sentence = tuple[list[str], list[str]]  # words, tags


def train(sentences: Sequence[Sentence], epochs: int = 8, seed: int = 0, margin: float = 4.0) -> LinearTagger:
    """Train an averaged perceptron; a wrong tag that scores within `margin` of the right one counts as an error."""
    words, gold = zip(*sentences, strict=True)
    rows, context = extract_features(words)
    # Features that occur once go to a spare row, discarded afterwards: they would fill rows that others share.
    flat = rows.astype(np.int64)
    rows = np.where(np.bincount(flat.ravel(), minlength=BUCKETS)[flat] > 1, flat, BUCKETS).astype(np.uint64)
    index = {tag: number for number, tag in enumerate(TAGS)}
    answers = [np.array([index[tag] for tag in tags]) for tags in gold]
    starts = np.cumsum([0, *map(len, words)])
    weights, summed = (np.zeros((BUCKETS + 1, len(TAGS)), dtype=np.float32) for _ in range(2))
    rng, step = np.random.default_rng(seed), 0
    for _ in range(epochs):
        for number in rng.permutation(len(words)):
            before = second = START
            for offset, right in enumerate(answers[number]):
                at = starts[number] + offset
                active = np.concatenate([rows[at], tag_features([before], [second], context[at : at + 1])[0]])
                scores = weights[active].sum(0)
                guess = int(scores.argmax())
                scores[right] -= margin
                rival = int(scores.argmax())
                step += 1
                if rival != right:
                    for tag, sign in ((right, 1.0), (rival, -1.0)):
                        weights[active, tag] += sign
                        summed[active, tag] += sign * step
                before, second = guess, before
    return LinearTagger((weights - summed / np.float32(step))[:BUCKETS], "difflm-tagger (fresh)")


def save_tagger(tagger: LinearTagger, path: Path) -> None:
    """Write eight bits per weight and one scale per tag."""
    scale = np.abs(tagger.weights).max(0) / 127
    quantised = np.round(tagger.weights / np.where(scale > 0, scale, 1)).astype(np.int8)
    data = save({"weights": quantised, "scale": scale.astype(np.float32)})
    write_atomic(path, data)
    write_checked(path.with_suffix(".json"), {"sha256": hashlib.sha256(data).hexdigest()})


def read_conllu(path: Path) -> list[Sentence]:
    """Read words and Universal tags of a CoNLL-U file; ranges (8-9) and empty nodes (8.1) are skipped."""
    sentences: list[Sentence] = [([], [])]
    for number, line in read_lines(path):
        cells = line.split("\t")
        if not line.strip():
            sentences.append(([], []))
        elif not line.startswith("#") and len(cells) != 10:
            raise DifflmError(f"line {number} of {path} is not CoNLL-U: ten cells with tabs between them.")
        elif cells[0].isdigit():
            sentences[-1][0].append(cells[1])
            sentences[-1][1].append(cells[3])
    return [sentence for sentence in sentences if sentence[0]]


def split_contractions(sentence: Sentence) -> Sentence:
    """Split contractions as `split_words` does: is + n't becomes isn ' t, we + 've becomes we ' ve."""
    words: list[str] = []
    tags: list[str] = []
    for word, tag in zip(*sentence, strict=True):
        tail = word.lower().replace("’", "'")
        cut = word[-1] if tail == "n't" and words else word[1:] if tail in ("'ve", "'m") else ""
        if cut and tail == "n't":
            words[-1] += word[0]
        words += ["'", cut] if cut else [word]
        tags += ["PUNCT", tag] if cut else [tag]
    return words, tags


def accuracy(tagger: Tagger, sentences: Sequence[Sentence]) -> float:
    found = [tag for tags in tagger.tags([words for words, _ in sentences]) for tag in tags]
    return float(np.mean(np.array(found) == np.array([tag for _, tags in sentences for tag in tags])))


def treebank_path(data: Path, split: str) -> Path:
    for packed in (".gz", ""):
        path = data / "parsing" / f"en_ewt-ud-{split}.conllu{packed}"
        if path.is_file():
            return path
    raise UsageError(f"no parsing/en_ewt-ud-{split}.conllu[.gz] in {data}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(difflm.__file__).parent / WEIGHTS)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    training, held_out = (read_conllu(treebank_path(options.data, split)) for split in ("train", "dev"))
    contracted = [
        ours for ours, theirs in zip(map(split_contractions, training), training, strict=True) if ours != theirs
    ]
    save_tagger(train(training + contracted, options.epochs), options.out)
    tagger = LinearTagger.load(options.out)
    print(
        f"{tagger.name}: {accuracy(tagger, held_out):.4f} of the tags of EWT dev, {options.out.stat().st_size:,} bytes"
    )


if __name__ == "__main__":
    main()
