"""Corpora and texts: where they are found, what is refused, and windows of tokens."""

import hashlib
import io
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.data import Corpus, cache_folder, corpus, read_text, windows


def _written(folder: Path, **parts: str) -> Path:
    folder.mkdir(parents=True)
    for split, text in parts.items():
        (folder / f"{split}.txt").write_bytes(text.encode())
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("JOMA_SHARED", raising=False)
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def test_a_folder_has_the_splits_that_are_in_it(tmp_path):
    folder = _written(tmp_path / "mine", test="the tést text\r\n", train="the train text")
    found = corpus(folder)
    assert found.splits == ("train", "test")
    assert found.name == str(folder)
    assert found.read("test") == "the tést text\r\n"
    assert found.digest("test") == hashlib.sha256("the tést text\r\n".encode()).hexdigest()
    assert corpus(str(folder)) == found
    with pytest.raises(ValueError, match=rf"text {re.escape(str(folder))} has no valid\.txt in it"):
        found.read("valid")
    with pytest.raises(ValueError, match="split must be one of train, test, got 'dev'"):
        found.digest("dev")


def test_what_is_no_corpus(tmp_path, cache):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no train\.txt, no valid\.txt and no test\.t"):
        corpus(tmp_path / "empty")
    message = (
        "corpus must be a folder .*'embedded', 'wikitext-2', 'wikitext-103' or 'hub:NAME', got "
    )
    for name in ("nowhere", "wikitext-2:train"):
        with pytest.raises(ValueError, match=f"{message}'{name}'"):
            corpus(name)
    with pytest.raises(ValueError, match="'embedded', 'wikitext-2' or '-'"):
        read_text("nowhere.txt")
    (tmp_path / "a file").write_text("text")
    with pytest.raises(ValueError, match=message):
        corpus(tmp_path / "a file")


def test_a_corpus_of_ones_own():
    own = Corpus("own", {"valid": "日本".encode()})
    assert own.splits == ("valid",)
    assert own.read("valid") == "日本"
    with pytest.raises(ValueError, match="text own has no split train, only valid"):
        own.read("train")
    with pytest.raises(ValueError, match="parts must hold at least one of train, valid, test"):
        Corpus("own", {})
    with pytest.raises(ValueError, match="parts must be of train, valid, test, got 'dev'"):
        Corpus("own", {"dev": b""})


@pytest.mark.parametrize("name", ["wikitext-2", "wikitext-103"])
def test_a_named_corpus_is_searched_in_its_places(name, tmp_path, cache, monkeypatch):
    with pytest.raises(ValueError, match=rf"JOMA_SHARED \(not set\).*data/{name}.*{name}-v1$"):
        corpus(name)
    _written(tmp_path / name, valid="nearby")
    assert corpus(name).read("valid") == "nearby"
    _written(cache / "corpora" / name, valid="cached")
    assert corpus(name).read("valid") == "cached"
    _written(tmp_path / "shared" / "data" / name, valid="shared")
    assert corpus(name).read("valid") == "cached"
    monkeypatch.setenv("JOMA_SHARED", str(tmp_path / "shared"))
    assert corpus(name).read("valid") == "shared"
    assert corpus(name).name == name
    assert read_text(name) == "shared"
    with pytest.raises(ValueError, match=r"has no test\.txt"):
        read_text(f"{name}:test")


def test_the_embedded_splits_share_no_paragraph():
    embedded = corpus("embedded")
    assert embedded.splits == ("train", "valid", "test")
    whole = read_text("embedded")
    seen: set[str] = set()
    for split in embedded.splits:
        text = embedded.read(split)
        paragraphs = {paragraph.strip() for paragraph in re.split(r"\n\s*\n", text)}
        assert not seen & paragraphs
        assert all(paragraph in whole for paragraph in paragraphs)
        seen |= paragraphs
        assert len(text) > 10_000
        assert text == corpus("embedded").read(split) == read_text(f"embedded:{split}")
    assert len(embedded.read("train")) > 200_000
    # Nothing is lost: what is left out of a later split stands in an earlier one.
    missing = [part for part in re.split(r"\n\s*\n", whole) if part.strip() not in seen]
    assert missing == []


class _Rows:
    column_names = ("id", "text")

    def __init__(self, *rows: str) -> None:
        self.rows = rows

    def iter(self, batch_size):
        for first in range(0, len(self.rows), batch_size):
            yield {"text": list(self.rows[first : first + batch_size])}


