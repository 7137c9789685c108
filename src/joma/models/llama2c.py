"""Checkpoints of llama2.c: one file of 32-bit floats behind a header of seven integers."""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from joma.errors import JomaError
from joma.models._size_checks import MOST_LAYERS
from joma.models._special_tokens import SpecialTokens

if TYPE_CHECKING:
    import tokenizers
    from transformers import LlamaConfig

_HEADER = struct.Struct("<7i")
_LATER_VERSIONS = 0x616B3432  # "ak42", which the original format does not have
_BOS, _BYTES = 1, 3  # ids: the text's beginning, and the first of 256 single bytes
_MOST = 1 << 24  # of any one dimension: beyond it is no header


class Llama2cTokenizer:
    """SentencePiece's byte pair encoding with Llama's vocabulary: a space first, bytes last.

    Merges are ranked by the score of the piece they make, as transformers ranks those of a Llama.

    Args:
        pieces: The bytes of every token. The first three are control tokens; where the next 256
            are the single bytes, they stand for what no other piece covers.
        scores: How early a piece is merged; the highest first, the leftmost of equals.
    """

    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float]) -> None:
        if len(pieces) != len(scores) or len(pieces) <= _BYTES:
            raise JomaError(
                f"a tokenizer needs a score for each piece and more than {_BYTES} pieces, got "
                f"{len(pieces)} pieces and {len(scores)} scores"
            )
        self._pieces, self._scores = list(pieces), list(scores)
        stop = _BYTES + 256
        self._has_bytes = len(pieces) >= stop and all(
            pieces[_BYTES + byte] in _spellings(byte) for byte in range(256)
        )
        self._first_piece = stop if self._has_bytes else _BYTES
        self._tokenizer = self._merging()

    def _merging(self) -> "tokenizers.Tokenizer":
        """Return what turns a text into tokens."""
        import tokenizers

        ids: dict[str, int] = {}
        for index in range(self._first_piece, self.size):
            ids.setdefault(self._pieces[index].decode(errors="replace"), index)
        merges = sorted(
            (-self._scores[whole], ids[piece[:at]], ids[piece[at:]], piece[:at], piece[at:])
            for piece, whole in ids.items()
            for at in range(1, len(piece))
            if piece[:at] in ids and piece[at:] in ids
        )
        ids |= {f"<0x{byte:02X}>": _BYTES + byte for byte in range(256) if self._has_bytes}
        model = tokenizers.models.BPE(
            vocab={"<unk>": 0, **ids},
            merges=[(left, right) for *_, left, right in merges],
            unk_token="<unk>",
            byte_fallback=self._has_bytes,
        )
        return tokenizers.Tokenizer(model)

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> "Llama2cTokenizer":
        """Read the contents of a tokenizer.bin; `source` is what errors call it."""
        pieces, scores, at = [], [], 4
        while at < len(data):
            if at + 8 > len(data):
                raise JomaError(f"{source} is cut short: it ends within token {len(pieces)}")
            score, length = struct.unpack_from("<fi", data, at)
            at += 8
            if not 0 <= length <= len(data) - at or not math.isfinite(score):
                raise JomaError(
                    f"{source} is cut short or no llama2.c tokenizer: token {len(pieces)} should "
                    f"have {length} bytes and the score {score}"
                )
            pieces.append(data[at : at + length])
            scores.append(score)
            at += length
        if len(pieces) <= _BYTES:
            raise JomaError(f"{source} is no llama2.c tokenizer: it has {len(pieces)} tokens")
        return cls(pieces, scores)

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return len(self._pieces)

    @property
    def special_tokens(self) -> SpecialTokens:
        """The token for the beginning of a text."""
        return SpecialTokens((_BOS,), (), ("<s>",))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text, the token for its beginning first if `special`."""
        text = f" {text}".encode(errors="replace").decode() if text else ""
        return [*([_BOS] if special else []), *self._tokenizer.encode(text).ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without the space that `encode` puts before a text."""
        data, begins = bytearray(), False
        for token in tokens:
            if not 0 <= token < self.size:
                raise JomaError(f"tokens must be below {self.size}, got {token}")
            if token >= _BYTES:
                piece = self._pieces[token]
                if token < self._first_piece:
                    piece = bytes([token - _BYTES])
                data += piece.removeprefix(b" ") if begins else piece
            begins = token == _BOS
        return data.decode(errors="replace")


def _spellings(byte: int) -> tuple[bytes, ...]:
    """Return how exporters of different age wrote the token of a single byte."""
    return b"<0x%02X>" % byte, bytes([byte]), chr(byte).encode()


