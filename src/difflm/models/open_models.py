"""Load open diffusion language models from a directory with `config.json`, safetensors and a tokenizer.

None of their code is run, and nothing is unpickled. Every weight of the network must be there, and no other."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.data.chat import Chat
from difflm.data.open_tokenizer import ENDS, MASKS, OpenTokenizer, TokenizerFiles
from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion.base import Codec, Process
from difflm.diffusion.bounds import DiscreteBound
from difflm.diffusion.codecs import Tokens
from difflm.diffusion.codecs.embedding import Logits, SkipEmbedding
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Canvas, Conditioning, Denoiser, SelfConditioning, put_before
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import Objective, cross_entropy
from difflm.diffusion.processes import Absorbing, Gaussian, Uniform
from difflm.diffusion.processes.gaussian import Gumbel
from difflm.diffusion.samplers.loop import BoundDenoiser, Denoise, Steering
from difflm.diffusion.timesteps import LowDiscrepancy
from difflm.errors import DifflmError, UsageError
from difflm.models.base import Losses, Sampling
from difflm.models.diffusion import DiffusionModel, ModelParts, TrainedTexts
from difflm.models.lengths import OwnEnd
from difflm.models.open_families import (
    BUFFERS,
    EMBEDDING,
    FAMILIES,
    HEAD,
    HEAD_BIAS,
    MASKS_OF_NAMES,
    Config,
    Family,
    Layout,
)
from difflm.networks.open_transformer import Dit, DitShape, OpenTransformer, Shape
from difflm.runtime.files import Json, read_json
from difflm.runtime.hub import fetch_from_hub, is_open_config
from difflm.runtime.tensors import Stored, load_tensors


class Prompt(Conditioning):
    """The prompt before the text is read with it, without noise. All prompts of a batch have the same length. For a
    network that does not see later blocks, keys and values of the prompt's complete blocks are computed once, which is
    exact."""

    def prepare(self, denoiser: Denoiser, condition: Condition) -> Condition:
        if condition.source is None or condition.source_mask is None:
            return condition
        length = int(condition.source_mask.sum(-1).max())  # synchronises, once per batch
        source, there = condition.source[:, :length], condition.source_mask[:, :length]
        network, memory = denoiser.network, None
        if kept := cast(OpenTransformer | Dit, network).shape.count_kept(length):
            (vectors,) = denoiser.codec.inputs(source[:, :kept], denoiser.process.at(there[:, 0].float()), None)
            memory = cast(OpenTransformer, network).read_prompt(vectors)
            source, there = source[:, kept:], there[:, kept:]
        return replace(condition, source=source, source_mask=there, memory=memory)

    def place(self, denoiser: Denoiser, canvas: Canvas, condition: Condition) -> Canvas:
        """If the condition is dropped, the prompt is masked (Nie et al., 2025)."""
        if condition.source is None or condition.source_mask is None:
            return canvas
        before = torch.where(condition.source_mask, condition.source, denoiser.process.mask_id)
        memory = () if condition.memory is None else (condition.memory,)
        return replace(put_before(denoiser, canvas, before, torch.ones_like(condition.source_mask)), memory=memory)


@dataclass(frozen=True)
class Answers:
    """Prompts with their answers in training, [B, L]: ids, the positions that are seen, and those that are learned, of
    one of `blocks` [B, 1]."""

    ids: Tensor
    mask: Tensor
    free: Tensor
    blocks: Tensor


class OpenDiffusion(DiffusionModel):
    def __init__(self, denoiser: Denoiser, block: int, layout: Layout, **parts: Unpack[ModelParts]) -> None:
        """`block`: positions per block, for a network that does not attend to later ones; 0: it attends to all."""
        self.block, self.layout = block, layout
        super().__init__(denoiser, **parts)
        self.capabilities = replace(self.capabilities, greedy=self.process.mask_id >= 0, one_by_one=True)

    @property
    def can_hide_known(self) -> bool:
        return self.process.mask_id >= 0 and not self.block  # the prompt's cache depends on the prompt

    def count_before(self, steering: Steering) -> Tensor | None:
        if not self.block:
            return None
        if steering.source_mask is None:
            return torch.zeros(1, 1, dtype=torch.int64, device=self.denoiser.codec.bias.device)
        return steering.source_mask.sum(-1, keepdim=True)

    def bind_denoiser(self, denoiser: Denoiser, mask: Tensor, sampling: Sampling, steering: Steering) -> Denoise:
        if steering.source is None or not sampling.contrast:
            return super().bind_denoiser(denoiser, mask, sampling, steering)
        condition = denoiser.prepare(Condition(steering.source, steering.source_mask))
        return BoundDenoiser(denoiser, mask, condition, sampling.contrast)

    def set_longest(self, longest: int) -> None:
        """Write texts of up to this many tokens, and their END, if no length is asked for."""
        self.longest = self.lengths.longest = longest + 1

    def find_stored(self, layer: str) -> Stored:
        return self.layout.find_key(f"{layer.removeprefix('denoiser.network.')}.weight")

    # -- training on answers ------------------------------------------------------------------------------------

    def lay_out(self, batch: Batch, noise: Noise, ends: bool) -> Answers:
        """Prompts and answers on one canvas. A network that sees everything writes END on the rest of a canvas (Nie et
        al., 2025): with `ends`, answers are followed by a random number of them, up to the longest answer's END. One
        that writes blocks learns one of them at a time, after clean ones; END fills the last."""
        answers, lengths = batch.ids, batch.lengths.unsqueeze(1)
        width = answers.shape[1]
        if batch.source is None or batch.source_lengths is None:
            prompts, before = torch.full_like(answers[:, :1], START), torch.full_like(lengths, self.lengths.first)
        else:
            prompts, before = batch.source, batch.source_lengths.unsqueeze(1)
        most = prompts.shape[1] + width + 1
        most = -(-most // self.block) * self.block if self.block else most
        place, end = torch.arange(most, device=answers.device), before + lengths
        prompts, shown = F.pad(prompts, (0, most - prompts.shape[1])), F.pad(answers, (0, most - width))
        answer = shown.gather(1, (place - before).clamp(min=0))
        ids = torch.where(place < before, prompts, torch.where(place < end, answer, END))
        u = noise.uniform(0, stream=FILLING).unsqueeze(1)
        if not self.block:
            last = end + (u * (width - lengths + 1)).long() * ends
            return Answers(ids, place <= last, (place >= before) & (place <= last), torch.ones_like(u))
        number, first = place // self.block, before // self.block
        count = end // self.block - first + 1
        chosen = first + (u * count).long()
        return Answers(ids, number <= chosen, (place >= before) & (number == chosen), count.to(u))

    def forward(self, batch: Batch) -> Losses:
        """The loss of answers alone; prompts stay as they are."""
        noise = self.training_noise(batch)
        with torch.autocast(batch.ids.device.type, enabled=False):
            made = self.lay_out(batch, noise, ends=True)
            t, weight = self.times.sample(noise, made.free)
        texts = TrainedTexts(made.ids, made.mask, UNCONDITIONAL, noise)
        corrupted = self.corrupt_batch(texts, torch.where(made.free, t.unsqueeze(1), 0.0), weight)
        with torch.autocast(batch.ids.device.type, enabled=False):
            return self.weigh_losses(replace(corrupted, mask=made.free), t, weight, {})

    @torch.no_grad()
    def nats(self, batch: Batch, noise: Noise, draws: int = 1) -> Tensor:
        """Of a text after a prompt, the cross-entropy of its words and END at the middle time."""
        if self.capabilities.likelihood is not None:
            return super().nats(batch, noise, draws)
        made = self.lay_out(batch, noise, ends=False)
        at = torch.where(made.free, self.times.time_of(torch.full_like(made.blocks, self.times.usual)), 0.0)
        own = self.process.draw_noise(noise, 0, self.denoiser.codec.state_shape(made.ids.shape[1]), stream=11)
        x_t = self.process.corrupt(self.denoiser.codec.encode(made.ids), at, own)
        nats = cross_entropy(self.denoiser(x_t, at, made.mask).logits, made.ids) * made.free
        return made.blocks.squeeze(1) * (nats / at.clamp(min=EPSILON)).sum(-1)


ADVICE = "Download it again."
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
GENERATED = 128  # positions of a text if no length is given
CONTINUOUS = (1e-4, 1 - 1e-4)  # times of the bound: its integrand is not finite at the ends
EPSILON, FILLING = 1e-6, 40  # of a time; the random stream of how many END follow an answer
NOT_A_CONFIG = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


@dataclass(frozen=True)
class OpenModel:
    """An open model built from our parts."""

    model: OpenDiffusion
    tokenizer: OpenTokenizer
    config: Json
    chat: Chat | None


def find_open_model(name_or_path: str | Path) -> Path | None:
    """The directory of an open model; None for all other names."""
    path = Path(name_or_path) / "config.json"
    return path.parent if path.is_file() and is_open_config(read_json(path)) else None


# -- weights ----------------------------------------------------------------------------------------------------------


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a directory, from one file or from several that an index lists."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return load_tensors(single, ADVICE)
    if not index.is_file():
        if pickles := sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES):
            raise DifflmError(f"{folder}/{pickles[0]} is a pickle, which may run code when it is read: none is loaded.")
        raise DifflmError(f"{folder} holds no model.safetensors.")
    listed = read_json(index)
    places = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(places, dict) or any(
        Path(str(name)).name != name or not name.endswith(".safetensors") for name in places.values()
    ):
        raise DifflmError(f"{index} lists no safetensors files of its directory.")
    weights: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        weights |= load_tensors(folder / name, ADVICE)
    if apart := sorted(weights.keys() ^ places.keys()):
        raise DifflmError(f"{index} and its files disagree about {apart[0]}. {ADVICE}")
    return weights


def recognise(folder: Path, keys: Sequence[str]) -> tuple[Family, Json]:
    """The family of a model, by its config and keys, and its config, completed from its name."""
    config = read_json(folder / "config.json")
    config = config if isinstance(config, dict) else {}
    kind = str(config.get("model_type", ""))
    name = next((family.name for family in FAMILIES.values() if kind in family.kinds), kind)
    if {"tokens", "graph", "noise", "model"} <= config.keys():
        name = "sedd"
    if kind == "gpt2" and any(key.startswith("denoise_model.") for key in keys):
        name = "diffugpt"
    if name not in FAMILIES:
        raise UsageError(f"{folder}: diffusion models of the kind {kind or 'of this config.json'} are not supported.")
    family = FAMILIES[name]
    if (block := family.find_block(str(folder))) and not config.get("block_size"):
        config["block_size"] = block
    masks = [number for name, number in MASKS_OF_NAMES.items() if name in str(folder).lower()]
    if masks and config.get("mask_token_id") is None:
        config["mask_token_id"] = masks[0]
    return family, config


@contextmanager
def explain_config(folder: Path, family: Family) -> Iterator[None]:
    """Turn what fails when a config is read into one line."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{folder}/config.json: {error}.") from None
    except NOT_A_CONFIG as error:
        raise DifflmError(f"{folder}/config.json does not describe a {family.name} model ({error}).") from None


