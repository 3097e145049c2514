"""Packed rows: documents end to end, each learned as if it stood alone."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from difflm.app.cli import main
from difflm.data.batches import Batch, PackedBatches, PackedRows, held_out
from difflm.data.corpora import corpus, resolve_data
from difflm.data.texts import Example
from difflm.data.tokenfile import TokenFile, source_fingerprint
from difflm.data.tokenizers import END, PAD, SPECIALS, Words
from difflm.diffusion.noise import Noise
from difflm.errors import UsageError
from difflm.evaluation.corpora import corpus_for
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import METHODS, TextSpec
from difflm.models.autoregressive import Autoregressive
from difflm.runtime.files import read_json
from difflm.training.run import load_run
from tests.support.tiny import MODEL, assert_resumed_to_the_bit, tiny_run, write_grammar

PACKED = [name for name, method in METHODS.items() if method.packs]
VOCABULARY, WIDTH = 20, 16


def token_file(documents: list[list[int]]) -> TokenFile:
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.uint64)
    return TokenFile(np.array([i for one in documents for i in one], np.uint16), offsets)


@given(
    st.lists(st.lists(st.integers(4, 19), max_size=9), min_size=2, max_size=12),
    st.integers(1, 7),
    st.sets(st.integers(0, 11)),
)
def test_rows_are_the_documents_end_to_end(documents, width, held):
    """Cut by hand: all but the held-out documents, and the held-out ones alone."""
    tokens, without = token_file(documents), np.array(sorted(k for k in held if k < len(documents)), np.int64)
    for chosen, rows in (
        ([k for k in range(len(documents)) if k not in held], {"without": without}),
        (without.tolist(), {"only": without}),
    ):
        stream = [(number, token) for number in chosen for token in documents[number]]
        if not stream:
            continue
        packed = PackedRows(tokens, width, **rows)
        cut = [stream[k : k + width] for k in range(0, len(stream), width)]
        assert len(packed) == len(cut) and packed.total == len(stream)
        ids, lengths, numbers = packed.rows(np.arange(len(cut)))
        for row, own, length, number in zip(cut, ids, lengths, numbers, strict=True):
            assert own.tolist() == [token for _, token in row] + [PAD] * (width - len(row)) and length == len(row)
            order = list(dict.fromkeys(document for document, _ in row))
            assert number.tolist() == [order.index(document) for document, _ in row] + [-1] * (width - len(row))
        pieces = [sum(document == one for document, _ in row) for row in cut for one in {d for d, _ in row}]
        counts, words = packed.count(VOCABULARY)
        assert counts.tolist() == np.bincount(pieces, minlength=width + 1).tolist()
        assert words.tolist() == np.bincount([token for _, token in stream], minlength=VOCABULARY).tolist()


def test_a_batch_is_a_function_of_the_step_and_an_epoch_has_each_row_once():
    documents = [[k % 16 + 4] * (k % 5 + 1) for k in range(40)]
    rows = PackedRows(token_file(documents), 4)
    batches = PackedBatches(rows, 3, seed=7)
    seen = np.concatenate([batches.batch(step).ids for step in range(len(rows) // 3)])
    again = PackedBatches(rows, 3, seed=7).batch(4)
    assert (again.ids == batches.batch(4).ids).all() and (again.documents == batches.batch(4).documents).all()
    assert len(rows) == 30 and sorted(seen.tolist()) == sorted(rows.rows(np.arange(30))[0].tolist())
    assert not (batches.batch(0).ids == PackedBatches(rows, 3, seed=8).batch(0).ids).all()


def mapped_megabytes() -> float:
    """Memory of files that are mapped and read."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssFile"))
    return int(line.split()[1]) / 1024


