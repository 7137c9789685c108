"""Text to tokens and back, whatever tokenizer a model came with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from joma.errors import JomaError
from joma.models._hub import is_tokenizer_file, local_folder
from joma.models._llama2c_tokenizer import Llama2cTokenizer
from joma.models._quiet import first_line, need_transformers, quietly


@runtime_checkable
class Tokenizer(Protocol):
    """What turns text into a model's tokens."""

    @property
    def size(self) -> int:
        """How many tokens there are."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those the tokenizer itself puts around it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        ...


class ByteTokenizer:
    """Every byte of the text is a token: for a model trained so, or where no tokenizer is known."""

    size = 256

    def encode(self, text: str) -> list[int]:
        """The bytes of the text in UTF-8."""
        return list(text.encode(errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of bytes."""
        return bytes(tokens).decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer of transformers, by its own defaults.

    Args:
        tokenizer: what `AutoTokenizer` made.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def size(self) -> int:
        """How many tokens there are, those added later included."""
        return len(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text of any length, with the special tokens the tokenizer adds."""
        with quietly():  # a warning that no model takes a text that long
            return list(self.tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)


def load_tokenizer(source: str | Path, *, revision: str | None = None) -> Tokenizer:
    """A tokenizer from a folder, a hub id, a tokenizer.json, a .gguf, a tokenizer.bin, or "bytes".

    Raises:
        ValueError: there is none.
    """
    if source == "bytes":
        return ByteTokenizer()
    path = Path(source)
    if path.is_file() and path.suffix not in (".json", ".gguf"):
        return Llama2cTokenizer.from_bytes(path.read_bytes(), str(path))
    need_transformers(f"the tokenizer {source}")
    if path.is_file():
        return _from_json(path) if path.suffix == ".json" else from_gguf(path)
    folder = local_folder(source, revision)
    tokenizer = from_folder(folder)
    if tokenizer is None:
        raise JomaError(f"{folder} has no tokenizer: no tokenizer.json or the like is in it")
    return tokenizer


def from_folder(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder in Hugging Face layout, None where it has no files of one."""
    # Without its files transformers makes an empty tokenizer up for some models.
    if not any(is_tokenizer_file(path.name) for path in folder.iterdir()):
        return None
    return _wrapped(str(folder), str(folder))


def from_gguf(path: Path) -> Tokenizer:
    """The tokenizer inside a GGUF file."""
    return _wrapped(str(path), str(path.parent), gguf_file=path.name)


def _from_json(path: Path) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    try:
        with quietly():
            return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_file=str(path)))
    except Exception as error:  # the tokenizers library raises plain exceptions
        raise JomaError(f"{path} is no tokenizer ({first_line(error)})") from error


def _wrapped(what: str, folder: str, **options: str) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        with quietly():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **options
            )
    except Exception as error:  # every tokenizer class fails in its own way
        raise JomaError(
            f"the tokenizer of {what} cannot be read ({first_line(error)}); give another with "
            "--tokenizer PATH or --tokenizer bytes"
        ) from error
    if not tokenizer.vocab_size:
        raise JomaError(
            f"the tokenizer of {what} is empty: files of it are missing; give another with "
            "--tokenizer PATH or --tokenizer bytes"
        )
    return HuggingFaceTokenizer(tokenizer)
