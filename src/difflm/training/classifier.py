"""Train and load classifiers that guide a model."""

from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.controls import guidance
from difflm.controls.guidance import Classifier, Guided, LabelReader
from difflm.controls.sentence_classifier import load_sentence_classifier
from difflm.data.batches import Batch
from difflm.data.corpora import corpus_path
from difflm.data.labels import NONE, NOTHING, Labelling, Labels, check_places, read_labels
from difflm.data.texts import file_kind
from difflm.data.tokenfile import Ints, Limits, TokenFile
from difflm.data.tokenizers import PAD, Tokenizer
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.errors import DifflmError, UsageError, first_line
from difflm.methods.rivals.prefix_classifier import LENGTH, PrefixClassifier, with_ends
from difflm.models.autoregressive import Autoregressive
from difflm.models.base import NO_WORDS, Capabilities, LanguageModel, Losses, Trainable
from difflm.networks import Sizes
from difflm.runtime.files import FORMAT, Json, check_sha256, read_checked
from difflm.runtime.tensors import SkipInit, load_into, load_tensors
from difflm.training.checkpoints import advise_resume
from difflm.training.recipe import Recipe
from difflm.training.run import FORMATS, NOT_A_MODEL, load_run, resolve_run
from difflm.training.texts import Prepared, Setup, choose_texts, make_batches, read_tokens

TIMES = 5  # the random stream of times
SPANS = 6  # that of pairs of positions
FOLLOWING = "following words"  # the loss that needs no labels
COUNT_BATCH = 10_000  # texts whose words are counted at once


class Learner(Trainable):
    """A classifier in training, with the frozen model that it will guide."""

    capabilities = Capabilities(starts=())  # it writes no texts

    def __init__(self, classifier: Classifier, guided: LanguageModel, low_noise: float = 2.0) -> None:
        super().__init__()
        self.classifier, self.low_noise = classifier, low_noise
        guided.eval().requires_grad_(False)
        self.guided = lambda: guided  # no submodule, so that it is not saved; copies share it, since it is not trained

    def forward(self, batch: Batch) -> Losses:
        noise = self.training_noise(batch)
        # By default half of the texts are in the lowest quarter of the times, where the final words are decided.
        found = self.label_nats(batch, noise.uniform(0, stream=TIMES) ** self.low_noise, noise)
        terms = {f"{name}_nats": nats.sum() for name, nats in found.items()}  # a label may be called "loss" or "step"
        texts = torch.full((), len(batch.ids), device=batch.ids.device)
        return Losses(torch.stack(list(terms.values())).sum(), terms, texts)

    @torch.no_grad()
    def nats(self, batch: Batch, noise: Noise, draws: int = 1) -> Tensor:
        """The loss of each text, at one time of the process."""
        found = self.label_nats(batch, noise.uniform(0, stream=TIMES), noise)
        return torch.stack(list(found.values())).sum(0)

    def label_nats(self, batch: Batch, u: Tensor, noise: Noise) -> dict[str, Tensor]:
        """−log p(labels | x_t) of each text, [B], at times given by u in [0, 1); for tags and spans the mean over its
        words, so that every labelling has the same weight, however many positions it labels."""
        guided = self.guided().to(batch.ids.device)
        codec, process, t = guided.denoiser.codec, guided.denoiser.process, guided.times.time_of(u)
        canvas, mask = guided.lengths.canvas(batch.ids, batch.lengths)
        with torch.no_grad(), torch.autocast(canvas.device.type, enabled=False):
            own = process.draw_noise(noise, 1, codec.state_shape(canvas.shape[1]))
            view = guided.denoiser.view(process.corrupt(codec.encode(canvas), t, own), t)
        output = self.classifier(view, t, mask)
        first = guided.lengths.first
        return {
            name: output.nats(name, guidance.labels_on_canvas(one, batch.labels[name], mask.shape[1], first))
            / (1 if one.kind == "text" else batch.lengths)
            for name, one in self.classifier.labellings.items()
        }


