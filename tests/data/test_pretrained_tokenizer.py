"""Tokenizers of others: their pieces under difflm's four special ids."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Encoder

from difflm.app.cli import main
from difflm.data.tokenizers import SPECIALS, UNK, PretrainedTokenizer, Tokenizer
from difflm.training.run import load_run
from tests.support.pretrained import TEXTS, train_encoder
from tests.support.tiny import MODEL, write_grammar

KINDS = ("bpe", "wordpiece", "unigram", "words")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    for kind in KINDS:
        (root / kind).mkdir()
        train_encoder(kind).save(str(root / kind / "tokenizer.json"))
    return {kind: root / kind for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_those_of_the_library_behind_four_ids(kind, folders, tmp_path):
    """The same pieces in the same order, whatever it cuts off, adds or pads by itself."""
    theirs, ours = Encoder.from_file(str(folders[kind] / "tokenizer.json")), PretrainedTokenizer.read(folders[kind])
    theirs.no_truncation()
    theirs.no_padding()
    for text, ids in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
        expected = theirs.encode(text, add_special_tokens=False)
        assert [ours.pieces[i - len(SPECIALS)] for i in ids] == expected.tokens
        assert ours.decode(ids) == theirs.decode(expected.ids) and min(ids) >= len(SPECIALS)
    special = [token.content for token in theirs.get_added_tokens_decoder().values() if token.special]
    assert ours.size == len(SPECIALS) + theirs.get_vocab_size() - len(special)
    assert not {*special} & {*ours.pieces}
    ours.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert again.fingerprint() == ours.fingerprint() and again.encode_batch(TEXTS) == ours.encode_batch(TEXTS)


def test_what_is_unknown_is_unknown_and_no_text_spells_a_special_token(folders):
    pieces, spelled = PretrainedTokenizer.read(folders["wordpiece"]), PretrainedTokenizer.read(folders["bpe"])
    assert UNK in pieces.encode("The 狗 pub") and pieces.unknown("The 狗 pub") == ["狗"]
    assert spelled.decode(spelled.encode("a <|end|> b")) == "a <|end|> b"


def train(tmp_path: Path, tokenizer: Path, *changes: str) -> int:
    write_grammar(tmp_path / "my.txt", 60)
    sizes = [f"model.{key}={value}" for key, value in MODEL.items()]
    settings = ["longest=64", "steps=2", "batch_size=4", "sample_every=0", *sizes, *changes]
    data = f"data={tmp_path / 'my.txt'}"
    return main(["train", "own-text", data, f"tokenizer={tokenizer}", *settings, "--out", str(tmp_path / "run")])


@pytest.mark.parametrize("method", [pytest.param("mdlm", marks=pytest.mark.long), "autoregressive"])
def test_a_run_takes_the_pieces_and_needs_them_no_longer(method, folders, tmp_path, capsys):
    """It has no END and no mask of its own, which no model here misses."""
    assert train(tmp_path, folders["bpe"], f"method={method}") == 0
    assert "ids: the pieces of bpe, and START, END, UNK and PAD" in capsys.readouterr().out
    assert load_run(tmp_path / "run")[1].fingerprint() == PretrainedTokenizer.read(folders["bpe"]).fingerprint()
    assert main(["generate", str(tmp_path / "run"), *(["--steps", "2"] if method == "mdlm" else [])]) == 0
    assert "| tokens | bpe, " in (tmp_path / "run" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "holds no tokenizer.json: a fast tokenizer's save_pretrained writes one."),
        ('{"model": {"type": "WordPiece"}}', "is not a tokenizer: the tokenizers library cannot read it"),
        ("{", "is not a readable JSON file"),
        ("words", "this tokenizer cannot read the texts: WordLevel error: Missing [UNK] token"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_gets_a_line(content, said, folders, tmp_path, capsys):
    folder = tmp_path / "other"
    folder.mkdir()
    if content == "words":
        content = (folders["words"] / "tokenizer.json").read_text()
        assert json.loads(content)["model"]["type"] == "WordLevel"
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    assert train(tmp_path, folder) in (1, 2)
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) <= 2 and not (tmp_path / "run").exists()
