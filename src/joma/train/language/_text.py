"""The tokens a language model is trained on, and which of them a step reads."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joma.errors import JomaError
from joma.random import integers
from joma.train.language._config import DataSection

if TYPE_CHECKING:
    from joma.data.corpora import Corpus
    from joma.data.tokenizing import TextTokenizer


@dataclass(frozen=True, eq=False)
class Text:
    """A corpus in tokens.

    Args:
        tokenizer: Tokenizer that made the tokens.
        train: Tokens to learn, memory-mapped.
        valid: Tokens of the validation text, None where the corpus has none.
        digest: Hash of both and of the tokenizer.
    """

    tokenizer: "TextTokenizer"
    train: NDArray[Any]
    valid: NDArray[Any] | None
    digest: str


def read_tokens(data: DataSection) -> Text:
    """Return the tokens of a section [data], encoded once and mapped from then on.

    Raises:
        JomaError: There is no such text, or it is shorter than a window.
    """
    from joma.data.corpora import corpus
    from joma.data.encoded import encoded

    text = corpus(data.corpus)
    tokenizer = _tokenizer(data, text)
    splits = [split for split in ("train", "valid") if split == "train" or split in text.splits]
    parts = {split: encoded(text, tokenizer, split) for split in splits}
    for split, part in parts.items():
        if len(part) <= data.window:
            raise JomaError(
                f"data.window must be below {len(part)}, as many tokens as the {split} text of "
                f"{data.corpus} has, got {data.window}"
            )
    hashes = [tokenizer.digest, *(part.manifest["text"] for part in parts.values())]
    return Text(
        tokenizer,
        parts["train"].tokens,
        parts["valid"].tokens if "valid" in parts else None,
        hashlib.sha256(" ".join(hashes).encode()).hexdigest(),
    )


def save_tokenizer(tokenizer: "TextTokenizer", folder: Path) -> None:
    """Write a tokenizer's files as transformers has them; bytes need none."""
    from joma.data import HuggingFace
    from joma.models.tokenizers import note_no_special_tokens

    if isinstance(tokenizer, HuggingFace):
        tokenizer.tokenizer.save_pretrained(str(folder))
        note_no_special_tokens(folder)  # training text is encoded without them
    elif hasattr(tokenizer, "save"):
        tokenizer.save(folder)  # type: ignore[attr-defined]


def _tokenizer(data: DataSection, text: "Corpus") -> Any:
    from joma import data as texts

    if data.tokenizer == "bytes":
        return texts.BYTES
    if data.tokenizer == "basic_english":
        return texts.BasicEnglish.of(text)
    if data.tokenizer == "bpe":
        assert data.vocabulary is not None, "the section asks for it"
        return texts.ByteBPE.train(text.read("train"), data.vocabulary)
    from joma.models.tokenizers import HuggingFaceTokenizer, load_tokenizer

    loaded = load_tokenizer(data.tokenizer)
    if not isinstance(loaded, HuggingFaceTokenizer):
        raise JomaError(
            "data.tokenizer must be bytes, basic_english, bpe or a tokenizer of transformers, got "
            f"{data.tokenizer!r}, which is another"
        )
    return texts.HuggingFace(loaded.tokenizer)


_DRAWN_AT_ONCE = 1 << 20
"""Tokens of the steps that are gathered together, 8 MB."""

_MOST_STEPS = 128
"""Steps that are gathered together at most."""

_SHARE = 0.1
"""Share of a GPU's free memory that the text may take to be kept there."""


class Feed:
    """Batches that depend on the seed and the step alone, so that a training resumes without state.

    A batch is windows of the text that begin at random places, drawn with replacement. Windows of
    many steps are gathered at once, so that a step by itself costs nothing to read. On a GPU the
    whole text is kept there where it fits, places are drawn and windows gathered there, and the
    host sends nothing.

    Args:
        tokens: Tokens of the text.
        window: Number of tokens in a sequence.
        batch: Number of sequences in a step, of all processes.
        seed: Seed of the order.
        device: Where the batches are wanted; the CPU unless given.

    Attributes:
        resident: Whether the whole text is on that GPU.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        window: int,
        batch: int,
        seed: int,
        device: torch.device | None = None,
    ) -> None:
        if len(tokens) <= window:
            raise JomaError(
                f"window must be below {len(tokens)}, as many tokens as there are, got {window}"
            )
        self.tokens, self.window, self.batch = tokens, window, batch
        self.device = torch.device("cpu") if device is None else device
        self.resident = self.device.type == "cuda" and _fits(tokens, self.device)
        self._seed = torch.tensor([seed], device=self.device if self.resident else None)
        self._text: Tensor | None = self._moved() if self.resident else None
        self._at_once = min(max(_DRAWN_AT_ONCE // (batch * (window + 1)), 1), _MOST_STEPS)
        self._first = 0
        self._gathered: Tensor | None = None

    def at(self, step: int) -> Tensor:
        """Return the sequences of a step, each with the token after it: (batch, window + 1).

        They are on the device, and not to be written to.
        """
        behind = step - self._first
        if self._gathered is None or not 0 <= behind < len(self._gathered):
            self._gathered, self._first, behind = self._gather(step), step, 0
        return self._gathered[behind]

    def _gather(self, step: int) -> Tensor:
        """Return the sequences of the steps from `step` on: (steps, batch, window + 1)."""
        steps = torch.arange(step, step + self._at_once, device=self._seed.device)
        places = len(self.tokens) - self.window
        starts_SB = integers(self._seed.expand(len(steps)), "windows", steps, self.batch, places)
        inside = torch.arange(self.window + 1, device=self._seed.device)
        if self._text is not None:
            return self._text[starts_SB.unsqueeze(-1) + inside].long()
        where = starts_SB.numpy()[..., None] + inside.numpy()
        windows = torch.from_numpy(self.tokens[where].astype(np.int64))
        if self.device.type != "cuda":
            return windows
        return windows.pin_memory().to(self.device, non_blocking=True)

    def _moved(self) -> Tensor:
        # Not as unsigned numbers of 16 bits, which not every version of torch can index.
        return torch.from_numpy(self.tokens.astype(np.int32)).to(self.device)


def _fits(tokens: NDArray[Any], device: torch.device) -> bool:
    """Return whether a text may be kept on a GPU."""
    free, _ = torch.cuda.mem_get_info(device)
    return 4 * len(tokens) <= _SHARE * free


def first_windows(tokens: NDArray[Any], window: int, count: int) -> Tensor:
    """Return the first windows, each with the token after it: (at most count, window + 1)."""
    number = min(count, (len(tokens) - 1) // window)
    where = window * np.arange(number)[:, None] + np.arange(window + 1)
    return torch.from_numpy(tokens[where].astype(np.int64))
