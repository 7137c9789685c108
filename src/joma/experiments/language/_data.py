"""The text as the networks read it: streams side by side, in windows of 35 words."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from joma.data import BasicEnglish, Corpus, corpus, encoded, streams
from joma.errors import JomaError
from joma.experiments.language._groups import LENGTH, LanguageSetting, Size


@dataclass(frozen=True, eq=False)
class WindowedText:
    """A text for one size of the experiment.

    Attributes:
        setting: what it makes of that size.
        train: windows to learn from.
        valid: windows to measure on.
    """

    setting: LanguageSetting
    train: "Windows"
    valid: "Windows"

    def to(self, device: str) -> "WindowedText":
        """Return the same text on a device."""
        return replace(self, train=self.train.to(device), valid=self.valid.to(device))


def find(size: Size) -> Corpus:
    """Return the text of a size.

    Raises:
        ValueError: it is not there, or has no part to train or to measure on.
    """
    source = corpus(size.corpus)
    for split in ("train", "valid"):
        source.where(split)
    return source


def load(size: Size) -> WindowedText:
    """Read and encode the text of a size."""
    source = find(size)
    tokenizer = BasicEnglish.of(source)
    if size.vocabulary is not None:
        tokenizer = BasicEnglish(tokenizer.vocabulary[: size.vocabulary])

    def read(split: str, count: int, most: int | None) -> Windows:
        tokens = encoded(source, tokenizer, split).tokens[:most]
        try:
            return Windows(streams(tokens, count))
        except ValueError as error:
            raise JomaError(f"{split} of text {size.corpus} is too short: {error}") from None

    train = read("train", size.streams, size.train_tokens)
    valid = read("valid", size.valid_streams, size.valid_tokens)
    digests = {split: source.digest(split) for split in ("train", "valid")}
    setting = LanguageSetting(
        size,
        words=tokenizer.size,
        stream=train.streams_SN.shape[1],
        digests={**digests, "tokenizer": tokenizer.digest},
    )
    return WindowedText(setting, train, valid)


class Windows:
    """Windows of 35 words, one after the other along all streams, each with the words that follow.

    The last one may be short: all have the same shape, and weights say which words are there.

    Args:
        streams_SN: the streams, (S, words).

    Attributes:
        count: windows there are, the short one included.
        whole: those that are whole.
    """

    def __init__(self, streams_SN: Tensor) -> None:
        if streams_SN.shape[1] < 2:
            raise JomaError(f"streams must have at least 2 words each, got {streams_SN.shape[1]}")
        self.streams_SN = streams_SN
        self._last = streams_SN.shape[1] - 1  # the last word is only predicted
        self.whole = self._last // LENGTH
        self.count = -(-self._last // LENGTH)
        self._places_T = torch.arange(LENGTH, device=streams_SN.device)

    def to(self, device: str) -> "Windows":
        """Return the same windows on a device."""
        return Windows(self.streams_SN.to(device))

    def at(self, step: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the window of a step, epoch after epoch.

        There is nothing in it that a CUDA graph could not capture, where `step` is a tensor.

        Returns:
            Words, the words that follow, both (S, 35), and how much each of them counts, (S, 35)
            and together 1; 0 for what is not there.
        """
        index_T = step % self.count * LENGTH + self._places_T
        inside_T = (index_T < self._last).double()
        index_T = index_T.clamp(max=self._last - 1)
        tokens, targets = (self.streams_SN.index_select(1, index_T + ahead) for ahead in (0, 1))
        weights_T = inside_T / (inside_T.sum() * len(tokens))
        return tokens, targets, weights_T.expand_as(tokens)

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all windows, window w of stream s in row w·S + s; weights are together 1."""
        parts = [self.at(window) for window in range(self.count)]
        tokens, targets, weights = (torch.cat(part) for part in zip(*parts, strict=True))
        inside = (weights > 0).double()
        return tokens, targets, inside / inside.sum()
