"""The twin that reads a source: exact likelihoods given it, and beam search, checked by enumeration and by hand."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from difflm import TextDiffusion
from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.left_to_right import left_to_right
from difflm.diffusion.samplers.loop import Steering
from difflm.errors import UsageError
from difflm.fast.inference import Inference
from difflm.fast.recorded import RecordedDecoder
from difflm.models.autoregressive import BANNED, Autoregressive
from difflm.models.base import Sampling
from difflm.networks import EncoderDecoder
from tests.support import pairs
from tests.support.pairs import LENGTH, TEXTS, sequences, write_reversals
from tests.support.tiny import train_quietly
from tests.support.twins import SOURCES, WORDS, batch_of, random_reader


def steering(sources: list[list[int]], width: int = 6, known: Tensor | None = None) -> Steering:
    lengths = torch.tensor([len(source) for source in sources])
    ids = torch.tensor([[*source, *[PAD] * (width - len(source))] for source in sources])
    return Steering(known, source=ids, source_mask=torch.arange(width) < lengths.unsqueeze(1))


@torch.no_grad()
def read_whole(model: Autoregressive, texts: list[tuple[int, ...]], source: list[int]) -> Tensor:
    """Logits after START and each word of texts of one length, by a network that is asked directly."""
    assert isinstance(model.network, EncoderDecoder)
    ids = torch.tensor([[START, *text] for text in texts])
    rows = torch.tensor([source] * len(texts))
    mask = torch.ones_like(rows, dtype=torch.bool)
    return model.network(model.embedding(ids), None, None, model.network.encode(rows, mask), mask)


def allowed(logits: Tensor, first: bool) -> Tensor:
    """log p of the words that a text may have; it has at least one."""
    logits = logits.clone()
    logits[..., list(BANNED) + ([END] if first else [])] = float("-inf")
    return logits.log_softmax(-1)


def run(
    model: Autoregressive, sampling: Sampling, told: Steering, width: int = 5, inference: Inference | None = None
) -> list[list[int]]:
    count = len(told.source)
    frames = (inference or Inference(model)).stream(
        Noise(3, torch.arange(count)), torch.full((count,), width), width, sampling, told
    )
    *_, last = frames
    return [model.lengths.words(row) for row in last.tokens.tolist()]


# -- likelihood -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_probabilities_of_all_texts_given_a_source_sum_to_one(source):
    """Texts of at most three tokens, and the mass of everything that begins with three and goes on."""
    model = random_reader(0)
    texts = [text for n in range(4) for text in itertools.product([START, UNK, PAD, *WORDS], repeat=n)]
    with torch.no_grad():
        nats, mask = model.batch_nats(batch_of(texts, source))
    ended = torch.exp(-(nats * mask).sum(-1).double()).sum()
    longest = mask.sum(-1) == 4
    begins = torch.exp(-nats[longest][:, :3].sum(-1).double())
    goes_on = begins * (1 - torch.exp(-nats[longest][:, 3].double()))
    assert float(ended + goes_on.sum()) == pytest.approx(1, abs=1e-5)


def test_nats_are_the_chain_rule_given_the_source():
    model, text = random_reader(1), (6, 5, 4)
    found = [float(model.nats(batch_of([text], source))) for source in SOURCES]
    for nats, source in zip(found, SOURCES, strict=True):
        logits = read_whole(model, [text], source)[0].log_softmax(-1)
        assert nats == pytest.approx(-sum(float(logits[i, word]) for i, word in enumerate((*text, END))), rel=1e-4)
    assert len({round(nats, 3) for nats in found}) == 3


def test_padding_of_sources_changes_no_likelihood():
    model = random_reader(1)
    alone = torch.cat([model.nats(batch_of([(6, 5, 4)], source)) for source in SOURCES])
    told = steering(SOURCES)
    lengths = told.source_mask.sum(1)
    told.source[~told.source_mask] = 6  # whatever stands beyond the end
    together = model.nats(Batch(torch.tensor([[6, 5, 4]] * 3), torch.full((3,), 3), told.source, lengths))
    assert torch.allclose(together, alone, rtol=1e-5)


def test_label_smoothing_is_of_the_loss_alone():
    """(1 − ε) of the cross-entropy, and ε of the mean −log p of all words."""
    model, batch = random_reader(2), batch_of([(4, 5), (6, 6)], SOURCES[0])
    logits = read_whole(model, [(4, 5), (6, 6)], SOURCES[0])
    targets = F.pad(batch.ids, (0, 1), value=END)
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert float(model.nats(batch).sum()) == pytest.approx(float(plain), rel=1e-5)
    smoothed = 0.9 * plain - 0.1 * logits.log_softmax(-1).mean(-1).sum()
    assert model.label_smoothing == 0.1
    assert float(model(batch).total.detach()) == pytest.approx(float(smoothed), rel=1e-5)


def test_gradients_reach_the_encoder():
    model = random_reader(2).train()
    model(batch_of([(4, 5), (6, 6)], SOURCES[0])).total.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.network.encoder.blocks.parameters())


# -- decoding ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_cached_step_answers_as_the_whole_text_does():
    """Two texts of each source, one after the other, as beam search asks."""
    model, texts = random_reader(3), [(4, 6, 5), (6, 5, 5)]
    told = steering(SOURCES)
    memory, caches = model.encode_source(told.source, told.source_mask), []
    whole = torch.cat([read_whole(model, texts, source) for source in SOURCES])
    inputs = torch.tensor([[START, *text] for text in texts] * 3)
    for i in range(4):
        logits, caches = model.read(inputs[:, i : i + 1], caches, memory)
        assert torch.allclose(logits[:, 0], whole[:, i], atol=1e-4)


SETTINGS = [
    Sampling(),
    Sampling(temperature=0),
    Sampling(top_k=2, top_p=0.8),
    Sampling(beams=1),
    Sampling(beams=4),
    Sampling(beams=3, length_penalty=1.0),
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_batch_of_sources_is_each_of_them_alone(sampling):
    """Also with a decoder that wrote other texts before, and beside sources that are longer."""
    model = random_reader(4, vocabulary=12, longest=10)
    draw = random.Random(0)
    sources = [[draw.randrange(4, 12) for _ in range(draw.randrange(1, 7))] for _ in range(12)]
    inference = Inference(model)
    run(model, sampling, steering(sources[::-1]), 10, inference)
    together = run(model, sampling, steering(sources), 10, inference)
    assert len(inference._decoders.idle) == 1
    for k, source in enumerate(sources):
        noise, told = Noise(3, torch.tensor([k])), steering([source], len(source))
        *_, last = model.stream(noise, torch.tensor([10]), 10, sampling, told)
        assert model.lengths.words(last.tokens[0].tolist()) == together[k]
    assert len({tuple(text) for text in together}) > 6  # the source decides


@pytest.mark.long
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0), Sampling(beams=3, length_penalty=1.0)])
def test_a_step_is_the_same_work_on_the_same_tensors(sampling):
    """What a CUDA graph demands: the operations of one step, traced at the first word of other sources, write every
    word of these."""
    model, told = random_reader(4, vocabulary=12, longest=10), steering([[5, 9, 6], [11], [4, 4, 8, 7, 10]])
    memory = model.encode_source(told.source.flip(0), told.source_mask.flip(0))
    decoder = RecordedDecoder(model, 3, 10, sampling, memory)
    decoder.state.begin(Noise(0, torch.arange(3)), None)
    traced = make_fx(lambda: decoder._step())()
    decoder.step.function = traced
    noise = Noise(3, torch.arange(3))
    *_, last = decoder.frames(noise, None, model.encode_source(told.source, told.source_mask))
    *_, plain = model.stream(noise, torch.full((3,), 10), 10, sampling, told)
    assert torch.equal(last.tokens, plain.tokens) and len(plain.tokens.unique(dim=0)) == 3


def enumerate_scores(model: Autoregressive, source: list[int], begin: tuple[int, ...] = ()) -> dict[tuple, float]:
    """log p of all texts of at most four words that go on from `begin`, END included."""
    found = {}
    for n in range(len(begin) + 1, 5):
        texts = [(*begin, *rest) for rest in itertools.product(WORDS, repeat=n - len(begin))]
        logits = read_whole(model, texts, source)
        total = torch.zeros(len(texts))
        for i in range(len(begin), n + 1):
            words = torch.tensor([(*text, END)[i] for text in texts])
            total += allowed(logits[:, i], first=i == len(begin)).gather(1, words.unsqueeze(1)).squeeze(1)
        found |= dict(zip(texts, total.tolist(), strict=True))
    return found


def penalised(scores: dict[tuple, float], alpha: float) -> list[int]:
    """The text of the best score as in Wu et al. (2016), END counted as a word."""
    return list(max(scores, key=lambda text: scores[text] / ((5 + len(text) + 1) / 6) ** alpha))


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_wide_beam_finds_the_best_text_of_every_source(seed):
    """81 beams hold every partial text of four words. All sources at once, with and without a penalty."""
    model = random_reader(seed)
    scores = [enumerate_scores(model, source) for source in SOURCES]
    lengths = []
    for alpha in (0.0, 0.6, 1.5, 4.0):
        expected = [penalised(some, alpha) for some in scores]
        assert run(model, Sampling(beams=81, length_penalty=alpha), steering(SOURCES)) == expected
        lengths.append(sum(map(len, expected)))
    assert lengths == sorted(lengths)  # a larger penalty never shortens the best text


def test_a_search_goes_on_from_given_words():
    model, begins = random_reader(5), [(4,), (), (6, 5)]
    known = torch.full((3, 5), FREE)
    for k, begin in enumerate(begins):
        known[k, : len(begin)] = torch.tensor(begin, dtype=torch.int64)
    scores = [enumerate_scores(model, source, begin) for source, begin in zip(SOURCES, begins, strict=True)]
    for alpha in (0.0, 1.0):
        found = run(model, Sampling(beams=81, length_penalty=alpha), steering(SOURCES, known=known))
        assert found == [penalised(some, alpha) for some in scores]


Chances = Callable[[tuple[int, ...]], list[float]]  # log p of the next word of a text


def search_by_hand(chances: Chances, beams: int, alpha: float, longest: int) -> tuple[list[int], int]:
    """The text that a beam search of one source finds, and how many partial texts it reads."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    best, best_score, ended = (), float("-inf"), 0
    for i in range(longest):
        found = sorted(
            ((score + p, text, word) for score, text in live for word, p in enumerate(chances(text))), reverse=True
        )
        for score, text, word in found:
            if word == END and score / ((6 + i) / 6) ** alpha > best_score:
                best, best_score = text, score / ((6 + i) / 6) ** alpha
        ended += sum(word == END and score > float("-inf") for score, _, word in found[:beams])
        live = [(score, (*text, word)) for score, text, word in found if word != END][:beams]
        stands, hopes = (live[0][0] / (n / 6) ** alpha for n in (6 + i, 5 + longest))
        if hopes < best_score or (ended >= beams and stands < best_score):
            break
    return list(best or live[0][1]), beams * (i + 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 4])
