"""Train the bundled part-of-speech tagger on UD English EWT: `python -m benchmarks.train_tagger --data DIR`.

DIR holds parsing/en_ewt-ud-train.conllu[.gz] and en_ewt-ud-dev.conllu[.gz]. Sentences with contractions are learnt
twice, as the treebank cuts them and as `difflm.data.words` does. One core, a few minutes; the same weights every time.
"""

import argparse
from pathlib import Path

import difflm
from difflm.annotators.tagger import WEIGHTS, LinearTagger, accuracy, as_our_words, read_conllu, train
from difflm.errors import UsageError


def treebank(data: Path, split: str) -> Path:
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
    learnt, held = (read_conllu(treebank(options.data, split)) for split in ("train", "dev"))
    contracted = [ours for ours, theirs in zip(map(as_our_words, learnt), learnt, strict=True) if ours != theirs]
    train(learnt + contracted, options.epochs).save(options.out)
    tagger = LinearTagger.load(options.out)
    print(f"{tagger.name}: {accuracy(tagger, held):.4f} of the tags of EWT dev, {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
