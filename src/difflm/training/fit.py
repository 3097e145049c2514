"""From a recipe to a run: read the texts, build the tokenizer and the model, train."""

import json
import shlex
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from difflm.data.batches import PackedBatches, PackedRows, held_out, split
from difflm.data.chat import ChatSources
from difflm.data.corpora import NAMES, corpus_examples, corpus_path, resolve_data
from difflm.data.labels import read_labels, read_noise
from difflm.data.open_tokenizer import TokenizerFiles
from difflm.data.remote import fetch_remote, is_remote
from difflm.data.tokenfile import Ints, Limits, TokenFile, tokens_that_hold_most
from difflm.data.tokenizers import UNK, Tokenizer
from difflm.diffusion.noise import Noise
from difflm.errors import DifflmError, UsageError
from difflm.methods import METHODS, TextSpec
from difflm.models.autoregressive import Autoregressive
from difflm.models.base import LanguageModel
from difflm.models.open_models import OpenModel, load_open_model
from difflm.networks.low_rank import adapt_linears
from difflm.runtime.distributed import current
from difflm.runtime.files import OF_WEIGHTS, append_line, locked, refuse_links, write_checked
from difflm.runtime.threads import check_process
from difflm.training import texts
from difflm.training.checkpoints import newest_checkpoint, read_whole_config
from difflm.training.classifier import prepare_classifier, resolve_guided
from difflm.training.model_card import finish_run
from difflm.training.pace import set_pace
from difflm.training.recipe import Recipe, check, check_init, read_recipe
from difflm.training.run import WRITTEN, load_run, refuse_broken, resolve_run
from difflm.training.texts import Prepared, Setup
from difflm.training.trainer import Outcome, Trainer, Watcher
from difflm.training.validation import Figure

CHANGEABLE = ("steps", "minutes", "lr", "log")  # keys of a recipe that may change when a run is resumed
Changes = dict[str, tuple[object, object]]  # the values before and now, by key
Origin = tuple[Ints, Ints]  # seed and sample number of the teacher's noise for each text
Initial = tuple[LanguageModel, Tokenizer]


def train_run(setup: Setup, watcher: Watcher, command: Sequence[str] = ()) -> Outcome:
    """Train a model or a classifier in a directory, which is locked during training, or continue the run there. A
    finished model gets a card that names the command, if there is one; a classifier is part of a model, without a card
    of its own."""
    recipe, root = setup.recipe, setup.root
    recipe = recipe.model_copy(update={"data": resolve_data(recipe.data, root), "init": resolve_run(recipe.init)})
    guides = recipe.method == "classifier"
    if guides:
        recipe = resolve_guided(recipe)
    if is_remote(recipe.data) and current().first:
        fetch_remote(recipe.data, root, recipe.column, setup.note)
    prepare = {"classifier": prepare_classifier, "lora": prepare_open}.get(recipe.method, prepare_model)
    outcome = train_prepared(replace(setup, recipe=recipe), prepare, watcher)
    if command and not guides and outcome.stopped != "interrupted" and current().first:
        finish_run(setup.out, shlex.join(command))
    return outcome