@pytest.mark.parametrize(("beams", "alpha"), [(1, 0.0), (2, 0.0), (3, 0.6), (4, 1.0), (5, 2.0)])
def test_a_narrow_beam_keeps_what_it_should(beams, alpha, seed):
    """Texts and network calls of a batch against a search of each source in plain Python."""
    model = random_reader(seed, vocabulary=9, longest=10, end=-1.0)
    expected = []
    for source in SOURCES:

        def chances(text: tuple[int, ...], source: list[int] = source) -> list[float]:
            return allowed(read_whole(model, [text], source)[0, -1], first=not text).tolist()

        expected.append(search_by_hand(chances, beams, alpha, 10))
    noise, sampling = Noise(0, torch.arange(3)), Sampling(beams=beams, length_penalty=alpha)
    (frame,) = Inference(model).stream(noise, torch.full((3,), 10), 10, sampling, steering(SOURCES))
    assert [model.lengths.words(row) for row in frame.tokens.tolist()] == [text for text, _ in expected]
    assert frame.calls.tolist() == [calls for _, calls in expected]


class Bigrams:
    """A model whose next word depends on the last one."""

    longest, start, end, pad = 6, START, END, PAD

    def __init__(self, chances: dict[int, dict[int, float]]) -> None:
        self.banned = torch.zeros(7, dtype=torch.bool)
        self.table = torch.full((7, 7), 1e-9)
        for last, words in chances.items():
            for word, p in words.items():
                self.table[last, word] = p

    def read(self, words, caches=None, memory=None):
        return self.table[words].log(), []


