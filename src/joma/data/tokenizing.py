"""Text to tokens and back, for training: words, byte pairs, bytes, or what others made.

Every tokenizer is a `TextTokenizer`: it knows how many tokens there are and has a digest, which
identifies what was encoded with it.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from joma.common import json_files
from joma.data.corpora import Corpus, pieces
from joma.errors import JomaError

UNKNOWN = "<unk>"
"""What stands for a word that is not in the vocabulary."""

TOKENIZER_FILE = "tokenizer.json"
"""Where a folder keeps its tokenizer, as transformers has it."""

_SPACED = "'.,()!?"
_SEPARATING = ("<br />", ";", ":")


class TextTokenizer(Protocol):
    """What turns text into tokens, identified by a digest."""

    @property
    def size(self) -> int:
        """How many tokens there are; each is a number below it."""
        ...

    @property
    def digest(self) -> str:
        """A SHA-256 of whatever decides the tokens, in hexadecimal."""
        ...

    def encode(self, text: str) -> Sequence[int] | np.ndarray:
        """Return the tokens of a text, with none put around it."""
        ...

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens."""
        ...


def basic_english(text: str) -> list[str]:
    """Return the words of a text by torchtext's rules of this name, in lower case.

    An apostrophe, full stop, comma, round bracket, exclamation or question mark is a word of its
    own; colons, semicolons and `<br />` part words; double quotes vanish, and what stood on either
    side of one becomes one word. The words of a text are those of its lines, one after the other.
    """
    text = text.lower().replace('"', "")
    # Replacing one sign after the other takes a third of the time `translate` does.
    for sign in _SEPARATING:
        text = text.replace(sign, " ")
    for sign in _SPACED:
        text = text.replace(sign, f" {sign} ")
    return text.split()


@dataclass(frozen=True)
class BasicEnglish:
    """Words by the rules of `basic_english`, numbered by a vocabulary.

    Attributes:
        vocabulary: the words by their numbers; the first is `<unk>`, for all that are not in it.
    """

    vocabulary: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.vocabulary[:1] != (UNKNOWN,):
            raise JomaError(
                f"vocabulary must be a tuple that begins with {UNKNOWN}, "
                f"got {self.vocabulary[:1]!r}"
            )
        if len(self._numbers) < len(self.vocabulary):
            repeated = Counter(self.vocabulary).most_common(1)[0][0]
            raise JomaError(f"vocabulary must hold each word once, got {repeated!r} again")

    @classmethod
    def of(cls, corpus: Corpus) -> "BasicEnglish":
        """Return the vocabulary of a corpus's training split, as torchtext builds it.

        `<unk>` is first, then come all words, the most frequent first, and those that are equally
        frequent in the order of their characters.
        """
        counts: Counter[str] = Counter()
        for piece in pieces(corpus.read("train")):
            counts.update(basic_english(piece))
        counts.pop(UNKNOWN, None)
        return cls((UNKNOWN, *sorted(counts, key=lambda word: (-counts[word], word))))

    @classmethod
    def load(cls, folder: str | Path) -> "BasicEnglish":
        """Return what `save` wrote into a folder.

        Raises:
            ValueError: there is none, or a tokenizer of another kind.
        """
        path = Path(folder) / TOKENIZER_FILE
        content = json_files.read(path)
        try:
            words = tuple(content["model"]["vocab"])
        except (KeyError, TypeError):
            words = ()
        if content != _word_level({word: number for number, word in enumerate(words)}):
            raise JomaError(f"{path} must be words by basic_english, it is another tokenizer")
        return cls(words)

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer into a folder, whole, in the layout of transformers.

        Transformers then finds the same words but for two corners: a capital sigma at the end of a
        word, and control characters that Python takes for white space.
        """
        json_files.write(Path(folder) / TOKENIZER_FILE, _word_level(self._numbers))
        write_tokenizer_config(Path(folder), unk_token=UNKNOWN)

    @property
    def size(self) -> int:
        """How many words there are, `<unk>` included."""
        return len(self.vocabulary)

    @property
    def digest(self) -> str:
        """A SHA-256 of the vocabulary, in hexadecimal."""
        return digest_of("basic_english", *self.vocabulary)

    def encode(self, text: str) -> np.ndarray:
        """Return the numbers of a text's words, int32."""
        number = self._numbers.get
        return np.array([number(word, 0) for word in basic_english(text)], dtype=np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the words of numbers, with a space between two."""
        return " ".join([self.vocabulary[token] for token in checked_tokens(tokens, self.size)])

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.vocabulary)}


class Bytes:
    """Every byte of the text in UTF-8 is a token."""

    size = 256

    @property
    def digest(self) -> str:
        """A SHA-256, in hexadecimal."""
        return digest_of("bytes")

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of a text, uint8."""
        return np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of bytes; those that are no UTF-8 are replaced."""
        return bytes(checked_tokens(tokens, self.size)).decode(errors="replace")


BYTES = Bytes()
"""Every byte is a token."""


def digest_of(*parts: str) -> str:
    """Return a SHA-256 of texts, which tells apart where one ends and the next begins."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def checked_tokens(tokens: Sequence[int] | np.ndarray, size: int) -> list[int]:
    """Return tokens as a list, all of them known."""
    numbers = np.asarray(tokens, dtype=np.int64)
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < size:
        outside = numbers[(numbers < 0) | (numbers >= size)][0]
        raise JomaError(f"tokens must be from 0 to {size - 1}, got {outside}")
    return numbers.tolist()


def write_tokenizer_config(folder: Path, **settings: str) -> None:
    """Write what transformers needs next to a tokenizer.json, whole."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    json_files.write(folder / "tokenizer_config.json", {**config, **settings})


def _word_level(numbers: dict[str, int]) -> dict[str, Any]:
    """Return the rules of `basic_english` with a vocabulary, as a tokenizer.json has them."""

    def replace(sign: str, by: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": {"String": sign}, "content": by}

    rules = [
        {"type": "Lowercase"},
        replace('"', ""),
        *(replace(sign, " ") for sign in _SEPARATING),
        *(replace(sign, f" {sign} ") for sign in _SPACED),
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": rules},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": numbers, "unk_token": UNKNOWN},
    }
