"""Models on latents of a whole text: the autoencoder, the diffusion of its latents, the Gaussian VAE."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from difflm.data.batches import Batch
from difflm.data.tokenizers import END, UNK
from difflm.diffusion.base import Network
from difflm.diffusion.condition import Condition
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import BoundDenoiser, Steering
from difflm.errors import UsageError
from difflm.evaluation.corpora import corpus_for
from difflm.evaluation.language import evaluate_language
from difflm.evaluation.options import Options
from difflm.fast import inference
from difflm.fast.inference import Inference
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import METHODS, TextSpec
from difflm.methods.gpvae import kl_from_standard
from tests.support.tiny import assert_resumed_to_the_bit, tiny_run, write_grammar

BOTH = ["ld4lg", "gpvae"]
SMALL = {"hidden": 16, "heads": 2, "layers": 1, "encoder_layers": 1, "autoencoder_layers": 1, "dropout": 0.0}
WORDS, LONGEST = 13, 6


def sizes_of(method: str, **changes) -> dict:
    own = {**SMALL, "latents": 3, "latent_dim": 4, **changes}
    return {key: value for key, value in own.items() if key in METHODS[method].model_fields}


def build(method: str, source: int = 0, spread: float = 0.5, **changes):
    """Random weights of which every latent and every word has a say."""
    torch.manual_seed(len(method))
    model = METHODS[method](**sizes_of(method, **changes)).build(TextSpec(WORDS, LONGEST, source)).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "head" in name:
            nn.init.normal_(weight, std=spread)
    return model


def some_texts(count: int = 4) -> Batch:
    torch.manual_seed(7)
    return Batch(torch.randint(5, WORDS, (count, 5)), torch.arange(count) % 4 + 2)


def noise_of(count: int) -> Noise:
    return Noise(3, torch.arange(count))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each method after three steps, by its own name."""
    folder = tmp_path_factory.mktemp("latents")
    return {name: tiny_run(folder, name, model=sizes_of(name), steps=3, batch_size=4) for name in BOTH}


# -- the autoencoder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BOTH)
def test_words_one_by_one_are_those_of_the_whole_text(method):
    """What is read with caches, from the same latents, has the logits of all words at once."""
    model = build(method)
    model, batch = getattr(model, "autoencoder", model), some_texts()
    memory = model.encode_latents(model.encode(batch.ids, batch.lengths))
    whole, _ = model.read(batch.ids, memory=memory)
    caches, found = [], []
    for word in batch.ids.split(1, 1):
        logits, caches = model.read(word, caches, memory)
        found.append(logits)
    assert torch.allclose(torch.cat(found, 1), whole, atol=1e-5)


def test_latents_lie_on_the_sphere_and_know_nothing_of_padding():
    model, batch = build("ld4lg").autoencoder, some_texts()
    latents = model.encode(batch.ids, batch.lengths)
    assert latents.shape == (4, 3, 4) and torch.allclose(latents.square().mean(-1), torch.ones(4, 3), atol=1e-5)
    behind = torch.arange(5) >= batch.lengths.unsqueeze(1)
    other = model.encode(torch.where(behind, 5, batch.ids), batch.lengths)
    assert torch.allclose(latents, other, atol=1e-6)
    assert latents.var(0).mean() > 0.1  # what the first latents know of a text


# -- diffusion of latents -------------------------------------------------------------------------------------------


class Knowing(Network):
    """The v of a denoiser that knows the clean latents."""

    def __init__(self, process, clean):
        super().__init__()
        self.process, self.clean = process, clean

    def forward(self, inputs, t, mask=None):
        level, x = self.process.at(t), inputs[..., : self.clean.shape[-1]]
        alpha, sigma = (value.view(-1, 1, 1) for value in (level.alpha, level.sigma))
        return (alpha * x - self.clean) / sigma