def test_the_length_penalty_by_hand():
    """p(4) = 0.36 with n = 2, p(4 6) = 0.24 with n = 3: the longer wins where (8/7)^α > log 0.24 / log 0.36, so for
    α above 2.5."""
    model = Bigrams({START: {4: 0.6, 5: 0.4}, 4: {END: 0.6, 6: 0.4}, 5: {5: 1.0}, 6: {END: 1.0}})
    for alpha, expected in ((0.0, [4]), (2.4, [4]), (2.6, [4, 6])):
        (frame,) = left_to_right(model, Noise(0, torch.arange(2)), 6, Sampling(beams=3, length_penalty=alpha))
        assert [[word for word in row if word != PAD] for row in frame.tokens.tolist()] == [expected] * 2


def test_a_confident_model_is_not_cut_short_by_its_unlikely_ends():
    """Every word may end the text with p = 1e-4, which is the second best there is: two such ends are no reason to stop
    while the likely text goes on."""
    chain = {START: {4: 1.0}, 4: {5: 1.0, END: 1e-4}, 5: {6: 1.0, END: 1e-4}, 6: {END: 1.0}}
    (frame,) = left_to_right(Bigrams(chain), Noise(0, torch.arange(1)), 6, Sampling(beams=2, length_penalty=1.0))
    assert frame.tokens[0, :3].tolist() == [4, 5, 6]


