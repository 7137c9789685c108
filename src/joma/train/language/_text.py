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
    from joma.data.subwords import HuggingFace
    from joma.models.tokenizers import note_no_special_tokens

    if isinstance(tokenizer, HuggingFace):
        tokenizer.tokenizer.save_pretrained(str(folder))
        note_no_special_tokens(folder)  # training text is encoded without them
    elif hasattr(tokenizer, "save"):
        tokenizer.save(folder)  # type: ignore[attr-defined]


def _tokenizer(data: DataSection, text: "Corpus") -> Any:
    from joma.data import subwords, tokenizing

    if data.tokenizer == "bytes":
        return tokenizing.BYTES
    if data.tokenizer == "basic_english":
        return tokenizing.BasicEnglish.of(text)
    if data.tokenizer == "bpe":
        assert data.vocabulary is not None, "the section asks for it"
        return subwords.ByteBPE.train(text.read("train"), data.vocabulary)
    from joma.models.tokenizers import HuggingFaceTokenizer, load_tokenizer

    loaded = load_tokenizer(data.tokenizer)
    if not isinstance(loaded, HuggingFaceTokenizer):
        raise JomaError(
            "data.tokenizer must be bytes, basic_english, bpe or a tokenizer of transformers, got "
            f"{data.tokenizer!r}, which is another"
        )
    return subwords.HuggingFace(loaded.tokenizer)


@dataclass(frozen=True, eq=False)
class Feed:
    """Batches that depend on the seed and the step alone, so that a training resumes without state.

    A batch is windows of the text that begin at random places, drawn with replacement.

    Args:
        tokens: Tokens of the text.
        window: Number of tokens in a sequence.
        batch: Number of sequences in a step, of all processes.
        seed: Seed of the order.
    """

    tokens: NDArray[Any]
    window: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.window:
            raise JomaError(
                f"window must be below {len(self.tokens)}, as many tokens as there are, got "
                f"{self.window}"
            )

    def at(self, step: int) -> Tensor:
        """Return the sequences of a step, each with the token after it: (batch, window + 1)."""
        seeds = torch.tensor([self.seed])
        places = len(self.tokens) - self.window
        starts = integers(seeds, "windows", step, self.batch, places)[0].numpy()
        where = starts[:, None] + np.arange(self.window + 1)
        return torch.from_numpy(self.tokens[where].astype(np.int64))


def first_windows(tokens: NDArray[Any], window: int, count: int) -> Tensor:
    """Return the first windows, each with the token after it: (at most count, window + 1)."""
    number = min(count, (len(tokens) - 1) // window)
    where = window * np.arange(number)[:, None] + np.arange(window + 1)
    return torch.from_numpy(tokens[where].astype(np.int64))
