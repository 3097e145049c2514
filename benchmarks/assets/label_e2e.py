"""Label E2E for guidance classifiers: the eight fields of each meaning representation and a part of speech for every
word, or the phrases of the bundled parser and the position of each word in them, or both without fields. For prompts,
all that can be asked for: fields, parts of speech and phrases.

    python benchmarks/assets/label_e2e.py words --data DIR --out words.jsonl
    python benchmarks/assets/label_e2e.py syntax --data DIR --texts written.txt --out syntax.jsonl
    python benchmarks/assets/label_e2e.py prompts --data DIR --out prompts.jsonl

`--texts` adds generated texts, one per line, to those of E2E; their fields are unknown, so they get syntax alone.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from difflm.annotators.e2e_fields import FIELDS
from difflm.annotators.parser import own_parser, parse_texts
from difflm.annotators.tagger import spacy_tagger
from difflm.annotators.trees import phrases, shapes
from difflm.data.corpora import e2e_path, read_e2e
from difflm.data.words import split_words
from difflm.runtime.files import write_atomic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("words", "trees", "syntax", "prompts"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--split", choices=("train", "valid"), default="train")
    parser.add_argument("--texts", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if not (asked.data or asked.texts):
        parser.error("give --data, --texts or both")
    pairs = list(read_e2e(e2e_path(asked.data, asked.split))) if asked.data else []
    texts = [pair.text for pair in pairs] + [line for path in asked.texts for line in path.read_text().splitlines()]
    if asked.texts and asked.what not in ("trees", "syntax"):
        parser.error("the fields of generated texts are unknown: label their syntax or trees")
    words = [split_words(text) for text in texts]
    labels: list[dict[str, Any]] = [{} for _ in texts]
    if asked.what in ("words", "prompts"):
        labels = [{name: pair.fields.get(name) for name in FIELDS} for pair in pairs]
    if asked.what != "trees":
        for own, tags in zip(labels, spacy_tagger().tags(words), strict=True):
            own["pos"] = list(tags)
    if asked.what != "words":
        for own, tree in zip(labels, parse_texts(own_parser(), words), strict=True):
            own["tree"] = [list(span) for span in phrases(tree)]
            if asked.what != "prompts":
                own["shape"] = shapes(tree)
    rows = [{"text": text, **own} for text, own in zip(texts, labels, strict=True)]
    write_atomic(asked.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


if __name__ == "__main__":
    main()
