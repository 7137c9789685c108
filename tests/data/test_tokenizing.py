import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.data import (
    BYTES,
    BasicEnglish,
    ByteBPE,
    Corpus,
    HuggingFace,
    basic_english,
    corpus,
    streams,
    tokenizing,
)
from joma.data.corpora import pieces

pytest.importorskip("tokenizers")

PLACES = [os.environ.get("JOMA_SHARED"), Path(__file__).parents[3] / "shared"]
SHARED = next((p for p in PLACES if p and (Path(p) / "data" / "wikitext-2").is_dir()), None)

# Torchtext's rules as its documentation lists them: each pattern and what takes its place, in turn.
RULES = [
    (r"\'", " '  "),
    (r"\"", ""),
    (r"\.", " . "),
    (r"<br \/>", " "),
    (r",", " , "),
    (r"\(", " ( "),
    (r"\)", " ) "),
    (r"\!", " ! "),
    (r"\?", " ? "),
    (r"\;", " "),
    (r"\:", " "),
    (r"\s+", " "),
]
ODD = st.text(alphabet="aBΣé 'n\".,()!?;:\n\r\t\x1c\u3000<br/>-@1", max_size=60)


def _by_the_rules(line: str) -> list[str]:
    line = line.lower()
    for pattern, by in RULES:
        line = re.sub(pattern, by, line)
    return line.split()


@settings(max_examples=200, deadline=None)
@given(
    lines=st.lists(ODD.map(lambda line: line.replace("\n", " ")) | st.just("x<br />y"), max_size=5)
)
def test_basic_english_is_what_its_rules_give_line_by_line(lines):
    expected = [word for line in lines for word in _by_the_rules(line)]
    assert basic_english("\n".join(lines)) == expected


def test_the_vocabulary_counts_the_training_split_alone():
    text = Corpus("own", {"train": b"b a . a c <unk> <unk> <unk> B", "valid": b"d d d"})
    words = BasicEnglish.of(text)
    assert words.vocabulary == ("<unk>", "a", "b", ".", "c")
    assert words.size == 5
    tokens = words.encode("A d <unk>\nc")
    assert tokens.tolist() == [1, 0, 0, 4]
    assert words.encode("").tolist() == []
    assert BYTES.encode("é\ud800").tolist() == [0xC3, 0xA9, ord("?")]


def test_a_vocabulary_that_is_none():
    with pytest.raises(ValueError, match=r"vocabulary must be .* begins with <unk>, got \('a',\)"):
        BasicEnglish(("a", "<unk>"))
    with pytest.raises(ValueError, match=r"begins with <unk>, got \(\)"):
        BasicEnglish(())
    with pytest.raises(ValueError, match="must hold each word once, got 'a' again"):
        BasicEnglish(("<unk>", "b", "a", "a"))


def test_a_digest_tells_vocabularies_apart():
    ways = [("<unk>",), ("<unk>", "a", "b"), ("<unk>", "b", "a"), ("<unk>", "ab")]
    assert len({BasicEnglish(way).digest for way in ways} | {BYTES.digest}) == 5
    assert BasicEnglish(ways[1]).digest == BasicEnglish(ways[1]).digest


@settings(max_examples=200, deadline=None)
@given(text=ODD, length=st.integers(1, 20))
def test_the_words_of_the_pieces_are_those_of_the_text(text, length):
    cut = list(pieces(text, length))
    assert "".join(cut) == text
    assert all(len(piece) >= length for piece in cut[:-1])
    assert [word for piece in cut for word in basic_english(piece)] == basic_english(text)


