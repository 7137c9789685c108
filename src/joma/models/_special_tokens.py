"""The special tokens that a model was trained to find around its text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from joma.errors import printable

_SAMPLES = ("x", "the", "a b", "1", ".", "é")
"""Texts of which at least one should give tokens, whatever the vocabulary."""


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens put before and after a text, such as <bos>, or [CLS] and [SEP].

    Attributes:
        before: Tokens before the text.
        after: Tokens after the text.
        names: The names of all of them, those before first.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.before) + len(self.after)

    def around(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of a text with these around them."""
        return [*self.before, *tokens, *self.after]

    def around_each(self, windows: Tensor) -> Tensor:
        """Return windows, shape (number, length), with these around every one of them."""
        if not self.count:
            return windows
        before, after = (
            torch.tensor(tokens, dtype=windows.dtype).expand(len(windows), -1)
            for tokens in (self.before, self.after)
        )
        return torch.cat([before, windows, after], 1)

    def describe(self) -> str:
        """Return what they are, such as "each begins with <bos>"; empty where there are none."""
        before = printable(" ".join(self.names[: len(self.before)]), 60)
        after = printable(" ".join(self.names[len(self.before) :]), 60)
        if before and after:
            return f"each begins with {before} and ends with {after}"
        if before or after:
            return f"each begins with {before}" if before else f"each ends with {after}"
        return ""


NO_SPECIAL_TOKENS = SpecialTokens()


def added_special_tokens(
    encode: Callable[[str, bool], list[int]], name: Callable[[int], str]
) -> SpecialTokens | None:
    """Return what a tokenizer puts around a text, found by encoding one with and without.

    Args:
        encode: Takes a text and whether special tokens are added, and returns its tokens.
        name: Returns the name of a token.

    Returns:
        The special tokens, or None where the tokenizer does more than put some around the text.
    """
    for sample in _SAMPLES:
        plain, whole = encode(sample, False), encode(sample, True)
        if whole == plain and plain:
            return NO_SPECIAL_TOKENS
        starts = [
            start
            for start in range(len(whole) - len(plain) + 1)
            if whole[start : start + len(plain)] == plain
        ]
        if plain and len(starts) == 1:
            before, after = whole[: starts[0]], whole[starts[0] + len(plain) :]
            return SpecialTokens(
                tuple(before), tuple(after), tuple(name(token) for token in [*before, *after])
            )
    return None
