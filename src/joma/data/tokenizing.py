"""Text to tokens and back, for training: words, byte pairs, bytes, or what others made.

Every tokenizer is a `TextTokenizer`: it knows how many tokens there are and has a digest, which
identifies what was encoded with it.
"""

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from joma.common import json_files
from joma.common.files import write_bytes
from joma.data.corpora import Corpus, pieces
from joma.errors import JomaError, how_to_install

UNKNOWN = "<unk>"
"""What stands for a word that is not in the vocabulary."""

TOKENIZER_FILE = "tokenizer.json"
"""Where a folder keeps its tokenizer, as transformers has it."""

_AT_ONCE, _PARTS = 1 << 16, 32
"""Characters that one thread of `tokenizers` takes at once, and how many such parts."""

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

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer into a folder, whole, in the layout of transformers.

        Transformers then finds the same words but for two corners: a capital sigma at the end of a
        word, and control characters that Python takes for white space.
        """
        json_files.write(Path(folder) / TOKENIZER_FILE, _word_level(self._numbers))
        _write_config(Path(folder), unk_token=UNKNOWN)

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


BYTES = Bytes()
"""Every byte is a token."""


class ByteBPE:
    """Byte pair encoding over bytes with GPT-2's rules for what a word is: nothing is unknown.

    Made by `train`; it needs the `tokenizers` package.

    Args:
        tokenizer: a `tokenizers.Tokenizer` of this kind.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def train(cls, text: str, size: int) -> "ByteBPE":
        """Merge learned from a text; the same text gives the same ones.

        Args:
            text: what to learn from.
            size: how many tokens there shall be, the 256 bytes included; there are fewer where the
                text has no further pair that comes twice.
        """
        if size < 256:
            raise JomaError(f"size must be at least 256, as many as there are bytes, got {size}")
        library = _tokenizers()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=2,
            show_progress=False,
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(pieces(text, _AT_ONCE), trainer)
        return cls(tokenizer)

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer into a folder, whole, in the layout of transformers."""
        text = self.tokenizer.to_str(pretty=True)
        write_bytes(Path(folder) / TOKENIZER_FILE, text.encode())
        _write_config(Path(folder))

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return self.tokenizer.get_vocab_size()

    @property
    def digest(self) -> str:
        """A SHA-256 of the merges and rules, in hexadecimal."""
        return digest_of("bpe", json.dumps(json.loads(self.tokenizer.to_str()), sort_keys=True))

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, int32."""
        # In one piece a text takes two hundred times its memory, and one thread.
        parts = list(pieces(text, _AT_ONCE))
        ids = [np.empty(0, np.int32)]
        for first in range(0, len(parts), _PARTS):
            some = parts[first : first + _PARTS]
            done = self.tokenizer.encode_batch_fast(some, add_special_tokens=False)
            ids += [np.array(part.ids, dtype=np.int32) for part in done]
        return np.concatenate(ids)


class HuggingFace:
    """A tokenizer of transformers, as training text is encoded: nothing is put around it.

    Args:
        tokenizer: what `AutoTokenizer` made.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def size(self) -> int:
        """One more than the largest token: some vocabularies have gaps."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @property
    def digest(self) -> str:
        """A SHA-256 of the files transformers saves it in, in hexadecimal."""
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            files = sorted(path for path in Path(folder).iterdir() if path.is_file())
            parts = [part for path in files for part in (path.name, _lasting(path))]
        return digest_of("huggingface", *parts)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text of any length, int32."""
        ids = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        return np.array(ids["input_ids"], dtype=np.int32)


def _lasting(path: Path) -> str:
    """Return what a saved file says, except what each call to a tokenizer sets."""
    data = path.read_bytes()
    if path.name != TOKENIZER_FILE:
        return data.decode("latin-1")
    content = json.loads(data)
    return json.dumps({**content, "truncation": None, "padding": None}, sort_keys=True)


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise JomaError(f"byte-level BPE needs tokenizers: {how_to_install('hf')}") from error
    return tokenizers


def digest_of(*parts: str) -> str:
    """Return a SHA-256 of texts, which tells apart where one ends and the next begins."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def _write_config(folder: Path, **settings: str) -> None:
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
