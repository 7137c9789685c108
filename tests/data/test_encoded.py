import errno
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.data import BYTES, BasicEnglish, Corpus, corpora, corpus, encoded, windows

TEXT = "One, two.\nThree! \n" * 50


class Counted:
    """A tokenizer that counts how often it is asked."""

    def __init__(self, size: int = 256, name: str = "counted") -> None:
        self.size, self.digest, self.asked = size, name, 0

    def encode(self, text: str) -> list[int]:
        self.asked += 1
        return list(text.encode())


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "text").mkdir()
    for split in ("train", "valid"):
        (tmp_path / "text" / f"{split}.txt").write_text(f"{TEXT} {split}", encoding="utf-8")
    return tmp_path / "text"


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def test_encoded_once_and_opened_from_then_on(folder, cache, caplog):
    caplog.set_level(logging.INFO)
    text, tokenizer = corpus(folder), Counted()
    first = encoded(text, tokenizer, "train", cache=cache)
    assert f"encoding {folder / 'train.txt'}" in caplog.text
    caplog.clear()
    again = encoded(corpus(folder), tokenizer, "train", cache=cache)
    assert tokenizer.asked == 1
    assert caplog.text == ""
    for found in (first, again):
        assert isinstance(found.tokens, np.memmap)
        assert found.tokens.dtype == np.uint16
        assert not found.tokens.flags.writeable
        assert bytes(found.tokens.tolist()).decode() == text.read("train")
        assert len(found) == len(text.read("train"))
    assert first.manifest == again.manifest
    assert again.manifest["text"] == text.digest("train")
    assert again.manifest["tokenizer"] == "counted"
    assert again.manifest["vocabulary"] == 256
    assert windows(again.tokens, 7).shape == (len(again) // 7, 7)


def test_splits_and_tokenizers_are_kept_side_by_side(folder, cache):
    text, one, other = corpus(folder), Counted(), Counted(name="other")
    for _ in range(2):
        for split in text.splits:
            for tokenizer in (one, other):
                found = encoded(text, tokenizer, split, cache=cache)
                assert found.manifest["tokenizer"] == tokenizer.digest
                assert bytes(found.tokens.tolist()).decode().endswith(split)
    assert one.asked == other.asked == 2


def test_a_changed_text_is_noticed(folder, cache):
    tokenizer = Counted()
    old = encoded(corpus(folder), tokenizer, "train", cache=cache)
    kept = old.tokens.tolist()
    changed = TEXT.replace("One", "Ten", 1)
    (folder / "train.txt").write_text(changed)
    new = encoded(corpus(folder), tokenizer, "train", cache=cache)
    assert bytes(new.tokens.tolist()).decode() == changed
    assert old.tokens.tolist() == kept  # what is open is not changed under its reader
    assert len(list(cache.iterdir())) == 1


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _other_version(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 0}))


@pytest.mark.parametrize(
    ("name", "damage", "warns"),
    [
        ("tokens.npy", _cut, True),
        ("tokens.npy", _flipped, True),
        ("tokens.npy", Path.unlink, True),
        ("manifest.json", _cut, True),
        ("manifest.json", _other_version, False),
        ("manifest.json", lambda path: path.write_text("[]"), False),
        ("manifest.json", Path.unlink, False),
    ],
)
def test_damage_is_noticed_and_repaired(folder, cache, caplog, name, damage, warns):
    tokenizer = Counted()
    whole = encoded(corpus(folder), tokenizer, "train", cache=cache).tokens.tolist()
    damage(next(cache.glob(f"*/{name}")))
    for _ in range(2):
        again = encoded(corpus(folder), tokenizer, "train", cache=cache)
        assert tokenizer.asked == 2
        assert again.tokens.tolist() == whole
    assert ("is damaged: encoding again" in caplog.text) is warns


@pytest.mark.parametrize(("size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_a_token_takes_as_few_bytes_as_will_do(folder, cache, size, dtype):
    class Last(Counted):
        def encode(self, text):
            return [self.size - 1, 0]

    found = encoded(corpus(folder), Last(size), "train", cache=cache)
    assert found.tokens.dtype == dtype
    assert found.tokens.tolist() == [size - 1, 0]


def test_what_cannot_be_encoded(folder, cache):
    text = corpus(folder)
    with pytest.raises(ValueError, match=r"must give tokens from 0 to 99, .* to 119 in "):
        encoded(text, Counted(100), "train", cache=cache)
    with pytest.raises(ValueError, match=r"has no test\.txt in it"):
        encoded(text, BYTES, "test", cache=cache)
    quotes = Corpus("quotes", {"train": b'""'})
    with pytest.raises(ValueError, match="text must have tokens: the tokenizer finds none in quot"):
        encoded(quotes, BasicEnglish(("<unk>",)), "train", cache=cache)
    (folder / "train.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="must be UTF-8"):
        encoded(text, BYTES, "train", cache=cache)
    assert not cache.exists()


def test_a_full_disk_loses_nothing(folder, cache, caplog, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    old = encoded(corpus(folder), BYTES, "train", cache=cache)
    files = {path: path.read_bytes() for path in cache.glob("*/*")}
    (folder / "train.txt").write_text("another text")
    monkeypatch.setattr(np, "save", full)
    found = encoded(corpus(folder), BYTES, "train", cache=cache)
    assert bytes(found.tokens.tolist()).decode() == "another text"
    assert not found.tokens.flags.writeable
    assert "kept in memory" in caplog.text
    assert "(No space left on device)" in caplog.text
    assert {path: path.read_bytes() for path in cache.glob("*/*")} == files
    assert len(old) > len(found)


def test_the_cache_is_in_the_cache_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "moved"))
    encoded(corpus(folder), BYTES, "valid")
    encoded(corpus("embedded"), BYTES, "valid")
    names = sorted(path.name[:-16] for path in (tmp_path / "moved" / "encoded").iterdir())
    assert names == ["embedded-valid-", "text-valid-"]


@settings(max_examples=30, deadline=None)
@given(text=st.text(alphabet="ab .\n\"'é", min_size=1).filter(str.strip), length=st.integers(1, 9))
def test_pieces_give_the_tokens_of_the_whole(tmp_path_factory, text, length):
    own = Corpus("own", {"train": text.encode()})
    words = BasicEnglish.of(own)
    if not words.encode(text).size:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "PIECE", length)
        found = encoded(own, words, "train", cache=tmp_path_factory.mktemp("cache"))
    assert np.array_equal(found.tokens, words.encode(text))
