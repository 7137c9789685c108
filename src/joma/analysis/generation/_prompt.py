"""A prompt as tokens, and tokens as text while they come."""

from typing import Any

from joma.common.quiet import quietly, reading
from joma.errors import JomaError
from joma.inference.support import learned_positions, text_config
from joma.models import Loaded

_CONTEXT = 8
"""Tokens before the first one that decide how it is written, such as whether a space precedes."""


def encode_prompt(loaded: Loaded, text: str, *, chat: bool = False) -> list[int]:
    """Return the tokens of a prompt, with those before it that the model was trained with.

    No token that ends a text is put after it: the model is to continue.

    Args:
        loaded: The model.
        text: The prompt.
        chat: Whether the prompt is the user's turn of a conversation, to be put into the model's
            chat template.

    Raises:
        JomaError: The prompt has no token, or the model has no chat template.
    """
    if chat:
        tokens = loaded.encode(_in_template(loaded, text), special=False)
    else:
        tokens = [*loaded.special_tokens.before, *loaded.encode(text, special=False)]
    if not tokens:
        raise JomaError("prompt must hold at least one token, got an empty text")
    return tokens


def _in_template(loaded: Loaded, text: str) -> str:
    inner: Any = getattr(loaded.tokenizer, "tokenizer", None)
    if not getattr(inner, "chat_template", None):
        raise JomaError(
            f"{loaded.source} has no chat template: leave --chat out, and write the prompt as the "
            "model was trained to read it"
        )
    turns = [{"role": "user", "content": text}]
    with reading(lambda said: f"the chat template of {loaded.source} fails ({said})"), quietly():
        return str(inner.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def stop_tokens(loaded: Loaded) -> frozenset[int]:
    """Return the tokens at which a continuation ends.

    They are what configuration and tokenizer name, and those that begin a text: a model that was
    trained on one text after the other ends one by beginning the next.
    """
    inner: Any = getattr(loaded.tokenizer, "tokenizer", None)
    found = set(loaded.special_tokens.before)
    for owner in (loaded.model.config, getattr(loaded.model, "generation_config", None), inner):
        named = getattr(owner, "eos_token_id", None)
        found.update(it for it in (named if isinstance(named, list) else [named]) if it is not None)
    return frozenset(int(it) for it in found)


def check_length(loaded: Loaded, prompt: int, new: int) -> str | None:
    """Return what a reader should know of a text longer than the model's context, if it is.

    Args:
        loaded: The model.
        prompt: Tokens of the prompt.
        new: Tokens to be generated.

    Raises:
        JomaError: The model's positions are learned, and there are fewer than tokens.
    """
    limit = learned_positions(text_config(loaded.model))
    if limit is not None and prompt + new > limit:
        room = limit - prompt
        right = (
            f"--max-new-tokens may be {room} at most" if room > 0 else "the prompt must be shorter"
        )
        raise JomaError(
            f"{loaded.source} has learned {limit} positions, and the prompt of {prompt} tokens "
            f"with {new} new ones needs {prompt + new}: {right}"
        )
    if loaded.context is not None and prompt + new > loaded.context:
        return (
            f"The text grows to {prompt + new} tokens, and {loaded.source} was made for "
            f"{loaded.context}: beyond them the full cache, the reference, is not reliable either."
        )
    return None


class TextStream:
    """Turns tokens into text as they come; half a character waits for its other half.

    Args:
        loaded: The model, for its tokenizer.
        before: Tokens that precede the first one.
    """

    def __init__(self, loaded: Loaded, before: list[int]) -> None:
        assert loaded.tokenizer is not None
        self._decode = loaded.tokenizer.decode
        self._tokens = before[-_CONTEXT:]
        self._written = len(self._decode(self._tokens))

    def add(self, token: int) -> str:
        """Return the text that a further token adds, empty while a character is incomplete."""
        self._tokens.append(token)
        return "" if self._decode(self._tokens).endswith("\ufffd") else self.rest()

    def rest(self) -> str:
        """Return what is left, an incomplete character as a replacement sign."""
        added = self._decode(self._tokens)[self._written :]
        self._tokens = self._tokens[-2 * _CONTEXT :]
        self._written = len(self._decode(self._tokens))
        return added
