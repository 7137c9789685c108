"""A split's tokens, encoded once and kept on disk with the hashes of what they come from."""

import hashlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from joma.common import json_files
from joma.common.files import replacing
from joma.data.corpora import CACHE, Corpus, cache_folder, decoded, pieces
from joma.data.tokenizing import TextTokenizer, digest_of
from joma.errors import JomaError

_ARRAY, _MANIFEST = "tokens.npy", "manifest.json"
_VERSION = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Encoded:
    """The tokens of a split of a corpus.

    Attributes:
        tokens: shape (length,), uint16, or uint32 where there are more than 65,536 tokens; read
            from disk as they are used, and not to be written to.
        manifest: what they come from: `corpus`, `split`, `text` and `tokenizer` (their SHA-256),
            `vocabulary` (the tokenizer's size), and of the array `length`, `dtype` and, once it is
            on disk, `array` (the SHA-256 of its file).
    """

    tokens: np.ndarray
    manifest: dict[str, Any]

    def __len__(self) -> int:
        return len(self.tokens)


def encoded(
    corpus: Corpus, tokenizer: TextTokenizer, split: str, *, cache: Path | None = None
) -> Encoded:
    """Return a split's tokens: from the cache where they are there and valid, else encoded again.

    Valid is what was made of this very text by this very tokenizer, and is as it was written: all
    three are hashed each time. A text of more than 16 million characters is encoded in pieces, cut
    at the ends of lines: words, bytes and `ByteBPE` give the same tokens as the whole text, another
    tokenizer may differ by a few tokens at each cut.

    Args:
        corpus: the text.
        tokenizer: what makes tokens of it.
        split: which part of the corpus.
        cache: a folder with one for each such array; by default `encoded` in the cache folder.
            Where it cannot be written to, the tokens are kept in memory.

    Raises:
        ValueError: the text cannot be read or has no tokens.
    """
    data, where = corpus.read_bytes(split), corpus.where(split)
    source = {
        "version": _VERSION,
        "corpus": corpus.name,
        "split": split,
        "tokenizer": tokenizer.digest,
        "text": hashlib.sha256(data).hexdigest(),
    }
    parent = cache_folder() / "encoded" if cache is None else Path(cache)
    folder = parent / _folder_name(corpus, split, tokenizer.digest)
    if (found := _opened(folder, source)) is not None:
        return found
    _log.info("encoding %s", where)
    size = tokenizer.size
    tokens = _encode(decoded(data, where), tokenizer, size, where)
    manifest = {
        **source,
        "vocabulary": size,
        "length": len(tokens),
        "dtype": tokens.dtype.name,
    }
    return _kept(tokens, manifest, folder)


def _folder_name(corpus: Corpus, split: str, tokenizer: str) -> str:
    """Return a name by the corpus, not by its text: a changed text takes the old one's place."""
    part = corpus.parts.get(split)
    place = str(part.resolve()) if isinstance(part, Path) else corpus.name
    readable = re.sub(r"[^\w.-]+", "-", Path(corpus.name).name) or "corpus"
    return f"{readable}-{split}-{digest_of(place, split, tokenizer)[:16]}"


def _opened(folder: Path, source: dict[str, Any]) -> Encoded | None:
    """Return what is in the cache, if it is whole and was made of this."""
    if not (folder / _MANIFEST).is_file():
        return None
    try:
        manifest = json_files.read(folder / _MANIFEST)
        if not isinstance(manifest, dict) or not source.items() <= manifest.items():
            return None  # another text or tokenizer in its place
        if _sha256(folder / _ARRAY) == manifest.get("array"):
            return Encoded(np.load(folder / _ARRAY, mmap_mode="r", allow_pickle=False), manifest)
    except (OSError, ValueError, TypeError):
        pass
    _log.warning("%s is damaged: encoding again", folder)
    return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _encode(text: str, tokenizer: TextTokenizer, size: int, where: str) -> np.ndarray:
    dtype = np.uint16 if size <= 1 << 16 else np.uint32
    parts = []
    for piece in pieces(text):
        part = np.asarray(tokenizer.encode(piece))
        if part.size and not 0 <= part.min() <= part.max() < size:
            raise JomaError(
                f"tokenizer must give tokens from 0 to {size - 1}, its size less one, "
                f"got {part.min()} to {part.max()} in {where}"
            )
        parts.append(part.astype(dtype))
    tokens = np.concatenate(parts)
    if not tokens.size:
        raise JomaError(f"text must have tokens: the tokenizer finds none in {where}")
    tokens.setflags(write=False)
    return tokens


def _kept(tokens: np.ndarray, manifest: dict[str, Any], folder: Path) -> Encoded:
    """Return the tokens from the disk, once they are there."""
    path = folder / _ARRAY
    try:
        with replacing(path) as file:
            np.save(file, tokens, allow_pickle=False)
        manifest["array"] = _sha256(path)
        # Last: an array without its manifest counts as none.
        json_files.write(folder / _MANIFEST, manifest)
        return Encoded(np.load(path, mmap_mode="r", allow_pickle=False), manifest)
    except OSError as error:
        _log.warning(
            "the tokens are kept in memory: %s cannot be written (%s); another folder can be named "
            "by the environment variable %s",
            folder,
            error.strerror or error,
            CACHE,
        )
        return Encoded(tokens, manifest)
