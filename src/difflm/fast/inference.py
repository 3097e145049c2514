"""How a model generates: cast, compiled, with captured sampling steps. The model itself does not change."""

import copy
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.data.tokenizers import PAD
from difflm.diffusion.base import Network
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Frame, RowStates, SamplerInputs, Steering
from difflm.fast.accelerate import accelerate
from difflm.fast.cpu_layers import pack_layers, use_eight_bits
from difflm.fast.cuda_graphs import (
    CapturedCalls,
    CapturedFunction,
    CapturedLengths,
    GraphPool,
    capture_key,
    is_capturing,
)
from difflm.fast.recorded import (
    JoinableSampler,
    RecordedDecoder,
    RecordedSampler,
    ask_few_places,
    can_capture,
    recorder_of,
)
from difflm.fast.repairs import GROWTH, Repairs, expect_nearby, unwritten_log_probs
from difflm.machine import is_on
from difflm.models.autoregressive import Autoregressive
from difflm.models.base import LanguageModel, PrefixModel, Runner, Sampling, TextBatch
from difflm.models.batching import WIDTH
from difflm.models.diffusion import DiffusionModel
from difflm.models.lengths import LengthPredictor
from difflm.networks.transformer import Transformer
from difflm.runtime.tensors import module_tensors, storage_addresses

T = TypeVar("T")
MAX_RECORDED = 8  # captured samplers, one per shape
MAX_DECODERS = 4  # captured left-to-right decoders; so many readings of repairs, too, which keep logits
MAX_BEAM_ROWS = 1024  # partial texts that are searched at once
MAX_LOGITS = 2**27  # limit for a captured scoring pass, whose memory is kept
MAX_TIMES = 128  # steps whose modulations a CPU keeps: for `e2e` 74 KB each, four times as much in batches of four
ALIGNMENT = 8