def load_network(
    folder: Path, dtype: torch.dtype, device: torch.device, rows: Sequence[int] | None = None, mask: int | None = None
) -> tuple[OpenTransformer | Dit, Tensor]:
    """Load the network of a directory and its token embedding. `rows` are the tokens to keep, in this order, followed
    by the `mask` in the embedding; None: all as they are."""
    weights = read_weights(folder)
    family, config = recognise(folder, [*weights])
    if family.noise == "gaussian":
        config["gumbel"] = take_gumbel(folder, weights)
    with explain_config(folder, family), torch.device("meta"):  # allocates nothing, whatever a damaged config says
        shape = family.layout.read_shape(config)
        network = shape.build(family.count_words(config))
    found = collect_weights(folder, weights, network, family.layout, config)
    weights.clear()  # each is freed as soon as it is cast
    for name in [*found]:
        own = found[name]
        if rows is not None and name in (EMBEDDING, HEAD, HEAD_BIAS):
            chosen = [*rows, mask] if name == EMBEDDING and mask is not None else [*rows]
            own = own[torch.tensor(chosen)]
        found[name] = own.to(device, dtype).contiguous()
    embedding = found.pop(EMBEDDING)
    if is_tied(config):
        found[HEAD] = embedding[: len(found[HEAD])]  # one matrix for both
    if rows is not None:
        with torch.device("meta"):
            network = shape.build(len(rows))
    network.load_state_dict(found, assign=True)
    return network.requires_grad_(False).eval(), embedding


