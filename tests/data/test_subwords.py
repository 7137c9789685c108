import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.data import BasicEnglish, ByteBPE, Corpus, HuggingFace, corpus, subwords
from joma.data.corpora import pieces

pytest.importorskip("tokenizers")

ODD = st.text(alphabet="aBé 'st\".,\n\r\t\x1c\u3000=1日", max_size=60)


@pytest.fixture(scope="module")
def prose() -> str:
    return corpus("embedded").read("valid")


@pytest.fixture(scope="module")
def bpe(prose) -> ByteBPE:
    return ByteBPE.train(prose, 500)


@settings(max_examples=30, deadline=None)
@given(text=st.text(alphabet=st.characters(codec="utf-8")))
def test_any_text_comes_back(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


def test_merges_shorten_the_text(bpe, prose):
    tokens = bpe.encode(prose)
    assert bpe.size == 500
    assert 0 <= tokens.min() <= tokens.max() < 500
    assert len(tokens) < 0.6 * len(prose.encode())
    assert ByteBPE.train("none twice", 300).size == 256
    for bad in (255, 0):
        with pytest.raises(ValueError, match=f"size must be at least 256.*got {bad}"):
            ByteBPE.train(prose, bad)
    with pytest.raises(ValueError, match="tokens must be from 0 to 499, got 500"):
        bpe.decode([500])


@settings(max_examples=200, deadline=None)
@given(text=ODD, length=st.integers(1, 20))
def test_the_tokens_of_the_pieces_are_those_of_the_text(bpe, text, length):
    words = bpe.tokenizer.pre_tokenizer.pre_tokenize_str
    cut = [word for piece in pieces(text, length) for word, _ in words(piece)]
    assert cut == [word for word, _ in words(text)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subwords, "_AT_ONCE", length)
        patch.setattr(subwords, "_PARTS", 2)
        assert bpe.encode(text).tolist() == bpe.tokenizer.encode(text).ids


def test_another_process_learns_the_same(bpe):
    code = (
        "from joma.data import ByteBPE, corpus\n"
        "print(ByteBPE.train(corpus('embedded').read('valid'), 500).digest)"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == bpe.digest


def test_a_folder_keeps_it(bpe, prose, tmp_path):
    bpe.save(tmp_path / "kept")
    again = ByteBPE.load(tmp_path / "kept")
    assert again.digest == bpe.digest
    assert np.array_equal(again.encode(prose), bpe.encode(prose))
    assert ByteBPE.train(prose, 499).digest != bpe.digest


def _changed(path: Path, **parts: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | parts))


@pytest.mark.parametrize(
    "parts",
    [
        {"decoder": None},
        {"model": {"type": "WordPiece"}},
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
    ],
)
def test_another_kind_of_tokenizer_is_not_taken_for_it(bpe, tmp_path, parts):
    bpe.save(tmp_path)
    _changed(tmp_path / "tokenizer.json", **parts)
    with pytest.raises(ValueError, match=r"tokenizer\.json must be a byte-level BPE with GPT-2's"):
        ByteBPE.load(tmp_path)


def test_files_that_are_no_tokenizer(bpe, tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        ByteBPE.load(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        BasicEnglish.load(tmp_path)
    path = tmp_path / "tokenizer.json"
    for content, message in (
        ("{", "is not valid JSON"),
        ("[]", "another tokenizer"),
        ("{}", "another tokenizer"),
        ('{"model": 1}', "another tokenizer"),
    ):
        path.write_text(content)
        for kind in (ByteBPE, BasicEnglish):
            with pytest.raises(ValueError, match=message):
                kind.load(tmp_path)
    bpe.save(tmp_path)
    _changed(path, model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]})
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer \("):
        ByteBPE.load(tmp_path)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="byte-level BPE needs tokenizers: pip install -c"):
        ByteBPE.train("text", 300)


def test_transformers_reads_what_is_saved(bpe, prose, tmp_path):
    transformers = pytest.importorskip("transformers")
    words = BasicEnglish.of(Corpus("own", {"train": prose.encode()}))
    text = prose + '\nIt\'s "Bob" (<unk>)<br />unseen-word; x: É?'
    for name, own in (("bpe", bpe), ("words", words)):
        own.save(tmp_path / name)
        theirs = HuggingFace(transformers.AutoTokenizer.from_pretrained(tmp_path / name))
        assert theirs.size == own.size
        assert np.array_equal(theirs.encode(text), own.encode(text))
        assert theirs.decode(own.encode(text)) == own.decode(own.encode(text))
        shutil.copytree(tmp_path / name, tmp_path / "elsewhere" / name)
        moved = transformers.AutoTokenizer.from_pretrained(tmp_path / "elsewhere" / name)
        assert HuggingFace(moved).digest == theirs.digest
        moved.add_tokens(["unseen-word"])
        assert HuggingFace(moved).digest != theirs.digest
    assert BasicEnglish.load(tmp_path / "words") == words
    with pytest.raises(ValueError, match="must be words by basic_english, it is another"):
        BasicEnglish.load(tmp_path / "bpe")


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
    assert wrapped.decode(wrapped.encode("a gap")) == "a gap"
