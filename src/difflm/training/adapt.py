"""Adapters in training: put into a model that starts from another one, or into somebody else's diffusion model."""

from collections import deque
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from difflm.data.chat import ChatSources
from difflm.data.corpora import corpus_examples
from difflm.data.open_tokenizer import TokenizerFiles
from difflm.data.tokenfile import Limits, TokenFile, select_texts, tokens_that_hold_most
from difflm.errors import UsageError
from difflm.models.open_models import OpenModel, load_open_model
from difflm.networks.low_rank import adapt_linears
from difflm.runtime.distributed import current
from difflm.training import texts
from difflm.training.recipe import Recipe
from difflm.training.texts import Prepared, Setup
from difflm.training.validation import Figure


def add_adapters(recipe: Recipe, model: nn.Module) -> None:
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
    setup = replace(setup, recipe=choose_lengths(setup, found, tokens))
    recipe = setup.recipe
    selection = select_texts(tokens, Limits(recipe.longest, recipe.source_longest))
    training, held_out = texts.read_splits(setup, tokenizer, tokens, selection)
    texts.report_left_out(setup, selection, held_out[1], "Give a larger longest or source_longest.")
    add_adapters(recipe, model)
    model.set_longest(recipe.longest)
    # All canvases have room for the longest answer: what follows an answer depends on no other.
    wide = replace(setup, recipe=recipe.model_copy(update={"widths": (recipe.longest,)}))
    if recipe.has_sources:
        model.capabilities = replace(model.capabilities, likelihood=None)
    figure: Figure = "masked_nats" if model.capabilities.likelihood is None else "nats_per_token"
    batches, validation = texts.make_batches(wide, recipe.longest, training, held_out)
    counts = {"texts": len(training[1]), "held_out": len(held_out[1]), **texts.count_left_out(recipe, selection)}
    config = texts.describe_run(recipe, model, tokenizer, counts)
    return Prepared(recipe, model, batches, validation, figure, config)


def choose_lengths(setup: Setup, found: OpenModel, tokens: TokenFile) -> Recipe:
    """The recipe with sizes that hold 99 % of the answers and prompts, within what the model reads."""
    recipe, room = setup.recipe, found.model.lengths.max_words
    longest = recipe.longest or min(texts.round_up(tokens_that_hold_most(tokens.lengths)), room // 2)
    source = recipe.source_longest
    if tokens.sources is not None:
        source = source or texts.round_up(tokens_that_hold_most(tokens.sources.lengths))
        source = min(source, room - longest)
    if longest > room or (tokens.sources is not None and source < 1):
        raise UsageError(f"longest={longest} leaves no room for prompts: this model reads {room} tokens.")
    return recipe.model_copy(update={"longest": longest, "source_longest": source})