def take_gumbel(folder: Path, weights: dict[str, Tensor]) -> tuple[float, float]:
    """LangFlow's schedule, which is learned and stored among the weights."""
    weights.pop("proposal.entropy", None)  # what the schedule was fitted to
    try:
        loc, scale = (float(weights.pop(f"proposal.{name}")) for name in ("loc", "scale"))
    except (KeyError, RuntimeError) as error:
        raise DifflmError(f"{folder} is not a langflow model: it lacks a number {error}.") from None
    return loc, scale


def collect_weights(
    folder: Path, weights: dict[str, Tensor], network: nn.Module, layout: Layout, config: Config
) -> dict[str, Tensor]:
    """The weights of a network by name, and its token embedding; missing or surplus ones are an error."""
    shapes = {name: weight.shape for name, weight in network.named_parameters()}
    shapes[EMBEDDING] = network.get_parameter(HEAD).shape
    stored = {name: layout.find_key(name) for name in shapes}
    if is_tied(config):
        tie_weights(folder, weights, stored[EMBEDDING].key, stored[HEAD].key)
    wanted, there = {one.key for one in stored.values()}, {key for key in weights if not BUFFERS.search(key)}
    for what, names in (("lacks", wanted - there), ("has a surplus key:", there - wanted)):
        if names:
            raise DifflmError(f"{folder} is not what its config.json says: it {what} {sorted(names)[0]}.")
    found = {name: stored[name].take(weights[stored[name].key]) for name in shapes}
    for name, shape in shapes.items():
        if found[name].shape != shape:
            raise DifflmError(f"{folder}: {stored[name].key} has another shape than its config.json says.")
    return found


