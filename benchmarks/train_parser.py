"""Train a parser on a treebank and say how well it parses held-out trees.

    python -m benchmarks.train_parser --data DATA --treebank gum --out PARSER --device cuda --encoder MINILM

Without --encoder it learns its words from nothing. `gum` is GUM's freely licensed genres, `gum-all` the whole.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.encoders import load_encoder
from benchmarks.treebanks import TREEBANKS, Treebank, treebank
from difflm.annotators.parser import Parser, SpanParser, Training, labels_of, train_parser
from difflm.annotators.span_scorer import HashedShape
from difflm.annotators.trees import Tree, agreements


def say(name: str, began: float) -> Callable[[float, float], None]:
    def told(done: float, loss: float) -> None:
        print(f"{name} {100 * done:3.0f} %  {loss:.3f} points/word  {time.monotonic() - began:.0f} s", flush=True)

    return told


def learn(
    name: str,
    trees: Sequence[Tree],
    encoder: Path | None,
    device: str,
    epochs: float,
    minutes: float,
    batch: int = 32,
    seed: int = 0,
) -> SpanParser:
    """A parser trained on the trees; on top of a pretrained encoder where one is given."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    shape, weights = load_encoder(encoder) if encoder else (HashedShape(), None)
    parser = SpanParser(name, shape, labels_of(trees))
    if weights:
        parser.network.encoder.load_state_dict(weights)
    plan = Training(epochs, minutes, encoder_lr=3e-4 if encoder else 1e-3, batch=batch, seed=seed)
    train_parser(parser.to(device), trees, plan, say(name, time.monotonic()))
    return parser


def measured(parser: Parser, trees: Sequence[Tree]) -> dict[str, float]:
    counts = agreements(trees, parser.parse([tree.words() for tree in trees]))
    shares = {"f1": counts.f1, "precision": counts.precision, "recall": counts.recall, "exact": counts.exact_share}
    return {name: round(100 * share, 2) for name, share in shares.items()} | {"trees": counts.trees}


def options(about: str | None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--data", type=Path, required=True, help="holds parsing/ and e2e/")
    found.add_argument("--treebank", choices=TREEBANKS, default="gum")
    found.add_argument("--encoder", type=Path, help="a pretrained encoder, whole or cut")
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--epochs", type=float, default=20)
    found.add_argument("--minutes", type=float, default=2.0, help="training ends here at the latest")
    found.add_argument("--limit", type=int, help="trees and texts at most, for a quick look")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--out", type=Path, required=True)
    return found


def main() -> None:
    given = options(__doc__).parse_args()
    bank: Treebank = given.treebank
    kept, held = (trees[: given.limit] for trees in treebank(bank, given.data))
    print(f"{bank}: {len(kept)} trees to train on, {len(held)} held out", flush=True)
    parser = learn(bank, kept, given.encoder, given.device, given.epochs, given.minutes, seed=given.seed)
    result = measured(parser, held)
    parser.save(given.out, {"trained_on": bank, "seed": given.seed, "measured": {f"{bank}, held out": result}})
    print(json.dumps(result))


if __name__ == "__main__":
    main()