def train_prepared(setup: Setup, prepare: Callable[[Setup], Prepared], watcher: Watcher) -> Outcome:
    """Prepare a run and train it. If preparing fails, nothing is left behind. With several processes, the first one
    builds the tokenizer and token files, which the others read, and writes all files."""
    check_process()
    out, resume, processes = setup.out, setup.resume, current()
    if processes.count > 1 and not (setup.recipe.steps or resume):
        raise UsageError("several processes cannot choose how many steps fit into `minutes`: give steps=N.")
    check_shares(processes.count, setup.recipe.batch_size)
    if not processes.first:
        processes.any()
        setup = replace(setup, resume=True)
    with locked(out) if processes.first else nullcontext():
        changes: Changes = {}
        if resume:
            recipe, changes = check_same_recipe(setup.recipe, out)
            setup = replace(setup, recipe=recipe)
        elif processes.first and ((out / "config.json").exists() or newest_checkpoint(out)):
            raise UsageError(f"{out} already holds a run. Continue it with --resume or choose another --out.")
        elif processes.first:
            refuse_links(out, WRITTEN)
        with remove_on_failure(out, keep=setup.resume):  # also set for the other processes
            ready = prepare(setup)
            if processes.first:
                processes.any()
            pace = set_pace(ready.recipe, ready.config, setup.begun, setup.note)
            trainer = Trainer(ready.model, ready.recipe, out, setup.device, ready.figure, pace=pace)
            if resume:
                trainer.resume(setup.note)
            if processes.first:
                record_changes(changes, trainer.step, ready.recipe.steps, setup)
                write_checked(out / "recipe.json", ready.recipe.model_dump())
                before = read_whole_config(out)  # whose weights do not change: their checksum is kept
                kept = {key: before[key] for key in OF_WEIGHTS if key in before}
                write_checked(out / "config.json", {**ready.config, **kept})
        outcome = trainer.fit(ready.batches, ready.held_out, watcher)
        if processes.first:
            write_checked(out / "config.json", {**ready.config, **outcome.summary()})
            if ready.tokenizer is not None and not (out / "tokenizer.json").exists():
                ready.tokenizer.save(out / "tokenizer.json")
                setup.note(f"{out}/tokenizer.json was removed during training; it is written again", texts.WARN)
        return outcome


def check_shares(processes: int, batch_size: int) -> None:
    """Reject a batch that the processes cannot share evenly. Each share has an even number of texts, since every second
    text of a batch is trained differently."""
    if processes > 1 and batch_size % (2 * processes):
        raise UsageError(
            f"batch_size={batch_size} is that of all {processes} processes: give a multiple of {2 * processes}."
        )