@pytest.mark.parametrize("sampler", ["ancestral", "ddim", "dpm-solver", "heun"])
def test_who_knows_the_latents_of_a_text_writes_what_the_decoder_reads_off_them(sampler):
    """At every step that somebody watches; the decoder, not the canvas, ends the text."""
    model, batch = build("ld4lg"), some_texts()
    expected = model.reconstruct(batch)
    model.denoiser.network = Knowing(model.denoiser.process, model.autoencoder.encode(batch.ids, batch.lengths))
    sampling = replace(model.sampling, sampler=sampler, steps=3)
    frames = list(model.stream(noise_of(4), torch.full((4,), LONGEST), LONGEST, sampling))
    assert len(frames) == 3 and all(torch.equal(frame.tokens[:, :6], expected) for frame in frames)
    assert model.lengths.words([7, 8, END, 9]) == [7, 8] and model.calls(sampling, 4) == 5 + 3 * (
        2 if sampler == "heun" else 1
    )


def test_guidance_moves_the_estimate_away_from_the_one_without_a_source():
    model, level = build("ld4lg", source=4), torch.tensor([0.5, 0.5])
    source = Condition(torch.randint(5, WORDS, (2, 4)), torch.ones(2, 4, dtype=torch.bool))
    condition = model.denoiser.prepare(source)
    x, mask = torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    level = model.denoiser.process.at(level)
    told, dropped = (model.denoiser(x, level, mask, one).clean for one in (condition, condition.null()))
    moved = BoundDenoiser(model.denoiser, mask, condition, 1.0)(x, level, None).clean
    assert not torch.allclose(told, dropped) and torch.allclose(moved, 2 * told - dropped, atol=1e-4)
    assert model.sampling.contrast == 1 and build("ld4lg").sampling.contrast == 0


def test_no_gradient_of_the_diffusion_reaches_the_autoencoder():
    model, batch = build("ld4lg").train(), some_texts()
    both = model(batch)
    assert set(both.terms) == {"ce", "mse"}
    both.terms["mse"].backward()
    assert all(weight.grad is None or not weight.grad.any() for weight in model.autoencoder.parameters())
    assert any(weight.grad is not None and weight.grad.any() for weight in model.denoiser.parameters())


def test_captured_steps_and_beams_in_parts_write_the_same(monkeypatch):
    """A GPU's ways, on the CPU: steps that are recorded, and a search of few texts at a time, each with its latents."""
    for method in BOTH:
        model = build(method, spread=2.0)
        settings = replace(model.sampling, beams=2, **({"steps": 3} if method == "ld4lg" else {}))
        lengths, made = torch.full((5,), LONGEST), []
        for record, most in ((False, 1024), (True, 1024), (False, 4)):
            monkeypatch.setattr(inference, "MAX_BEAM_ROWS", most)
            *_, last = Inference(model, record=record).stream(noise_of(5), lengths, LONGEST, settings)
            made.append(last.tokens)
        assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
        assert len({tuple(row) for row in made[0].tolist()}) > 1  # other latents, another text


# -- the Gaussian VAE -----------------------------------------------------------------------------------------------


def test_kl_from_the_prior_is_that_of_the_library():
    mean, log_variance = torch.randn(2, 50).unbind()
    q = torch.distributions.Normal(mean, (log_variance / 2).exp())
    expected = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0))
    assert torch.allclose(kl_from_standard(mean, log_variance), expected, atol=1e-5)


def test_the_bound_of_a_vae_is_its_integral_and_lies_above_the_likelihood():
    """With one number for a latent both integrals are sums over a fine grid."""
    model, batch = build("gpvae", latents=1, latent_dim=1), some_texts(3)
    z = torch.linspace(-6, 6, 241)

    @torch.no_grad()
    def nats_at(row: int) -> torch.Tensor:
        """−log p(text | z) at every z."""
        ids, lengths = (part[row : row + 1].expand(len(z), *part.shape[1:]) for part in (batch.ids, batch.lengths))
        nats, there = model.token_nats(ids, lengths, model.encode_latents(z.view(-1, 1, 1)))
        return (nats * there).sum(-1)

    mean, log_variance = (part.flatten() for part in model.posterior(batch))
    prior, step = torch.distributions.Normal(0.0, 1.0).log_prob(z), math.log(12 / 240)
    found, error = model.nats_and_error(batch, noise_of(3), draws=100)
    for row in range(3):
        nats = nats_at(row)
        q = torch.distributions.Normal(mean[row], (log_variance[row] / 2).exp()).log_prob(z).exp() * 12 / 240
        bound = (q * nats).sum() + kl_from_standard(mean[row], log_variance[row])
        assert nats.max() - nats.min() > 0.05  # z has a say
        assert abs(found[row] - bound) < 5 * error[row] + 1e-3
        assert bound > -torch.logsumexp(prior + step - nats, 0)