def is_tied(config: Config) -> bool:
    return bool(config.get("tie_word_embeddings", config.get("weight_tying", config.get("model_type") == "gpt2")))


def tie_weights(folder: Path, weights: dict[str, Tensor], embedding: str, head: str) -> None:
    """Files hold one or both names of a tied pair."""
    if embedding in weights and head in weights and not torch.equal(weights[embedding], weights[head]):
        raise DifflmError(f"{folder}: {embedding} and {head} differ, though its config.json says that they are one.")
    for one, other in ((embedding, head), (head, embedding)):
        if one not in weights and other in weights:
            weights[one] = weights[other]


# -- tokens -----------------------------------------------------------------------------------------------------------


def find_tokenizer(folder: Path, family: Family) -> Path:
    """The directory of a model's tokenizer. Some families use a common one and do not include it."""
    if not family.tokenizer or any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return folder
    try:
        return fetch_from_hub(family.tokenizer)
    except UsageError:
        raise UsageError(f"{folder} holds no tokenizer.json: put that of {family.tokenizer} there.") from None


def find_mask(folder: Path, family: Family, config: Config, files: TokenizerFiles, rows: int) -> int:
    """The id of the mask. All places that name one must agree."""
    said = {
        "its tokenizer": files.find("mask_token"),
        "its config.json": config.get("mask_token_id"),
        "its family": family.find_mask(config),
        **{f"its token {files.encoder.id_to_token(found)}": found for found in files.find_among(MASKS)},
    }
    named = {who: number for who, number in said.items() if number is not None}
    if not named:
        raise UsageError(f'{folder} names no mask: add "mask_token_id" to its config.json.')
    (first, mask), *others = named.items()
    for who, number in others:
        if number != mask:
            raise UsageError(f"{folder}: the mask is {mask} for {first} and {number} for {who}: they disagree.")
    if not isinstance(mask, int) or not 0 <= mask < rows:
        raise UsageError(f"{folder}: its mask {mask} is outside the {rows} rows of its embedding.")
    return mask


def find_special(name: str, config: Config, files: TokenizerFiles) -> int | None:
    """The id of a token such as "eos", from the config or the tokenizer."""
    found = config.get(f"{name}_token_id")
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, int) else files.find(f"{name}_token")


def find_end(config: Config, files: TokenizerFiles) -> int | None:
    """The id of the token that ends a text."""
    end = find_special("eos", config, files)
    return end if end is not None else next(iter(files.find_among(ENDS)), None)


