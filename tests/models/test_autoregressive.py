"""The autoregressive twin, checked by enumeration of all short texts of a tiny vocabulary."""

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.left_to_right import draw_by_inverse_cdf, left_to_right, truncate_logits
from difflm.diffusion.samplers.loop import Steering
from difflm.fast.inference import MAX_DECODERS, Inference
from difflm.models.autoregressive import BANNED, Autoregressive
from difflm.models.base import Sampling
from difflm.networks import Sizes
from tests.support.twins import VOCABULARY, WORDS, padded, random_twin, ruled


@pytest.fixture(scope="module")
def twin() -> Autoregressive:
    """Random weights, far from uniform."""
    return random_twin(11, 0.35)


def full_logits(twin: Autoregressive, text: tuple[int, ...]) -> Tensor:
    """Of the word after `text`, by one pass over all of it."""
    with torch.no_grad():
        return twin.network(twin.embedding(torch.tensor([[START, *text]])), None)[0, -1]


def test_a_cached_step_answers_as_the_whole_text_does(twin):
    text, caches = (4, 6, 6, 5, 4, 5), []
    with torch.no_grad():
        for i, last in enumerate((START, *text)):
            logits, caches = twin.read(torch.tensor([[last]]), caches)
            assert torch.allclose(logits[0, 0], full_logits(twin, text[:i]), atol=1e-4)


@torch.no_grad()
def test_several_words_after_a_cache_are_read_as_one_text(twin):
    words = torch.tensor([[START, 4, 6, 6, 5, 4]])
    whole, _ = twin.read(words)
    first, caches = twin.read(words[:, :2], [])
    second, caches = twin.read(words[:, 2:], caches)
    assert torch.allclose(torch.cat([first, second], dim=1), whole, atol=1e-4)
    assert caches[0][0].shape[2] == 6


def test_soft_words_are_read_as_the_mean_of_their_vectors(twin):
    """Probabilities of one are words; those between are read, and gradients reach them."""
    words = torch.tensor([[START, 4, 6], [START, 5, 5]])
    hard = nn.functional.one_hot(words, VOCABULARY).float()
    assert torch.allclose(twin.read(hard)[0], twin.read(words)[0], atol=1e-5)
    soft = hard.clone()
    soft[0, 1] = torch.tensor([0, 0, 0, 0, 0.3, 0.7, 0])
    soft.requires_grad_()
    logits, _ = twin.read(soft)
    vectors = 0.3 * twin.embedding.weight[4] + 0.7 * twin.embedding.weight[5]
    inputs = torch.stack([twin.embedding.weight[START], vectors, twin.embedding.weight[6]]).unsqueeze(0)
    assert torch.allclose(logits[:1], twin.network(inputs, None), atol=1e-5)
    (gradient,) = torch.autograd.grad(logits[0, -1, 4], soft)
    assert gradient[0].abs().amin() > 0 and not gradient[1].any()


def test_nats_are_the_chain_rule(twin):
    texts = [(4,), (6, 5, 4), (5, 5)]
    nats = twin.nats(padded(texts))
    for found, text in zip(nats.tolist(), texts, strict=True):
        by_hand = sum(-float(full_logits(twin, text[:i]).log_softmax(-1)[word]) for i, word in enumerate((*text, END)))
        assert found == pytest.approx(by_hand, rel=1e-4)


def test_probabilities_of_all_texts_sum_to_one(twin):
    """Texts of at most three tokens, and the mass of everything that begins with three and goes on."""
    others = [token for token in range(VOCABULARY) if token != END]
    texts = [text for n in range(4) for text in itertools.product(others, repeat=n)]
    batch = padded(texts)
    ids, lengths = batch.ids, batch.lengths
    with torch.no_grad():
        nats, mask = twin.token_nats(ids, lengths)
    ended = torch.exp(-(nats * mask).sum(-1).double()).sum()
    longest = lengths == 3
    begins = torch.exp(-nats[longest][:, :3].sum(-1).double())
    goes_on = begins * (1 - torch.exp(-nats[longest][:, 3].double()))
    assert float(ended + goes_on.sum()) == pytest.approx(1, abs=1e-5)


