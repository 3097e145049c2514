"""Sources with words of their own: letters of two cases are written as Greek ones. The two sides share no word."""

import json
import random
import shutil
from pathlib import Path

import pytest

from difflm import TextDiffusion
from difflm.app.cli import main
from difflm.data.texts import Example
from difflm.data.tokenfile import TokenFile
from difflm.data.tokenizers import UNK, Tokenizer, Words
from difflm.errors import DifflmError, UsageError
from difflm.evaluation.seq2seq import reads
from difflm.methods import METHODS, TextSpec
from difflm.training.recipe import check, load_recipe
from difflm.training.run import load_run, read_config
from tests.support.tiny import assert_resumed_to_the_bit, train_quietly

pytestmark = pytest.mark.long  # a few seconds of setup

LENGTH, TEXTS = 4, 48
LATIN, GREEK = "abcdABCD", "αβγδ"
SMALL = {"embedding_dim": 16, "hidden": 32, "layers": 2, "encoder_layers": 1, "heads": 2, "dropout": 0.0}
RECIPE = {
    "method": "difflm",
    "model": SMALL,
    "tokenizer": "words",
    "more_than": 0,
    "longest": LENGTH,
    "source_longest": 8,
    "source_words": "own",
    "steps": 80,
    "batch_size": 32,
    "warmup": 10,
    "lr": 8e-3,
    "ema": 0.9,
}
ONE_STEP = {"longest": 16, "steps": 1, "batch_size": 4}


def sequences(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(LATIN, k=LENGTH)) for _ in range(count)]


def in_greek(source: str) -> str:
    return source.lower().translate(str.maketrans(LATIN[:4], GREEK))


def write_pairs(path: Path, count: int) -> Path:
    rows = [{"src": source, "trg": in_greek(source)} for source in sequences(count, 0)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(out: Path, **changes) -> Path:
    return train_quietly({**RECIPE, **changes}, out)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sides")
    return train(folder / "run", data=str(write_pairs(folder / "pairs.jsonl", 1000)), distinct=True)


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """Trained for a step: its words are there."""
    folder = tmp_path_factory.mktemp("sides")
    return train(folder / "run", data=str(write_pairs(folder / "pairs.jsonl", 1000)), distinct=True, steps=1)


@pytest.mark.long
def test_unseen_sources_are_written_in_words_of_the_other_side(run):
    lm = TextDiffusion.from_pretrained(run)
    unseen = sequences(TEXTS, 1)
    made = lm.generate(source=unseen, steps=10, temperature=0.5)
    right = [in_greek(source) for source in unseen]
    assert sum(text.text == one for text, one in zip(made, right, strict=True)) >= 0.95 * TEXTS
    assert sum(text.text == one for text, one in zip(made, right[1:], strict=False)) <= 0.1 * TEXTS


def test_each_side_has_the_words_of_its_own_texts(begun):
    """Beside four specials and a newline, which words are counted with: eight words of sources, four of texts."""
    model, tokenizer, config = load_run(begun)
    assert set(tokenizer.pieces) == {*GREEK, "\n"} and set(tokenizer.for_sources.pieces) == {*LATIN, "\n"}
    assert (config["vocabulary"], config["source_vocabulary"]) == (9, 13)
    assert model.vocabulary == 9 and model.denoiser.network.embed_source.num_embeddings == 13
    tokens = TokenFile.open(begun / "data" / "train")
    sources, lengths = tokens.sources.rows(range(len(tokens)), LENGTH)
    assert [tokenizer.for_sources.decode(row) for row in sources] == sequences(1000, 0) and set(lengths) == {LENGTH}
    assert [tokenizer.decode(row) for row in tokens.rows(range(3), LENGTH)[0]] == list(map(in_greek, sequences(3, 0)))


def test_the_card_names_both_vocabularies(begun):
    from difflm.training.model_card import summarise

    assert "words, 9 in the vocabulary, 13 in that of the sources;" in summarise(read_config(begun))["tokens"]


def test_translate_knows_the_words_of_sources_and_no_others(begun, tmp_path, capsys):
    (tmp_path / "sources.txt").write_text("a B c d\nα β a z\n")
    assert main(["translate", str(begun), str(tmp_path / "sources.txt"), "--steps", "3"]) == 0
    said = capsys.readouterr()
    assert "3 of 8 tokens of the sources are words that this model does not know" in said.err
    assert len(said.out.splitlines()) == 2 and set(said.out) <= {*GREEK, " ", "\n"}
    assert TextDiffusion.from_pretrained(begun).encode_sources("α β a z").pop().count(UNK) == 3


def test_the_seq2seq_task_reads_sources_by_their_own_words(run, capsys):
    argv = ["evaluate", str(run), "--task", "seq2seq", "--mbr", "1", "--steps", "10", "--temperature", "0.5", "--json"]
    assert main(argv) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {row["name"]: row["bleu_sacre"] for row in rows}
    assert found["run"] > 90 and found["copy of the source"] == 0
    assert {row["sources"] for row in rows} == {read_config(run)["held_out"]}  # as training told repeated pairs apart


@pytest.mark.parametrize("method", [k for k, one in METHODS.items() if one.task != "text" and one.kind != "adapter"])
def test_every_method_reads_sources_of_another_vocabulary_or_says_that_it_does_not(method):
    values = {**RECIPE, "method": method, "model": {}, "data": "pairs.jsonl"}
    if METHODS[method].one_canvas:
        with pytest.raises(UsageError, match=f"source_words: {method} has one embedding for both sides"):
            check(values)
        return
    sizes = {key: value for key, value in SMALL.items() if key in METHODS[method].model_fields}
    model = check({**values, "model": sizes}).build_method().build(TextSpec(9, 8, 8, 40))
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items() if "embed_source" in name}
    assert [shape[0] for shape in shapes.values()] == [40] and model.vocabulary == 9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["method=diffuseq-v2"], "source_words: diffuseq-v2 has one embedding for both sides"),
        (["task=span-denoising"], "source_words: in span-denoising, source and text are one text"),
        (["method=diffusion-lm", "source_longest=0"], "source_words: diffusion-lm reads no sources. Leave it out"),
        (["source_words=two"], "source_words: input should be 'shared' or 'own'"),
    ],
)
def test_what_cannot_have_words_for_each_side_gets_one_line(changes, said, tmp_path, capsys):
    data = f"data={write_pairs(tmp_path / 'pairs.jsonl', 8)}"
    argv = ["train", "multi30k", data, "source_words=own", "licence=none", *changes, "--out", str(tmp_path / "run")]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1 and not (tmp_path / "run").exists()


