"""Candidates that are ranked by a model, and the likelihoods given a source by which they are."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from difflm import Contains, TextDiffusion
from difflm.app.cli import main
from difflm.app.commands import translate as command
from difflm.data.batches import Batch
from difflm.data.meaning import Lexicon
from difflm.data.text_metrics import sentence_bleu_nltk4
from difflm.data.tokenizers import END, PAD, SPECIALS, START, UNK, Words
from difflm.diffusion.base import Belief
from difflm.diffusion.bounds import DiscreteBound
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import Objective
from difflm.diffusion.processes import Absorbing
from difflm.diffusion.timesteps import TimeSampler
from difflm.errors import UsageError, speak_command
from difflm.fast.inference import Inference
from difflm.fast.repairs import GROWTH, OFFSETS, expect_nearby, repair_rows
from difflm.generation import ranking
from difflm.generation.jobs import Ids
from difflm.generation.ranking import TOKEN_DRAWS, UNKNOWN_SPELLING, VECTOR_DRAWS, GapFit, make_ranking
from difflm.methods import METHODS, TextSpec
from difflm.models.base import Capabilities, Sampling
from difflm.models.batching import pad_token_rows, source_condition
from difflm.models.diffusion import DiffusionModel
from difflm.models.lengths import DrawnFromSource
from difflm.runtime.resumable import ResumableLines
from tests.support.oracles import JOINT
from tests.support.pairs import FEW, RECIPE
from tests.support.recorded import Strict
from tests.support.tiny import train_quietly
from tests.support.token_oracles import AtAnyTime
from tests.support.twins import SOURCES, WORDS, batch_of, random_reader

pytestmark = pytest.mark.long  # a few seconds of setup

LONGEST, EACH = 8, 6
LETTERS = Words([*SPECIALS, *"abcdefgh"])
ASKED = ["a b c d", "h g", "d d d e e f"]
SMALL = {"hidden": 32, "layers": 1, "encoder_layers": 1, "heads": 2, "dropout": 0.0}
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
GAUSSIAN = {"difflm", "difformer", "diffuseq", "ar-diffusion"}


def build(method: str, tokenizer: Words = LETTERS, **sizes) -> TextDiffusion:
    """Random weights of which every word of the source and of the text has a say; no length of a text is certain."""
    own = {**SMALL, "embedding_dim": 8} if method in GAUSSIAN else SMALL
    own = {key: value for key, value in own.items() if key in METHODS[method].model_fields}
    torch.manual_seed(len(method))
    model = METHODS[method](**own, **sizes).build(TextSpec(tokenizer.size, LONGEST, LONGEST)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "head" in name:
            nn.init.normal_(parameter, std=0.05 if name.startswith("lengths.") else 0.5)
    made = TextDiffusion(model, tokenizer, {"method": method})
    made.name = method
    return made


def settings(lm: TextDiffusion) -> dict[str, int]:
    return {} if lm.config["method"] == "encoder-decoder" else {"steps": 2}


def draws_of(lm: TextDiffusion) -> int:
    return VECTOR_DRAWS if lm.config["method"] in GAUSSIAN else TOKEN_DRAWS


def spy_on_choice(lm: TextDiffusion, **asked) -> tuple[list, dict]:
    """The texts that are kept, and all candidates of each as ids and as texts."""
    job = lm.make_job(1, source=ASKED, **settings(lm), **asked)
    seen, choose = {}, job.choose

    def spy(numbers, ids, made):
        texts = [[decode() for decode in group] for group in made]
        seen.update(zip(numbers, zip(ids, texts, strict=True), strict=True))
        return choose(numbers, ids, made)

    job.choose = spy
    kept = {k: text for _, made in lm.run_jobs([job]) for k, text in made.items()}
    return [kept[k] for k in range(len(ASKED))], seen


def nats_alone(lm: TextDiffusion, ids: list[int], source: str, number: int) -> float:
    """Nats per token of one text, asked of the model itself."""
    told = torch.tensor([lm.tokenizer.encode(source)])
    batch = Batch(torch.tensor([ids]), torch.tensor([len(ids)]), told, torch.tensor([told.shape[1]]))
    return float(lm.model.nats(batch, Noise(7, torch.tensor([number])), draws_of(lm))) / (len(ids) + 1)


# -- likelihoods given a source ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_scores_of_all_texts_given_a_source_are_those_of_a_distribution(source):
    """Texts of at most three tokens, and the mass of everything that begins with three and goes on."""
    model = random_reader(0)
    lm = TextDiffusion(model, Words([*SPECIALS, *"abc"]), {"method": "encoder-decoder"})
    texts = [list(text) for n in range(4) for text in itertools.product([START, UNK, PAD, *WORDS], repeat=n)]
    ended = torch.exp(-lm.score_ids(texts, sources=[source] * len(texts)).double()).sum()
    with torch.no_grad():
        nats, _ = model.batch_nats(batch_of([tuple(text) for text in texts if len(text) == 3], source))
    goes_on = torch.exp(-nats[:, :3].sum(-1).double()) * (1 - torch.exp(-nats[:, 3].double()))
    assert float(ended + goes_on.sum()) == pytest.approx(1, abs=1e-5)


class ToldWhich(AtAnyTime):
    """Knows all about two words whose joint distribution the source names: that of the oracles, or its transpose."""

    def __init__(self) -> None:
        super().__init__(Absorbing(3))
        self.joints = [super().context, AtAnyTime(Absorbing(3), JOINT.T).context]
        self.conditioning.source_longest = 1

    def forward(self, x, t, mask=None, condition: Condition = UNCONDITIONAL, previous=None) -> Belief:
        level = self.process.at(t)
        each = torch.stack([known(x, level.t) for known in self.joints])
        context = each[condition.source[:, 0], torch.arange(len(x))]
        return self.codec.belief(context, x, level, None, self.process)


def test_a_bound_given_the_source_is_the_likelihood_of_an_exact_denoiser():
    """With masks it is tight: of 18 cells each is within 4.5 of its standard errors."""
    denoiser = ToldWhich()
    lengths = DrawnFromSource(2, 1)
    parts = Objective({"ce": 1.0}), TimeSampler(None), lengths, Sampling("ancestral")
    model = DiffusionModel(denoiser, *parts, bound=DiscreteBound())
    model.capabilities = replace(model.capabilities, source_limit=1)
    lm = TextDiffusion(model, LETTERS, {"method": "exact"})
    each, draws = 400, 64
    cells = [[a, b] for a in range(3) for b in range(3) for _ in range(each)]
    for source, joint in enumerate((JOINT, JOINT.T)):
        nats = lm.score_ids(cells, 0, draws, len(cells), sources=[[source]] * len(cells)).double().view(9, each)
        error = nats.std(1) / math.sqrt(each)
        exact = math.log(2) - joint.flatten().log()  # a text has one word or two
        assert float(error.max()) < 0.05 and float(((nats.mean(1) - exact) / error).abs().max()) < 4.5


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("difflm", marks=pytest.mark.long),
        *("diffuseq", "ar-diffusion", "mdlm", "block-diffusion", "encoder-decoder"),
    ],
)
def test_a_score_is_that_of_the_text_with_its_source_in_any_batch(method):
    lm = build(method)
    texts = ["a b c", "c b a h g f", "h"]
    draws = draws_of(lm)
    together = lm.score(texts, 7, draws, source=ASKED)
    for number, (text, source) in enumerate(zip(texts, ASKED, strict=True)):
        ids = lm.tokenizer.encode(text)
        assert together[number] / (len(ids) + 1) == pytest.approx(nats_alone(lm, ids, source, number), rel=1e-4)
    shifted = lm.score(texts, 7, draws, source=ASKED[1:] + ASKED[:1])
    assert all(abs(own - other) > 1e-3 for own, other in zip(together, shifted, strict=True))
    assert lm.score(texts, 7, draws, source=ASKED[0])[0] == pytest.approx(together[0], rel=1e-4)


def test_sources_that_are_missing_or_too_many_are_refused(tiny_runs):
    lm = build("difflm")
    with pytest.raises(UsageError, match="writes each text from a source: give one"):
        lm.score(["a b"])
    with pytest.raises(UsageError, match="from a source, and none is given"):
        lm.score_ids([[5]])
    with pytest.raises(UsageError, match="1 texts have 3 sources: give each its own"):
        lm.score(["a b"], source=ASKED)
    with pytest.raises(UsageError, match="source 1 has 9 tokens; this model reads at most 8"):
        lm.score(["a b"], source="a " * 9)
    with pytest.raises(UsageError, match="was trained on texts without sources"):
        TextDiffusion.from_pretrained(tiny_runs["difflm"]).score(["A pub."], source="a b")


# -- ranking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize(
    "method", [pytest.param("difflm", marks=pytest.mark.long), "mdlm", "block-diffusion", "encoder-decoder"]
)
def test_the_kept_candidate_has_the_fewest_nats_per_token(method, twin):
    lm = build(method)
    scorer = build("encoder-decoder", label_smoothing=0.2) if twin else lm
    kept, seen = spy_on_choice(lm, seed=7, candidates=EACH, rank=scorer if twin else "bound")
    differ = 0
    for number, (text, source) in enumerate(zip(kept, ASKED, strict=True)):
        ids, made = seen[number]
        held = [0 < len(row) <= scorer.model.max_words for row in ids]
        costs = [
            nats_alone(scorer, one, source, number) if fits else math.inf for fits, one in zip(held, ids, strict=True)
        ]
        best = min(range(EACH), key=costs.__getitem__)
        assert text.text == made[best].text
        scored = sum(held) * scorer.model.nats_calls(draws_of(scorer))
        assert text.denoiser_calls == sum(one.denoiser_calls for one in made) + scored
        assert text.seconds > made[best].seconds
        differ += best > 0
    assert differ  # not the first ones anyhow


@pytest.mark.parametrize("draws", [1, 4, 9])
@pytest.mark.parametrize("method", ["difflm", "diffuseq", "ar-diffusion", "mdlm", "block-diffusion"])
def test_calls_of_a_score_are_those_of_the_denoiser(method, draws, monkeypatch):
    lm, asked = build(method), []
    forward = lm.model.denoiser.forward
    monkeypatch.setattr(lm.model.denoiser, "forward", lambda *args, **more: asked.append(1) or forward(*args, **more))
    lm.score(["a b"], draws=draws, source="c d")
    assert len(asked) == lm.model.nats_calls(draws)


def test_blocks_of_one_word_are_scored_by_one_call():
    assert build("block-diffusion", block=1).model.nats_calls(9) == 1


def test_candidates_of_several_lengths_and_under_control_are_ranked_too():
    lm, twin = build("difformer"), build("encoder-decoder")
    kept, seen = spy_on_choice(lm, candidates=6, rank=twin, length_beam=3, controls=[Contains("b")])
    for number, text in enumerate(kept):
        ids, made = seen[number]
        assert len({len(row) for row in ids}) == 3
        costs = [nats_alone(twin, row, ASKED[number], 0) for row in ids]
        assert text.text == made[costs.index(min(costs))].text and text.controls[0]["satisfied"]


def test_what_the_twin_cannot_hold_is_last():
    lm, twin = build("mdlm"), build("encoder-decoder")
    twin.model.lengths.max_words = 3
    job = lm.make_job(1, source=ASKED[0], candidates=3, rank=twin)
    long, short, empty = [4] * 4, [5, 6], []
    assert [one.index for one in job.choose([0, 0], [[long, empty, short], [empty, long, long]], [])] == [2, 0]
    assert [one.calls for one in job.choose([0, 0], [[long, empty, short], [empty, long, long]], [])] == [1, 0]


@pytest.mark.parametrize(("candidates", "repairs"), [(1, 0), (4, 0), (4, 6)])
def test_a_captured_score_reads_each_source_once(candidates, repairs, monkeypatch):
    """As on a GPU: texts of one source share its row, unless one of them cannot be held."""
    lm, twin = build("mdlm"), build("encoder-decoder")
    sources = [lm.tokenizer.encode(source) for source in ASKED]
    ids = [[[4 + (k + n) % 8] * (1 + (2 * k + n) % 5) for k in range(candidates)] for n in range(len(ASKED))]
    monkeypatch.setattr("difflm.generation.ranking.DOUBT", 0.8)  # an untrained twin finds nothing unlikely
    ranking = make_ranking(lm, twin, 2, sources, len(sources), 7, repairs)
    monkeypatch.setattr("difflm.generation.ranking.CPU_TEXTS", 1024)

    def costs() -> list[float]:
        return [one.nats_per_token for group in ranking.read_versions(range(len(ids)), ids) for one in group]

    apart = costs()
    for module in ("difflm.fast.cuda_graphs", "difflm.fast.repairs"):
        monkeypatch.setattr(f"{module}.CapturedFunction", Strict)
    twin.inference.record, read, encode = True, [], twin.model.network.encode
    monkeypatch.setattr(twin.model.network, "encode", lambda ids, mask: read.append(len(ids)) or encode(ids, mask))
    for _ in range(3):  # the third one as if captured
        assert costs() == pytest.approx(apart, rel=1e-5)
    monkeypatch.setattr("difflm.generation.ranking.CPU_TEXTS", 2)  # several batches, of similar length
    assert costs() == pytest.approx(apart, rel=1e-5)
    assert read[:3] == [len(ASKED)] * 3 and sum(read[3:]) == candidates * len(ASKED)


def test_the_ranking_model_takes_the_ids_of_the_writer(monkeypatch):
    lm, twin = build("mdlm", Words([*SPECIALS, *"abcdefgh"])), build("encoder-decoder", Words([*SPECIALS, *"abcdefgh"]))
    asked = {"source": ASKED, "candidates": 2, "steps": 2}
    before = lm.generate(1, rank=twin, **asked)
    monkeypatch.setattr(twin.tokenizer, "encode_batch", lambda texts: pytest.fail("tokenised again"))
    assert [text.text for text in lm.generate(1, rank=twin, **asked)] == [text.text for text in before]
    twin.model.capabilities = replace(twin.model.capabilities, source_limit=5)
    with pytest.raises(UsageError, match="source 3 has 6 tokens; this model reads at most 5"):
        lm.generate(2, rank=twin, **asked)


@pytest.mark.long
def test_a_choice_depends_on_nothing_but_the_text_and_its_number():
    lm = build("difflm")
    whole = lm.generate(2, source=ASKED, candidates=3, rank="bound", steps=2)
    again = lm.generate(2, source=ASKED[:1], candidates=3, rank="bound", steps=2)
    assert [text.text for text in whole[:2]] == [text.text for text in again]


def test_texts_without_sources_are_ranked_too(tiny_runs):
    lm, judge = (TextDiffusion.from_pretrained(tiny_runs[name]) for name in ("difflm", "autoregressive"))
    made = lm.generate(4, steps=2)
    (text,) = lm.generate(1, steps=2, candidates=4, rank=judge)
    nats = [judge.score([one.text])[0] / (len(one.tokens) + 1) for one in made]
    assert text.text == made[nats.index(min(nats))].text and text.denoiser_calls == 4 * 2 + 4


@speak_command()
def test_what_cannot_rank_is_refused(tiny_runs):
    lm = build("difflm")

    def refuse(said: str, candidates: int = 2, writer: TextDiffusion = lm, **asked) -> None:
        with pytest.raises(UsageError, match=said):
            writer.generate(source="a b", candidates=candidates, **asked)

    refuse("give --candidates 2 or more", candidates=1, rank="bound")
    refuse("give --candidates 2 or more", candidates=1, mbr=3, rank="bound")
    refuse("--candidates and --mbr both choose", mbr=3, rank="bound")
    refuse("rank must be 'bound' or a model, not 'twin'", rank="twin")
    refuse("seqdiffuseq has no likelihood and no bound", writer=build("seqdiffuseq"), rank="bound")
    refuse("difflm reads no source", rank=TextDiffusion.from_pretrained(tiny_runs["difflm"]))
    refuse("has another vocabulary than", rank=build("mdlm", Words([*SPECIALS, *"abc"])))
    refuse("--candidates needs something to choose by")
    plain = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    reader = TextDiffusion(lm.model, plain.tokenizer, lm.config)
    with pytest.raises(UsageError, match="written from a source, and none is given"):
        plain.generate(candidates=2, rank=reader)


# -- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twin(reverser, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rerank") / "twin"
    recipe = {**RECIPE, "method": "encoder-decoder", "model": {k: v for k, v in FEW.items() if k != "embedding_dim"}}
    data = str(reverser.parent / "pairs.jsonl")
    return train_quietly({**recipe, "steps": 20, "data": data}, folder)


@pytest.fixture
def sources(tmp_path) -> Path:
    (tmp_path / "sources.txt").write_text("".join(f"{source}\n" for source in ASKED))
    return tmp_path / "sources.txt"


@pytest.mark.long
def test_translate_ranks_in_any_pieces(reverser, twin, sources, capsys, monkeypatch):
    monkeypatch.setattr(command, "PIECE", {"cpu": 3})
    lm = TextDiffusion.from_pretrained(reverser)
    for rank, given in (("bound", "bound"), (str(twin), TextDiffusion.from_pretrained(twin))):
        argv = ["translate", str(reverser), str(sources), "--steps", "2", "--candidates", "3", "--rank", rank, "--json"]
        assert main(argv) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        expected = lm.generate(source=ASKED, steps=2, candidates=3, rank=given)
        assert [(row["text"], row["denoiser_calls"]) for row in rows] == [(t.text, t.denoiser_calls) for t in expected]


@pytest.mark.long
def test_another_rank_does_not_continue_a_file(reverser, twin, sources, tmp_path, complaint, monkeypatch):
    argv = ("translate", reverser, sources, "--out", tmp_path / "out.txt", "--steps", 2, "--candidates", 2, "--rank")
    with monkeypatch.context() as patch:
        patch.setattr(ResumableLines, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main([str(arg) for arg in (*argv, "bound")]) == 1
    assert "was started with another rank" in complaint(2, *argv, twin)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--rank", "bound"), "give --candidates 2 or more"),
        (("--rank", "bound", "--mbr", 3), "give --candidates 2 or more"),
        (("--rank", "nothing", "--candidates", 2), "nothing is neither a bundled model nor a directory"),
        (("--rank", "EMPTY", "--candidates", 2), "so it is not a run"),
        (("--rank", "TEXTS", "--candidates", 2), "difflm reads no source"),
    ],
)
def test_a_rank_that_cannot_be_is_one_line(reverser, tiny_runs, sources, tmp_path, complaint, more, said):
    (tmp_path / "empty").mkdir()
    named = {"EMPTY": tmp_path / "empty", "TEXTS": tiny_runs["difflm"]}
    out = tmp_path / "out.txt"
    assert said in complaint(2, "translate", reverser, sources, "--out", out, *(named.get(arg, arg) for arg in more))
    assert not out.exists() and not out.with_name("out.txt.partial").exists()


@pytest.mark.long
def test_evaluate_has_a_row_for_each_rank_and_counts_its_calls(reverser, twin, tmp_path, capsys, complaint):
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"src": one, "trg": one[::-1]}) + "\n" for one in ASKED))
    argv = ["evaluate", reverser, "--task", "seq2seq", "--pairs", tmp_path / "pairs.jsonl", "--steps", 2]
    argv += ["--rank", "bound", "--out", tmp_path / "out.jsonl"]
    assert main([str(arg) for arg in (*argv, "--mbr", 3, "--rank", twin, "--json")]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    lm = TextDiffusion.from_pretrained(reverser)
    calls = 3 * lm.model.nats_calls(VECTOR_DRAWS)
    assert [(row["how"], row["calls"]) for row in rows[1:4]] == [
        ("MBR of 3", 6),
        ("by bound, best of 3", 6 + calls),
        ("by the twin, best of 3", 9),
    ]
    for row, rank in zip(rows[2:4], ("bound", TextDiffusion.from_pretrained(twin)), strict=True):
        texts = [text.text for text in lm.generate(source=ASKED, steps=2, candidates=3, rank=rank)]
        bleu = sum(sentence_bleu_nltk4(text, [source[::-1]]) for text, source in zip(texts, ASKED, strict=True)) / 3
        assert bleu > 0 and row["bleu_sentence_nltk4"] == pytest.approx(bleu)
    assert "give --mbr 2 or more" in complaint(2, *argv, "--mbr", 1)
    assert "--rank takes one run at most" in complaint(2, *argv, "--rank", "a", "--rank", "b")
    assert "was trained on texts without sources" in complaint(2, *argv, "--rank", "e2e")
    assert "--rank is for --task seq2seq" in complaint(2, "evaluate", reverser, "--rank", "bound")


@pytest.mark.long
def test_pairs_are_scored_from_columns_parallel_files_and_with_one_source(reverser, tmp_path, capsys, complaint):
    texts = ["d c b a", "g h", "f e e d d d"]
    lm = TextDiffusion.from_pretrained(reverser)
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({"src": s, "trg": t}) + "\n" for s, t in zip(ASKED, texts, strict=True))
    )
    (tmp_path / "s").write_text("\n".join(ASKED) + "\n")
    (tmp_path / "t.txt").write_text("\n".join(texts) + "\n")

    def scored(*argv: object) -> list[dict]:
        assert main(["score", str(reverser), *map(str, argv), "--draws", "3", "--json"]) == 0
        *rows, mean = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert mean["texts"] == 3 and [row["text"] for row in rows] == texts
        return rows

    expected = lm.score(texts, draws=3, source=ASKED)
    for given in (tmp_path / "pairs.jsonl", f"{tmp_path / 's'},{tmp_path / 't.txt'}"):
        rows = scored(given)
        assert [row["nats"] for row in rows] == pytest.approx(expected, abs=1e-3)
        assert [row["source"] for row in rows] == ASKED
    rows = scored(tmp_path / "t.txt", "--source", ASKED[1])
    assert [row["nats"] for row in rows] == pytest.approx(lm.score(texts, draws=3, source=ASKED[1]), abs=1e-3)
    assert "has no sources for its texts" in complaint(2, "score", reverser, tmp_path / "t.txt")
    assert "source 1 is empty" in complaint(2, "score", reverser, tmp_path / "t.txt", "--source", " ")


def test_a_model_without_sources_scores_none(tiny_runs, tmp_path, complaint):
    (tmp_path / "t.txt").write_text("A pub.\n")
    said = complaint(2, "score", tiny_runs["difflm"], tmp_path / "t.txt", "--source", "a")
    assert "was trained on texts without sources" in said


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_a_captured_pass_reads_texts_as_the_model_does(device: str) -> None:
    """Padded to few widths, over tensors that stay where they are, and with the weights of the moment."""
    twin = build("encoder-decoder").model.to(device)
    inference, draw = Inference(twin, record=True), torch.Generator().manual_seed(0)
    for turn, (texts, words) in enumerate([(3, 5), (3, 5), (2, 7), (3, 5), (3, 3), (3, 5)]):
        lengths, told = torch.randint(1, words + 1, (2, texts), generator=draw).to(device)
        ids, source = torch.randint(4, LETTERS.size, (2, texts, words), generator=draw).to(device)
        batch = Batch(ids, lengths, source, told)
        if turn == 4:
            with torch.no_grad():
                twin.network.head.weight.mul_(1.5)
        nats, error = inference.nats_and_error(batch, Noise(0, torch.arange(texts, device=device)), 1)
        assert torch.allclose(nats, twin.nats(batch), atol=1e-4) and not error.any()


# -- repairs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "word", "became", "moved"),
    [
        (1, 9, [4, 9, 6, 7], 0),
        (1, 6, [4, 6, 7], 1),  # it comes next anyway
        (1, 7, [4, 7], 2),
        (1, 4, [4, 4, 5, 6, 7], -1),  # an insertion
        (4, 9, [4, 5, 6, 7, 9], 0),
        (1, END, [4], 0),
    ],
)
def test_the_rest_of_a_repaired_text_is_what_follows_the_word_in_the_draft(place, word, became, moved):
    """Without room for another word, a word is replaced."""
    draft, lengths, none = torch.tensor([[4, 5, 6, 7, 0, 0]]), torch.tensor([4]), torch.tensor([0])
    given = draft, draft, lengths, none, torch.tensor([place]), torch.tensor([word])
    for room in (6, 4) if place < 4 else (6,):
        rows, sizes, shift = repair_rows(*given, torch.tensor([room]), torch.tensor(OFFSETS))
        expected = became if len(became) <= room else [4, 4, 6, 7]
        assert rows[0].tolist() == expected + [PAD] * (6 - len(expected))
        assert sizes.item() == len(expected) and shift.item() == (moved if expected == became else 0)


def test_a_word_that_was_replaced_is_wanted_behind_its_successor():
    """9 replaces 5 and 5 is wanted next: nothing of the draft is lost."""
    draft, lengths, offsets = torch.tensor([[4, 5, 6, 0, 0]]), torch.tensor([3]), torch.tensor(OFFSETS)
    text, _, shift = repair_rows(draft, draft, lengths, torch.tensor([0]), *torch.tensor([[1], [9], [5]]), offsets)
    assert text[0].tolist() == [4, 9, 6, PAD, PAD]
    text, sizes, shift = repair_rows(text, draft, lengths, shift, *torch.tensor([[2], [5], [5]]), offsets)
    assert text[0].tolist() == [4, 9, 5, 6, PAD] and sizes.item() == 4 and shift.item() == -1


class PlainRepairs:
    """What `Repairs` does, for one text and in lists: `read` gives the scores of all words at each place of a text."""

    def __init__(self, read: Callable[[Ids], Tensor], room: int, doubt: float) -> None:
        self.read, self.room, self.doubt = read, room, math.log(doubt)

    def put(self, text: Ids, place: int, word: int) -> Ids | None:
        if word == END:
            return text[:place] or None
        rest, draft = place + self.shift, self.draft
        for offset in (1, -1, 2, -2, 3, -3):
            found = [*text[:place], word, *draft[rest + offset + 1 :]] if rest + offset >= 0 else []
            if word in draft[rest + offset : rest + offset + 1] and rest + offset >= 0 and len(found) <= self.room:
                self.shift += offset
                return found
        found = [*text[:place], word, *draft[rest + 1 :]]
        return found if len(found) <= self.room else None

    def __call__(self, text: Ids, repairs: int) -> tuple[Ids, float, int]:
        self.draft, self.shift = text, 0
        edge, branched, tried, readings = 0, False, set[int](), 0
        best: tuple[float, Ids, list[float], list[tuple[float, int]]] | None = None
        for _ in range(repairs + 1):
            readings += 1
            tokens, scores = [*text, END], self.read(text)
            own = [float(scores[k, token]) for k, token in enumerate(tokens)]
            gains = []
            for k, token in enumerate(tokens):
                word = next(w for w in scores[k].argsort(descending=True).tolist() if w != token)
                bad = (word == END and k == 0) or (k == len(text) and len(text) >= self.room)
                gains.append((-math.inf if bad else float(scores[k, word]) - own[k], word))
            cost, better = -sum(own) / len(tokens), False
            if best is None or cost < best[0]:
                if best is not None:
                    same = itertools.takewhile(
                        lambda pair: pair[0] == pair[1], zip(tokens, [*best[1], END], strict=False)
                    )
                    last = len([*same])
                    tried = {k for k in tried if k <= last}
                best, better = (cost, text, own, gains), True
            place = next((k for k in range(edge, len(tokens)) if gains[k][0] > -self.doubt), None)
            if place is not None and branched:
                place = place if sum(own[: place + 1]) + gains[place][0] > sum(best[2][: place + 1]) else None
            if place is not None:
                tried |= {place} if better else set()
                changed = self.put(text, place, gains[place][1])
            else:
                open_ = [k for k in range(len(best[3])) if k not in tried and best[3][k][0] > self.doubt]
                if not open_:
                    break
                place = max(open_, key=lambda k: best[3][k][0])
                tried.add(place)
                self.draft, self.shift, edge, branched = best[1], 0, place + 1, True
                changed = self.put(best[1], place, best[3][place][1])
            assert changed is not None
            text = changed
        assert best is not None
        return best[1], best[0], readings


@pytest.mark.parametrize(("doubt", "repairs"), [(1.0, 20), (0.7, 60), (0.5, 60), (0.2, 6), (0.2, 60)])
@pytest.mark.parametrize("captured", [False, True])
def test_repairs_are_those_of_a_plain_loop(doubt, repairs, captured, monkeypatch):
    """With and without what the writer expects, captured and not: the same texts, costs and numbers of readings."""
    monkeypatch.setattr("difflm.fast.repairs.CapturedFunction", Strict)
    writer, twin = build("cmlm"), build("encoder-decoder")
    follow = 2 * torch.randn(LETTERS.size, LETTERS.size, generator=torch.Generator().manual_seed(0))
    network = twin.model.read  # a word depends little on the one before it, so that is added
    read_both = lambda words, memory: (network(words, memory=memory)[0] + follow[words], [])  # noqa: E731
    monkeypatch.setattr(twin.model, "read", read_both)
    sources, draw = twin.encode_sources(ASKED), torch.Generator().manual_seed(1)
    inference, tries, writer.inference.record = Inference(twin.model, record=captured), 0, captured
    for words in (3, 5, 7):
        lengths = torch.randint(1, words + 1, (3,), generator=draw)
        ids = torch.randint(4, LETTERS.size, (3, words), generator=draw)
        batch = Batch(ids, lengths, *pad_token_rows(sources))
        for expect in (None, writer.inference.expect_words):
            found = inference.repair_texts(batch, repairs, doubt, expect)
            told = None if expect is None else expect(batch)[..., : LETTERS.size]
            near = torch.zeros(3, 1, 1) if told is None else expect_nearby(told, lengths, LONGEST + 1)
            for k in range(3):

                def read(row: Ids, k: int = k, near: Tensor = near) -> Tensor:
                    memory = twin.model.encode_source(torch.tensor([sources[k]]), torch.ones(1, len(sources[k])) > 0)
                    with torch.no_grad():
                        log_p = twin.model.read(torch.tensor([[START, *row]]), memory=memory)[0][0].log_softmax(-1)
                    return (log_p + near[k, : len(log_p)]).masked_fill(twin.model.banned, -math.inf)

                room = min(int(lengths[k]) + GROWTH, twin.model.max_words)
                row, cost, readings = PlainRepairs(read, room, doubt)(ids[k, : lengths[k]].tolist(), repairs)
                assert found[3 : 3 + len(row), k].long().tolist() == row and found[2, k] == len(row)
                assert found[1, k] == readings and found[0, k].item() == pytest.approx(cost, abs=1e-4)
                tries = max(tries, readings)
    assert tries > 5


def test_a_writer_expects_words_nearby():
    """Those of its first step, at most two places away; the end of a text is never unexpected."""
    writer, sources = build("cmlm"), [[4, 5, 6], [7, 8]]
    rows, owners = [[4, 5, 6, 7], [8], [9, 9], [4, 4, 4]], [0, 0, 1, 1]
    found = writer.inference.expect_words(Batch(*pad_token_rows(rows), *pad_token_rows(sources)))
    other = writer.inference.expect_words(Batch(*pad_token_rows([[7, 7, 7, 7]]), *pad_token_rows(sources[:1])))
    assert torch.allclose(found[0], other[0], atol=1e-5)  # whatever the words are
    process, denoiser = writer.model.process, writer.model.denoiser
    for k, (row, owner) in enumerate(zip(rows, owners, strict=True)):
        told = denoiser.prepare(source_condition([sources[owner]]))
        canvas, mask = writer.model.lengths.canvas(*pad_token_rows([[process.mask_id] * len(row)]))
        with torch.no_grad():
            log_p = denoiser(canvas, process.at(torch.ones(1)), mask, told).logits.log_softmax(-1)[0]
        begin = writer.model.lengths.first
        assert torch.allclose(found[k, : len(row)], log_p[begin : begin + len(row)], atol=1e-5)
    near = expect_nearby(found, torch.tensor([len(row) for row in rows]), 6)
    assert near.shape == (4, 6, found.shape[-1]) and not near[..., END].any()
    for k, row in enumerate(rows):
        for place in range(6):
            places = {min(max(place + offset, 0), len(row) - 1) for offset in range(-2, 3)}
            most = found[k, sorted(places)].max(0).values
            expected = 0.3 * (most - most.max())
            expected[END] = 0
            assert torch.allclose(near[k, place], expected, atol=1e-5)


@pytest.mark.parametrize("recorded", [False, True])  # True: as on a GPU, captured and padded
def test_texts_that_are_written_greedily_are_settled_and_others_become_so(recorded):
    """With `doubt` 1 the first doubt moves on with every repair until there is none; then nothing is read again. With
    a smaller one other words are tried; more repairs never give a less likely text."""
    writer, twin = build("cmlm"), build("encoder-decoder")
    twin.inference.record = recorded
    sources = twin.encode_sources(ASKED)
    greedy = [twin.tokenizer.encode(text.text) for text in twin.generate(source=ASKED, temperature=0.0)]
    held = [k for k, row in enumerate(greedy) if len(row) > 2]
    rows, own = [greedy[k] for k in held], [sources[k] for k in held]
    assert rows
    costs = twin.score_ids(rows, sources=own)
    for one, row, nats in zip(twin.repair_ids(rows, 3, 1.0, sources=own), rows, costs, strict=True):
        assert one.readings == 1 and one.ids == row
        assert one.nats_per_token == pytest.approx(float(nats) / (len(one.ids) + 1), abs=1e-4)
    changed = [[*row[:1], 4 + (row[1] - 3) % 8, *row[2:]] for row in rows]
    for one, row in zip(twin.repair_ids(changed, 50, 1.0, sources=own), rows, strict=True):
        assert one.readings > 1 and one.ids == row
    drafts = [writer.tokenizer.encode(text.text) for text in writer.generate(source=ASKED, steps=1)]
    assert max(one.readings for one in twin.repair_ids(drafts, 50, 1.0, sources=sources)) > 2
    tried = [twin.repair_ids(drafts, repairs, 0.2, sources=sources) for repairs in (0, 5, 20)]
    assert all(one.readings <= 21 for one in tried[2]) and max(one.readings for one in tried[2]) > 6
    some = [[one.nats_per_token for one in group] for group in tried]
    assert all(a >= b >= c for a, b, c in zip(*some, strict=True)) and sum(some[2]) < sum(some[0]) - 0.01


@pytest.mark.parametrize("compiled", [False, True])
def test_captured_readings_repair_as_others_do(compiled, monkeypatch):
    """One text or several, of several widths and numbers of repairs, after a change of weights too. Of compiled ones
    this tests what is traced."""
    monkeypatch.setattr("difflm.fast.repairs.CapturedFunction", Strict)
    monkeypatch.setattr(torch, "compile", lambda traced, **_: traced)
    twin = build("encoder-decoder")
    plain, captured = Inference(twin.model, record=False), Inference(twin.model, record=True, compiled=compiled)
    draw = torch.Generator().manual_seed(0)
    for turn, (texts, words) in enumerate([(3, 5), (3, 5), (3, 5), (1, 7), (3, 5)]):
        lengths, told = torch.randint(1, words + 1, (2, texts), generator=draw)
        ids, source = torch.randint(4, LETTERS.size, (2, texts, words), generator=draw)
        if turn == 4:
            with torch.no_grad():
                twin.model.network.head.weight.mul_(1.5)
        made = [one.repair_texts(Batch(ids, lengths, source, told), turn, 0.5) for one in (plain, captured)]
        assert torch.allclose(made[0][:3], made[1][:3], atol=1e-4)
        for row, other, size in zip(made[0][3:].T, made[1][3:].T, made[0][2].long(), strict=True):
            assert torch.equal(row[:size], other[:size])


def test_captured_readings_in_another_dtype_follow_the_weights(monkeypatch):
    """By a copy of the model, which is brought up to date for every request; compiled or not is told apart."""
    monkeypatch.setattr("difflm.fast.repairs.CapturedFunction", Strict)
    monkeypatch.setattr(torch, "compile", lambda traced, **_: traced)
    twin = build("encoder-decoder")
    ids, source, sizes = torch.randint(4, LETTERS.size, (2, 3, 5)), torch.randint(4, 9, (3, 4)), torch.tensor([5, 3, 4])
    batch, kept = (
        Batch(ids[0], sizes, source, torch.tensor([4, 2, 3])),
        Inference(twin.model, torch.bfloat16, record=True),
    )
    for scale in (1.0, 1.5):
        with torch.no_grad():
            twin.model.network.head.weight.mul_(scale)
        fresh = Inference(twin.model, torch.bfloat16, record=True)
        found, wanted, exact = (one.repair_texts(batch, 3, 0.5) for one in (kept, fresh, Inference(twin.model)))
        assert torch.equal(found, wanted) and not torch.equal(found[0], exact[0])
        assert torch.allclose(found[0], exact[0], atol=0.2)
    kept.compiled = True
    kept.repair_texts(batch, 3, 0.5)
    assert len(kept._repairs.idle) == 2


def test_repairs_are_chosen_where_the_ranking_model_finds_them_likelier(monkeypatch):
    """All versions of all candidates compete, each reading counts as a call, and nothing gets worse if what the writer
    expects has no weight. It is asked once for each candidate."""
    monkeypatch.setattr("difflm.fast.repairs.WEIGHT", 0.0)
    writer, twin = build("cmlm"), build("encoder-decoder")
    asked = {"candidates": 3, "rank": twin, "steps": 2}
    plain, mended = (writer.generate(source=ASKED, **asked, repairs=count) for count in (0, 9))
    costs = [twin.score([text.text for text in texts], source=ASKED) for texts in (plain, mended)]
    sizes = [[len(text.tokens) + 1 for text in texts] for texts in (plain, mended)]
    before, after = ([nats / size for nats, size in zip(*one, strict=True)] for one in zip(costs, sizes, strict=True))
    assert all(new <= old + 1e-5 for new, old in zip(after, before, strict=True)) and sum(after) < sum(before) - 0.01
    more = [b.denoiser_calls - a.denoiser_calls for a, b in zip(plain, mended, strict=True)]
    assert all(3 <= count <= 30 for count in more) and max(more) > 3
    alone = [writer.generate(source=source, **asked, repairs=9)[0].text for source in ASKED]
    assert alone[0] == mended[0].text  # of the same seed and number
    monkeypatch.setattr("difflm.fast.repairs.WEIGHT", 3.0)
    heard = writer.generate(source=ASKED, **asked, repairs=9)
    assert [text.text for text in heard] != [text.text for text in mended]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"rank": "bound", "repairs": 1}, "needs a left-to-right model"),
        ({"repairs": 1}, "needs a left-to-right model"),
        ({"repairs": -1}, "between 0 and"),
        ({"repairs": True}, "between 0 and"),
    ],
)
def test_repairs_that_nobody_can_make_are_refused(asked, said):
    with pytest.raises(UsageError, match=said):
        build("cmlm").generate(source=ASKED, **{"candidates": 2, **asked})


def test_repairs_do_not_undo_controls():
    with pytest.raises(UsageError, match="may undo"):
        build("cmlm").generate(
            source="a b", candidates=2, rank=build("encoder-decoder"), repairs=1, controls=[Contains("a")]
        )


def test_commands_repair(reverser, twin, sources, tmp_path, capsys, complaint, monkeypatch):
    """`translate` counts one more reading per candidate, and `evaluate` names the row after it."""
    argv = ["translate", reverser, sources, "--steps", 2, "--candidates", 2, "--rank", twin]
    monkeypatch.setattr("difflm.generation.ranking.DOUBT", 1.0)  # an untrained twin finds nothing unlikely
    calls = []
    for repairs in (0, 1):
        assert main([str(arg) for arg in (*argv, "--repairs", repairs, "--json")]) == 0
        calls.append([json.loads(line)["denoiser_calls"] for line in capsys.readouterr().out.splitlines()])
    assert [after - before for before, after in zip(*calls, strict=True)] == [2] * len(calls[0])
    assert "between 0 and" in complaint(2, *argv, "--repairs", -1)
    assert "--repairs may undo" in complaint(2, *argv, "--repairs", 1, "--length", 2)
    assert "needs a left-to-right" in complaint(2, *argv[:-1], "bound", "--repairs", 1)
    (tmp_path / "pairs.jsonl").write_text('{"src": "a cheap pub", "trg": "eine billige Kneipe"}\n' * 2)
    argv = ["evaluate", reverser, "--task", "seq2seq", "--pairs", tmp_path / "pairs.jsonl", "--steps", 2, "--mbr", 2]
    assert main([str(arg) for arg in (*argv, "--rank", twin, "--repairs", 1, "--json")]) == 0
    assert "by the twin, best of 2, 1 repair each" in capsys.readouterr().out
    alone = [*argv[:-1], 1, "--rank", twin]
    assert "give --mbr 2 or more" in complaint(2, *alone)
    assert main([str(arg) for arg in (*alone, "--repairs", 9, "--json")]) == 0  # one candidate suffices
    assert "by the twin, 9 repairs each" in capsys.readouterr().out
    assert "needs a left-to-right" in complaint(2, *argv, "--rank", "bound", "--repairs", 1)


def test_a_filling_with_an_unknown_spelling_must_be_likelier_by_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known are the words of the training texts and those that are given."""
    texts = ["a gleeby pub", "an old pub", "a Zizzi pub"]
    words, model = (
        Lexicon(frozenset({"a", "an", "old"})),
        SimpleNamespace(capabilities=Capabilities(reads_in_order=True)),
    )
    tokenizer = SimpleNamespace(decode=lambda row: texts[row[0]])
    writer: Any = SimpleNamespace(lexicon=words, tokenizer=tokenizer, model=model, gaps={})
    for nats, best in (([1, 1.1 + UNKNOWN_SPELLING, 99], 0), ([1, 0.9 + UNKNOWN_SPELLING, 99], 1), ([1, 9, 1.1], 2)):
        monkeypatch.setattr(ranking, "read_in_order", lambda _, rows, nats=nats: nats)
        (chosen,) = GapFit(writer, 0, 0, given="Zizzi's ___ pub")([0], [[[0], [1], [2]]])
        assert chosen.index == best
    writer.gaps["restates"] = "gleeby"
    monkeypatch.setattr(ranking, "read_in_order", lambda _, rows: [1, 9 + UNKNOWN_SPELLING, 99])
    assert GapFit(writer, 0, 0)([0], [[[0], [1], [2]]])[0].index == 1  # nobody asked for other words