def test_pads_and_the_batch_change_no_likelihood(twin):
    alone = twin.nats(padded([(4, 5)]))
    beside = twin.nats(padded([(4, 5), (6, 6, 6, 6, 6)]))
    assert float(beside[0]) == pytest.approx(float(alone[0]), rel=1e-5)
    batch = padded([(4, 5), (6, 6, 6, 6, 6)])
    batch.ids[0, 2:] = 6  # whatever stands beyond the end
    assert float(twin.nats(batch)[0]) == pytest.approx(float(alone[0]), rel=1e-5)


def test_the_loss_is_nats_per_token_with_end_counted(twin):
    batch = padded([(4, 5), (6, 6, 6, 6, 5)])
    expected = float(twin.nats(batch).sum()) / (3 + 6)
    assert float(twin(batch).means()["loss"].detach()) == pytest.approx(expected, rel=1e-5)


def run(
    twin: Autoregressive | Inference, sampling: Sampling, count: int = 1, width: int = 5, seed: int = 0
) -> list[list[int]]:
    inference = twin if isinstance(twin, Inference) else Inference(twin)
    *_, last = inference.stream(Noise(seed, torch.arange(count)), torch.full((count,), width), width, sampling)
    return [inference.model.lengths.words(row) for row in last.tokens.tolist()]


def test_a_text_costs_a_call_for_each_word_and_its_end(twin):
    """On a canvas of five a fifth word is the last, and no call asks for END."""
    assert [twin.calls(Sampling(), words) for words in (1, 4, 5)] == [2, 5, 5]
    assert twin.calls(Sampling(beams=3), 4) == 15


def test_frames_say_which_word_is_new(twin):
    """Also no frame goes beyond the longest text, however wide the canvas is laid out."""
    frames = list(Inference(twin).stream(Noise(0, torch.arange(40)), torch.full((40,), 5), 16, Sampling()))
    assert len(frames) == 5
    before = torch.full((40, 16), PAD)
    for frame in frames:
        assert torch.equal(frame.changed, frame.tokens != before)
        before = frame.tokens


def test_temperature_zero_is_greedy(twin):
    text: tuple[int, ...] = ()
    while len(text) < 5:
        word = int(ruled(full_logits(twin, text), first=not text).argmax())
        if word == END:
            break
        text = (*text, word)
    for seed in range(3):
        assert run(twin, Sampling(temperature=0), seed=seed) == [list(text)]
    assert run(twin, Sampling(top_k=1)) == [list(text)]


@pytest.mark.long
def test_drawn_texts_follow_the_model(twin):
    """20,000 texts of at most two words: total variation below the 0.03 that nine cells and their rest allow."""
    count, found = 20_000, run(twin, Sampling(), 20_000, width=3)
    heads = [tuple(text[:2]) for text in found]
    gap = 0.0
    for text in [(a,) for a in WORDS] + list(itertools.product(WORDS, repeat=2)):
        p = 1.0
        for i, word in enumerate(text if len(text) == 2 else (*text, END)):
            p *= float(ruled(full_logits(twin, text[:i]), first=i == 0).softmax(-1)[word])
        gap += abs(p - heads.count(text) / count) / 2
    assert gap < 0.03
    assert not {START, UNK, PAD, END} & {word for text in found for word in text}
    assert all(found)  # no text is empty


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2, 5, 6, 9])
def test_a_wide_beam_finds_the_likeliest_text(seed):
    """81 beams hold every partial text of four words; the likeliest is known by enumeration. END is made rare, so
    that the likeliest texts are long and depend on all of their words."""
    twin = random_twin(seed, 1.0)
    with torch.no_grad():
        twin.network.head.bias[END] = -20.0
    texts = [text for n in range(1, 5) for text in itertools.product(WORDS, repeat=n)]
    scores = torch.zeros(len(texts))
    for k, text in enumerate(texts):
        steps = (ruled(full_logits(twin, text[:i]), first=i == 0).log_softmax(-1) for i in range(len(text) + 1))
        scores[k] = sum(step[word] for step, word in zip(steps, (*text, END), strict=True))
    best = texts[int(scores.argmax())]
    assert run(twin, Sampling(beams=81), count=2) == [list(best)] * 2


def test_one_beam_stops_where_greedy_would_or_sooner(twin):
    """A single beam walks the greedy words; it may end earlier, at the best END on the way."""
    no_end = run(twin, Sampling(beams=1))[0]
    text: tuple[int, ...] = ()
    for word in no_end:
        logits = ruled(full_logits(twin, text), first=not text)
        logits[END] = float("-inf")
        assert word == int(logits.argmax())
        text = (*text, word)


