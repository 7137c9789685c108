"""Pieces of words as tokens: byte-level BPE trained here, and any tokenizer of transformers."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from joma.common import json_files
from joma.common.files import write_bytes
from joma.data.corpora import pieces
from joma.data.tokenizing import (
    TOKENIZER_FILE,
    checked_tokens,
    digest_of,
    write_tokenizer_config,
)
from joma.errors import JomaError, how_to_install

_AT_ONCE, _PARTS = 1 << 16, 32
"""Characters that one thread of the library takes at once, and how many such parts."""


class ByteBPE:
    """Byte pair encoding over bytes with GPT-2's rules for what a word is: nothing is unknown.

    Made by `train` or `load`; it needs the `tokenizers` package.

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

    @classmethod
    def load(cls, folder: str | Path) -> "ByteBPE":
        """Return what `save` wrote into a folder, or another tokenizer.json with GPT-2's rules.

        Raises:
            ValueError: there is none, or a tokenizer of another kind.
        """
        path = Path(folder) / TOKENIZER_FILE
        content = json_files.read(path)
        if not _is_byte_bpe(content):
            raise JomaError(
                f"{path} must be a byte-level BPE with GPT-2's rules, it is another tokenizer; "
                "HuggingFace takes any"
            )
        try:
            return cls(_tokenizers().Tokenizer.from_str(json.dumps(content)))
        except Exception as error:  # the library raises nothing more precise
            raise JomaError(f"{path} is no tokenizer ({error})") from error

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer into a folder, whole, in the layout of transformers."""
        text = self.tokenizer.to_str(pretty=True)
        write_bytes(Path(folder) / TOKENIZER_FILE, text.encode())
        write_tokenizer_config(Path(folder))

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

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens; bytes that are no UTF-8 are replaced."""
        return self.tokenizer.decode(checked_tokens(tokens, self.size), skip_special_tokens=False)


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

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens, special ones included."""
        numbers = checked_tokens(tokens, self.size)
        return self.tokenizer.decode(numbers, clean_up_tokenization_spaces=False)


def _lasting(path: Path) -> str:
    """Return what a saved file says, except what each call to a tokenizer sets."""
    data = path.read_bytes()
    if path.name != TOKENIZER_FILE:
        return data.decode("latin-1")
    content = json.loads(data)
    return json.dumps({**content, "truncation": None, "padding": None}, sort_keys=True)


def _is_byte_bpe(content: Any) -> bool:
    """Return whether a tokenizer.json has GPT-2's rules: no token crosses a line's end."""
    try:
        rules = content["pre_tokenizer"]
        return (
            content["model"]["type"] == "BPE"
            and content["decoder"]["type"] == rules["type"] == "ByteLevel"
            and content["normalizer"] is None
            and rules.get("use_regex", True)
            and not rules["add_prefix_space"]
            and not any(
                added["lstrip"] or added["rstrip"] or "\n" in added["content"]
                for added in content["added_tokens"]
            )
        )
    except (KeyError, TypeError):
        return False


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