@contextmanager
def remove_on_failure(out: Path, keep: bool) -> Iterator[None]:
    """Remove what was written to `out` when preparing a run fails, unless there was something to `keep`."""
    before = set(out.iterdir())
    try:
        yield
    except BaseException:
        for path in set() if keep else set(out.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise


def check_same_recipe(recipe: Recipe, out: Path) -> tuple[Recipe, Changes]:
    """The recipe that a run is resumed with: the original one, with the sizes that were chosen from its texts, and
    deliberate changes."""
    before = check(read_recipe(out))
    first = dict(before)
    sizes = {key: dict(recipe)[key] or first[key] for key in ("longest", "source_longest")}
    recipe = recipe.model_copy(update=sizes)
    changes = {key: (first[key], now) for key, now in dict(recipe).items() if first[key] != now}
    for key, (then, now) in changes.items():
        if key not in CHANGEABLE or (key == "minutes" and before.steps):
            allowed = f"{', '.join(CHANGEABLE[:-1])} and {CHANGEABLE[-1]}"
            raise UsageError(f"{out} was started with {key}={then}, not {now}. Only {allowed} may change at --resume.")
    return recipe, changes


def record_changes(changes: Changes, step: int, steps: int, setup: Setup) -> None:
    """Record in the metrics which settings apply from this step on, of `steps`. The recipe is written afterwards: if
    the run is killed in between, it records them again."""
    if 0 < steps < step:
        raise UsageError(f"{setup.out} is at step {step:,} already: give steps={step} or more.")
    if "lr" in changes and steps == step:
        raise UsageError(f"{setup.out} has taken all of its {step:,} steps: with another lr, give more steps=N too.")
    if changes:
        append_line(setup.out / "metrics.jsonl", json.dumps({"kind": "resumed", "step": step, **changes}))
        said = ", ".join(f"{key}={now} instead of {then}" for key, (then, now) in changes.items())
        setup.note(f"from step {step:,} on: {said}", texts.INFO)


# -- a model of our own ------------------------------------------------------------------------------------------------


def prepare_model(setup: Setup) -> Prepared:
    """Read the texts of a recipe, and build the tokenizer and the model."""
    recipe, out = setup.recipe, setup.out
    initial: Initial | None = None
    if recipe.init:
        setup.note(f"loading {Path(recipe.init).name}", texts.DOING)
        check_init(recipe)
        initial = load_run(recipe.init)[:2]
    elif not setup.resume:
        setup.note("learning a tokenizer", texts.DOING)
    if not setup.resume:
        (initial[1] if initial else texts.build_tokenizer(setup)).save(out / "tokenizer.json")
    tokenizer = Tokenizer.load(out / "tokenizer.json")
    own = tokenizer.fingerprint()
    if setup.resume and read_whole_config(out).get("tokenizer", own) != own:
        raise DifflmError(f"{out}/tokenizer.json is damaged: the run was started with another. Copy it again.")
    tokens = texts.read_tokens(setup, tokenizer, "train")
    recipe = texts.choose_sizes(setup, tokenizer, tokens)
    setup = replace(setup, recipe=recipe)
    torch.manual_seed(recipe.seed)
    sources = tokenizer.for_sources.size if recipe.source_words == "own" else 0
    spec = TextSpec(tokenizer.size, recipe.longest, recipe.source_longest, sources, tokenizer)
    model = recipe.build_method().build(spec)
    refuse_broken(model)
    prepare = prepare_packed if recipe.rows == "packed" else prepare_rows
    return prepare(setup, model, tokenizer, tokens, initial)


def prepare_rows(
    setup: Setup, model: LanguageModel, tokenizer: Tokenizer, tokens: TokenFile, initial: Initial | None
) -> Prepared:
    """Choose the texts that fit, a row each; hold some out; count what the model begins with, and make batches."""
    recipe, able, longest = setup.recipe, model.capabilities, setup.recipe.longest
    limits = Limits(min(model.max_words, longest), recipe.source_longest, model.lengths.room)
    advice = texts.advise_longest(recipe, longest - limits.target, tokens)
    chosen = texts.choose_texts(setup, tokenizer, tokens, limits, advice)
    subset, counts = chosen.training[1], chosen.counts
    counts["held_out_seen"] = texts.count_overlap(setup, *chosen.training, *chosen.held_out)
    if not (initial and isinstance(model, type(initial[0]))):
        for part in model.pair_readers:
            part.read_pairs(texts.count_neighbours(tokens, subset, longest, tokenizer.size))
    start_weights(setup, model, tokenizer, *texts.histograms(tokens, subset, longest, tokenizer.size), initial)
    if tokens.sources is not None:
        lengths = tokens.sources.lengths[subset], tokens.lengths[subset]
        model.observe_pairs(texts.count_pairs(*lengths, recipe.source_longest + 1, longest + 1))
    origin: Origin | None = None
    if able.coupled:
        if not initial:
            raise UsageError("a coupled model starts from its teacher: give init=MODEL, which wrote the texts.")
        origin = read_noise(corpus_path(recipe.data, setup.root), recipe.column or "text")
        kept = np.union1d(subset, chosen.held_out[1])
        drawn = initial[0].draw_lengths(Noise(torch.from_numpy(origin[0][kept]), torch.from_numpy(origin[1][kept])))
        # These come from another teacher, or are tokenized differently from how they were generated.
        if odd := int((drawn.numpy() != tokens.lengths[kept]).sum()):
            name = Path(str(recipe.init)).name
            setup.report(f"{odd:,} of {len(kept):,} texts do not have the length that {name} gives to their noise")
    batches, validation = texts.make_batches(setup, longest, chosen.training, chosen.held_out, origin=origin)
    if tokens.holds_pieces:
        counts["whole_texts_held_out"] = True
    if recipe.task == "prompts":
        labels = read_labels(corpus_path(recipe.data, setup.root), recipe.column or "text")
        counts["labels"] = [one.labelling.to_json() for one in labels]
    noisy = {"vectors", "simplex"} & {*able.settings} or able.whole_text
    others: Figure = "round_nats" if METHODS[recipe.method].family == "edits" else "masked_nats"
    unlikely: Figure = "pair_nats" if origin else "noisy_nats" if noisy else others
    figure: Figure = "nats_per_token" if able.likelihood else unlikely
    config = texts.describe_run(recipe, model, tokenizer, counts)
    return Prepared(recipe, model, batches, validation, figure, config, tokenizer)


def prepare_packed(
    setup: Setup, model: LanguageModel, tokenizer: Tokenizer, tokens: TokenFile, initial: Initial | None
) -> Prepared:
    """The same for rows that hold several documents. Those that are held out are packed separately: the corpus's own
    split, or a hundredth of a file that has none."""
    recipe, total = setup.recipe, len(tokens)
    valid, held = tokens, held_out(total, recipe.seed)
    if recipe.data in NAMES:
        valid = texts.read_tokens(setup, tokenizer, "valid")
        held = np.arange(len(valid))
        rows, checked = PackedRows(tokens, recipe.longest), PackedRows(valid, recipe.longest)
    else:
        if tokens.holds_pieces:
            _, held = split(np.arange(total), total, recipe.seed, tokens.texts)
        rows, checked = PackedRows(tokens, recipe.longest, held), PackedRows(tokens, recipe.longest, only=held)
    few = frozenset(held.tolist() if valid is tokens else ())
    overlap = texts.count_overlap(setup, tokens, (number for number in range(total) if number not in few), valid, held)
    learned = total - len(few)
    setup.report(f"{learned:,} texts of {rows.total:,} tokens in {len(rows):,} rows of {recipe.longest}")
    counts = {"texts": learned, "held_out": len(held), "held_out_seen": overlap, "left_out": 0, "rows": len(rows)}
    counts |= {"whole_texts_held_out": True} if tokens.holds_pieces else {}
    lengths, words = map(torch.from_numpy, rows.count(tokenizer.size))
    start_weights(setup, model, tokenizer, lengths, words, initial)
    size = min(recipe.batch_size, len(checked))
    fixed = PackedBatches(checked, size, recipe.seed)
    validation = [fixed.batch(step) for step in range(min(texts.VALIDATION_BATCHES, len(checked) // size))]
    batches = PackedBatches(rows, recipe.batch_size, recipe.seed)
    config = texts.describe_run(recipe, model, tokenizer, counts)
    return Prepared(recipe, model, batches, validation, "nats_per_token", config, tokenizer)


def start_weights(
    setup: Setup, model: LanguageModel, tokenizer: Tokenizer, lengths: Tensor, words: Tensor, initial: Initial | None
) -> None:
    """Initialise a model with the weights of another, or with statistics of the texts, and with pretrained weights if
    its method has some."""
    recipe = setup.recipe
    if initial and isinstance(model, type(initial[0])):
        model.start_from(initial[0], lengths)
    else:
        model.observe(lengths, words)
        if recipe.lora or not newest_checkpoint(setup.out):  # its weights would replace these
            recipe.build_method().start(model, tokenizer)
            if initial:
                begin_with_twin(model, initial[0])
    if initial:
        unknown, total = int(words[UNK]), int(words.sum())
        if unknown == total:
            raise DifflmError(f"{recipe.init} knows no word of {recipe.data}. Train without init=.")
        if unknown:
            name = Path(str(recipe.init)).name
            setup.report(f"{unknown:,} of {total:,} words are unknown to {name} and count as unknown words")
    add_adapters(recipe, model)


@torch.no_grad()
def begin_with_twin(model: LanguageModel, twin: LanguageModel) -> None:
    """Copy the network of a left-to-right model into one that denoises tokens: words, layers, the source's encoder. The
    mask is initialised with the mean word vector; learned positions, which the twin does not have, with zeros."""
    other = cast(Autoregressive, twin)
    network, table = model.denoiser.network, model.denoiser.codec.get_parameter("raw")
    own = network.state_dict()
    fitting = {k: v for k, v in other.network.state_dict().items() if k in own and own[k].shape == v.shape}
    network.load_state_dict(fitting, strict=False)
    table.copy_(other.embedding.weight.mean(0).expand_as(table))
    table[: other.vocabulary] = other.embedding.weight
    if "places" in own:
        own["places"].zero_()


# -- somebody else's model, with adapters ------------------------------------------------------------------------------


def add_adapters(recipe: Recipe, model: torch.nn.Module) -> None:
    """Freeze a model but for the adapters that a recipe asks for, if it does."""
    if recipe.lora:
        if current().shards:
            raise UsageError("lora: adapters are small; leave --shard out.")
        torch.manual_seed(recipe.seed)
        adapt_linears(model, recipe.lora, recipe.scaling, recipe.targets)


def prepare_open(setup: Setup) -> Prepared:
    """Load somebody else's diffusion model, add adapters, and read conversations or texts as it spells them."""
    recipe, folder = setup.recipe, Path(setup.recipe.model["pretrained"])
    if recipe.has_sources and not setup.resume:  # mistakes are found before the model is loaded
        if TokenizerFiles(folder).template is None:
            raise UsageError(f"{folder} has no chat template, in tokenizer_config.json or chat_template.jinja.")
        deque(corpus_examples(recipe.data, setup.root, column=recipe.column, task=recipe.task), maxlen=0)
    setup.note(f"loading {folder.name}", texts.DOING)
    narrow = recipe.adapt_to(setup.device.type).precision == "bf16"
    found = load_open_model(folder, setup.device, torch.bfloat16 if narrow else torch.float32)
    model, tokenizer = found.model, found.tokenizer
    if not model.process.masks:
        raise UsageError(f"{folder}: adapters are learned for models that write by masks; this one does not.")
    if found.chat is not None:
        tokenizer.for_sources = ChatSources(found.chat)
    tokens = texts.read_tokens(setup, tokenizer, "train")
    recipe = choose_lengths(recipe, found, tokens)
    # All canvases have room for the longest answer: what follows an answer depends on no other.
    setup = replace(setup, recipe=recipe.model_copy(update={"widths": (recipe.longest,)}))
    limits = Limits(recipe.longest, recipe.source_longest)
    advice = "Give a larger longest or source_longest."
    chosen = texts.choose_texts(setup, tokenizer, tokens, limits, advice)
    add_adapters(recipe, model)
    model.set_longest(recipe.longest)
    if recipe.has_sources:
        model.capabilities = replace(model.capabilities, likelihood=None)
    figure: Figure = "masked_nats" if model.capabilities.likelihood is None else "nats_per_token"
    batches, validation = texts.make_batches(setup, recipe.longest, chosen.training, chosen.held_out)
    config = texts.describe_run(recipe, model, tokenizer, chosen.counts)
    return Prepared(recipe, model, batches, validation, figure, config)


def choose_lengths(recipe: Recipe, found: OpenModel, tokens: TokenFile) -> Recipe:
    """The recipe with sizes that hold 99 % of the answers and prompts, within what the model reads."""
    room, source = found.model.lengths.max_words, recipe.source_longest
    longest = recipe.longest or min(texts.round_up(tokens_that_hold_most(tokens.lengths)), room // 2)
    if tokens.sources is not None:
        source = min(source or texts.round_up(tokens_that_hold_most(tokens.sources.lengths)), room - longest)
    if longest > room or (tokens.sources is not None and source < 1):
        raise UsageError(f"longest={longest} leaves no room for prompts: this model reads {room} tokens.")
    return recipe.model_copy(update={"longest": longest, "source_longest": source})
