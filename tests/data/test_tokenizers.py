"""Words, byte pairs, and the promise that the printed text has the words the model meant."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difflm.data.corpora import read_e2e
from difflm.data.tokenizers import END, PAD, SPECIALS, START, UNK, Bpe, Tokenizer, Words
from difflm.data.words import join_words, split_words
from difflm.errors import DifflmError, UsageError
from tests.support.corpora import DATA, needs_e2e

NATURAL = [
    "Clowns, near the riverside, isn't cheap.",
    "The Vaults (a pub) serves £30 meals; it's family-friendly!",
    "A 5-star coffee shop: £20-25, rated 3/5.",
    "'The Eagle' is near Café Sicilia.",
    '"Why not?" they\'d say, "we\'ve paid $10.50."',
    "The customers' rating isn't low...",
    "St. John's College, Mr. Smith's and the U.K. aren't far.",
    "You can't miss it—thats all.",
    "It cannot close before 7pm, wont it?",
    "Fish & chips for £30+, hors d'oeuvres at O'Brien's.",
    "“Curly” quotes, ‘single’ ones, and it’s fine.",
    "Ein „schönes“ Mädchen trägt 2,50 € – nicht mehr.",
    "L'été est passé, c'est fini.",
    "یک متن فارسی، دو؟",
    "हिन्दी में लिखा हुआ।",
    "我们吃饭。",
    "Two lines,\nas one text.",
]


@pytest.mark.parametrize("text", NATURAL)
def test_natural_spacing_survives_being_cut_and_joined(text: str) -> None:
    assert join_words(split_words(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("£ 30 .", ["£", "30", "."]),
        ("£30.", ["£", "30", "."]),
        ("family-friendly", ["family", "-", "friendly"]),
        ("£ 20- £ 25", ["£", "20-", "£", "25"]),
        ("isn 't", ["isn", "'", "t"]),
        ("isn't it's", ["isn", "'", "t", "it", "'s"]),
        ("cant thats id 30lb", ["ca", "nt", "that", "s", "i", "d", "30", "lb"]),
        ("friendly--can 20--25", ["friendly", "--", "can", "20", "-", "-25"]),
        ("Wildwood.' 5. .The 20.Yes", ["Wildwood", ".", "'", "5", ".", ".The", "20.Yes"]),
        ("Café \n", ["Café", "\n"]),
        ("हिन्दी", ["हिन्दी"]),
        ("dont im", ["dont", "im"]),  # words of French and German
    ],
)
def test_words_are_cut_as_in_the_corpus(text: str, words: list[str]) -> None:
    assert split_words(text) == words


def test_corpus_spacing_is_printed_naturally() -> None:
    text = "The Mill is family - friendly , near Café Rouge , and isn ' t over £ 20 - £ 25 ."
    assert join_words(text.split()) == "The Mill is family-friendly, near Café Rouge, and isn't over £20-£25."


PIECES = "a I The 20 25 - -- -25 20- £ $ ' 's t d s ca nt that . .. .The , ; : / + & ( ) \" “ ” ’ – — St. St L. L lb \n"
pieces = st.sampled_from(PIECES.split(" "))


@given(st.lists(pieces, max_size=12))
def test_printed_text_has_the_same_words(words: list[str]) -> None:
    """Whatever the order of the words, touching neighbours are read back as they were."""
    assert split_words(join_words(words)) == words


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\n"), max_size=40))
def test_no_sign_is_lost(text: str) -> None:
    assert "".join(split_words(text)) == "".join(text.split())


@needs_e2e
@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.long), "valid"])
def test_every_e2e_reference_is_read_back(split: str) -> None:
    for pair in read_e2e(DATA / "e2e" / f"{split}.txt.gz"):
        words = split_words(pair.text)
        assert split_words(join_words(words)) == words


@needs_e2e
@pytest.mark.parametrize("split", ["train", "valid"])
def test_every_e2e_reference_is_cut_as_spacy_cuts_it(split: str) -> None:
    tokenizer = pytest.importorskip("spacy").blank("en").tokenizer
    for pair in read_e2e(DATA / "e2e" / f"{split}.txt.gz"):
        line = f"{pair.text} \n"  # as the original read it
        assert split_words(line) == [token.text for token in tokenizer(line)]


@needs_e2e
def test_e2e_vocabulary_is_the_published_one() -> None:
    published = json.loads((DATA / "e2e" / "vocab_821.json").read_text(encoding="utf-8"))
    built = Words.build(pair.text for pair in read_e2e(DATA / "e2e" / "train.txt.gz"))
    assert {word: i for i, word in enumerate(built.words)} == published
    assert built.words[21] == "\n"
    with gzip.open(DATA / "e2e" / "valid.txt.gz", "rt", encoding="utf-8") as file:
        text = next(file).split("||")[1].strip()
    assert built.words.index("\n") not in built.encode(text)


@pytest.fixture(scope="module")
def words() -> Words:
    return Words.build(["The Mill isn't cheap .", "The Mill is cheap , isn't it ?"], more_than=1)


def test_words_are_kept_by_count_in_order_of_appearance() -> None:
    built = Words.build(["b a b", "a b c", "B"], more_than=1)
    assert built.words == [*SPECIALS, "b", "a", "\n"]
    assert (START, END, UNK, PAD) == (0, 1, 2, 3)


def test_unknown_words_are_unk_and_specials_are_not_printed(words: Words) -> None:
    ids = words.encode("The Mill isn't dear.")
    assert ids.count(UNK) == 2  # "dear", and "." that was there once
    assert words.decode([START, *ids, END, PAD]) == "The Mill isn't"
    assert words.tokens([START, *ids, END, PAD]) == ["The", "Mill", "isn", "'", "t"]


def test_newlines_at_the_ends_are_not_printed(words: Words) -> None:
    newline = words.words.index("\n")
    assert words.decode([newline, *words.encode("The Mill"), newline, newline]) == "The Mill"
    assert words.decode([newline]) == ""


def test_a_text_cannot_spell_a_special() -> None:
    built = Words.build(["the END of START"], more_than=0)
    assert min(built.encode("END START PAD")) == UNK
    assert built.decode(built.encode("the END")) == "the END"


def test_a_vocabulary_of_nothing_is_refused() -> None:
    with pytest.raises(DifflmError, match="more than 10 times"):
        Words.build(["only once"] * 3)


@pytest.fixture(scope="module")
def bpe() -> Bpe:
    return Bpe.build(["The Mill serves French food near the riverside.", "Ünïcödé START and END 日本"] * 3, size=300)


@given(text=st.text())
@settings(max_examples=300)
def test_byte_pairs_bring_any_text_back(bpe: Bpe, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert bpe.decode([START, *ids, END, PAD, PAD]) == text
    assert all(len(SPECIALS) <= i < bpe.size for i in ids)


def test_byte_pairs_never_make_a_special(bpe: Bpe) -> None:
    assert min(bpe.encode("START END UNK PAD")) >= len(SPECIALS)
    assert "".join(bpe.tokens(bpe.encode("START and END"))) == "START and END"


def test_byte_pairs_keep_to_their_size(bpe: Bpe) -> None:
    assert 260 < bpe.size <= 300
    with pytest.raises(UsageError, match="260"):
        Bpe.build(["a"], size=100)


@pytest.mark.parametrize("name", ["words", "bpe"])
def test_a_saved_tokenizer_is_the_same(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert type(again) is type(tokenizer)
    assert again.fingerprint() == tokenizer.fingerprint()
    assert again.encode("The Mill, Café!") == tokenizer.encode("The Mill, Café!")
    assert again.size == tokenizer.size


def test_different_tokenizers_have_different_fingerprints(words: Words, bpe: Bpe) -> None:
    longer = Words([*words.words, "more"])
    assert len({words.fingerprint(), longer.fingerprint(), bpe.fingerprint()}) == 3


@pytest.mark.parametrize(
    "content",
    [
        '{"kind": "words", "words": ["START", "EN',
        "[]",
        "{}",
        '{"model": {}}',
        '{"kind": "words", "words": ["a"]}',
        '{"kind": "words", "words": 3}',
        '{"kind": "words", "words": ["START", "END", "UNK", "PAD", "a", "a"]}',
        '{"kind": "bpe", "pieces": ["a"], "merges": []}',
        '{"kind": "bpe", "pieces": ["a"], "merges": ["a b c"]}',
    ],
)
def test_a_foreign_or_cut_tokenizer_file_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DifflmError, match=r"tokenizer\.json"):
        Tokenizer.load(path)


def test_a_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DifflmError, match="does not exist"):
        Tokenizer.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("kind", [None, "pieces", 3, ["words"], {"words": 1}])
def test_a_kind_that_is_none_is_named(tmp_path, kind):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"kind": kind, "words": [*SPECIALS]}))
    with pytest.raises(DifflmError, match="is not a tokenizer that difflm wrote: its kind is"):
        Tokenizer.load(tmp_path / "tokenizer.json")
