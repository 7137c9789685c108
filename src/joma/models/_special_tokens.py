"""The special tokens that a model was trained to find around its text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from joma.errors import printable


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