def test_pieces_end_with_lines():
    text = " one . \n \n two\n\nthree"
    assert list(pieces(text, 1)) == [" one .", " \n \n two", "\n\nthree"]
    assert list(pieces(text)) == [text]
    assert list(pieces("")) == []


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=40), count=st.integers(1, 40))
def test_streams_go_on_from_row_to_row(tokens, count):
    if count > len(tokens):
        with pytest.raises(ValueError, match="count must be at least 1, got 0"):
            streams(tokens, 0)
        with pytest.raises(ValueError, match=f"count must be at most {len(tokens)}.*got {count}"):
            streams(tokens, count)
        return
    for kind in (tokens, np.array(tokens, dtype=np.uint16), np.array(tokens, dtype=np.uint32)):
        rows = streams(kind, count)
        assert rows.shape == (count, len(tokens) // count)
        assert rows.flatten().tolist() == tokens[: rows.numel()]


@pytest.mark.skipif(SHARED is None, reason="JOMA_SHARED names no folder with data/wikitext-2")
def test_wikitext2_has_the_published_counts(monkeypatch):
    monkeypatch.setenv("JOMA_SHARED", str(SHARED))
    text = corpus("wikitext-2")
    assert text.digest("train").startswith("9e9fa1ad")
    words = BasicEnglish.of(text)
    assert words.size == 28_782
    counts = {split: len(words.encode(text.read(split))) for split in text.splits}
    assert counts == {"train": 2_049_990, "valid": 214_417, "test": 241_859}
    train = words.encode(text.read("train"))
    # 2,928 whole batches of 20 streams of 35, and a short one of 18.
    assert divmod(streams(train, 20).shape[1] - 1, 35) == (2_928, 18)


# Byte pairs, and tokenizers of transformers


@pytest.fixture(scope="module")
def prose() -> str:
    return corpus("embedded").read("valid")


@pytest.fixture(scope="module")
def bpe(prose) -> ByteBPE:
    return ByteBPE.train(prose, 500)


def test_merges_shorten_the_text(bpe, prose):
    tokens = bpe.encode(prose)
    assert bpe.size == 500
    assert 0 <= tokens.min() <= tokens.max() < 500
    assert len(tokens) < 0.6 * len(prose.encode())
    assert bpe.tokenizer.decode(tokens) == prose
    assert ByteBPE.train("none twice", 300).size == 256
    for bad in (255, 0):
        with pytest.raises(ValueError, match=f"size must be at least 256.*got {bad}"):
            ByteBPE.train(prose, bad)


@settings(max_examples=200, deadline=None)
@given(text=ODD, length=st.integers(1, 20))
def test_the_tokens_of_the_pieces_are_those_of_the_text(bpe, text, length):
    words = bpe.tokenizer.pre_tokenizer.pre_tokenize_str
    cut = [word for piece in pieces(text, length) for word, _ in words(piece)]
    assert cut == [word for word, _ in words(text)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing, "_AT_ONCE", length)
        patch.setattr(tokenizing, "_PARTS", 2)
        assert bpe.encode(text).tolist() == bpe.tokenizer.encode(text).ids


def test_another_process_learns_the_same(bpe):
    code = (
        "from joma.data import ByteBPE, corpus\n"
        "print(ByteBPE.train(corpus('embedded').read('valid'), 500).digest)"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == bpe.digest


def test_transformers_reads_what_is_saved(bpe, prose, tmp_path):
    transformers = pytest.importorskip("transformers")
    words = BasicEnglish.of(Corpus("own", {"train": prose.encode()}))
    text = prose + '\nIt\'s "Bob" (<unk>)<br />unseen-word; x: É?'
    for name, own in (("bpe", bpe), ("words", words)):
        own.save(tmp_path / name)
        theirs = HuggingFace(transformers.AutoTokenizer.from_pretrained(tmp_path / name))
        assert theirs.size == own.size
        assert np.array_equal(theirs.encode(text), own.encode(text))
        shutil.copytree(tmp_path / name, tmp_path / "elsewhere" / name)
        moved = transformers.AutoTokenizer.from_pretrained(tmp_path / "elsewhere" / name)
        assert HuggingFace(moved).digest == theirs.digest
        moved.add_tokens(["unseen-word"])
        assert HuggingFace(moved).digest != theirs.digest


def test_a_tokenizer_of_transformers_puts_nothing_around_a_text(bpe, tmp_path):
    transformers = pytest.importorskip("transformers")
    bpe.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        bos_token="<s>",
        pad_token="<s>",
        model_max_length=4,
    )
    theirs.add_tokens(["gap"])
    wrapped = HuggingFace(theirs)
    before = wrapped.digest
    text = "longer than the model takes at once"
    assert np.array_equal(wrapped.encode(text), bpe.encode(text))
    assert wrapped.size == 502
    theirs(["a", "longer"], padding=True, truncation=True, max_length=3)
    assert wrapped.digest == before
    assert np.array_equal(wrapped.encode(text), bpe.encode(text))
