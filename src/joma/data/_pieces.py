"""A long text in pieces that can be encoded one by one."""

import re
from collections.abc import Iterator

PIECE = 1 << 24
"""Characters of a piece unless told: a tokenizer takes far more memory than its text."""

_BETWEEN = re.compile(r"(?<=\S) *\n")


def pieces(text: str, length: int | None = None) -> Iterator[str]:
    """A text in pieces of at least `length` characters but for the last, cut where a line ends.

    Each cut is behind a line's last word, before any spaces. Words, bytes and GPT-2's rules for
    byte pairs never reach across it, so that the tokens of the pieces are those of the whole text.
    """
    length = PIECE if length is None else length
    assert length > 0
    start = 0
    while start < len(text):
        cut = _BETWEEN.search(text, start + length)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end