def test_own_words_say_that_there_are_sources(tmp_path):
    """`difflm` reads sources or none; of one file, nothing but the recipe says which."""
    data = str(write_pairs(tmp_path / "pairs.jsonl", 40))
    assert not check({**RECIPE, "data": data, "source_longest": 0, "source_words": "shared"}).has_sources
    assert check({**RECIPE, "data": data, "source_longest": 0}).has_sources


@pytest.mark.long
def test_characters_are_learned_from_each_side(tmp_path):
    data = str(write_pairs(tmp_path / "pairs.jsonl", 40))
    tokenizer = load_run(train(tmp_path / "run", data=data, **ONE_STEP, tokenizer="characters"))[1]
    assert tokenizer.pieces == sorted({*GREEK, " "}) and tokenizer.for_sources.pieces == sorted({*LATIN, " "})


@pytest.mark.long
def test_words_of_another_run_are_shared_whatever_the_texts(tmp_path, capsys):
    """So that the other run can rank what this one writes, though it learned from other texts."""
    first = train(tmp_path / "first", data=str(write_pairs(tmp_path / "pairs.jsonl", 40)), **ONE_STEP)
    others = tmp_path / "others.jsonl"
    others.write_text('{"src": "a b", "trg": "α β"}\n' * 8)
    changes = [f"data={others}", "source_words=own", "steps=1", "batch_size=2", "longest=8", "licence=none"]
    changes += ["method=difflm", *(f"model.{key}={value}" for key, value in SMALL.items())]
    assert main(["train", "multi30k", f"tokenizer={first}", *changes, "--out", str(tmp_path / "second")]) == 0
    assert load_run(tmp_path / "second")[1].fingerprint() == load_run(first)[1].fingerprint()
    capsys.readouterr()
    for wrong, said in [
        ([f"tokenizer={first}", "source_words=shared"], "goes with source_words=own"),
        (["tokenizer=bpee"], "tokenizer=bpee is none of words, bpe, characters, nor a run: bpee is neither"),
    ]:
        assert main(["train", "multi30k", *changes, *wrong, "--out", str(tmp_path / "third")]) == 2
        err = capsys.readouterr().err
        assert said in err and len(err.splitlines()) == 1 and not (tmp_path / "third").exists()


