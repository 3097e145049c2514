"""Training and loading of classifiers that guide a model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from difflm.controls.guidance import Classifier, labels_on_canvas, matches_model, model_signature
from difflm.data.batches import Batch, Batches, LabelBatch, split
from difflm.data.corpora import corpus_path, resolve_data
from difflm.data.labels import NOTHING, Labelling, Labels, read_labels
from difflm.data.tokenfile import TokenFile
from difflm.data.tokenizers import Tokenizer
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.errors import DifflmError, UsageError
from difflm.models.base import Losses, Trainable, training_noise
from difflm.models.diffusion import DiffusionModel
from difflm.runtime.files import locked, read_json, write_atomic
from difflm.runtime.tensors import SkipInit, load_into, load_tensors
from difflm.training.checkpoints import advise_resume
from difflm.training.fit import (
    INFO,
    Note,
    budget_of,
    check_free,
    check_same_recipe,
    count_left_out,
    default_widths,
    read_tokens,
    remove_on_failure,
    report_left_out,
    resolve_init,
    validation_batches,
)
from difflm.training.recipe import Recipe
from difflm.training.run import load_run
from difflm.training.trainer import Outcome, Trainer, Watcher

FORMAT = 1
SIZES = ("hidden", "layers", "heads", "dropout")
TIMES = 5  # the stream of random numbers that times are drawn from
COUNT_BATCH = 10_000  # texts whose words are counted together


class Frozen:
    """Holds the guided model. Copies share it, since it is neither trained nor averaged."""

    def __init__(self, model: DiffusionModel) -> None:
        self.model = model.eval().requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Frozen":
        return self


class Learner(Trainable):
    """A classifier in training, with the frozen model that it will guide."""

    def __init__(self, classifier: Classifier, guided: DiffusionModel) -> None:
        super().__init__()
        self.classifier = classifier
        self.frozen = Frozen(guided)  # not a submodule, so that it is not saved

    def forward(self, batch: Batch) -> Losses:
        guided, noise = self.frozen.model.to(batch.ids.device), training_noise(batch)
        # Half of the texts at the last quarter of the times, where the final words are decided.
        t = guided.times.time_of(noise.uniform(0, stream=TIMES) ** 2)
        found = self.label_nats(batch, t, noise)
        terms = {f"{name}_nats": nats.sum() for name, nats in found.items()}  # a label may be called "loss" or "step"
        return Losses(torch.stack(list(terms.values())).sum(), terms, torch.full((), len(t), device=t.device))

    @torch.no_grad()
    def nats(self, batch: Batch, noise: Noise, draws: int = 1) -> Tensor:
        """The loss of each text, at one time of the process."""
        guided = self.frozen.model.to(batch.ids.device)
        t = guided.times.time_of(noise.uniform(0, stream=TIMES))
        return torch.stack(list(self.label_nats(batch, t, noise).values())).sum(0)

    def label_nats(self, batch: Batch, t: Tensor, noise: Noise) -> dict[str, Tensor]:
        """−log p(labels | x_t) of each text, [B]; for tags and spans the mean over its words, so that every labelling
        counts equally, however many positions it labels."""
        guided = self.frozen.model
        codec, process = guided.denoiser.codec, guided.process
        canvas, mask = guided.lengths.canvas(batch.ids, batch.lengths)
        with torch.no_grad(), torch.autocast(canvas.device.type, enabled=False):
            own = process.draw_noise(noise, 1, codec.state_shape(canvas.shape[1]))
            view = guided.denoiser.view(process.corrupt(codec.encode(canvas), t, own), t)
        output = self.classifier(view, t, mask)
        first = guided.lengths.first
        return {
            name: output.nats(name, labels_on_canvas(one, batch.labels[name], mask.shape[1], first))
            / label_positions(one, batch.lengths)
            for name, one in self.classifier.labellings.items()
        }


def label_positions(labelling: Labelling, lengths: Tensor) -> Tensor:
    return torch.ones_like(lengths) if labelling.kind == "text" else lengths


def train_guide(
    recipe: Recipe, out: Path, device: torch.device, watcher: Watcher, note: Note, root: Path | None, resume: bool
) -> Outcome:
    """Train the classifier of a recipe in `out`, with the tokenizer and codec of the model that it guides."""
    check_recipe(recipe)
    method = recipe.build_method().model_dump()
    method["guides"] = resolve_init(method["guides"])
    recipe = recipe.model_copy(update={"data": resolve_data(recipe.data, root), "model": method})
    with locked(out):
        return _train_locked(recipe, out, device, watcher, note, root, resume)


def _train_locked(
    recipe: Recipe, out: Path, device: torch.device, watcher: Watcher, note: Note, root: Path | None, resume: bool
) -> Outcome:
    method = recipe.model
    if resume:
        check_same_recipe(recipe, out)
    else:
        check_free(out)
    guided, tokenizer, _ = load_run(method["guides"])
    if not isinstance(guided, DiffusionModel):
        raise UsageError(f"{method['guides']} is no diffusion model: a classifier has nothing to guide there.")
    with remove_on_failure(out, keep=resume):
        max_words = min(guided.max_words, guided.longest)  # blocks may generate more than they were trained on
        tokens, labels = read_labelled(recipe, tokenizer, max_words, out, root, note)
        kept, held = split(tokens, recipe.seed)
        about = {"model": method, "tokenizer": tokenizer.fingerprint(), "texts": len(kept), **count_left_out(tokens)}
        if resume:
            check_same_model(out, guided)
        else:
            report_left_out(tokens, held, max_words, note)
        torch.manual_seed(recipe.seed)
        classifier = new_classifier(method, guided, labels)
        count_words(classifier, tokens, labels)
        widths = recipe.widths or default_widths(guided.longest, device)
        label_batches = {one.labelling.name: batches_of(one, tokens) for one in labels}
        batches = Batches(tokens, recipe.batch_size, recipe.seed, widths, kept, label_batches)
        validation = validation_batches(tokens, held, recipe, widths, label_batches)
        write_atomic(out / "recipe.json", json.dumps(recipe.model_dump(), indent=1) + "\n")
        write_guide_config(out, classifier, guided, about)
    budget = budget_of(recipe, device)
    trainer = Trainer(Learner(classifier, guided), budget, out, device, "label_nats")
    if resume and not trainer.resume():
        note("no checkpoint yet, starting anew", INFO)
    outcome = trainer.fit(batches, validation, watcher)
    write_guide_config(out, classifier, guided, {**about, **outcome.summary()})
    return outcome


def check_recipe(recipe: Recipe) -> None:
    """Refuse settings that would have no effect, and data that cannot hold labels."""
    for key in ("init", "tokenizer", "vocabulary", "more_than", "longest"):
        if getattr(recipe, key) != Recipe.model_fields[key].default:
            raise UsageError(f"a classifier has words and sizes of the model that it guides: leave {key} out.")
    path = Path(recipe.data)
    if (path.with_suffix("") if path.suffix == ".gz" else path).suffix != ".jsonl":
        raise UsageError(
            f"a classifier learns from labels, and {recipe.data} is no .jsonl file. "
            'Give one with a text and labels a line, such as {"text": "...", "topic": "food"}.'
        )


def check_same_model(out: Path, guided: DiffusionModel) -> None:
    if not matches_model(guided.denoiser, read_json(out / "config.json").get("signature", [])):
        raise DifflmError(f"the model that {out} guides changed since it was begun: train the classifier anew.")


def read_labelled(
    recipe: Recipe, tokenizer: Tokenizer, max_words: int, out: Path, root: Path | None, note: Note
) -> tuple[TokenFile, list[Labels]]:
    """Read the texts of the recipe's file and all their labellings, of which at least one must have two values."""
    path = corpus_path(recipe.data, root)
    tokens = read_tokens(recipe, tokenizer, max_words, out, "train", root, note)
    found = read_labels(path, recipe.column or "text")
    for one in found:
        check_label_positions(one, tokens, path)
    same = [one.labelling.name for one in found if not one.tells]
    if len(same) == len(found):
        raise UsageError(f"each label of {path} has one value: there is nothing to tell apart. Label some otherwise.")
    for name in same:
        note(f"{name!r} is the same in every text: asking for it will change nothing", INFO)
    return tokens, found


