"""Train a parser on a treebank and report how well it parses held-out trees.

    python -m benchmarks.assets.train_parser --data DATA --treebank gum --out PARSER --device cuda --encoder MINILM

Without --encoder it learns words from scratch and is saved. `gum` is GUM's freely licensed genres, `gum-all` the whole.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from benchmarks.assets.treebanks import TREEBANKS, Treebank, treebank
from difflm.annotators.parser import (
    HashedShape,
    HashedWords,
    SpanParser,
    SpanScorer,
    batch_by_cells,
    best_binary_trees,
    index_by_width,
    mark_sentences,
)
from difflm.annotators.trees import CHAIN, Tree, agreements, phrases
from difflm.runtime.files import write_checked
from difflm.runtime.tensors import save_tensors

FORMS = 2  # the first features of a word identify the word itself
RARE = 3  # a chain of labels that occurs less often is learned as its outermost label


def count_labels(trees: Sequence[Tree]) -> list[str]:
    """Return the labels that a parser learns: frequent chains, and every outermost label."""
    counts = Counter(span.label for tree in trees for span in phrases(tree))
    return sorted(label for label, count in counts.items() if count >= RARE or CHAIN not in label)


def margin_loss(scores: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
    """Return how far the best rival outscores the right tree, per word; each wrong label gives a rival one point
    (Stern et al., 2017). `targets` [B, n, n] holds labels at (from, to), 0 where there is no phrase."""
    gains = (scores - scores[..., :1]).float()
    right = targets.unsqueeze(-1)
    rivals = (gains + 1).scatter_add(-1, right, -torch.ones_like(right, dtype=gains.dtype))
    value, label = rivals.detach().max(-1)
    best = best_binary_trees(index_by_width(value), mark_sentences(value, lengths))
    place = torch.arange(best.shape[1], device=best.device)
    width = place - place.unsqueeze(1)
    best = best.gather(2, width.clamp(min=0).expand_as(best)) * (width > 0)  # by (from, to) again
    found = (rivals.gather(-1, label.unsqueeze(-1)).squeeze(-1) * best).sum((1, 2))
    return (found - gains.gather(-1, right).sum((1, 2, 3))).clamp(min=0).sum() / lengths.sum()


@torch.no_grad()
def start_weights(network: SpanScorer) -> None:
    """Initialise a new parser: nine spans in ten are no phrase, so it starts there instead of learning it; and with the
    zeros of a Transformer's head all boundaries, hence all spans, would be equal."""
    network.out.bias[0] = 5.0
    if isinstance(network.encoder, HashedWords):
        nn.init.xavier_uniform_(network.encoder.body.head.weight)


def drop_forms(encoder: HashedWords) -> RemovableHandle:
    """Drop some word forms while it is trained, so that it learns to read unknown words by their letters."""

    def drop(table: nn.Module, inputs: tuple[Tensor, ...], vectors: Tensor) -> Tensor:
        if not encoder.training:
            return vectors
        known = torch.rand(vectors.shape[:2], device=vectors.device) >= encoder.shape.dropout
        return torch.cat([vectors[:, :, :FORMS] * known[..., None, None], vectors[:, :, FORMS:]], dim=2)

    return encoder.table.register_forward_hook(drop)