# -- front doors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BOTH)
def test_texts_depend_on_their_number_alone_and_frames_end_in_them(method, runs):
    lm, steps = TextDiffusion.from_pretrained(runs[method]), {"steps": 3} if method == "ld4lg" else {}
    (one,), many = lm.generate(1, seed=5, **steps), lm.generate(6, seed=5, **steps)
    assert one.tokens == many[0].tokens and one.denoiser_calls == lm.model.calls(lm.sampling(**steps), len(one.tokens))
    drafts = [drafts[0] for drafts in lm.stream(1, seed=5, **steps)]
    assert [token for token in drafts[-1].tokens if token] == one.tokens
    assert method == "gpvae" or len(drafts) == 3


def test_the_noise_of_latents_can_be_drawn(runs):
    pytest.importorskip("matplotlib")
    from difflm.app.plots.schedules import learned_curve

    curve = learned_curve("ld4lg", TextDiffusion.from_pretrained(runs["ld4lg"]))
    assert curve.alpha[0] > 0.99 and curve.alpha[-1] < 0.01


@pytest.mark.native
def test_bfloat16_writes_words(runs):
    enabled = torch._C._get_mkldnn_enabled()
    for method in BOTH:
        lm = TextDiffusion.from_pretrained(runs[method], dtype=torch.bfloat16)
        assert len(lm.generate(2, **({"steps": 2} if method == "ld4lg" else {}))) == 2
        assert torch._C._get_mkldnn_enabled() == enabled  # the arithmetic of others stays as it was


@pytest.mark.parametrize("method", BOTH)
def test_what_latents_cannot_do_is_refused_in_one_line(method, runs, tmp_path, complaint):
    run = runs[method]
    (tmp_path / "my.jsonl").write_text('{"text": "A pub.", "mood": "calm"}\n' * 20)
    asked = ["--length", "4"], ["--infill", "A ___ pub."], ["--contains", "pub"], ["--method", "fudge", "--length", "4"]
    for argv in asked:
        assert "latents of a whole text" in complaint(2, "generate", run, *argv)
    argv = f"model.guides={run}", f"data={tmp_path / 'my.jsonl'}", "steps=1", "--out", tmp_path / "guide"
    assert "latents of a whole text" in complaint(2, "train", "classifier", *argv)
    assert not (tmp_path / "guide" / "config.json").exists()
    assert "word vectors" in complaint(2, "generate", run, "--noise-temperature", "0.5") or method == "gpvae"
    if method == "ld4lg":
        (tmp_path / "my.txt").write_text("A pub.\n")
        assert "no likelihood and no bound" in complaint(2, "score", run, tmp_path / "my.txt")
        assert "masks" in complaint(2, "generate", run, "--contrast", "2")  # there is no source


def test_the_report_has_the_share_of_words_that_come_back(runs):
    lms = {name: TextDiffusion.from_pretrained(run) for name, run in runs.items()}
    report = evaluate_language(
        lms, corpus_for(lms["gpvae"], None), options=Options(samples=2, draws=2, score_texts=4, settings={"steps": 2})
    )
    rows = {name: report.row(name) for name in BOTH}
    assert all(0 <= row.figures["reconstructed"] <= 1 and row.texts["reconstructed"] == 4 for row in rows.values())
    assert rows["gpvae"].notes["likelihood"] == "bound" and rows["ld4lg"].figures["nats_per_token"] is None
    assert any("reconstructed words" in str(cell) for cell in report.table().columns[0].cells)
    assert [row.name for row in report.rows[1:]] == ["ld4lg", "ld4lg, random latents", "gpvae"]
    assert all(row.figures.get("reconstructed") is None for row in (report.rows[0], report.rows[2]))


def test_a_perfect_autoencoder_brings_all_words_back(runs, monkeypatch):
    from difflm.evaluation.language import reconstructed_share

    lm = TextDiffusion.from_pretrained(runs["ld4lg"])
    rows = [[5, 6, 7], [8, 9]]
    monkeypatch.setattr(lm.model, "reconstruct", lambda batch: torch.cat([batch.ids, batch.ids[:, :1] * 0 + END], 1))
    assert reconstructed_share(lm, rows) == 1.0
    monkeypatch.setattr(lm.model, "reconstruct", lambda batch: torch.tensor([[5, 6, 6, 6], [8, END, 3, 3]]))
    assert reconstructed_share(lm, rows) == 3 / 6  # of four words two, of two one
    assert reconstructed_share(lm, [[5, UNK, 7], [8, 9]]) == 2 / 5  # an unknown word cannot come back