def check_label_positions(labels: Labels, tokens: TokenFile, path: Path) -> None:
    """Check that a text has as many tags as tokens, and no span beyond its end."""
    name, kind = labels.labelling.name, labels.labelling.kind
    if kind == "text":
        return
    for number, length in zip(tokens.numbers().tolist(), tokens.lengths.tolist(), strict=True):
        row, where = labels.rows[number], f"text {number + 1} of {path} has {length} tokens"
        if kind == "tags" and row and len(row) != length:
            raise UsageError(f"{where} and {len(row)} labels under {name!r}. Give one for each token of the model.")
        if kind == "spans" and any(last >= length for _, last, _ in row):
            raise UsageError(f"{where}; a span under {name!r} ends behind them. Places count from 0, ends included.")
        if kind == "spans" and len({(first, last) for first, last, _ in row}) < len(row):
            raise UsageError(f"text {number + 1} of {path} has two labels for one span under {name!r}. Give one.")
        if kind == "spans" and len(row) > 2 * length:
            raise UsageError(f"{where} and {len(row)} spans under {name!r}, more than a tree: at most {2 * length}.")


def new_classifier(method: dict[str, Any], guided: DiffusionModel, labels: list[Labels]) -> Classifier:
    sizes = {key: method[key] for key in SIZES}
    labellings = [one.labelling for one in labels]
    made = Classifier(labellings, guided.denoiser.codec.view_dim, guided.longest, guided.vocabulary, **sizes)
    if guided.denoiser.codec.holds_tokens:
        # A one-hot input selects a column of the weight. PyTorch's default scale makes it a thirtieth of a position's
        # vector, which is learned late: after 400 steps on E2E, 14.0 instead of 6.7 nats of labels per text.
        torch.nn.init.normal_(made.trunk.input.weight)
    return made