class PrefixLearner(Learner):
    """The same for a left-to-right model: there is no noise, and every prefix of a text is a training example."""

    classifier: PrefixClassifier

    def label_nats(self, batch: Batch, u: Tensor, noise: Noise) -> dict[str, Tensor]:
        """−log p(label | x_≤i) as a mean over the prefixes of each text, [B], or over its words for tags; and, at one
        prefix of each text given by u in [0, 1), −log p(words that follow) divided by the text's length."""
        guided = cast(Autoregressive, self.guided().to(batch.ids.device))
        canvas = with_ends(batch.ids, batch.lengths)
        place, ends = torch.arange(canvas.shape[1], device=canvas.device), batch.lengths.unsqueeze(1) + 1
        with torch.no_grad(), torch.autocast(canvas.device.type, enabled=False):
            view = guided.view(canvas)
        output, found = self.classifier(view), {}
        for name, one in self.classifier.labellings.items():
            labels, there = batch.labels[name], place <= ends
            if one.kind == "spans":
                found[name] = self.span_nats(name, output.features, labels, batch.lengths, noise)
                continue
            if one.kind == "text":
                labels = labels.unsqueeze(1).expand_as(there)
            else:
                labels = guidance.labels_on_canvas(one, labels, canvas.shape[1], 1)
                there = labels != NOTHING
            nats = -output.text(name).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            found[name] = (nats * there).sum(-1) / there.sum(-1).clamp(min=1)
        at = (u * ends.squeeze(1)).long()  # START, or a word
        behind = torch.where((place > at.unsqueeze(1)) & (place < ends), canvas, PAD)
        follows = torch.zeros(len(canvas), guided.vocabulary, device=canvas.device).scatter(1, behind, 1.0)
        follows[:, PAD] = 0
        answers = self.classifier.following(output.features[torch.arange(len(at), device=at.device), at])
        nats = F.binary_cross_entropy_with_logits(answers.float(), follows, reduction="none").sum(-1)
        return {**found, FOLLOWING: nats / batch.lengths}

    def span_nats(self, name: str, features: Tensor, spans: Tensor, lengths: Tensor, noise: Noise) -> Tensor:
        """−log p(label | x_≤i) as a mean over the spans of each text and as many random pairs of positions, [B], each
        at a random prefix: most pairs are not spans, and a sample of them is enough."""
        count, rows = spans.shape[1], torch.arange(len(spans), device=spans.device).unsqueeze(1)
        u = noise.uniform(0, 4 * count, stream=SPANS)
        a, b = (u[:, : 2 * count] * lengths.unsqueeze(1)).long().chunk(2, dim=1)
        mask = torch.arange(features.shape[1] - 2, device=spans.device) < lengths.unsqueeze(1)
        given = spans[..., 2] != NOTHING
        first = torch.cat([spans[..., 0].clamp(min=0), torch.minimum(a, b)], 1)
        last = torch.cat([spans[..., 1].clamp(min=0), torch.maximum(a, b)], 1)
        there = torch.cat([given, given], 1)
        at = (u[:, 2 * count :] * (lengths + 2).unsqueeze(1)).long()  # START, a word or END; word k is at k + 1
        answers = self.classifier.label_spans(name, features[rows, at], first - at + 1, last - at + 1)
        labels = guidance.span_chart(spans, mask)[rows, first, last]
        nats = -answers.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return (nats * there).sum(-1) / there.sum(-1).clamp(min=1)


def resolve_guided(recipe: Recipe) -> Recipe:
    """Name the model that a classifier guides in a way that holds everywhere. Settings that would have no effect are
    rejected, and data that cannot have labels."""
    for key in ("init", "tokenizer", "vocabulary", "more_than", "longest"):
        if getattr(recipe, key) != Recipe.model_fields[key].default:
            raise UsageError(f"a classifier has words and sizes of the model that it guides: leave {key} out.")
    if file_kind(Path(recipe.data)) != ".jsonl":
        raise UsageError(
            f"a classifier learns from labels, and {recipe.data} is no .jsonl file. "
            'Give one with a text and its labels per line, such as {"text": "...", "topic": "food"}.'
        )
    method = recipe.build_method().model_dump()
    return recipe.model_copy(update={"model": {**method, "guides": resolve_run(method["guides"])}})