def test_many_texts_are_searched_in_parts(monkeypatch):
    """So that memory has a limit: two texts at a time, and a rest of one, give the words of all at once."""
    model, sampling, told = random_reader(7), Sampling(beams=5, length_penalty=0.5), steering(SOURCES * 2 + SOURCES[:1])
    noise, lengths = Noise(0, torch.arange(7)), torch.full((7,), 5)
    (whole,) = Inference(model).stream(noise, lengths, 5, sampling, told)
    monkeypatch.setattr("difflm.fast.inference.MAX_BEAM_ROWS", 10)
    (parts,) = Inference(model).stream(noise, lengths, 5, sampling, told)
    assert torch.equal(parts.tokens, whole.tokens) and torch.equal(parts.calls, whole.calls)


def test_rules_take_part_in_a_search():
    model = random_reader(7)

    def ban(prefix: Tensor, logits: Tensor, caches: list) -> Tensor:
        assert len(prefix) == len(logits) == 3 * 81
        return logits.index_fill(1, torch.tensor([5]), float("-inf"))

    told = Steering(source=steering(SOURCES).source, source_mask=steering(SOURCES).source_mask, prefix_rules=[ban])
    found = run(model, Sampling(beams=81), told)
    assert all(5 not in text for text in found)
    assert any(5 in text for text in run(model, Sampling(beams=81), steering(SOURCES)))