@dataclass(frozen=True)
class Header:
    """The seven integers; `vocab_size` is negative where the classifier is not the embedding."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < (abs(value) if name == "vocab_size" else value) <= _MOST:
                raise JomaError(f"{name} cannot be {value}")
        if self.n_layers > MOST_LAYERS:
            raise JomaError(f"n_layers must be at most {MOST_LAYERS}, got {self.n_layers}")
        if self.dim % self.n_heads or (self.dim // self.n_heads) % 2:
            raise JomaError(f"{self.n_heads} heads cannot share a width of {self.dim}")
        if self.n_heads % self.n_kv_heads:
            raise JomaError(f"{self.n_heads} heads cannot share {self.n_kv_heads} keys")

    @property
    def tied(self) -> bool:
        """Whether the classifier is the embedding."""
        return self.vocab_size > 0

    def tables(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Return the names and shapes of what follows the header, in the order of the file."""
        layers, width, hidden, vocabulary = (
            self.n_layers,
            self.dim,
            self.hidden_dim,
            abs(self.vocab_size),
        )
        keys = width // self.n_heads * self.n_kv_heads
        yield "embed_tokens", (vocabulary, width)
        yield "input_layernorm", (layers, width)
        yield "self_attn.q_proj", (layers, width, width)
        yield "self_attn.k_proj", (layers, keys, width)
        yield "self_attn.v_proj", (layers, keys, width)
        yield "self_attn.o_proj", (layers, width, width)
        yield "post_attention_layernorm", (layers, width)
        yield "mlp.gate_proj", (layers, hidden, width)
        yield "mlp.down_proj", (layers, width, hidden)
        yield "mlp.up_proj", (layers, hidden, width)
        yield "norm", (width,)
        yield "rotary", (2, self.seq_len, width // self.n_heads // 2)
        if not self.tied:
            yield "lm_head", (vocabulary, width)

    @property
    def bytes(self) -> int:
        """The size of the checkpoint."""
        return _HEADER.size + 4 * sum(math.prod(shape) for _, shape in self.tables())


def read_header(path: Path) -> Header:
    """Return the header of a checkpoint, once the file's size has borne it out."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(_HEADER.size)
    if len(start) < _HEADER.size:
        raise JomaError(f"{path} is no llama2.c checkpoint: it has {size} bytes")
    if struct.unpack_from("<I", start)[0] == _LATER_VERSIONS:
        raise JomaError(
            f"{path} is a llama2.c checkpoint of version {struct.unpack_from('<i', start, 4)[0]}; "
            "export it with version 0 to have it read"
        )
    try:
        header = Header(*_HEADER.unpack(start))
    except ValueError as error:
        raise JomaError(
            f"{path} is no llama2.c checkpoint, folder, .gguf or .safetensors file: {error}"
        ) from error
    if size < header.bytes:
        raise JomaError(
            f"{path} is cut short or no llama2.c checkpoint: by its header it should have "
            f"{header.bytes} bytes and it has {size}"
        )
    return header


def read_weights(path: Path, header: Header) -> dict[str, Tensor]:
    """Return the weights under the names and in the layout of a Hugging Face Llama."""
    weights: dict[str, Tensor] = {}
    with open(path, "rb") as file:
        file.seek(_HEADER.size)
        for name, shape in header.tables():
            if name == "rotary":  # computed from the positions
                file.seek(4 * math.prod(shape), 1)
                continue
            values = np.fromfile(file, dtype="<f4", count=math.prod(shape)).reshape(shape)
            table = torch.from_numpy(values)
            if name == "lm_head":
                weights["lm_head.weight"] = table
            elif name in ("embed_tokens", "norm"):
                weights[f"model.{name}.weight"] = table
            else:
                for layer, weight in enumerate(table):
                    if name.endswith(("q_proj", "k_proj")):
                        weight = _halves(weight, header.dim // header.n_heads)
                    weights[f"model.layers.{layer}.{name}.weight"] = weight
    return weights


def llama_config(header: Header) -> "LlamaConfig":
    """Return the configuration of the Llama that computes what llama2.c does."""
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=abs(header.vocab_size),
        hidden_size=header.dim,
        intermediate_size=header.hidden_dim,
        num_hidden_layers=header.n_layers,
        num_attention_heads=header.n_heads,
        num_key_value_heads=header.n_kv_heads,
        max_position_embeddings=header.seq_len,
        rms_norm_eps=1e-5,
        tie_word_embeddings=header.tied,
    )


def read_tokenizer(path: Path, header: Header) -> Llama2cTokenizer | None:
    """Return the tokenizer after the weights in the file, or in a tokenizer.bin next to it."""
    size = path.stat().st_size
    if size > header.bytes:
        with open(path, "rb") as file:
            file.seek(header.bytes)
            rest = file.read()
        try:
            tokenizer = Llama2cTokenizer.from_bytes(rest, "what follows")
        except ValueError as error:
            raise JomaError(
                f"{path} should have {header.bytes} bytes by its header, or a tokenizer after "
                f"them, and it has {size}: {error}"
            ) from error
    elif (path.parent / "tokenizer.bin").is_file():
        other = path.parent / "tokenizer.bin"
        tokenizer = Llama2cTokenizer.from_bytes(other.read_bytes(), str(other))
    else:
        return None
    if tokenizer.size != abs(header.vocab_size):
        raise JomaError(
            f"the tokenizer is not that of {path}: it has {tokenizer.size} tokens, and the model "
            f"has embeddings for {abs(header.vocab_size)}"
        )
    return tokenizer


def _halves(weight: Tensor, head: int) -> Tensor:
    """Return rows from rotary pairs side by side (llama2.c) to rotary halves (transformers)."""
    rows, width = weight.shape
    return weight.reshape(-1, head // 2, 2, width).transpose(1, 2).reshape(rows, width)
