import math

import pytest
import torch

from joma.errors import JomaError
from joma.models import load, load_tokenizer
from joma.models.gguf import read_header
from tests.models.tiny import CONTEXT, LAYERS, WIDTH, tiny, tokens

pytest.importorskip("gguf", reason="GGUF files are read by the gguf package")

import gguf

from tests.models.tiny_gguf import write_gguf


@pytest.fixture
def path(tmp_path):
    return write_gguf(tmp_path / "model.gguf")


def test_a_gguf_file_is_the_model_it_was_made_of(path, capfd):
    loaded = load(path)
    assert capfd.readouterr() == ("", "")
    with torch.no_grad():
        expected = tiny("llama")(tokens()).logits
        torch.testing.assert_close(loaded.model(tokens()).logits, expected, rtol=0, atol=1e-5)
    assert loaded.context == CONTEXT
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.encode("abba")) == "abba"
    assert loaded.encode("abba")[-3:] == [29, 4, 3]


def test_a_gguf_file_is_parsed_once_and_a_changed_one_again(path, monkeypatch):
    parsed = []
    build = gguf.GGUFReader._build_fields

    def count(self, *args):
        parsed.append(self.data)
        return build(self, *args)

    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", count)
    first = load(path)
    assert len(parsed) == 1
    write_gguf(path, add_bos_token=True, bos_token_id=1)
    assert load(path).encode("ab") != first.encode("ab")
    assert len(parsed) == 2


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"add_bos_token": True, "bos_token_id": 1}, [1, 29]),
        ({"add_bos_token": False, "bos_token_id": 1}, [29]),
        (
            {"add_bos_token": True, "bos_token_id": 1, "add_eos_token": True, "eos_token_id": 2},
            [1, 29, 2],
        ),
    ],
)
def test_the_file_says_which_special_tokens_are_added(tmp_path, entries, expected):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", **entries))
    assert tokenizer.encode("ab") == expected
    assert tokenizer.special_tokens.count == len(expected) - 1


def test_the_header_is_read_without_the_tensors(path):
    header = read_header(path)
    assert header.values["llama.block_count"] == LAYERS
    assert header.shapes["output_norm.weight"] == (WIDTH,)
    assert sum(map(math.prod, header.shapes.values())) == sum(
        p.numel() for p in tiny("llama").parameters()
    )


def test_a_file_cut_short_or_with_sizes_that_no_model_has_is_refused(path):
    data = path.read_bytes()
    at = data.index(b"llama.block_count") + len(b"llama.block_count") + 4
    many = data[:at] + (2**31).to_bytes(4, "little") + data[at + 4 :]
    for content, message in (
        (b"", r"model\.gguf"),
        (data[: len(data) // 2], r"model\.gguf"),
        (many, "block_count above 2048"),
    ):
        path.write_bytes(content)
        with pytest.raises(JomaError, match=message) as refused:
            load(path)
        assert "\n" not in str(refused.value)