# -- truncation, worked by hand -----------------------------------------------------------------------------------

SHARES = torch.tensor([[0.1, 0.4, 0.2, 0.25, 0.05]])


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.1, 0.4, 0.2, 0.25, 0.05]),
        (Sampling(top_k=2), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        (Sampling(top_k=9), [0.1, 0.4, 0.2, 0.25, 0.05]),
        (Sampling(top_p=0.3), [0, 1, 0, 0, 0]),
        (Sampling(top_p=0.6), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        (Sampling(top_p=0.7), [0, 0.4 / 0.85, 0.2 / 0.85, 0.25 / 0.85, 0]),
        (Sampling(top_p=0.97), [0.1, 0.4, 0.2, 0.25, 0.05]),
        # Of the two likeliest, 0.4/0.65 = 0.62 already exceeds 0.6.
        (Sampling(top_k=2, top_p=0.6), [0, 1, 0, 0, 0]),
        # Squares: 0.01, 0.16, 0.04, 0.0625, 0.0025, sum 0.275.
        (Sampling(temperature=0.5), [0.01 / 0.275, 0.16 / 0.275, 0.04 / 0.275, 0.0625 / 0.275, 0.0025 / 0.275]),
    ],
)
def test_truncation_keeps_what_it_says(sampling, expected):
    assert truncate_logits(SHARES.log(), sampling).softmax(-1)[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_inverse_distribution_by_hand():
    p = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    cases = {1e-7: 1, 0.2: 1, 0.26: 3, 0.74: 3, 0.76: 4, 1 - 1e-7: 4}
    for u, word in cases.items():
        assert draw_by_inverse_cdf(p, torch.tensor([u])).tolist() == [word]


def test_the_rarest_word_is_drawn_as_often_as_it_should():
    """One word of a hundred thousand holds 1e-6; evenly spaced numbers hit its share to one of them."""
    p = torch.full((1, 100_001), (1 - 1e-6) / 100_000)
    p[0, -1] = 1e-6
    inside = torch.tensor([1 - 0.5e-6], dtype=torch.float64)
    assert draw_by_inverse_cdf(p, inside).tolist() == [100_000]
    assert draw_by_inverse_cdf(p, torch.tensor([1 - 1.5e-6], dtype=torch.float64)).tolist() == [99_999]


def test_words_end_where_the_text_does(twin):
    assert twin.lengths.words([4, 5, END, 6, PAD]) == [4, 5]
    assert twin.lengths.words([4, 5, 6]) == [4, 5, 6]
    assert math.isinf(float(truncate_logits(SHARES.log(), Sampling(top_k=1))[0, 0]))


# -- words to begin with ------------------------------------------------------------------------------------------


def begun(twin: Autoregressive, begins: list[list[int]], sampling: Sampling, seed: int = 0) -> list[list[int]]:
    known = torch.full((len(begins), 5), FREE)
    for row, ids in enumerate(begins):
        known[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    noise, lengths = Noise(seed, torch.arange(len(begins))), torch.full((len(begins),), 5)
    *_, last = Inference(twin).stream(noise, lengths, 5, sampling, Steering(known))
    return [twin.lengths.words(row) for row in last.tokens.tolist()]


def test_a_text_goes_on_from_the_words_that_were_given(twin):
    """Side by side with others of other lengths; UNK may be given, and at least one word is added."""
    begins = [[4], [5, UNK, 6], [], [6, 6, 6, 6]]
    for sampling in (Sampling(), Sampling(temperature=0)):
        for begin, text in zip(begins, begun(twin, begins, sampling), strict=True):
            assert text[: len(begin)] == begin
            assert len(begin) < len(text) <= 5
            assert UNK not in text[len(begin) :]


def test_the_word_after_a_beginning_follows_the_model(twin):
    """10,000 draws of one word behind two that were given, against the softmax; 0.02 is four standard errors."""
    found = begun(twin, [[5, 4]] * 10_000, Sampling())
    logits = ruled(full_logits(twin, (5, 4)), first=True)  # nor does a text end where its beginning was given
    p = logits.softmax(-1)
    for word in WORDS:
        share = sum(text[2] == word for text in found) / len(found)
        assert share == pytest.approx(float(p[word]), abs=0.02)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_wide_beam_finds_the_likeliest_end_of_a_text(seed):
    """Two beginnings in one batch, each with the best of all ends by enumeration."""
    twin = random_twin(seed, 1.0)
    with torch.no_grad():
        twin.network.head.bias[END] = -20.0
    begins = [[4], [6, 5]]
    best = []
    for begin in begins:
        ends = [end for n in range(1, 5 - len(begin)) for end in itertools.product(WORDS, repeat=n)]
        scores = []
        for end in ends:
            total = 0.0
            for i, word in enumerate((*end, END)):
                total += float(ruled(full_logits(twin, (*begin, *end[:i])), first=i == 0).log_softmax(-1)[word])
            scores.append(total)
        best.append([*begin, *ends[scores.index(max(scores))]])
    assert begun(twin, begins, Sampling(beams=81)) == best


def written_by_hand(
    twin: Autoregressive, sampling: Sampling, noise: Noise, width: int, known: Tensor | None = None
) -> Tensor:
    """The texts of a batch, a word at a time, every step reading the whole text again: what a decoder must write."""
    batch = len(noise.samples)
    tokens, done = torch.full((batch, width), PAD), torch.zeros(batch, dtype=torch.bool)
    words = torch.full((batch, 1), START)
    for i in range(min(width, twin.longest)):
        with torch.no_grad():
            logits = twin.network(twin.embedding(words), None)[:, -1]
        logits[:, list(BANNED)] = float("-inf")
        if i == 0:
            logits[:, END] = float("-inf")
        if known is not None and i:
            logits[:, END] = logits[:, END].masked_fill(known[:, i - 1] >= 0, float("-inf"))
        p = truncate_logits(logits, sampling).softmax(-1)
        drawn = p.argmax(-1) if sampling.temperature == 0 else draw_by_inverse_cdf(p, noise.uniform(i, stream=3))
        if known is not None:
            drawn = torch.where(known[:, i] >= 0, known[:, i], drawn)
        tokens[:, i] = torch.where(done, PAD, drawn)
        done |= drawn == END
        words = torch.cat([words, drawn.unsqueeze(1)], dim=1)
    return tokens


@pytest.mark.long
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0), Sampling(top_k=2, top_p=0.8)])
def test_a_recorded_decoder_writes_what_the_generator_writes(sampling):
    """Twice with one decoder, so that nothing is left of the texts before; 300 texts of up to twelve words."""
    model = Autoregressive(40, 12, Sizes(32, 2, 4, 0.0), sampling)
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    inference = Inference(model.eval())
    known = torch.full((300, 16), FREE)
    known[:100, :3] = torch.randint(4, 40, (100, 3))
    for seed, steering in ((0, Steering()), (1, Steering(known=known)), (0, None)):
        noise, lengths = Noise(seed, torch.arange(300)), torch.full((300,), 12)
        *_, recorded = inference.stream(noise, lengths, 16, sampling, steering)
        *_, plain = model.stream(noise, lengths, 16, sampling, steering)
        expected = written_by_hand(model, sampling, noise, 16, steering.known if steering else None)
        assert torch.equal(recorded.tokens, expected) and torch.equal(plain.tokens, expected)
        assert torch.allclose(recorded.confidence, plain.confidence, atol=1e-4)
    assert len(inference._decoders.idle) == 1


