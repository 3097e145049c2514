"""A left-to-right model of others as a diffusion model: what the benchmark does, on a tiny model of random weights."""

import gzip
import json
import sys

import pytest
import torch

from benchmarks.assets import adapt, english, english_texts
from benchmarks.assets.adapt import Teacher, join, split, trim
from benchmarks.assets.english_texts import Source
from benchmarks.tables.timed import read_results
from difflm.data.tokenizers import SPECIALS
from difflm.training import fit
from difflm.training.run import read_config
from tests.support.open_checkpoints import write_model, write_tokenizer


@pytest.fixture
def teacher(tmp_path):
    folder = write_model(tmp_path / "teacher", "diffullama", eos_token_id=100, bos_token_id=100)
    write_tokenizer(folder, rows=110, marks=False)
    return folder


def test_pieces_are_joined_when_all_have_arrived(tmp_path):
    (tmp_path / "from").mkdir()
    for name, size in (("a.bin", 25), ("b.json", 3)):
        (tmp_path / "from" / name).write_bytes(bytes(range(size)))
    pieces = split(tmp_path / "from", tmp_path / "pieces", size=10)
    assert [path.stat().st_size for path in pieces] == [10, 10, 5, 3]
    held = pieces[1].read_bytes()
    pieces[1].unlink()
    assert join(tmp_path / "pieces", tmp_path / "to") == ["a.bin.002"] and not (tmp_path / "to").exists()
    pieces[1].write_bytes(held)
    assert join(tmp_path / "pieces", tmp_path / "to") == []
    for name in ("a.bin", "b.json"):
        assert (tmp_path / "to" / name).read_bytes() == (tmp_path / "from" / name).read_bytes()