@pytest.mark.kept("posix")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells which memory belongs to files")
def test_what_was_read_of_a_corpus_does_not_stay_in_memory(tmp_path):
    """A corpus of 8 MiB, row by row; then, to see that it would be noticed, all at once."""
    count, length = 1 << 22, 64
    meta = {"count": count // length, "tokens": count, "dtype": "<u2"}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    np.arange(count, dtype="<u2").tofile(tmp_path / "ids.bin")
    np.arange(0, count + 1, length, dtype="<u8").tofile(tmp_path / "offsets.bin")
    tokens, before, most = TokenFile.open(tmp_path), mapped_megabytes(), 0.0
    rows = PackedRows(tokens, 256)
    for step in range(64):
        ids, _, _ = rows.rows(np.arange(step * 256, (step + 1) * 256))
        assert ids[0, 0] == step * 256 * 256 % 65536
        most = max(most, mapped_megabytes() - before)
    assert most < 2
    tokens.ids.sum()
    assert mapped_megabytes() - before > 6


def test_what_a_killed_process_left_is_removed(tmp_path):
    left = tmp_path / ".train.abc" / "new"
    left.mkdir(parents=True)
    (left / "ids.bin").write_bytes(b"half")
    tokens = TokenFile.build(tmp_path / "train", [Example("a b")], Words([*SPECIALS, "a", "b"]), {"ended": True})
    assert tokens.ids.tolist() == [4, 5, END] and [path.name for path in tmp_path.iterdir()] == ["train"]


def test_a_directory_of_shards_is_one_corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("shards").mkdir()
    Path("shards/b.jsonl").write_text('{"text": "Three."}\n')
    Path("shards/a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "One."}\n{"text": "Two."}\n'))
    Path("shards/README.md").write_text("No text.")
    assert list(corpus("shards", None)) == ["One.", "Two.", "Three."]
    assert resolve_data("shards", None) == str(tmp_path / "shards")
    before = source_fingerprint(Path("shards"))
    Path("shards/c.jsonl").write_text('{"text": "Four."}\n')
    assert source_fingerprint(Path("shards")) != before
    Path("shards/d.txt").write_text("Five.\n")
    with pytest.raises(UsageError, match=r"shards holds files of \.jsonl and \.txt: files of one kind are one corpus"):
        corpus("shards", None)
    Path("empty").mkdir()
    with pytest.raises(UsageError, match="empty holds no files that end in"):
        corpus("empty", None)


def random_model(name: str):
    """An untrained model whose answers depend on everything that it is told."""
    model = METHODS[name](**MODEL).build(TextSpec(VOCABULARY, WIDTH)).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    model.observe(torch.arange(1, WIDTH + 2), torch.arange(VOCABULARY))
    return model


def pack(documents: list[list[int]]) -> Batch:
    """Documents as one row, with an empty place behind them."""
    ids = [i for one in documents for i in one]
    numbers = [k for k, one in enumerate(documents) for _ in one]
    row, padded = (torch.tensor([one + [empty] * (WIDTH - len(ids))]) for one, empty in ((ids, PAD), (numbers, -1)))
    return Batch(row, torch.tensor([len(ids)]), documents=padded, index=torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", PACKED)
def test_the_loss_of_a_row_is_the_sum_of_its_documents_alone(name, dtype, monkeypatch):
    """Training loss and nats, at one time and with the noise that each position has in the row."""
    model = random_model(name).train(dtype is None)
    model.set_compute_dtype(dtype)
    documents = [[5, 6, 7, 8, 9], [10], [11, 12, 5, 13, 6, 7], [9, 4, 4]]
    ends = [END] if isinstance(model, Autoregressive) else []
    ended = [one[: len(one) - len(ends)] + ends for one in documents]  # as many positions with END
    ended[1] = documents[1]  # cut off, or one word
    drawn, begin = torch.rand(1, WIDTH, 3), 0
    if not ends:
        monkeypatch.setattr(model.times, "draw", lambda noise, each=1: torch.full(noise.samples.shape, 0.6))
        draw = lambda noise, step, shape, stream=0: drawn[:, begin : begin + shape[0]]  # noqa: E731
        monkeypatch.setattr(model.process, "draw_noise", draw)
    packed, noise = pack(ended), Noise(0, torch.zeros(1, dtype=torch.long))
    whole, whole_nats = model(packed), model.nats(packed, noise, 2)
    losses, nats, count = [], [], 0
    for one in ended:
        words = torch.tensor([one[:-1] if one[-1] == END else one])
        alone = Batch(words, torch.tensor([words.shape[1]]), index=torch.zeros(1, dtype=torch.long))
        if ends and one[-1] != END:  # nobody predicts an END here
            found, _ = model.token_nats(alone.ids, alone.lengths)
            losses.append(found[:, :-1].sum())
            nats.append(found[:, :-1].sum(-1))
            count += len(one)
        else:
            found = model(alone)
            losses.append(found.total)
            nats.append(model.nats(alone, noise, 2))
            count += int(found.count)
        begin += len(one)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is None else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(whole.total, sum(losses), **close)
    torch.testing.assert_close(whole_nats, sum(nats), **close)
    assert int(whole.count) == count


ARGV = ["steps=6", "batch_size=4", "longest=40", "rows=packed", "sample_every=0", "save_every=2", "vocabulary=300"]


@pytest.mark.parametrize("name", ["mdlm", pytest.param("autoregressive", marks=pytest.mark.long)])
def test_a_packed_run_is_resumed_to_the_bit(name, tmp_path, monkeypatch):
    write_grammar(tmp_path / "my.txt", 120)
    sizes = [f"model.{key}={value}" for key, value in MODEL.items()]
    argv = ["train", "own-text", f"method={name}", f"data={tmp_path / 'my.txt'}", *ARGV, *sizes]
    assert_resumed_to_the_bit(argv, 3, tmp_path, monkeypatch)


def test_a_packed_run_learns_whole_documents_and_says_what_it_read(tmp_path):
    run = tiny_run(tmp_path, "autoregressive", rows="packed", longest=64, steps=3)
    config, (_, tokenizer, _) = read_json(run / "config.json"), load_run(run)
    assert (config["texts"], config["held_out"], config["left_out"]) == (990, 10, 0)
    tokens = TokenFile.open(run / "data" / "train")
    ends = tokens.offsets[1:].astype(int) - 1
    assert (tokens.ids[ends] == END).all() and (tokens.ids == END).sum() == 1000
    first = (tmp_path / "grammar.txt").read_text(encoding="utf-8").splitlines()[0]
    assert tokenizer.decode(tokens.ids[: tokens.offsets[1]].tolist()) == first


def test_a_packed_run_is_measured_on_pieces_of_held_out_documents(tmp_path):
    write_grammar(tmp_path / "lines.txt", 300)
    lines = (tmp_path / "lines.txt").read_text(encoding="utf-8").splitlines()
    documents = [" ".join(lines[k : k + 10]) for k in range(0, 300, 10)]
    (tmp_path / "grammar.txt").write_text("".join(f"{one}\n" for one in documents), encoding="utf-8")
    lm = TextDiffusion.from_pretrained(tiny_run(tmp_path, "autoregressive", rows="packed", steps=1))
    pieces = lm.tokenizer.encode_batch(corpus_for(lm, None).texts)
    held = lm.tokenizer.encode(documents[int(held_out(30, 0)[0])])
    assert pieces == [held[k : k + 24] for k in range(0, len(held), 24)] and len(pieces) > 1


def test_a_document_of_more_than_512_tokens_is_a_row(tmp_path):
    (tmp_path / "grammar.txt").write_text("".join(f"{'word ' * 600}{number}\n" for number in range(4)))
    run = tiny_run(tmp_path, "autoregressive", longest=640, steps=1, batch_size=2)
    assert read_json(run / "config.json")["left_out"] == 0 and load_run(run)[0].max_words == 640


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["method=difflm"], "difflm reads one text per row. These read packed rows: "),
        (["method=mdlm", "distinct=true"], "Give distinct=false."),
        (["method=mdlm", "task=seq2seq"], "packed rows have no sources."),
        (["method=mdlm", "widths=[8]"], "Give widths=[]."),
        (["method=mdlm", "longest=8193"], "less than or equal to 8192"),
    ],
)
def test_what_cannot_be_packed_is_refused_in_a_line(changes, said, tmp_path, capsys):
    argv = ["train", "own-text", "data=my.txt", "rows=packed", *changes, "--out", str(tmp_path / "run")]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) <= 2 and not (tmp_path / "run").exists()