def test_a_decoder_of_cast_weights_follows_the_model(twin):
    """What a model learns between two calls is in the second, whether the model or its inference says the dtype."""
    for own, other in ((torch.bfloat16, None), (None, torch.bfloat16)):
        model = copy.deepcopy(twin)
        model.set_compute_dtype(own)
        inference = Inference(model, other)
        before = run(inference, Sampling(), 40)
        with torch.no_grad():
            model.network.head.bias[WORDS[0]] += 100
        after = run(inference, Sampling(), 40)
        assert before != after and {word for text in after for word in text} == {WORDS[0]}
        assert len(inference._decoders.idle) == 1 and model.embedding.weight.dtype is torch.float32


def test_few_decoders_are_kept(twin):
    inference = Inference(twin)
    for count in range(1, 8):
        run(inference, Sampling(), count)
    assert len(inference._decoders.idle) == MAX_DECODERS
    inference.clear_recorded()
    assert not inference._decoders.idle


# -- rules --------------------------------------------------------------------------------------------------------


def ban(word):
    def rule(prefix, logits, caches):
        return logits.index_fill(1, torch.tensor([word]), float("-inf"))

    return rule


def test_texts_under_a_ban_follow_the_renormalised_model(twin):
    """Step by step: the probability that a frame tells of a word is that of the softmax without the banned one. And on
    the whole: 20,000 texts of at most two words, within the 0.03 in total variation that eight cells allow."""
    count, banned = 20_000, WORDS[1]
    *_, last = left_to_right(twin, Noise(0, torch.arange(count)), 3, Sampling(), [ban(banned)])
    words = [word for word in WORDS if word != banned]

    def conditional(text: tuple[int, ...]) -> Tensor:
        logits = ruled(full_logits(twin, text), first=not text)
        logits[banned] = float("-inf")
        return logits.softmax(-1)

    steps = {text: conditional(text) for n in range(3) for text in itertools.product(words, repeat=n)}
    for row, told in zip(last.tokens[:200].tolist(), last.confidence[:200].tolist(), strict=True):
        for i in range(len(row[: row.index(END) + 1] if END in row else row)):
            assert told[i] == pytest.approx(float(steps[tuple(row[:i])][row[i]]), abs=1e-5)
    found = [tuple(twin.lengths.words(row)) for row in last.tokens.tolist()]
    assert banned not in {word for text in found for word in text}
    heads, gap = [text[:2] for text in found], 0.0
    for text in [(a,) for a in words] + list(itertools.product(words, repeat=2)):
        path = text if len(text) == 2 else (*text, END)
        p = math.prod(float(steps[text[:i]][word]) for i, word in enumerate(path))
        gap += abs(p - heads.count(text) / count) / 2
    assert gap < 0.03


