import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.models import load
from joma.models.llama2c import Llama2cTokenizer
from tests.models import llama2c_reference as reference

PIECES = [" t", "he", "th", " the", "in", "ing", " a", "  ", "aa", "aaa", "é", "éa", " "]
PIECES += "theinga"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("heads", "keys"), [(4, 4), (4, 2), (3, 1)])
def test_the_same_scores_as_llama2c(tmp_path, tied, heads, keys):
    path = tmp_path / "model.bin"
    kept = reference.write(path, heads=heads, keys=keys, tied=tied)
    loaded = load(path, dtype=torch.float64)
    tokens = [1, 17, 299, 4, 4, 120, 63]
    with torch.no_grad():
        scores = loaded.model(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(scores, reference.logits(kept, tokens), rtol=0, atol=1e-5)
    assert loaded.context == 16
    assert loaded.vocabulary == 300
    assert loaded.tokenizer is None
    with pytest.raises(ValueError, match=r"--tokenizer PATH, or --tokenizer bytes"):
        loaded.encode("text")
    assert load(path, tokenizer="bytes").encode("az") == [97, 122]


def test_a_tokenizer_after_or_next_to_the_weights_or_given(tmp_path):
    path = tmp_path / "model.bin"
    reference.write(path, vocabulary=259 + len(PIECES))
    behind = reference.tokenizer_bytes(*reference.vocabulary(PIECES))
    text, expected = "the\n", [1, 259 + PIECES.index(" the"), 3 + ord("\n")]
    given_path = tmp_path / "other" / "own.bin"
    given_path.parent.mkdir()
    given_path.write_bytes(behind)
    assert load(path, tokenizer=given_path).encode(text) == expected
    (tmp_path / "tokenizer.bin").write_bytes(behind)
    assert load(path).encode(text) == expected
    joined = tmp_path / "other" / "model.data"
    joined.write_bytes(path.read_bytes() + behind)
    assert load(joined).encode(text) == expected
    joined.write_bytes(path.read_bytes() + behind[:-3])
    with pytest.raises(ValueError, match=r"model\.data should have \d+ bytes by its header"):
        load(joined)


@pytest.mark.parametrize("pieces", [1, 21])
def test_a_tokenizer_of_another_model_is_noticed(tmp_path, pieces):
    path = tmp_path / "model.bin"
    reference.write(path, vocabulary=270)
    (tmp_path / "tokenizer.bin").write_bytes(
        reference.tokenizer_bytes(*reference.vocabulary(["x"] * pieces))
    )
    with pytest.raises(ValueError, match=rf"not that of .*model\.bin.* {259 + pieces} .* 270"):
        load(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ((24, 20, 2, 4, 2, 300, 16), r"cut short or no llama2\.c checkpoint: .* should have \d+"),
        ((24, 20, 200_000, 4, 2, 300, 16), "n_layers must be at most 2048, got 200000"),
        ((0, 20, 2, 4, 2, 300, 16), "dim cannot be 0"),
        ((24, 20, 2, 5, 2, 300, 16), "5 heads cannot share a width of 24"),
        ((24, 20, 2, 4, 3, 300, 16), "4 heads cannot share 3 keys"),
        ((0x616B3432, 1, 0, 0, 0, 0, 0), "version 1"),
    ],
)
def test_a_header_is_not_believed_before_the_file_bears_it_out(tmp_path, header, message):
    path = tmp_path / "model.bin"
    path.write_bytes(struct.pack("<7i", *header) + bytes(1000))
    tracemalloc.start()
    with pytest.raises(ValueError, match=message):
        load(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000_000


@settings(deadline=None, max_examples=200)
@given(st.text(st.sampled_from("thein ga\né日<s>"), max_size=30))
def test_merges_are_those_of_the_naive_way(text):
    pieces, scores = reference.vocabulary(PIECES)
    tokenizer = Llama2cTokenizer.from_bytes(reference.tokenizer_bytes(pieces, scores), "it")
    assert tokenizer.size == len(pieces)
    tokens = tokenizer.encode(text)
    assert tokens == reference.encode(pieces, scores, text)
    assert tokenizer.decode(tokens) == text


@settings(deadline=None, max_examples=60)
@given(
    extra=st.lists(st.text("abc ", min_size=1, max_size=4), min_size=1, max_size=12),
    ranks=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    text=st.text("abcd ", max_size=25),
)
def test_any_vocabulary_with_ties_merges_leftmost_first(extra, ranks, text):
    pieces, scores = reference.vocabulary([*extra, *"abc "])
    scores[259 : 259 + len(extra)] = [-float(rank) for rank in ranks[: len(extra)]]
    tokenizer = Llama2cTokenizer(pieces, scores)
    assert tokenizer.encode(text) == reference.encode(pieces, scores, text)


@pytest.mark.parametrize("spelling", [lambda b: bytes([b]), lambda b: chr(b).encode()])
def test_bytes_in_older_spellings_do_not_stand_for_letters(spelling):
    pieces, scores = reference.vocabulary(PIECES)
    pieces[3:259] = [spelling(byte) for byte in range(256)]
    tokenizer = Llama2cTokenizer(pieces, scores)
    tokens = tokenizer.encode("the é日")
    assert tokens == reference.encode(pieces, scores, "the é日")
    assert tokenizer.decode(tokens) == "the é日"


def test_a_megabyte_is_encoded_even_where_it_cannot_be_cut():
    tokenizer = Llama2cTokenizer(*reference.vocabulary(PIECES))
    # The naive way takes hours for each.
    assert len(tokenizer.encode("the thing in a " * 70_000)) > 200_000
    alone, pair = (259 + PIECES.index(piece) for piece in (" a", "aa"))
    assert tokenizer.encode("a" * 99_999) == [1, alone, *[pair] * 49_999]


def test_what_is_no_tokenizer_and_tokens_that_are_none():
    tokenizer = Llama2cTokenizer(*reference.vocabulary(PIECES))
    with pytest.raises(ValueError, match=f"below {tokenizer.size}, got 9999"):
        tokenizer.decode([9999])
    for damaged in (b"", b"\xff" * 35):
        with pytest.raises(ValueError, match="the file is"):
            Llama2cTokenizer.from_bytes(damaged, "the file")