def load_open_model(folder: Path, device: torch.device, dtype: torch.dtype) -> OpenModel:
    """Load a model of another library's format; inconsistent files are rejected with a one-line error."""
    if dtype is torch.int8:
        raise UsageError("dtype int8 is for difflm's own Transformer: leave it out.")
    family, config = recognise(folder, [*stored_keys(folder)])
    files = TokenizerFiles(find_tokenizer(folder, family))
    with explain_config(folder, family):
        rows, context = family.count_words(config), family.count_positions(config)
    mask = find_mask(folder, family, config, files, rows) if family.noise == "masks" else None
    end = find_end(config, files)
    if end is None or end >= rows or end == mask:
        raise UsageError(f'{folder} names no token that ends a text: add "eos_token_id" to its config.json.')
    bos, cls, unknown, padding = (find_special(name, config, files) for name in ("bos", "cls", "unk", "pad"))
    specials = [end if one is None else one for one in (cls if bos is None else bos, end, unknown, padding)]
    if outside := [number for number in specials if not 0 <= number < rows or number == mask]:
        raise UsageError(f"{folder}: the special token {outside[0]} is the mask, or none of its {rows} tokens.")
    tokenizer = OpenTokenizer(files.definition, specials, () if mask is None else (mask,), rows, folder)
    network, embedding = load_network(folder, dtype, device, tokenizer.theirs, mask)
    shape = network.shape
    process, codec = build_state(family, shape, embedding, tokenizer.size)
    codec.bias = nn.Parameter(torch.zeros(tokenizer.size, device=device), requires_grad=False)
    listed = config.get("eos_token_id")
    more = [*files.find_among(family.ends), *(listed if isinstance(listed, list) else ())]
    ends = [one for one in dict.fromkeys([END, *map(tokenizer.our_id, more)]) if one not in (START, UNK, PAD)]
    forbidden = {START, UNK, PAD, *tokenizer.marks} - {*ends}
    begins = family.shifts or (cls is not None and bos in (None, cls))
    lengths = OwnEnd(min(GENERATED, context), context, begins, ends, sorted(forbidden))
    block = min((size for size in (family.sampling.block, shape.block) if size), default=0)
    estimates = SelfConditioning() if family.noise == "gaussian" else None
    model = OpenDiffusion(
        Denoiser(network, codec, process, Prompt(), estimates),
        shape.block,
        family.layout,
        objective=Objective({"elbo": 1.0}),
        times=LowDiscrepancy(limits=CONTINUOUS),
        lengths=lengths,
        sampling=replace(family.sampling, block=block),
        # The bound does not hold for blocks, or after a token that is always given.
        bound=None if shape.block or begins or family.noise == "gaussian" else DiscreteBound(),
    )
    parameters = sum(weight.numel() for weight in network.parameters()) + embedding.numel() * (not is_tied(config))
    about = {"method": family.name, "parameters": parameters, "sampling": {}, "recipe": {}}
    # An answer has at least one token, and its end.
    chat = Chat(files.template, tokenizer, files.settings, folder, context - 2) if files.template is not None else None
    return OpenModel(model.requires_grad_(False).eval(), tokenizer, about, chat)


def build_state(family: Family, shape: Shape | DitShape, embedding: Tensor, words: int) -> tuple[Process, Codec]:
    """The process and the codec: of tokens, or of vectors of length √D."""
    if family.noise == "gaussian":
        table = F.normalize(embedding.float(), dim=-1) * math.sqrt(embedding.shape[1])
        curve = Gumbel(*cast(DitShape, shape).gumbel or ())
        return Gaussian(curve), SkipEmbedding(table, prediction=Logits(evidence=True))
    process = Absorbing(words) if family.noise == "masks" else Uniform(words)
    with torch.device("meta"):
        codec = Tokens(words, embedding.shape[1], process.states)
    codec.raw = nn.Parameter(embedding, requires_grad=False)
    return process, codec


def stored_keys(folder: Path) -> dict[str, int]:
    """The names of a directory's tensors, and the numbers of their elements, without reading them."""
    from safetensors import safe_open

    keys: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                keys |= {key: math.prod(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except Exception:  # reading the tensors will report the error
            continue
    return keys


def describe_open_model(folder: Path) -> Json:
    """What a directory holds, from its config, its tokenizer and the headers of its weights, which are not read."""
    sizes = stored_keys(folder)
    family, config = recognise(folder, [*sizes])
    with explain_config(folder, family):
        shape = family.layout.read_shape(config)
        words, context = family.count_words(config), family.count_positions(config)
    files = TokenizerFiles(folder)
    there = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    # The bound does not hold after a token that is always given (`load_open_model`).
    bos, cls = (find_special(name, config, files) if there else None for name in ("bos", "cls"))
    begins = family.shifts or (cls is not None and bos in (None, cls) if there else family.begins)
    named = ("hidden", "layers", "heads", "block")
    return {
        "family": family.name,
        "noise": family.noise,
        "parameters": sum(size for key, size in sizes.items() if not BUFFERS.search(key)),
        "shape": {name: size for name in named if (size := getattr(shape, name))},
        "vocabulary": words,
        "context": context,
        "tokenizer": files.definition.get("model", {}).get("type") if there else None,
        "tokenizer_of": None if there else family.tokenizer or None,
        "chat": files.template is not None,
        "bound": not (shape.block or begins or family.noise == "gaussian"),
        "sampling": {"sampler": family.sampling.sampler, "steps": family.sampling.steps},
    }