def test_a_rule_that_forces_a_prefix_writes_what_a_known_prefix_does(twin):
    """Rules are asked in order with the words so far, and the rest of a text is as if its beginning had been given."""
    prefix, asked = [5, 4], []

    def force(words, logits, caches):
        asked.append(words.clone())
        if words.shape[1] < len(prefix):
            return torch.full_like(logits, float("-inf")).index_fill(1, torch.tensor([prefix[words.shape[1]]]), 0.0)
        return ban(END)(words, logits, caches) if words.shape[1] == len(prefix) else logits

    frames = list(left_to_right(twin, Noise(3, torch.arange(50)), 5, Sampling(), [force]))
    texts = [twin.lengths.words(row) for row in frames[-1].tokens.tolist()]
    assert texts == begun(twin, [prefix] * 50, Sampling(), seed=3)
    assert all(
        torch.equal(words, frame.tokens[:, :i]) for i, (words, frame) in enumerate(zip(asked, frames, strict=True))
    )


def test_a_rule_can_read_the_last_word_again(twin):
    """The caches of a rule hold START and the prefix: without their last entry, the last word gives the same logits."""
    seen = 0

    def reread(prefix, logits, caches):
        nonlocal seen
        seen += 1
        assert caches[0][0].shape[2] == prefix.shape[1] + 1
        if not prefix.shape[1]:
            return logits
        before = [(keys[:, :, :-1], values[:, :, :-1]) for keys, values in caches]
        again = twin.read(prefix[:, -1:], before)[0][:, -1]
        going = (prefix != END).all(1) & (prefix != PAD).all(1)  # an ended text shows padding
        assert torch.allclose(again[going], logits[going], atol=1e-4)
        return logits

    noise = Noise(0, torch.arange(20))
    *_, last = left_to_right(twin, noise, 5, Sampling(), [reread])
    assert seen == 5 and [twin.lengths.words(row) for row in last.tokens.tolist()] == run(twin, Sampling(), 20)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_inference_obeys_rules(twin, dtype):
    steering = Steering(prefix_rules=[ban(WORDS[0]), lambda prefix, logits, caches: logits.index_fill(1, PADS, 9.0)])
    noise, lengths = Noise(0, torch.arange(40)), torch.full((40,), 5)
    *_, last = Inference(twin, dtype).stream(noise, lengths, 5, Sampling(), steering)
    found = {word for row in last.tokens.tolist() for word in twin.lengths.words(row)}
    assert found == {WORDS[1], WORDS[2]}  # nor can a rule bring in what no text contains


PADS = torch.tensor([PAD, UNK, START])
