"""A limit on what a tokenizer's normalizers may make of a text.

A few normalizers that replace a letter by a hundred make a trillion letters of one, in a file of a
kilobyte. Each is tried on the text by itself, on pieces so short that its result is small.
"""

import base64
import json
import math
from collections.abc import Iterator
from typing import Any

from joma.errors import JomaError

_UNSUSPICIOUS = 64
"""Up to this possible growth, normalizers are not tried on their own."""

_MOST_GROWTH, _ALWAYS_ALLOWED = 50, 10_000
"""A text may become so many times longer, and this many letters in any case."""

_LETTERS_AT_ONCE = 1_000_000
_UNICODE = 18
"""Letters that a normal form of Unicode, the longest of any, makes of one."""


def check_growth(tokenizer: Any, text: str) -> None:
    """Raise JomaError where the normalizers of a tokenizer would make a text far longer.

    Args:
        tokenizer: Of transformers; one without normalizers of the tokenizers library passes.
        text: The text that is about to be encoded.
    """
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None:
        return
    parts = list(_parts(normalizer))
    if math.prod(growth for _, growth in parts) <= _UNSUSPICIOUS:
        return
    limit = _ALWAYS_ALLOWED + _MOST_GROWTH * len(text)
    for part, growth in parts:
        length = int(_LETTERS_AT_ONCE / growth)
        if length < 1:
            raise JomaError(
                f"the tokenizer has a normalizer that may make {growth:.0f} letters of one"
            )
        pieces, total = [], 0
        for start in range(0, len(text), length):
            pieces.append(part.normalize_str(text[start : start + length]))
            total += len(pieces[-1])
            if total > limit:
                raise JomaError(
                    f"the tokenizer's normalizers make a text more than {_MOST_GROWTH} times longer"
                )
        text = "".join(pieces)


def _parts(normalizer: Any) -> Iterator[tuple[Any, float]]:
    """Yield the single normalizers, and how many letters each can make of one."""
    state = json.loads(normalizer.__getstate__())
    if state["type"] == "Sequence":
        for index in range(len(state["normalizers"])):
            yield from _parts(normalizer[index])
    else:
        yield normalizer, max(1.0, _growth(state))


def _growth(state: dict[str, Any]) -> float:
    kind = state["type"]
    if kind == "Replace":
        replaced = len(state["pattern"].get("String", ""))
        # A regular expression may match between any two letters.
        return len(state["content"]) / replaced if replaced else 1 + len(state["content"])
    if kind == "Prepend":
        return 1 + len(state["prepend"])
    if kind == "Precompiled":
        table = base64.b64decode(state.get("precompiled_charsmap") or "")
        start = 4 + int.from_bytes(table[:4], "little")
        return max(map(len, table[start:].split(b"\0")), default=1)
    return _UNICODE if kind.startswith("NF") else 4
