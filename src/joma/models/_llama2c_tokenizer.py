"""The tokenizer of llama2.c checkpoints: byte pair merges in the order of scores."""

import heapq
import math
import struct
from collections.abc import Sequence
from functools import cached_property

from joma.errors import JomaError
from joma.models._special_tokens import SpecialTokens

_BOS, _BYTES = 1, 3  # ids: the text's beginning, and the first of 256 single bytes


class Llama2cTokenizer:
    """Encodes as SentencePiece does with Llama's vocabulary: a space before the text, bytes last.

    Args:
        pieces: the bytes of every token. The first three are control tokens; where the next 256
            are the single bytes, they stand for what no other piece covers.
        scores: how early a piece is merged; the highest first, the leftmost of equals.
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
        self._ids: dict[bytes, int] = {}
        for index in range(self._first_piece, len(pieces)):
            self._ids.setdefault(pieces[index], index)
        self._merged: dict[str, list[int]] = {}

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> "Llama2cTokenizer":
        """Reads the contents of a tokenizer.bin; `source` is what errors call it."""
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
        """Return the tokens of a text, the token for its beginning first unless told otherwise."""
        tokens = [_BOS] if special else []
        for chunk in self._chunks(f" {text}") if text else ():
            merged = self._merged.get(chunk)
            if merged is None:
                merged = self._merged[chunk] = self._merge(chunk)
            tokens += merged
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; the space put before a text is taken away after its beginning."""
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

    @cached_property
    def _joined(self) -> set[str]:
        """Every pair of neighbouring characters inside a piece: between others no merge goes."""
        joined: set[str] = set()
        for piece in self._ids:
            text = piece.decode(errors="replace")
            joined.update(text[at : at + 2] for at in range(len(text) - 1))
        return joined

    def _chunks(self, text: str) -> list[str]:
        """The text cut where no piece reaches across, so that each part can be merged alone."""
        joined, start, chunks = self._joined, 0, []
        for at in range(1, len(text)):
            if text[at - 1 : at + 1] not in joined:
                chunks.append(text[start:at])
                start = at
        return [*chunks, text[start:]]

    def _merge(self, text: str) -> list[int]:
        """Merges the best pair again and again; a heap holds the pairs, a linked list the rest."""
        pieces = self._pieces
        tokens = [token for character in text for token in self._character(character)]
        after = list(range(1, len(tokens) + 1))
        before = list(range(-1, len(tokens) - 1))
        heap: list[tuple[float, int, int, int, int]] = []

        def push(left: int) -> None:
            right = after[left]
            if right >= len(tokens) or min(tokens[left], tokens[right]) < self._first_piece:
                return
            both = self._ids.get(pieces[tokens[left]] + pieces[tokens[right]])
            if both is not None:
                heapq.heappush(heap, (-self._scores[both], left, tokens[left], tokens[right], both))

        for left in range(len(tokens)):
            push(left)
        while heap:
            _, left, first, second, both = heapq.heappop(heap)
            right = after[left]
            # A pair that a better merge has taken apart since it was pushed.
            if tokens[left] != first or right >= len(tokens) or tokens[right] != second:
                continue
            tokens[left], tokens[right] = both, -1
            after[left] = after[right]
            if after[right] < len(tokens):
                before[after[right]] = left
            push(left)
            if before[left] >= 0:
                push(before[left])
        return [token for token in tokens if token >= 0]

    def _character(self, character: str) -> list[int]:
        data = character.encode(errors="replace")
        whole = self._ids.get(data)
        if whole is not None:
            return [whole]
        return [_BYTES + byte for byte in data] if self._has_bytes else [0]


def _spellings(byte: int) -> tuple[bytes, ...]:
    """How exporters of different age wrote the token of a single byte."""
    return b"<0x%02X>" % byte, bytes([byte]), chr(byte).encode()
