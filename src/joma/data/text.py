"""Text to measure a model on: a corpus by its name, a file, or what comes through a pipe.

`read_text` finds it; `windows` cuts its tokens into the sequences a model is shown.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

SHARED = "JOMA_SHARED"
"""The environment variable with the folder that has data/wikitext-2 in it."""

_SPLITS = ("train", "valid", "test")


def read_text(source: str | Path) -> str:
    """The text of a source.

    Args:
        source: one of

            - "embedded", the prose of Python's own documentation, the same on every machine with
              that version of Python;
            - "wikitext-2", "wikitext-2:train", "wikitext-2:valid" or "wikitext-2:test", from
              data/wikitext-2 in the folder the environment variable JOMA_SHARED names; without a
              part, the validation text;
            - a folder with train.txt, valid.txt and test.txt, a part after a colon likewise;
            - a text file in UTF-8;
            - "-", the standard input.

    Raises:
        ValueError: there is no such text, or it is empty or not UTF-8.
    """
    name = str(source)
    if name == "embedded":
        return _embedded()
    if name == "-":
        return _decoded(sys.stdin.buffer.read(), "the standard input")
    path = Path(name) if Path(name).is_file() else _part(name)
    try:
        return _decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise ValueError(f"text {path} cannot be read: {error.strerror}") from error


def windows(
    tokens: Sequence[int], length: int | None = None, count: int | None = None, *, most: int = 512
) -> Tensor:
    """Consecutive pieces of a text, shape (number, length); a rest shorter than that is left out.

    Args:
        tokens: the whole text's tokens, encoded once.
        length: of a window; unless given, `most` or the whole text where that is shorter.
        count: at most so many, from the text's beginning; as many as there are unless given.
        most: the length unless one is given.

    Raises:
        ValueError: the text is shorter than one window of the length asked for.
    """
    for argument, value in (("length", length), ("count", count), ("most", most)):
        if value is not None and value < 1:
            raise ValueError(f"{argument} must be at least 1, got {value}")
    if not tokens:
        raise ValueError("tokens must not be empty: the text has none")
    if length is None:
        length = min(most, len(tokens))
    if length > len(tokens):
        raise ValueError(
            f"length must be at most {len(tokens)}, as many tokens as the text has, got {length}"
        )
    number = len(tokens) // length
    if count is not None:
        number = min(number, count)
    return torch.tensor(tokens[: number * length], dtype=torch.long).reshape(number, length)


def _embedded() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def _part(name: str) -> Path:
    """The file of a corpus's part: "FOLDER:part", or the name of a corpus for its folder."""
    corpus, colon, part = name.rpartition(":")
    if not colon or part not in _SPLITS:
        corpus, part = name, "valid"
    if corpus == "wikitext-2":
        shared = os.environ.get(SHARED)
        if not shared:
            raise ValueError(
                f"text wikitext-2 needs the environment variable {SHARED}, the folder with "
                "data/wikitext-2 in it; or give a folder with train.txt, valid.txt and test.txt"
            )
        folder = Path(shared) / "data" / "wikitext-2"
    else:
        folder = Path(corpus)
        if not folder.is_dir():
            raise ValueError(
                f"text must be a file, a folder with valid.txt, 'embedded', 'wikitext-2' or '-' "
                f"for the standard input, got {name!r}, which is none of them"
            )
    path = folder / f"{part}.txt"
    if not path.is_file():
        raise ValueError(f"text {folder} has no {part}.txt in it")
    return path


def _decoded(data: bytes, what: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(
            f"text must be UTF-8, but {what} has the byte 0x{byte:02x} at {error.start}"
        ) from error
    if not text.strip():
        raise ValueError(f"text must not be empty: there is none in {what}")
    return text