def prepare_classifier(setup: Setup) -> Prepared:
    """Load the model that is guided, read the labelled texts, and build the classifier."""
    recipe, method = setup.recipe, setup.recipe.model
    guided, tokenizer, _ = load_run(method["guides"])
    if guided.capabilities.whole_text:
        raise UsageError(NO_WORDS.format(method["guides"], guided.capabilities.whole_text))
    if not guided.capabilities.denoises and guided.capabilities.state != "prefix":
        raise UsageError(f"{method['guides']} is not one of difflm's own models: a classifier cannot see its texts.")
    view: Guided = guided.denoiser if guided.capabilities.denoises else cast(Autoregressive, guided)
    limits = Limits(min(guided.max_words, guided.longest))  # blocks may generate more than they were trained on
    tokens = read_tokens(setup, tokenizer, "train")
    chosen = choose_texts(setup, tokenizer, tokens, limits)
    kept = np.union1d(chosen.training[1], chosen.held_out[1])
    labels = read_labellings(setup, tokens, kept)
    if guided.capabilities.state == "prefix":  # every text has a length, which is one more label
        if any(one.labelling.name == LENGTH for one in labels):
            raise UsageError(f"no label may be called {LENGTH!r} here: lengths are learned without labels. Rename it.")
        lengths = Labelling(LENGTH, "text", (NONE, *map(str, range(1, guided.longest + 1))))
        labels = [*labels, Labels(lengths, np.minimum(tokens.lengths, guided.longest).tolist())]
    begun = read_checked(setup.out / "config.json") if setup.resume else None
    if begun is not None and not guidance.matches_model(view, begun.get("signature", [])):
        raise DifflmError(f"the model that {setup.out} guides has changed: train the classifier again.")
    torch.manual_seed(recipe.seed)
    labellings = [one.labelling for one in labels]
    classifier = build_classifier(labellings, view, guided.longest, method)
    count_words(classifier, tokens, kept, labels)
    columns = {one.labelling.name: one.batch for one in labels}
    batches, validation = make_batches(setup, guided.longest, chosen.training, chosen.held_out, labels=columns)
    config = {
        "format": FORMAT,
        "method": "classifier",
        "signature": guidance.model_signature(view),
        "longest": guided.longest,
        "causal": classifier.causal,
        "labels": [one.to_json() for one in labellings],
        "parameters": sum(p.numel() for p in classifier.parameters() if p.requires_grad),
        "model": method,
        "tokenizer": tokenizer.fingerprint(),
        **chosen.counts,
    }
    kind = PrefixLearner if guided.capabilities.state == "prefix" else Learner
    learner = kind(classifier, guided, method.get("low_noise", 2.0))
    return Prepared(recipe, learner, batches, validation, "label_nats", config)


def read_labellings(setup: Setup, tokens: TokenFile, kept: Ints) -> list[Labels]:
    """Read all labellings of the recipe's texts; at least one must have two values. A text has one tag per token, and
    no more spans than a tree, each once, within its end."""
    path = corpus_path(setup.recipe.data, setup.root)
    found = read_labels(path, setup.recipe.column or "text")
    for labels in found:
        name, kind = labels.labelling.name, labels.labelling.kind
        for number in () if kind == "text" else kept.tolist():
            row, length = labels.rows[number], int(tokens.lengths[number])
            where = f"text {number + 1} of {path} has {length} tokens"
            check_places(labels.labelling, row, length, where)
            if kind == "spans" and len({(first, last) for first, last, _ in row}) < len(row):
                raise UsageError(f"text {number + 1} of {path} has two labels for one span under {name!r}. Give one.")
            if kind == "spans" and len(row) > 2 * length:
                more = f"more than a tree: at most {2 * length}"
                raise UsageError(f"{where} and {len(row)} spans under {name!r}, {more}.")
    same = [one.labelling.name for one in found if not one.tells]
    if len(same) == len(found):
        raise UsageError(f"each label of {path} has only one value: a classifier needs texts of at least two.")
    for name in same:
        setup.report(f"{name!r} is the same in every text: asking for it will change nothing")
    return found


