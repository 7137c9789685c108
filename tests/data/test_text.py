import io
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.data import read_text, windows


def test_the_embedded_text_is_prose_and_the_same_again():
    text = read_text("embedded")
    assert len(text) > 300_000
    assert "statement" in text
    assert text == read_text("embedded")


def test_a_corpus_by_its_name_or_folder(tmp_path, monkeypatch):
    corpus = tmp_path / "data" / "wikitext-2"
    corpus.mkdir(parents=True)
    for part in ("train", "valid", "test"):
        (corpus / f"{part}.txt").write_text(f"the {part} text")
    monkeypatch.setenv("JOMA_SHARED", str(tmp_path))
    assert read_text("wikitext-2") == "the valid text"
    assert read_text("wikitext-2:test") == "the test text"
    assert read_text(corpus) == "the valid text"
    assert read_text(f"{corpus}:train") == "the train text"
    (corpus / "test.txt").unlink()
    with pytest.raises(ValueError, match=r"has no test\.txt"):
        read_text("wikitext-2:test")
    monkeypatch.delenv("JOMA_SHARED")
    with pytest.raises(ValueError, match="environment variable JOMA_SHARED"):
        read_text("wikitext-2")


def test_a_file_and_the_standard_input(tmp_path, monkeypatch):
    path = tmp_path / "own: text"
    path.write_bytes("\ufeffOnce, é\r\n".encode())
    assert read_text(str(path)) == "Once, é\r\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("日本".encode())))
    assert read_text("-") == "日本"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must not be empty: there is none in "),
        (b" \n\t", "must not be empty"),
        (b"caf\xe9", r"must be UTF-8, but .*text has the byte 0xe9 at 3"),
        (b"\xef\xbb\xbfa\xff", "has the byte 0xff at 1"),
    ],
)
def test_a_text_that_is_none(tmp_path, monkeypatch, content, message):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_text(tmp_path / "text")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    with pytest.raises(ValueError, match=message.replace(".*text", "the standard input")):
        read_text("-")


@pytest.mark.parametrize("name", ["nowhere.txt", "wikitext-103", "wikitext-2:middle", ""])
def test_an_unknown_name_is_answered_with_what_there_is(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="'embedded', 'wikitext-2' or '-'|no valid.txt"):  # noqa: RUF043
        read_text(name)


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