def test_a_missing_file_of_gaps_is_told_before_anything_is_loaded(tmp_path, monkeypatch):
    """Not as a division by no sentences after the model is ready."""
    (tmp_path / "empty.jsonl").touch()
    for name in ("none.jsonl", "empty.jsonl"):
        given = ["adapt", "fill", "no-run", "--teacher", "no-teacher", "--gaps", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", given)
        with pytest.raises(SystemExit, match=rf"no sentences with gaps in .*{name}"):
            adapt.main()


@pytest.mark.long
def test_the_teacher_is_the_published_model(teacher, monkeypatch):
    """Its nats are those of the Hugging Face library, its greedy words the likeliest; what it draws ends."""
    transformers = pytest.importorskip("transformers")
    own = Teacher(teacher, "cpu")
    theirs = transformers.LlamaForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    rows = own.tokenizer.encode_batch(["the dog sleeps in the garden", "a cat"])
    for row, found in zip(rows, own.nats(rows), strict=True):
        ids = torch.tensor([[100, *own.their_ids(row)]])
        with torch.no_grad():
            logs = theirs(ids).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(found, -logs.gather(1, ids[0, 1:, None]).squeeze(1), atol=2e-5, rtol=0)
    whole = own.nats(own.tokenizer.encode_batch(["the dog sleeps"]))[0]
    assert own.judge("the dog sleeps", 0) == pytest.approx(float(whole.mean()))
    assert own.judge("the dog sleeps", 7) == pytest.approx(float(whole[-1:].mean()))
    empty, words = [own.start], torch.tensor(own.tokenizer.theirs)
    assert all(len(row) <= 5 and 1 not in row for row in own.write([empty] * 3, 5))
    assert own.write([empty] * 3, 5) == own.write([empty] * 3, 5)
    monkeypatch.setattr(torch, "multinomial", lambda shares, *_, **__: words[shares[:, words].argmax(1, keepdim=True)])
    row, other = own.write([empty, [own.start, *own.their_ids(rows[1])]], 5)  # with keys and values that are kept
    assert len(row) == len(other) == 5
    for begun, written in (([], row), (rows[1], other)):
        texts = [[*begun, *written[:k]] for k in range(5)]
        assert written == [int(own.read([text], last=True)[0, -1][words].argmax()) + len(SPECIALS) for text in texts]


@pytest.mark.long
def test_a_trimmed_teacher_reads_the_same_words_and_spells_the_others(teacher):
    text, other = "the dog sleeps", "a cat in the garden"
    before = Teacher(teacher, "cpu")
    (row,) = before.tokenizer.encode_batch([text])
    logs = before.read([row])[0]
    trim(teacher, [text] * 3, len(before.tokenizer.theirs) - 12)
    after = Teacher(teacher, "cpu")
    (less,) = after.tokenizer.encode_batch([text])
    assert len(after.tokenizer.theirs) < len(before.tokenizer.theirs) and len(after.embedding) < 110
    assert [after.tokenizer.decode(ids) for ids in after.tokenizer.encode_batch([text, other])] == [text, other]
    found = after.read([less])[0]
    kept, same = (torch.tensor(one.their_ids(ids)) for one, ids in ((before, row), (after, less)))
    torch.testing.assert_close(logs[:, kept].log_softmax(-1), found[:, same].log_softmax(-1), atol=1e-5, rtol=0)


@pytest.mark.long
def test_a_teacher_becomes_a_diffusion_model(teacher, tmp_path, monkeypatch):
    """Every command, training in two parts; the page names all that was measured."""
    nouns = ("dog", "cat", "man", "boy", "girl", "king", "cook", "bird")
    for name, verb in (("one", "saw"), ("two", "met")):
        with gzip.open(tmp_path / f"{name}.txt.gz", "wt", encoding="utf-8") as file:
            file.write("\n\n".join(f"The {a} {verb} the {b} in the town." for a in nouns for b in nouns))
    sources = {name: Source(f"{name}.txt.gz", "CC0 1.0", "", "", name, held_out=10) for name in ("one", "two")}
    for module in (english_texts, english):
        monkeypatch.setattr(module, "SOURCES", sources)
    monkeypatch.setattr(fit, "Trainer", fit.Trainer)  # which training for minutes replaces
    monkeypatch.setattr(fit, "check_same_recipe", fit.check_same_recipe)
    gaps = [{"domain": "news", "text": "The dog ___ the cat in ___.", "words": ["saw", "the town"]}]
    (tmp_path / "gaps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gaps * 2))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["adapt", *map(str, words), "--device", "cpu"])
        adapt.main()

    given = ("--teacher", teacher, "--tokens", tmp_path / "tokens")
    run("prepare", "--data", tmp_path, *given, "--megabytes", 1)
    small = ("batch_size=8", "ema=0", "model.anneal=4")
    for out, method in (("masks", "mdlm"), ("blocks", "block-diffusion")):
        train = ("train", *given, "--out", tmp_path / out, f"method={method}", *small, "--minutes", "0.06")
        run(*train, "--seconds", "1")
        assert not (tmp_path / out / "done").exists()
        run(*train)
        assert (tmp_path / out / "done").exists() and read_config(tmp_path / out)["trained"]["stopped"] == "done"
    runs, made = (tmp_path / "masks", tmp_path / "blocks"), tmp_path / "measured.jsonl"
    few = ("--texts", 2, "--samples", 2, "--steps", 2)
    run("measure", *runs, *given, "--out", made, *few)
    judged = {record["run"]: record for record in read_results(made) if record["kind"] == "judged"}
    assert {*judged} == {"teacher", "held-out passages", "masks", "blocks"} and judged["masks"]["calls"] > 0
    run("fill", *runs, *given, "--gaps", tmp_path / "gaps.jsonl", "--out", tmp_path / "fills.jsonl", "--candidates", 2)
    rows = read_results(tmp_path / "fills.jsonl")
    assert [row["run"] for row in rows] == ["masks"] * 2 + ["blocks"] * 2
    assert all({*row["nats"]} == {"words", "filled", "left", "others"} and len(row["left"]) == 2 for row in rows)
    run("page", tmp_path / "fills.jsonl", "--measured", made, "--out", tmp_path / "page.md")
    said = (tmp_path / "page.md").read_text()
    assert "| | masks | blocks | teacher |" in said and "## Gaps: blocks" in said and "of other sentences" in said
