"""From labelled texts to a classifier that guides a model, and back from its directory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from difflm.controls.classifier import Classifier, belongs, on_canvas, signature
from difflm.data.batches import Batch, Batches, LabelBatch, split
from difflm.data.corpora import corpus_path, located
from difflm.data.labels import Labelling, Labels, read_labels
from difflm.data.tokenfile import TokenFile
from difflm.data.tokenizers import Tokenizer
from difflm.denoiser import Denoiser
from difflm.errors import DifflmError, UsageError
from difflm.files import read_json, write_atomic
from difflm.fit import Note, budget_of, default_widths, read_tokens, same_recipe, trained, whole_or_nothing
from difflm.model import DiffusionModel, LanguageModel
from difflm.noise import Noise
from difflm.recipe import Recipe
from difflm.run import load_run
from difflm.training.checkpoints import load_into, load_tensors
from difflm.training.loop import Outcome, Trainer, Watcher

FORMAT = 1
SIZES = ("hidden", "layers", "heads", "dropout")


class Learner(LanguageModel):
    """A classifier while it learns, beside the frozen parts of the model that it is to guide."""

    likelihood = None

    def __init__(self, classifier: Classifier, guided: DiffusionModel) -> None:
        super().__init__()
        self.classifier = classifier
        # Not a module of this one: what is frozen is neither trained nor averaged nor saved.
        self.frozen = (guided.eval().requires_grad_(False),)
        self.sampling, self.longest, self.vocabulary = guided.sampling, guided.longest, guided.vocabulary

    @property
    def room(self) -> int:
        return self.frozen[0].room

    def loss(self, ids: Tensor, lengths: Tensor, *labels: Tensor) -> dict[str, Tensor]:
        guided = self.frozen[0].to(ids.device)
        t, _ = guided.times.sample(ids.shape[0], ids.device)
        noise = torch.randn(*guided.lengths.canvas(ids, lengths)[0].shape, guided.denoiser.codec.dim, device=ids.device)
        nats = self.label_nats(ids, lengths, t, noise, labels)
        # Every labelling counts alike, however many places of a text it labels.
        parts = {name: (n / places(self.classifier.labellings[name], lengths)).mean() for name, n in nats.items()}
        return {**parts, "loss": torch.stack(list(parts.values())).sum()}

    @torch.no_grad()
    def nats(self, ids: Tensor, lengths: Tensor, noise: Noise, draws: int, *labels: Tensor) -> Tensor:
        guided = self.frozen[0].to(ids.device)
        t = guided.times.time_of(noise.uniform(0, stream=5))
        width = guided.lengths.canvas(ids, lengths)[0].shape[1]
        found = self.label_nats(ids, lengths, t, noise.normal(1, width, guided.denoiser.codec.dim), labels)
        return torch.stack(list(found.values())).sum(0)

    def label_nats(
        self, ids: Tensor, lengths: Tensor, t: Tensor, noise: Tensor, labels: tuple[Tensor, ...]
    ) -> dict[str, Tensor]:
        guided = self.frozen[0]
        canvas, mask = guided.lengths.canvas(ids, lengths)
        with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
            x_t = guided.process.corrupt(guided.denoiser.codec.encode(canvas), t, noise)
        opinion = self.classifier(guided.denoiser, x_t, t, mask)
        first = guided.lengths.first
        return {
            name: opinion.nats(name, on_canvas(one, chosen, mask.shape[1], first))
            for (name, one), chosen in zip(self.classifier.labellings.items(), labels, strict=True)
        }

    def compute_in(self, dtype: torch.dtype | None) -> None:
        raise NotImplementedError

    def lengths_for(self, noise: Noise) -> Tensor:
        raise NotImplementedError

    def stream(self, *_: Any) -> Any:
        raise NotImplementedError

    def words(self, row: list[int]) -> list[int]:
        raise NotImplementedError


def places(labelling: Labelling, lengths: Tensor) -> Tensor:
    return torch.ones_like(lengths) if labelling.kind == "text" else lengths


def train_guide(
    recipe: Recipe, out: Path, device: torch.device, watcher: Watcher, note: Note, root: Path | None, resume: bool
) -> Outcome:
    """Train the classifier of a recipe in `out`: words and vectors are those of the model that it guides."""
    recipe = recipe.model_copy(update={"data": located(recipe.data, root)})
    if resume:
        same_recipe(recipe, out)
    elif (out / "config.json").exists():
        raise UsageError(f"{out} already holds a run. Continue it with --resume or choose another --out.")
    guided, tokenizer, _ = load_run(recipe.model.get("guides", "e2e"))
    if not isinstance(guided, DiffusionModel):
        raise UsageError(f"{recipe.model['guides']} is no diffusion model: a classifier has nothing to guide there.")
    with whole_or_nothing(out, keep=resume):
        path = corpus_path(recipe.data, root)
        tokens = read_tokens(recipe, tokenizer, guided.room, out, "train", root, note)
        labels = read_labels(path, recipe.column or "text")
        batches_of = label_batches(tokens, labels, path)
        kept, held = split(tokens, recipe.seed)
        torch.manual_seed(recipe.seed)
        sizes = {key: value for key, value in recipe.build_method().model_dump().items() if key in SIZES}
        classifier = Classifier(
            [one.labelling for one in labels], guided.denoiser.codec.dim, guided.longest, tokenizer.size, **sizes
        )
        count_words(classifier, tokens, labels)
        widths = recipe.widths or default_widths(guided.longest, device)
        about = {"model": recipe.build_method().model_dump(), "tokenizer": tokenizer.fingerprint(), "texts": len(kept)}
        write_atomic(out / "recipe.json", json.dumps(recipe.model_dump(), indent=1) + "\n")
        write_guide_config(out, classifier, guided, about)
    trainer = Trainer(Learner(classifier, guided), budget_of(recipe, device), out, device)
    if resume and not trainer.resume():
        note("no checkpoint yet, starting anew", 0)
    held_out = Batches(tokens, min(recipe.batch_size, len(held)), recipe.seed, widths, held, batches_of)
    validation: list[Batch] = [held_out.batch(step) for step in range(max(1, min(8, len(held) // recipe.batch_size)))]
    outcome = trainer.fit(
        Batches(tokens, recipe.batch_size, recipe.seed, widths, kept, batches_of), validation, watcher
    )
    write_guide_config(out, classifier, guided, {**about, **trained(outcome)})
    return outcome


def count_words(classifier: Classifier, tokens: TokenFile, found: list[Labels]) -> None:
    """How often each word bears each tag in the labelled texts."""
    kept = tokens.numbers()
    for number, one in enumerate(found):
        if one.labelling.kind == "tags":
            ids, _ = tokens.rows(np.arange(len(tokens)), tokens.max_length)
            labels = one.batch(kept.tolist(), tokens.max_length)
            there = labels >= 0
            np.add.at(classifier.word_counts[str(number)].numpy(), (ids[there], labels[there]), 1)


def label_batches(tokens: TokenFile, found: list[Labels], path: Path) -> list[LabelBatch]:
    """Labels by number in the token file, which leaves out what is too long."""
    kept = tokens.numbers()
    lengths = tokens.lengths
    for one in found:
        if one.labelling.kind == "tags":
            for place, number in enumerate(kept.tolist()):
                if one.rows[number] and len(one.rows[number]) != lengths[place]:
                    raise UsageError(
                        f"text {number + 1} of {path} has {lengths[place]} tokens and {len(one.rows[number])} "
                        f"labels under {one.labelling.name!r}. Give one for each token of the model."
                    )

    def batch_of(one: Labels) -> LabelBatch:
        return lambda chosen, width: one.batch(kept[chosen].tolist(), width)

    return [batch_of(one) for one in found]


def write_guide_config(out: Path, classifier: Classifier, model: DiffusionModel, about: dict[str, Any]) -> None:
    config = {
        "format": FORMAT,
        "method": "classifier",
        "signature": signature(model.denoiser),
        "longest": model.longest,
        "labels": [one.to_json() for one in classifier.labellings.values()],
        "parameters": sum(p.numel() for p in classifier.parameters()),
        **about,
    }
    write_atomic(out / "config.json", json.dumps(config, indent=1, ensure_ascii=False) + "\n")


def load_guide(folder: Path, denoiser: Denoiser, tokenizer: Tokenizer) -> Classifier:
    """The classifier of a directory; one that was made for another model is refused."""
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or config.get("format") != FORMAT or config.get("method") != "classifier":
        raise DifflmError(f"{folder} does not hold a classifier that difflm wrote.")
    if config.get("tokenizer") != tokenizer.fingerprint() or not belongs(denoiser, config.get("signature", [])):
        raise UsageError(
            f"the classifier {folder} was made for another model ({config.get('guides')}), not for this one."
        )
    labellings = [Labelling(one["name"], one["kind"], tuple(one["values"])) for one in config["labels"]]
    sizes = {key: config["model"][key] for key in SIZES}
    classifier = Classifier(labellings, denoiser.codec.dim, config["longest"], denoiser.codec.vocabulary, **sizes)
    path = folder / "model.safetensors"
    weights = {name.removeprefix("classifier."): t for name, t in load_tensors(path).items()}
    load_into(classifier, weights, path)
    return classifier.to(denoiser.codec.bias.device).eval()
