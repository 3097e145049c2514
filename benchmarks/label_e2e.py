"""Label E2E for guiding classifiers: the eight fields of each meaning representation, a part of speech for every word,
and the constituents of a parse where trees are given.

    python benchmarks/label_e2e.py --data DIR --split train --out labels.jsonl [--trees trees.jsonl.gz]
"""

import argparse
import json
from pathlib import Path

from difflm.data.e2e import e2e_path, read_e2e
from difflm.data.fields import FIELDS
from difflm.data.taggers import spacy_tagger
from difflm.data.texts import read_lines
from difflm.data.trees import parse_tree
from difflm.data.words import split_words
from difflm.files import write_atomic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", choices=("train", "valid"), default="train")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trees", type=Path, help="one object a line: words, tree")
    asked = parser.parse_args()
    pairs = list(read_e2e(e2e_path(asked.data, asked.split)))
    words = [split_words(pair.text) for pair in pairs]
    tags = spacy_tagger().tags(words)
    rows = [
        {"text": pair.text, **{name: pair.fields.get(name) for name in FIELDS}, "pos": tag}
        for pair, tag in zip(pairs, tags, strict=True)
    ]
    if asked.trees:
        for row, (_, line) in zip(rows, read_lines(asked.trees), strict=True):
            row["tree"] = [list(span) for span in parse_tree(json.loads(line)["tree"]).spans()]
    write_atomic(asked.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


if __name__ == "__main__":
    main()