@pytest.mark.long
def test_byte_pairs_are_learned_from_each_side(tmp_path):
    """A letter and the space before it are one piece on the side that has them, and two or three on the other."""
    data = str(write_pairs(tmp_path / "pairs.jsonl", 40))
    lm = TextDiffusion.from_pretrained(train(tmp_path / "run", data=data, **ONE_STEP, tokenizer="bpe"))
    assert [len(side.encode(" a α")) for side in (lm.tokenizer, lm.tokenizer.for_sources)] == [3, 4]
    longest = " A b C d a B c D"  # eight tokens of a source, which the model reads; sixteen of a text
    assert reads(lm, [longest, longest + " a"]) == [True, False] and len(lm.tokenizer.encode(longest)) == 16


@pytest.mark.long
def test_a_stopped_run_is_resumed_and_keeps_its_words(tmp_path, monkeypatch, capsys):
    data = write_pairs(tmp_path / "pairs.jsonl", 40)
    changes = [f"model.{key}={value}" for key, value in SMALL.items()]
    changes += ["steps=6", "save_every=3", "batch_size=8", "warmup=0", "tokenizer=words", "more_than=0", "longest=8"]
    changes += ["source_longest=8", "validate_every=99", "licence=none", f"data={data}"]
    argv = ["train", "multi30k", "method=difflm", *changes]
    assert_resumed_to_the_bit([*argv, "source_words=own"], 4, tmp_path, monkeypatch)
    capsys.readouterr()
    assert main([*argv, "--out", str(tmp_path / "cut"), "--resume"]) == 2
    assert "was started with source_words=own, not shared" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_that_begins_with_another_has_its_words_of_both_sides(run, tmp_path):
    data = str(write_pairs(tmp_path / "pairs.jsonl", 40))
    fewer = {**ONE_STEP, "longest": LENGTH, "data": data, "init": str(run)}
    tuned = train(tmp_path / "tuned", **fewer)
    assert (tuned / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    assert read_config(tuned)["source_vocabulary"] == 13
    with pytest.raises(UsageError, match="has source_words=own, not shared: leave source_words out"):
        train(tmp_path / "other", **fewer, source_words="shared")
    begun = ["method=difflm", f"init={run}", f"data={data}", "licence=none"]
    assert load_recipe("multi30k", begun).source_words == "own"


def test_words_of_another_run_are_noticed(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "tokenizer.json"
    data = json.loads(path.read_text())
    words = data["for_sources"]["words"]
    words[4], words[5] = words[5], words[4]
    path.write_text(json.dumps(data))
    with pytest.raises(DifflmError, match="is not the tokenizer this model was trained with"):
        load_run(tmp_path / "run")
    path.write_text(json.dumps({**data, "for_sources": {"kind": "words"}}))
    with pytest.raises(DifflmError, match="is not a tokenizer that difflm wrote: it has no list of texts"):
        load_run(tmp_path / "run")


def test_a_shared_tokenizer_is_written_as_ever(tmp_path):
    tokenizer = Words.build(["a b"], 0)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == {"kind": "words", "words": tokenizer.words}
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert again.for_sources is again


def test_many_words_of_sources_fit_into_a_token_file(tmp_path):
    """More ids than 16 bits hold, on one side alone."""
    tokenizer = Words.build(["t"], 0)
    tokenizer.for_sources = Words(["START", "END", "UNK", "PAD", *(f"w{i}" for i in range(70_000))])
    tokens = TokenFile.build(tmp_path / "ids", [Example("t", "w69999 w0")], tokenizer, {})
    assert tokens.sources.rows([0], 2)[0].tolist() == [[70_003, 4]] and tokens.rows([0], 1)[0].tolist() == [[4]]
