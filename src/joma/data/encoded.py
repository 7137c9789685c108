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
    source = {"corpus": corpus.name, "split": split, "tokenizer": tokenizer.digest}
    parent = cache_folder() / "encoded" if cache is None else Path(cache)
    folder = parent / _folder_name(corpus, split, source["tokenizer"])
    found, reason = _opened(folder, {**source, "text": corpus.digest(split)})
    if found is not None:
        return found
    where = corpus.where(split)
    if reason is None:
        _log.info("encoding %s", where)
    else:
        _log.warning("encoding %s again: %s", where, reason)
    data = corpus.read_bytes(split)
    # The hash of what is encoded here: the file may have changed since the other was taken.
    source["text"] = hashlib.sha256(data).hexdigest()
    size = tokenizer.size
    tokens = _encode(decoded(data, where), tokenizer, size, where)
    manifest = {
        "version": _VERSION,
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


def _opened(folder: Path, source: dict[str, str]) -> tuple[Encoded | None, str | None]:
    """Return what is in the cache, or why it cannot be used; None for both where it is empty."""
    if not (folder / _MANIFEST).is_file():
        return None, None
    try:
        manifest = json_files.read(folder / _MANIFEST)
        if not isinstance(manifest, dict) or manifest.get("version") != _VERSION:
            return None, f"{folder / _MANIFEST} is of another version"
        for name, value in source.items():
            if manifest.get(name) != value:
                return None, f"the {name} has changed"
        path = folder / _ARRAY
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest.get("array"):
                return None, f"{path} is damaged"
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        return None, f"{folder} cannot be read ({error})"
    return Encoded(tokens, manifest), None


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
        with open(path, "rb") as file:
            manifest["array"] = hashlib.file_digest(file, "sha256").hexdigest()
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