@pytest.mark.long
@pytest.mark.parametrize("method", BOTH)
def test_a_resumed_run_has_the_weights_of_one_that_was_not_stopped(method, tmp_path, monkeypatch):
    write_grammar(tmp_path / "grammar.txt", 60)
    sizes = [f"model.{key}={value}" for key, value in sizes_of(method).items()]
    argv = ["train", "e2e-ld4lg-laptop", f"method={method}", f"data={tmp_path / 'grammar.txt'}", *sizes, "steps=6"]
    argv += ["batch_size=4", "save_every=2", "warmup=0", "more_than=0", "--device", "cpu"]
    assert_resumed_to_the_bit(argv, 3, tmp_path, monkeypatch)


# -- the smallest proof ---------------------------------------------------------------------------------------------

FIRST = torch.tensor([0.85, 0.05, 0.05, 0.05])  # how often each word is the first


def draw_pairs(count: int, generator: torch.Generator) -> torch.Tensor:
    """Two words, and the same again: the first is mostly the same, the second any of four."""
    first = torch.multinomial(FIRST, count, True, generator=generator)
    words = 5 + torch.stack([first, torch.randint(0, 4, (count,), generator=generator)], 1)
    return torch.cat([words, words], 1)


def train(model, make_batch, steps: int, rate: float = 6e-3) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.1)
    model.train()
    for _ in range(steps):
        losses = model(make_batch(generator))
        optimiser.zero_grad()
        (losses.total / losses.count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    model.eval()


def judge_pairs(tokens: torch.Tensor, model) -> tuple[float, int]:
    """The share of texts that the grammar allows, and how many different ones there are."""
    rows = [tuple(model.lengths.words(row)) for row in tokens.tolist()]
    good = [row for row in rows if len(row) == 4 and row[:2] == row[2:]]
    return len(good) / len(rows), len({*good})


@pytest.mark.long
def test_diffused_latents_write_the_grammars_texts_more_than_random_ones_do():
    """Reconstruction first; then texts from diffused latents, against a decoder that is fed with random ones, which
    mends much of the grammar by itself."""
    torch.manual_seed(0)
    sizes = {**SMALL, "hidden": 32, "latents": 4, "latent_dim": 4}
    model = METHODS["ld4lg"](**sizes).build(TextSpec(9, 5))
    train(model, lambda generator: Batch(draw_pairs(64, generator), torch.full((64,), 4)), 300)
    ids = draw_pairs(256, torch.Generator().manual_seed(1))
    assert (model.reconstruct(Batch(ids, torch.full((256,), 4)))[:, :4] == ids).float().mean() > 0.99
    lengths, sampling = torch.full((256,), 5), replace(model.sampling, steps=20)
    *_, diffused = model.stream(noise_of(256), lengths, 5, sampling)
    random = model.write_random(noise_of(256))
    found, by_chance = judge_pairs(diffused.tokens, model), judge_pairs(random, model)
    assert found[0] > 0.95 > 0.85 > by_chance[0] and found[1] > 4, (found, by_chance)


@pytest.mark.long
def test_a_class_is_a_source_of_one_word_and_is_obeyed():
    torch.manual_seed(0)
    sizes = {**SMALL, "hidden": 32, "latents": 2, "latent_dim": 8}
    model = METHODS["ld4lg"](**sizes).build(TextSpec(WORDS, 5, 2))

    def make_batch(generator: torch.Generator) -> Batch:
        label = torch.randint(0, 2, (32, 1), generator=generator)
        ids = 5 + 4 * label + torch.randint(0, 4, (32, 2), generator=generator)
        return Batch(ids, torch.full((32,), 2), label + 5, torch.ones(32, dtype=torch.int64))

    train(model, make_batch, 200)
    label = torch.arange(64).unsqueeze(1) % 2
    steering = Steering(source=label + 5, source_mask=torch.ones(64, 1, dtype=torch.bool))
    *_, made = model.stream(noise_of(64), torch.full((64,), 5), 5, replace(model.sampling, steps=10), steering)
    words = [
        (model.lengths.words(row), wanted)
        for row, wanted in zip(made.tokens.tolist(), label.flatten().tolist(), strict=True)
    ]
    obeyed = [len(row) == 2 and all((word - 5) // 4 == wanted for word in row) for row, wanted in words]
    assert sum(obeyed) / len(obeyed) > 0.9 and len({tuple(row) for row, _ in words}) > 8


# -- a frozen encoder-decoder of the Hugging Face library -------------------------------------------------------------

KINDS = {
    "bart": {
        "d_model": 16,
        **{f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")},
        **{f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")},
    },
    "t5": {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2},
}


def make_seq2seq(folder, kind: str):
    """A tiny encoder-decoder and its tokenizer, saved as the library saves them."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", "food", "rest", "##aurant", "."]
    inner = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.AutoConfig.for_model(kind, vocab_size=len(words), **ids, **KINDS[kind])
    torch.manual_seed(5)
    transformers.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    return folder


class Names:
    """A vocabulary of six words."""

    names = ("START", "END", "UNK", "PAD", "food", "restaurant", ".")
    size = len(names)

    def tokens(self, ids):
        return [self.names[i] for i in ids]


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_body_stays_as_it_is_between_texts_and_latents(kind, tmp_path):
    """Words begin as the mean of their pieces; what is read word by word is what is read at once; a step of training
    changes all but the body."""
    folder = make_seq2seq(tmp_path, kind)
    method = METHODS["ld4lg"](**sizes_of("ld4lg"), pretrained=str(folder))
    model = method.build(TextSpec(Names.size, LONGEST))
    method.start(model, Names())
    own = model.autoencoder
    import transformers

    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    vectors = theirs.get_input_embeddings().weight
    for table in (own.embedding.weight, own.encoder.embed.weight):
        assert torch.allclose(table[4], vectors[4]) and torch.allclose(table[5], (vectors[5] + vectors[6]) / 2)
    bodies = [(own.encoder.body, theirs.get_encoder()), (own.network.body, theirs.get_decoder())]
    for body, other in bodies:
        expected = {name: weight for name, weight in other.state_dict().items() if "embed_tokens" not in name}
        assert expected and all(torch.equal(body.state_dict()[name], weight) for name, weight in expected.items())
    batch = Batch(torch.randint(4, 7, (3, 5)), torch.tensor([5, 4, 2]))
    memory, caches, found = own.encode_latents(own.encode(batch.ids, batch.lengths)), [], []
    for word in batch.ids.split(1, 1):
        logits, caches = own.read(word, caches, memory)
        found.append(logits)
    assert torch.allclose(torch.cat(found, 1), own.read(batch.ids, memory=memory)[0], atol=1e-5)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(batch).total.backward()
    optimiser.step()
    same = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    frozen = {name for name in before if ".body." in name and "resampler" not in name}
    learned = {f"autoencoder.{name}.weight" for name in ("embedding", "encoder.embed", "network.head")}
    assert frozen and frozen <= same and learned <= before.keys() - same


def test_a_run_with_a_frozen_body_needs_its_directory_no_more(tmp_path):
    folder = make_seq2seq(tmp_path / "bart", "bart")
    sizes = {**sizes_of("ld4lg"), "pretrained": str(folder)}
    run = tiny_run(tmp_path, "ld4lg", model=sizes, steps=2, batch_size=4)
    folder.rename(tmp_path / "gone")
    lm = TextDiffusion.from_pretrained(run)
    assert [len(lm.generate(2, steps=2, beams=beams)) for beams in (0, 2)] == [2, 2]


def test_other_directories_are_refused_in_one_line(tmp_path, complaint):
    def refuse(*changes: str) -> str:
        return complaint(2, "train", "e2e-ld4lg-laptop", *changes, "--dry-run")

    assert "encoder-decoder" in refuse(f"model.pretrained={tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "not an encoder-decoder" in refuse(f"model.pretrained={tmp_path}")
    folder = make_seq2seq(tmp_path / "bart", "bart")
    with pytest.raises(UsageError, match="no sources"):
        METHODS["gpvae"](**sizes_of("gpvae"), pretrained=str(folder)).build(TextSpec(9, 8, 8))
