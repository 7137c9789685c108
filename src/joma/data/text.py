"""Text to measure a model on: a corpus by its name, a file, or what comes through a pipe.

`read_text` finds it; `windows` cuts its tokens into the sequences a model is shown, `streams` into
rows to be read in parallel.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from joma.common.checks import check_at_least
from joma.data.corpora import NAMED, SPLITS, corpus, decoded, embedded_text
from joma.errors import JomaError


def read_text(source: str | Path) -> str:
    """Return the text of a source.

    Args:
        source: one of

            - "embedded", the prose of Python's own documentation, the same on every machine with
              that version of Python; "embedded:train" and so on for one of its splits;
            - "wikitext-2", "wikitext-2:train", "wikitext-2:valid" or "wikitext-2:test", from
              data/wikitext-2 in the folder the environment variable JOMA_SHARED names; without a
              part, the validation text; any other corpus that `joma.data.corpus` knows likewise;
            - a folder with train.txt, valid.txt and test.txt, a part after a colon likewise;
            - a text file in UTF-8;
            - "-", the standard input.

    Raises:
        ValueError: there is no such text, or it is empty or not UTF-8.
    """
    name = str(source)
    if name == "embedded":
        return embedded_text()
    if name == "-":
        return decoded(sys.stdin.buffer.read(), "the standard input")
    path = Path(name)
    if not path.is_file():
        return _split(name)
    try:
        return decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise JomaError(f"text {path} cannot be read: {error.strerror}") from error


def windows(
    tokens: Sequence[int] | np.ndarray,
    length: int | None = None,
    count: int | None = None,
    *,
    most: int = 512,
) -> Tensor:
    """Return consecutive pieces of a text, shape (number, length); a shorter rest is left out.

    Args:
        tokens: the whole text's tokens, encoded once.
        length: of a window; unless given, `most` or the whole text where that is shorter.
        count: at most so many, from the text's beginning; as many as there are unless given.
        most: the length unless one is given.

    Raises:
        ValueError: the text is shorter than one window of the length asked for.
    """
    check_at_least(1, length=length, count=count, most=most)
    if len(tokens) == 0:
        raise JomaError("tokens must not be empty: the text has none")
    if length is None:
        length = min(most, len(tokens))
    if length > len(tokens):
        raise JomaError(
            f"length must be at most {len(tokens)}, as many tokens as the text has, got {length}"
        )
    number = len(tokens) // length
    if count is not None:
        number = min(number, count)
    return torch.tensor(tokens[: number * length], dtype=torch.long).reshape(number, length)


def streams(tokens: Sequence[int] | np.ndarray, count: int) -> Tensor:
    """Return a text cut into equally long rows to be read in parallel, shape (count, length).

    Each row continues where the one before it ended; the rest at the text's end is dropped.
    It is torchtext's `batchify`, with a stream along a row.

    Args:
        tokens: the whole text's tokens.
        count: how many rows.

    Raises:
        ValueError: there are more rows than tokens.
    """
    check_at_least(1, count=count)
    if count > len(tokens):
        raise JomaError(
            f"count must be at most {len(tokens)}, as many tokens as the text has, got {count}"
        )
    length = len(tokens) // count
    return torch.tensor(tokens[: count * length], dtype=torch.long).reshape(count, length)


def _split(name: str) -> str:
    """Return the text of "CORPUS:split", or of a corpus's validation split."""
    source, colon, split = name.rpartition(":")
    if not colon or split not in SPLITS:
        source, split = name, "valid"
    known = source == "embedded" or source in NAMED or source.startswith("hub:")
    if not known and not Path(source).is_dir():
        raise JomaError(
            f"text must be a file, a folder with valid.txt, 'embedded', 'wikitext-2' or '-' "
            f"for the standard input, got {name!r}, which is none of them"
        )
    return corpus(source).read(split)