def build_classifier(labellings: list[Labelling], guided: Guided, longest: int, method: Json) -> Classifier:
    sizes = Sizes(**{key: method[key] for key in ("hidden", "layers", "heads", "dropout")})
    if guided.reads_prefixes:
        causal = cast(Autoregressive, guided)
        return PrefixClassifier(labellings, causal.view_dim, longest, causal.vocabulary, sizes)
    codec = cast(Denoiser, guided).codec
    made = Classifier(labellings, codec.view_dim, longest, codec.vocabulary, sizes)
    if codec.state != "vectors":
        # A one-hot input selects a column of the weight. By PyTorch's default scale that is a thirtieth of a position's
        # vector, so it is learned late: after 400 steps on E2E, 14.0 instead of 6.7 nats of labels per text.
        torch.nn.init.normal_(made.trunk.input.weight)
    return made


def count_words(classifier: Classifier, tokens: TokenFile, kept: Ints, found: list[Labels]) -> None:
    """Count how often each word has each tag in the labelled texts."""
    width = int(tokens.lengths[kept].max())
    for number, one in enumerate(found):
        if one.labelling.kind == "tags":
            counts = classifier.word_counts[str(number)].numpy()
            for start in range(0, len(kept), COUNT_BATCH):
                chosen = kept[start : start + COUNT_BATCH]
                ids, labels = tokens.rows(chosen, width)[0], one.batch(chosen, width)
                labelled = labels != NOTHING
                np.add.at(counts, (ids[labelled], labels[labelled]), 1)


def heads_of(folder: Path) -> set[str] | None:
    """Names of the labels that the classifier in a directory knows; None if it cannot be read."""
    try:
        config = read_checked(folder / "config.json")
        return {folder.resolve().name} if "model_type" in config else {one["name"] for one in config["labels"]}
    except (DifflmError, KeyError, TypeError):
        return None


def load_guide(folder: Path, guided: Guided, tokenizer: Tokenizer) -> LabelReader:
    """Load the classifier in a directory; one trained for another model is rejected. A sentence classifier of the
    Hugging Face library works with any model."""
    if not (folder / "config.json").is_file():
        what = "holds no classifier" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}. Give the directory that `difflm train classifier` wrote.")
    config = read_checked(folder / "config.json")
    if isinstance(config, dict) and "model_type" in config:
        if guided.reads_prefixes or not cast(Denoiser, guided).codec.predicts_tokens:
            raise UsageError(
                f"{folder}: a sentence classifier guides diffusion models that predict words; not this one."
            )
        return load_sentence_classifier(folder, tokenizer).to(next(guided.parameters()).device)
    if not isinstance(config, dict) or config.get("format") not in FORMATS or config.get("method") != "classifier":
        raise DifflmError(f"{folder} does not hold a classifier that difflm wrote.")
    path, advice = folder / "model.safetensors", advise_resume(folder)
    tensors = load_tensors(path, advice)
    try:
        guides = Path(config["model"]["guides"]).name
        if config["tokenizer"] != tokenizer.fingerprint() or not guidance.matches_model(guided, config["signature"]):
            raise UsageError(f"the classifier {folder} was made for another model ({guides}), not for this one.")
        labellings = [Labelling(one["name"], one["kind"], tuple(one["values"])) for one in config["labels"]]
        with SkipInit(tensors):
            classifier = build_classifier(labellings, guided, config["longest"], config["model"])
    except NOT_A_MODEL as error:
        raise DifflmError(f"{folder}/config.json does not describe a classifier ({first_line(error)}).") from None
    weights = {name.removeprefix("classifier."): tensor for name, tensor in tensors.items()}
    load_into(classifier, weights, path)
    check_sha256(path, config, advice)
    return classifier.to(next(guided.parameters()).device).eval()