def count_words(classifier: Classifier, tokens: TokenFile, found: list[Labels]) -> None:
    """Count how often each word has each tag in the labelled texts."""
    for number, one in enumerate(found):
        if one.labelling.kind == "tags":
            counts, batch = classifier.word_counts[str(number)].numpy(), batches_of(one, tokens)
            for start in range(0, len(tokens), COUNT_BATCH):
                chosen = np.arange(start, min(start + COUNT_BATCH, len(tokens)))
                ids, labels = tokens.rows(chosen, tokens.max_length)[0], batch(chosen, tokens.max_length)
                labelled = labels != NOTHING
                np.add.at(counts, (ids[labelled], labels[labelled]), 1)


def batches_of(labels: Labels, tokens: TokenFile) -> LabelBatch:
    """Labels by index in the token file, which leaves some texts of the corpus out."""
    numbers = tokens.numbers()
    return lambda chosen, width: labels.batch(numbers[chosen].tolist(), width)


def write_guide_config(out: Path, classifier: Classifier, model: DiffusionModel, about: dict[str, Any]) -> None:
    config = {
        "format": FORMAT,
        "method": "classifier",
        "signature": model_signature(model.denoiser),
        "longest": model.longest,
        "labels": [one.to_json() for one in classifier.labellings.values()],
        "parameters": sum(p.numel() for p in classifier.parameters() if p.requires_grad),
        **about,
    }
    write_atomic(out / "config.json", json.dumps(config, indent=1, ensure_ascii=False) + "\n")


def heads_of(folder: Path) -> set[str] | None:
    """Names of the labels that the classifier of a directory knows; None where it cannot be read: loading it will say
    why."""
    try:
        return {one["name"] for one in json.loads((folder / "config.json").read_text(encoding="utf-8"))["labels"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load_guide(folder: Path, denoiser: Denoiser, tokenizer: Tokenizer) -> Classifier:
    """Load the classifier of a directory; one that was trained for another model is refused."""
    if not (folder / "config.json").is_file():
        what = "holds no classifier" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}. Give the directory that `difflm train classifier` wrote.")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or config.get("format") != FORMAT or config.get("method") != "classifier":
        raise DifflmError(f"{folder} does not hold a classifier that difflm wrote.")
    try:
        guides = Path(config["model"]["guides"]).name
        if config["tokenizer"] != tokenizer.fingerprint() or not matches_model(denoiser, config["signature"]):
            raise UsageError(f"the classifier {folder} was made for another model ({guides}), not for this one.")
        labellings = [Labelling(one["name"], one["kind"], tuple(one["values"])) for one in config["labels"]]
        sizes = {key: config["model"][key] for key in SIZES}
        with SkipInit():
            classifier = Classifier(
                labellings, denoiser.codec.view_dim, config["longest"], denoiser.codec.vocabulary, **sizes
            )
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise DifflmError(f"{folder}/config.json does not describe a classifier ({reason}).") from None
    path = folder / "model.safetensors"
    tensors = load_tensors(path, advise_resume(folder))
    weights = {name.removeprefix("classifier."): tensor for name, tensor in tensors.items()}
    load_into(classifier, weights, path)
    return classifier.to(denoiser.codec.bias.device).eval()