def test_the_source_is_encoded_once_a_generation(monkeypatch):
    encoded, encode = [], EncoderDecoder.encode

    def spy(self, source, mask):
        encoded.append(len(source))
        return encode(self, source, mask)

    monkeypatch.setattr(EncoderDecoder, "encode", spy)
    model = random_reader(8)
    for sampling in (Sampling(), Sampling(beams=4)):
        run(model, sampling, steering(SOURCES))
    assert encoded == [3, 3]


@pytest.mark.native
def test_a_decoder_of_cast_weights_follows_the_model():
    """Beams keep the model's own arithmetic unless the model says otherwise; each width has a copy of its own."""
    model, enabled = random_reader(8), torch._C._get_mkldnn_enabled()
    inference = Inference(model, torch.bfloat16)
    assert run(model, Sampling(beams=3), steering(SOURCES), inference=inference) == run(
        model, Sampling(beams=3), steering(SOURCES)
    )
    assert not inference._decoder_copies
    run(model, Sampling(), steering(SOURCES), inference=inference)
    assert torch._C._get_mkldnn_enabled() == enabled  # sources, too, are read in bfloat16 without turning oneDNN off
    assert [dtype for dtype, *_ in inference._decoder_copies] == [torch.bfloat16]
    with torch.no_grad():
        model.network.head.bias[5] += 100
    for own in (None, torch.bfloat16):
        model.set_compute_dtype(own)
        for sampling in (Sampling(), Sampling(beams=3)):
            found = run(model, sampling, steering(SOURCES), inference=inference)
            assert {word for text in found for word in text} == {5}
    assert len(inference._decoders.idle) == 3 and model.embedding.weight.dtype is torch.float32


def test_a_model_with_sources_writes_nothing_without():
    model = random_reader(8)
    with pytest.raises(UsageError, match="from a source, and none is given"):
        list(Inference(model).stream(Noise(0, torch.arange(1)), torch.tensor([5]), 5, Sampling()))
    with pytest.raises(UsageError, match="from a source, and none is given"):
        model.nats(Batch(torch.tensor([[4]]), torch.tensor([1])))


# -- a trained run ----------------------------------------------------------------------------------------------------

SMALL = {"hidden": 64, "layers": 2, "encoder_layers": 1, "heads": 2, "dropout": 0.0, "label_smoothing": 0.0}
RECIPE = {**pairs.RECIPE, "method": "encoder-decoder", "model": SMALL, "longest": LENGTH + 2, "steps": 100, "lr": 6e-3}


@pytest.fixture(scope="module")
def lm(tmp_path_factory) -> TextDiffusion:
    folder: Path = tmp_path_factory.mktemp("encoder-decoder")
    data = write_reversals(folder / "pairs.jsonl", 3000)
    return TextDiffusion.from_pretrained(train_quietly({**RECIPE, "data": data}, folder / "run"))


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"beams": 4}, {"beams": 4, "length_penalty": 0.6}])
def test_unseen_sequences_are_reversed_and_only_the_source_says_how(lm, settings):
    unseen = [" ".join(words) for words in sequences(TEXTS, 1)]
    expected = [" ".join(reversed(source.split())) for source in unseen]
    made = lm.generate(source=unseen, **settings)
    assert sum(text.text == right for text, right in zip(made, expected, strict=True)) >= 0.95 * TEXTS
    shuffled = lm.generate(source=unseen[1:] + unseen[:1], **settings)
    assert sum(text.text == right for text, right in zip(shuffled, expected, strict=True)) <= 0.1 * TEXTS
    assert {text.denoiser_calls for text in made} == {(LENGTH + 1) * settings.get("beams", 1)}
    assert lm.model.capabilities.likelihood == "exact" and lm.config["trained"]["validation"]["likelihood"] == "exact"


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"beams": 4}])
def test_a_text_is_the_same_whatever_is_written_beside_it(lm, settings):
    alone = lm.generate(source="a b c d", **settings)
    beside = lm.generate(source=["a b c d", "h h h h h", "g f"], **settings)
    assert [alone[0].text, alone[0].denoiser_calls] == [beside[0].text, beside[0].denoiser_calls]