def train(
    parser: SpanParser,
    trees: Sequence[Tree],
    epochs: float = 20,
    minutes: float = 2.0,
    lr: float = 1e-3,
    encoder_lr: float = 1e-3,
    batch_size: int = 32,
    seed: int = 0,
    warmup: float = 0.05,
) -> None:
    """Fit the parser to the trees; `epochs` or `minutes` end training, and the learning rate falls to 0 by then."""
    torch.manual_seed(seed)
    start_weights(parser.network)
    dropping = drop_forms(parser.network.encoder) if isinstance(parser.network.encoder, HashedWords) else None
    draw = random.Random(seed)
    number = {label: i for i, label in enumerate(parser.labels, 1)}
    sentences = [tree.words() for tree in trees]
    cells = [  # (from, to, label); a label that the parser does not know at all is no phrase
        [
            (first, last + 1, found)
            for first, last, label in phrases(tree)
            if (found := number.get(label) or number.get(label.split(CHAIN)[0]))
        ]
        for tree in trees
    ]
    encoder = list(parser.network.encoder.parameters())
    rest = [p for name, p in parser.network.named_parameters() if not name.startswith("encoder.")]
    rates = (encoder_lr, lr)
    optimiser = torch.optim.AdamW([{"params": encoder}, {"params": rest}], weight_decay=0.01, betas=(0.9, 0.98))
    seen, began, done, reported = 0, time.monotonic(), 0.0, 0.0
    while done < 1:
        # Sentences of similar length share a batch, so that there is little padding.
        order = sorted(range(len(trees)), key=lambda i: len(sentences[i]) + 4 * draw.random())
        batches = list(batch_by_cells(order, [len(words) for words in sentences], batch_size))
        draw.shuffle(batches)
        for batch in batches:
            seen += len(batch)
            done = max(seen / (epochs * len(trees)), (time.monotonic() - began) / (60 * minutes))
            if done > 1:
                break
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * min(1.0, done / warmup, (1 - done) / (1 - warmup))
            parser.network.train()
            scores, lengths = parser.scores([sentences[i] for i in batch])
            filled = torch.tensor([(b, *cell) for b, i in enumerate(batch) for cell in cells[i]]).view(-1, 4)
            places = filled.long().to(scores.device).T
            targets = torch.zeros(scores.shape[:3], dtype=torch.long, device=scores.device)
            targets[places[0], places[1], places[2]] = places[3]
            loss = margin_loss(scores, targets, lengths)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parser.network.parameters(), 1.0)
            optimiser.step()
            if done >= reported:
                print(f"{parser.name} {100 * done:3.0f} %  {loss.item():.3f} points/word", flush=True)
                reported += 0.1
    if dropping:
        dropping.remove()
    parser.network.eval()


def save_parser(parser: SpanParser, directory: Path, about: dict[str, Any] | None = None) -> None:
    """Write weights at half precision; `about` says what the parser learned from and what was measured."""
    shape: Any = parser.network.encoder.shape
    config = {
        "name": parser.name,
        "labels": parser.labels,
        "encoder": {"kind": "hashed", **asdict(shape)},
        "parameters": sum(p.numel() for p in parser.network.parameters()),
        **(about or {}),
    }
    halves = {k: v.half() for k, v in parser.network.state_dict().items()}
    config["sha256"] = save_tensors(directory / "model.safetensors", halves)
    # Not config.json: a directory with one is a run.
    write_checked(directory / "parser.json", config)


def train_new(
    name: str, trees: Sequence[Tree], encoder: Path | None, device: str, seed: int = 0, **plan: Any
) -> SpanParser:
    """Train a new parser, on top of a pretrained encoder where one is given."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    if encoder:
        from benchmarks.assets.encoders import PretrainedWords  # needs transformers
    network = PretrainedWords(encoder) if encoder else HashedWords(HashedShape())
    parser = SpanParser(name, network, count_labels(trees)).to(device)
    train(parser, trees, encoder_lr=3e-4 if encoder else 1e-3, seed=seed, **plan)
    return parser


def measure(parser: SpanParser, trees: Sequence[Tree]) -> dict[str, float]:
    counts = agreements(trees, parser.parse([tree.words() for tree in trees]))
    shares = {"f1": counts.f1, "precision": counts.matched / counts.found, "recall": counts.matched / counts.gold}
    shares["exact"] = counts.exact / counts.trees
    return {name: round(100 * share, 2) for name, share in shares.items()} | {"trees": counts.trees}


def make_options(about: str | None) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, required=True, help="contains parsing/ and e2e/")
    options.add_argument("--treebank", choices=TREEBANKS, default="gum")
    options.add_argument("--encoder", type=Path, help="directory of a pretrained encoder")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--epochs", type=float, default=20)
    options.add_argument("--minutes", type=float, default=2.0, help="training ends here at the latest")
    options.add_argument("--limit", type=int, help="maximum number of trees and texts, for a quick test")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, required=True)
    return options


def main() -> None:
    given = make_options(__doc__).parse_args()
    bank: Treebank = given.treebank
    kept, held = (trees[: given.limit] for trees in treebank(bank, given.data))
    print(f"{bank}: {len(kept)} trees to train on, {len(held)} held out", flush=True)
    plan = {"epochs": given.epochs, "minutes": given.minutes}
    parser = train_new(bank, kept, given.encoder, given.device, given.seed, **plan)
    result = measure(parser, held)
    if not given.encoder:
        about = {"trained_on": bank, "seed": given.seed, "measured": {f"{bank}, held out": result}}
        save_parser(parser, given.out, about)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