class Inference(Runner):
    """`dtype` is the network's arithmetic while it generates, unless the model itself gives one; int8 applies only to
    the matrix products in its blocks. `record` captures sampling steps; None: on a GPU. One object may generate several
    batches at once, in one thread or in many.

    The copy of the denoiser is updated from the model at the start of every request, so the model can be trained,
    loaded or moved at any time."""

    def __init__(
        self,
        model: LanguageModel,
        dtype: torch.dtype | None = None,
        compiled: bool = False,
        record: bool | None = None,
    ) -> None:
        accelerate(model)
        self.model, self.dtype, self.compiled, self.record = model, dtype, compiled, record
        self._lengths: CapturedLengths | None = None
        if model.capabilities.denoises and isinstance(policy := model.lengths, LengthPredictor):
            if not isinstance(policy.read_lengths, CapturedLengths):
                policy.read_lengths = CapturedLengths(policy)  # type: ignore[method-assign]
            self._lengths = policy.read_lengths
        self._copy: DenoiserCopy | None = None
        self._recorded: GraphPool[RecordedSampler] = GraphPool(MAX_RECORDED)
        self._joinable: GraphPool[JoinableSampler] = GraphPool(MAX_RECORDED)
        self._decoder_copies: dict[tuple[torch.dtype | None, bool, torch.device], Autoregressive] = {}
        self._decoders: GraphPool[RecordedDecoder] = GraphPool(MAX_DECODERS)
        self._read_nats = CapturedCalls(Autoregressive.nats)
        self._repairs: GraphPool[Repairs] = GraphPool(MAX_DECODERS)
        self._expectations = CapturedCalls(unwritten_log_probs, MAX_DECODERS)
        self._lock = threading.Lock()

    @property
    def device(self) -> torch.device:
        """The device of the model's weights."""
        return next(self.model.parameters()).device

    def records_steps(self, device: torch.device) -> bool:
        """Whether steps are captured there."""
        return device.type == "cuda" or is_on("cpu_recording") if self.record is None else self.record

    @property
    def denoiser(self) -> Denoiser:
        """The denoiser for generating. Networks of other libraries, which may have other tables, are not copied."""
        source = self.model.denoiser
        if not source.network.capturable:
            return source
        with self._lock:
            dtype = source.precision or self.dtype
            key = source.network, dtype, self.compiled, source.codec.bias.device
            if self._copy is None or self._copy.key != key:
                self._renew(source, dtype)
            assert self._copy is not None
            return self._copy.denoiser

    def sync_weights(self) -> None:
        """Make the model ready for a request: it does not train, and the copy has its weights. On a CPU, running texts
        keep the copy that they began with; on a GPU it is overwritten in place, after all queued work."""
        self.model.eval()
        if not isinstance(self.model, DiffusionModel):
            return
        source = self.model.denoiser
        if self.denoiser is source:
            return
        with self._lock, torch.no_grad():
            assert self._copy is not None
            if source.codec.bias.device.type != "cpu":
                self._copy.sync_weights(source)
            # On a CPU torch counts how often weights were changed.
            elif self._copy.versions != read_versions(source):
                self._renew(source, self._copy.key[1])

    def _renew(self, source: Denoiser, dtype: torch.dtype | None) -> None:
        self._recorded.clear()
        self._joinable.clear()
        self._expectations.pool.clear()
        if self._lengths is not None and self._copy is not None:  # some of what they captured refers to the old copy
            self._lengths.pool.clear()
        self._copy = DenoiserCopy(source, dtype, self.compiled)

    @torch.no_grad()  # as a decorator it applies while a frame is computed, not while the caller reads it
    def stream(
        self, noise: Noise, lengths: Tensor, width: int, sampling: Sampling, steering: Steering | None = None
    ) -> Generator[Frame]:
        """Yield the frames of one batch from noise to text, with captured steps if possible."""
        model, steering = self.model, steering or Steering()
        model.eval()
        if steering.decode is not None:
            yield from steering.decode(noise, width, sampling, steering)
        else:
            yield from model.write(TextBatch(noise, lengths, width, sampling, steering), self)

    def denoiser_of(self, model: LanguageModel) -> Denoiser:
        return self.denoiser

    def denoise(self, inputs: SamplerInputs, steering: Steering) -> Iterator[Frame]:
        watched = steering.watched_steps
        recorder = recorder_of(inputs) if self.records_steps(inputs.mask.device) else None
        if recorder is None:
            yield from inputs.frames()
            return
        inputs = inputs if watched is None else ask_few_places(inputs)
        create = partial(recorder, inputs, self.compiled and inputs.mask.is_cuda, self._recorded.latest)
        with self._recorded.acquire(capture_key(inputs), create) as recorded:
            yield from recorded.frames(inputs, watched)

    @torch.no_grad()
    def join(self, batch: TextBatch, rows: RowStates | None, order: Sequence[int], watched: bool) -> Generator[Frame]:
        """The frames of a batch whose rows are at different steps, with captured steps if possible: those of `rows` in
        this order go on, and those numbered −1 are new."""
        inputs = cast(DiffusionModel, self.model).sampler_inputs(self.denoiser, batch)
        if not self.records_steps(inputs.mask.device) or not can_capture(inputs):
            return inputs.join(rows, order, watched)
        return self._replay_rows(inputs, inputs.continue_rows(rows, order), watched)

    def _replay_rows(self, inputs: SamplerInputs, rows: RowStates, watched: bool) -> Generator[Frame]:
        how = self.compiled and inputs.mask.is_cuda, self._joinable.latest
        with self._joinable.acquire(capture_key(inputs), partial(JoinableSampler, inputs, rows, *how)) as sampler:
            yield from sampler.frames(inputs, rows, watched)

    def decode(self, part: PrefixModel, batch: TextBatch) -> Iterator[Frame]:
        """Yield frames of texts that are written from left to right, with captured steps if there are no rules."""
        model, texts = cast(Autoregressive, part), len(batch.lengths)
        sampling, steering = batch.sampling, batch.steering
        if sampling.beams and texts > (most := max(1, MAX_BEAM_ROWS // sampling.beams)):
            yield join_frames([*self._search_in_parts(model, batch, most)])
            return
        # On a CPU, where a half width saves less, beams compare sums of log-probabilities in the model's own dtype.
        dtype = None if sampling.beams and not model.banned.is_cuda else self.dtype
        decoder = self._sync_decoder(model, model.precision or dtype, self.compiled)
        captured = decoder.captures_words and decoder.network.capturable
        if steering.prefix_rules or not captured:
            yield from super().decode(decoder, batch)
            return
        memory = decoder.draw_memory(batch.noise, steering)
        settings = sampling.temperature, sampling.top_k, sampling.top_p, sampling.beams, sampling.length_penalty
        key = texts, batch.width, settings, storage_addresses(decoder), capture_key(memory)
        create = partial(RecordedDecoder, decoder, texts, batch.width, sampling, memory)
        with self._decoders.acquire(key, create) as recorded:
            yield from recorded.frames(batch.noise, steering.known, memory)

    def _search_in_parts(self, model: Autoregressive, batch: TextBatch, most: int) -> Iterator[Frame]:
        """Yield the frames of `most` texts at a time: each text has one row per beam, and only its words are kept."""
        noise, steering = batch.noise, batch.steering
        for start in range(0, len(noise.samples), most):
            part = slice(start, start + most)
            tensors = steering.known, steering.source, steering.source_mask, steering.latents
            known, source, mask, latents = (None if tensor is None else tensor[part] for tensor in tensors)
            own = replace(steering, known=known, source=source, source_mask=mask, latents=latents)
            seed = noise.seed if isinstance(noise.seed, int) else noise.seed[part]
            few = replace(batch, noise=Noise(seed, noise.samples[part]), lengths=batch.lengths[part], steering=own)
            yield from self.decode(model, few)

    def _sync_decoder(self, model: Autoregressive, dtype: torch.dtype | None, compiled: bool) -> Autoregressive:
        """The model itself if it needs no copy; otherwise a cast copy with the current weights, perhaps compiled."""
        # Networks of other libraries have tables that must not be cast.
        if (dtype is None and not compiled) or not model.network.capturable:
            return model
        with self._lock, torch.no_grad():
            key = dtype, compiled, model.banned.device
            if any(device != model.banned.device for *_, device in self._decoder_copies):  # the model was moved
                self._decoder_copies.clear()
                self._decoders.clear()
                self._repairs.clear()
            if key not in self._decoder_copies:
                made = copy.deepcopy(model).requires_grad_(False).eval().to(dtype=dtype)  # not cast for every word
                made.set_compute_dtype(None)
                for block in made.network.equal_blocks() if compiled else ():
                    block.compile(dynamic=False)
                self._decoder_copies[key] = made
            decoder = self._decoder_copies[key]
            torch._foreach_copy_(module_tensors(decoder), module_tensors(model))
        return decoder

    @property
    def captures_nats(self) -> bool:
        """Whether texts are scored by a captured pass; not by subclasses: an autoencoder has other nats."""
        model = self.model
        if type(model) is not Autoregressive or not model.network.capturable:
            return False
        return self.records_steps(model.banned.device)

    @property
    def shares_sources(self) -> bool:
        """Whether texts of one source, one after the other, can be scored with a single row of sources. On a CPU every
        text has its own, so that no score depends on how a batch is rounded."""
        return self.captures_nats and self.model.capabilities.source_limit > 0

    @torch.no_grad()
    def nats_and_error(self, batch: Batch, noise: Noise, draws: int) -> tuple[Tensor, Tensor]:
        """Like the model's own method. A left-to-right model reads few texts by a captured pass, with padding."""
        if not self._can_capture(batch):
            return self.model.nats_and_error(batch, noise, draws)
        model, padded = cast(Autoregressive, self.model), self._pad(batch)
        if model.training:
            model.eval()
        nats = self._read_nats(model, Batch(padded.ids, padded.lengths, padded.source, padded.source_lengths))
        return nats, torch.zeros_like(nats)

    @torch.no_grad()
    def repair_texts(
        self, batch: Batch, repairs: int, doubt: float, expect: Callable[[Batch], Tensor] | None = None
    ) -> Tensor:
        """What a left-to-right model makes of texts (`Repairs`), by captured readings where scores are captured.
        `expect` is the `expect_words` of their writer, if that has a say."""
        model = cast(Autoregressive, self.model)
        if model.training:
            model.eval()
        room = max(batch.ids.shape[1], min(batch.ids.shape[1] + GROWTH, model.max_words))
        batch = replace(batch, ids=F.pad(batch.ids, (0, room - batch.ids.shape[1]), value=PAD))
        capture = self._can_capture(batch)
        batch, expected = self._pad(batch) if capture else batch, None
        if expect is not None:
            log_p = expect(batch)[..., : model.vocabulary].to(batch.ids.device)
            expected = expect_nearby(log_p, batch.lengths, batch.ids.shape[1] + 1)
        if not capture:
            return Repairs(model, batch, doubt, False, expected)(batch, repairs, expected)
        decoder = self._sync_decoder(model, model.precision or self.dtype, compiled=False)  # compiled as a whole
        key = doubt, expected is None, self.compiled, capture_key(batch), storage_addresses(decoder)
        create = partial(Repairs, decoder, batch, doubt, True, expected, self.compiled)
        with self._repairs.acquire(key, create) as captured:
            return captured(batch, repairs, expected)

    @torch.no_grad()
    def expect_words(self, batch: Batch) -> Tensor:
        """log p of every word at each place of texts as long as these, [B, L, V], before any word is written, under a
        masked model; captured on a GPU."""
        model = self.model
        self.sync_weights()
        denoiser, device = self.denoiser, model.denoiser.codec.bias.device
        tensors = batch.ids, batch.lengths, batch.source, batch.source_lengths
        given = [one.to(device) for one in tensors if one is not None]
        recorded = self.records_steps(device) and denoiser is not model.denoiser
        call = self._expectations if recorded else unwritten_log_probs
        return call(denoiser, model.lengths, *given)

    def _can_capture(self, batch: Batch) -> bool:
        """Whether a left-to-right model reads these texts by a captured pass: not too many at a time."""
        if not self.captures_nats or batch.documents is not None:
            return False
        return batch.ids.numel() * self.model.vocabulary <= MAX_LOGITS

    def _pad(self, batch: Batch) -> Batch:
        """With rows of texts and sources as wide as a multiple of WIDTH, so that few shapes are captured."""
        most, source = self.model.capabilities.source_limit, batch.source
        source = None if source is None else pad_width(source, most)
        return replace(batch, ids=pad_width(batch.ids, self.model.max_words), source=source)

    def clear_recorded(self) -> None:
        """Free what was captured for earlier requests; the next one captures again."""
        for pool in (self._recorded, self._joinable, self._decoders, self._repairs):
            pool.clear()
        for calls in filter(None, (self._read_nats, self._expectations, self._lengths)):
            calls.pool.clear()


def pad_width(ids: Tensor, most: int) -> Tensor:
    """Pad rows [B, L] to a multiple of WIDTH, or to `most`."""
    return F.pad(ids, (0, max(0, min(-(-ids.shape[1] // WIDTH) * WIDTH, most) - ids.shape[1])), value=PAD)


def join_frames(frames: Sequence[Frame]) -> Frame:
    """Join the last frames of several parts of a batch."""
    columns = ("t", "tokens", "confidence", "mask", "changed", "calls")
    t, tokens, sure, mask, changed, calls = (torch.cat([getattr(one, name) for one in frames]) for name in columns)
    return Frame(frames[-1].step, t, tokens, sure, mask, changed, calls=calls)


class DenoiserCopy:
    """A denoiser for inference: its word vectors are already normalised and its linear layers are in the dtype of the
    computation. Otherwise both would be recomputed at every call."""

    def __init__(self, source: Denoiser, dtype: torch.dtype | None, compiled: bool) -> None:
        self.key = source.network, dtype, compiled, source.codec.bias.device  # what it was made from
        self.apart = compiled or dtype is not None or packs_weights(source.network)  # whether the network is a copy
        self.denoiser = copy.copy(source)  # of any class, with all its attributes
        self.denoiser._modules = dict(source._modules)
        self.denoiser.codec = source.codec.frozen()
        if self.apart:
            self.denoiser.network = prepare_network(source.network, dtype, compiled)
            if is_on_gpu(source.network) and source.network.encodes_sources:
                network: Any = self.denoiser.network  # encoding a source is a single replay, too
                network.encode = partial(CapturedCalls(type(network).encode), network)
        self.denoiser.precision = None if dtype is torch.int8 else dtype
        self._copying: tuple[tuple[int, ...], CapturedFunction] | None = None
        self.versions = read_versions(source)
        self.sync_weights(source)

    def sync_weights(self, source: Denoiser) -> None:
        """Copy the source's current weights. Whether they changed cannot be checked: a captured training step leaves no
        other trace. The copying is captured too, as long as the weights stay at their addresses."""

        @torch.no_grad()
        def work() -> None:
            mine, new = zip(*self.pairs(source), strict=True)
            torch._foreach_copy_(mine, new)

        there = storage_addresses(source)
        if self._copying is None or self._copying[0] != there:
            self._copying = there, CapturedFunction(work, source.codec.bias.device, warmup=1)
        self._copying[1]()

    def pairs(self, source: Denoiser) -> list[tuple[Tensor, Tensor]]:
        """Its weights, each with the source's. They are accessed as `data`, whose changes autograd does not track: else
        computing a classifier's gradient at this moment would fail, although the values are equal."""
        pairs = [*zip(self.denoiser.codec.frozen_tensors(), source.codec.frozen_tensors(), strict=True)]
        if self.apart:
            own, theirs = self.denoiser.network.state_dict(), source.network.state_dict()
            pairs += zip(own.values(), theirs.values(), strict=True)
        return [(mine.data[: len(new)] if mine.shape != new.shape else mine.data, new) for mine, new in pairs]


def read_versions(module: nn.Module) -> list[tuple[int, int]]:
    """Where its tensors are, and how often each was changed in place."""
    return [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in (*module.parameters(), *module.buffers())]


class PaddedLinear(nn.Linear):
    """A layer that computes a multiple of eight outputs and drops the surplus: a GPU's fast matrix products need such
    widths, and 821 words take several times as long as 824."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, -(-layer.out_features // ALIGNMENT) * ALIGNMENT, layer.bias is not None)
        self.to(layer.weight).requires_grad_(False)
        self.asked = layer.out_features
        for weight in self.parameters():
            weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., : self.asked]


class HalfNorm(nn.LayerNorm):
    """A norm in the dtype of its inputs, with sums in float32 inside: autocast would copy inputs there and back."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = (None if one is None else one.to(x.dtype) for one in (self.weight, self.bias))
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def narrow_norms(network: Network, dtype: torch.dtype) -> None:
    """Norms of a network's blocks compute in a narrow dtype, and have weights in it."""
    for norm in (part for block in network.equal_blocks() for part in block.children()):
        if type(norm) is nn.LayerNorm:
            norm.to(dtype).__class__ = HalfNorm


def prepare_network(network: Network, dtype: torch.dtype | None, compiled: bool) -> Network:
    """A copy whose linear layers are in `dtype`. On a CPU its blocks are compiled one by one, since they share their
    code; on a GPU whole steps are compiled. Its weights are copied later."""
    eight, layers = dtype is torch.int8, [part for part in network.modules() if isinstance(part, nn.Linear)]
    # Each weight is cast as it is copied: a whole copy in float32 would be the most memory that generating takes.
    narrow = {id(w): nn.Parameter(w.to(dtype)) for one in layers for w in one.parameters() if dtype and not eight}
    network = copy.deepcopy(network, narrow).requires_grad_(False).eval()
    if eight:
        use_eight_bits(network)
    if is_on_gpu(network):
        if dtype is not None:
            narrow_norms(network, dtype)
        head = dict(network.named_children()).get("head")
        if isinstance(head, nn.Linear) and head.out_features % ALIGNMENT:
            network.head = PaddedLinear(head)
    elif compiled and dtype is not torch.int8:
        for block in network.equal_blocks() or [network]:
            block.compile(dynamic=False)
    elif packs_weights(network):
        pack_layers(position_layers(cast(Transformer, network)))
    if isinstance(network, Transformer) and network.head.weight.device.type == "cpu":
        # A copy on a CPU is replaced when weights change.
        network.modulations_at = remember_times(network.modulations_at)  # type: ignore[method-assign, assignment]
    return network


def remember_times(compute: Callable[[Tensor], T]) -> Callable[[Tensor], T]:
    """A function of times on a CPU, with its last answers: all texts of a request have the same times. What is recorded
    computes them, since a recorded step cannot read numbers."""

    @lru_cache(MAX_TIMES)
    def find_answer(times: tuple[float, ...], dtype: torch.dtype) -> T:
        return compute(torch.tensor(times, dtype=dtype))

    return lambda t: compute(t) if t.dim() != 1 or is_capturing() else find_answer((*t.tolist(),), t.dtype)


def packs_weights(network: Network) -> bool:
    return isinstance(network, Transformer) and not is_on_gpu(network) and is_on("packed_weights")


def position_layers(network: Transformer) -> Iterator[nn.Module]:
    """Layers that are applied to every position, unlike those of the time, which are applied once per text."""
    return (layer for part in (network.input, *network.position_parts(), network.head) for layer in part.modules())


def is_on_gpu(network: Network) -> bool:
    return next(network.parameters()).is_cuda
