"""A text as a model reads it: windows of tokens, each with the model's special tokens around it."""

from torch import Tensor

from joma.data.text import windows
from joma.errors import JomaError
from joma.models import Loaded

WINDOW = 512
WINDOWS = 20

BEYOND = 256
"""Tokens that a piece of the text must have beyond those needed: its end is cut anywhere."""
_LETTERS_PER_TOKEN = 12


def text_windows(
    loaded: Loaded, text: str, window: int | None = None, count: int = WINDOWS
) -> tuple[Tensor, str | None]:
    """Return the first windows of a text, and what a reader should know of them.

    Every window has the special tokens around it that the model was trained with, such as <bos>;
    they count in its length. The rest of it are consecutive tokens of the text.

    Args:
        loaded: the model, whose tokenizer is used.
        text: the text.
        window: tokens of a window; where None, 512, or what the model takes or the text has if
            that is less.
        count: windows at most.

    Raises:
        ValueError: the window asked for is longer than the text or than the model takes, or has no
            place for a token of the text.
    """
    longest, special = loaded.context, loaded.special_tokens
    if window is not None and longest is not None and window > longest:
        raise JomaError(
            f"window must be at most {longest}, the longest that {loaded.source} takes, got "
            f"{window}"
        )
    usual = min(WINDOW, longest or WINDOW)
    if (window or usual) <= special.count:
        raise JomaError(
            f"window must be at least {special.count + 1}, for {special.describe()}, got "
            f"{window or usual}"
        )
    tokens = _encoded(loaded, text, (window or usual) * count)
    if window is not None and window > len(tokens) + special.count:
        raise JomaError(
            f"window must be at most {len(tokens) + special.count}, as many tokens as the text "
            f"has, got {window}"
        )
    plain = None if window is None else window - special.count
    shown = special.around_each(windows(tokens, plain, count, most=usual - special.count))
    if window is None and shown.shape[1] < usual:
        note = f"The text has {len(tokens)} tokens, less than a window of {usual}: it is read whole"
        return shown, f"{note}."
    if len(shown) < count:
        return shown, f"The text has {len(shown)} of the {count} windows asked for."
    return shown, None


def _encoded(loaded: Loaded, text: str, needed: int) -> list[int]:
    """Return tokens of a text's beginning, as those of the whole text begin, at least `needed`.

    A text may be far longer than what is read of it, and some tokenizers take their time.
    """
    letters = _LETTERS_PER_TOKEN * (needed + BEYOND)
    while True:
        tokens = loaded.encode(text[:letters], special=False)
        if letters >= len(text) or len(tokens) >= needed + BEYOND:
            return tokens
        letters *= 2