@pytest.fixture
def hub(cache, monkeypatch) -> types.ModuleType:
    module = types.ModuleType("datasets")
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_a_dataset_of_the_hub_is_downloaded_once(hub, cache):
    asked = []

    def load_dataset(*name):
        asked.append(name)
        # As WikiText's rows are: those with words end their line, those without do not.
        return {"train": _Rows(*["", " = É = \n"] * 600), "validation": _Rows("a\nb"), "x": _Rows()}

    hub.load_dataset = load_dataset  # type: ignore[attr-defined]
    found = corpus("hub:some/text:part-1")
    assert found.splits == ("train", "valid")
    assert found.read("train") == "\n = É = \n" * 600
    assert read_text("hub:some/text:part-1") == "a\nb\n"
    assert corpus("hub:some/text:part-1") == found
    assert asked == [("some/text", "part-1")]
    corpus("hub:some/text")
    corpus("hub:some:text")
    assert asked[1:] == [("some/text",), ("some", "text")]
    with pytest.raises(ValueError, match=r"has no test\.txt"):
        found.read("test")


def test_a_download_that_was_cut_short_is_begun_again(hub):
    class Cut(_Rows):
        def iter(self, batch_size):
            yield from super().iter(batch_size)
            raise KeyboardInterrupt

    good = {"train": _Rows("one"), "test": _Rows("two")}
    hub.load_dataset = lambda name: good | {"test": Cut("two")}  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        corpus("hub:text")
    hub.load_dataset = lambda name: good  # type: ignore[attr-defined]
    assert corpus("hub:text").read("test") == "two\n"


def test_what_cannot_be_had_from_the_hub(hub, monkeypatch):
    def offline(name):
        raise ConnectionError("Couldn't reach 'text' on the Hub.\nmore")

    for load, message in (
        (offline, r"hub:text cannot be had from the hub \(Couldn't reach 'text' on the Hub\)$"),
        (lambda name: {"dev": _Rows()}, "must have a split train, validation or test, it has dev"),
        (lambda name: {"train": types.SimpleNamespace(column_names=["prose"])}, "has prose"),
    ):
        hub.load_dataset = load  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=message):
            corpus("hub:text")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="hub:text needs datasets: pip install datasets"):
        corpus("hub:text")
    for bad in ("hub:", "hub:a:b:c", "hub:a/b/c", "hub:a:", "hub:a b"):
        with pytest.raises(ValueError, match=f"such as hub:Salesforce/.*, got '{bad}'"):
            corpus(bad)


def test_the_cache_folder_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("JOMA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "joma"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "joma"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "joma"
    monkeypatch.setenv("JOMA_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"
    assert list(tmp_path.iterdir()) == []


def test_a_file_and_the_standard_input(tmp_path, monkeypatch):
    path = tmp_path / "own: text"
    path.write_bytes("\ufeffOnce, é\r\n".encode())
    assert read_text(str(path)) == "Once, é\r\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("日本".encode())))
    assert read_text("-") == "日本"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must not be empty: there is none in WHERE$"),
        (b"\n \n", "must not be empty"),
        (b"caf\xe9", "must be UTF-8, but WHERE has the byte 0xe9 at 3"),
        (b"\xef\xbb\xbfa\xff", "has the byte 0xff at 1"),
    ],
)
def test_a_text_that_is_none(tmp_path, monkeypatch, content, message):
    path = tmp_path / "train.txt"
    path.write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    for where, read in (
        (str(path), lambda: corpus(tmp_path).read("train")),
        ("own:train", lambda: Corpus("own", {"train": content}).read("train")),
        (str(path), lambda: read_text(path)),
        ("the standard input", lambda: read_text("-")),
    ):
        with pytest.raises(ValueError, match=message.replace("WHERE", re.escape(where))):
            read()


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 1000), min_size=1, max_size=60),
    length=st.integers(1, 60),
    count=st.none() | st.integers(1, 9),
)
def test_windows_follow_each_other_through_the_text(tokens, length, count):
    if length > len(tokens):
        with pytest.raises(ValueError, match=f"at most {len(tokens)}.*got {length}"):
            windows(tokens, length, count)
        return
    cut = windows(tokens, length, count)
    assert cut.dtype == torch.long
    number = cut.shape[0]
    assert cut.flatten().tolist() == tokens[: number * length]
    if count is None or number < count:
        assert len(tokens) - number * length < length
    else:
        assert number == count


def test_a_short_text_is_one_window_unless_a_length_is_asked_for():
    assert windows([5, 6, 7]).tolist() == [[5, 6, 7]]
    assert windows(list(range(1030))).shape == (2, 512)
    assert windows(list(range(10)), most=4).shape == (2, 4)
    with pytest.raises(ValueError, match="length must be at most 3, as many tokens as the text"):
        windows([5, 6, 7], 4)
    with pytest.raises(ValueError, match="tokens must not be empty"):
        windows([])
    for bad in ({"length": 0}, {"count": 0}, {"most": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be at least 1"):
            windows([1], **bad)
