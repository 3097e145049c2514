"""Label E2E for guidance classifiers: the eight fields of each meaning representation and a part of speech for every
word, or the phrases of the bundled parser and the position of each word in them. For prompts, all that can be
asked for: fields, parts of speech and phrases.

    python benchmarks/label_e2e.py words --data DIR --split train --out words.jsonl
    python benchmarks/label_e2e.py trees --data DIR --split train --out trees.jsonl
    python benchmarks/label_e2e.py prompts --data DIR --split train --out prompts.jsonl
"""

import argparse
import json
from pathlib import Path
from typing import Any

from difflm.annotators.e2e_fields import FIELDS
from difflm.annotators.parser import own_parser, parse_texts
from difflm.annotators.tagger import spacy_tagger
from difflm.annotators.trees import phrases, shapes
from difflm.data.e2e import E2EPair, e2e_path, read_e2e
from difflm.data.words import split_words
from difflm.runtime.files import write_atomic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("words", "trees", "prompts"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", choices=("train", "valid"), default="train")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    pairs = list(read_e2e(e2e_path(asked.data, asked.split)))
    words = [split_words(pair.text) for pair in pairs]
    labels = label_words(pairs, words) if asked.what != "trees" else label_trees(words)
    if asked.what == "prompts":
        labels = [{**own, "tree": one["tree"]} for own, one in zip(labels, label_trees(words), strict=True)]
    rows = [{"text": pair.text, **label} for pair, label in zip(pairs, labels, strict=True)]
    write_atomic(asked.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def label_words(pairs: list[E2EPair], words: list[list[str]]) -> list[dict[str, Any]]:
    tags = spacy_tagger().tags(words)
    fields = [{name: pair.fields.get(name) for name in FIELDS} for pair in pairs]
    return [{**own, "pos": tag} for own, tag in zip(fields, tags, strict=True)]


def label_trees(words: list[list[str]]) -> list[dict[str, Any]]:
    trees = parse_texts(own_parser(), words)
    return [{"tree": [list(span) for span in phrases(tree)], "shape": shapes(tree)} for tree in trees]


if __name__ == "__main__":
    main()
