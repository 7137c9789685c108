"""A synthetic language: sparse bigrams with Zipf frequencies, and segments that come again.

Which tokens may follow depends on the last token, which of these is likely on the one before it,
and where a segment is repeated, what followed earlier comes again. So embeddings, MLPs and
attention all have something to learn.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LENGTH = 32
"""Tokens of a sequence."""
FOLLOWERS = 6
"""Tokens that may follow a token."""
REPEATED = 0.6
"""Share of sequences in which a segment comes again."""
MASKED = 0.25
"""Share of tokens that are masked for encoders, and in what an encoder–decoder reads."""


@dataclass(frozen=True)
class Language:
    """A random language.

    Attributes:
        vocabulary: How many tokens there are.
        seed: Which language.
        changed: Share of the tokens whose followers are another language's, for fine-tuning.
    """

    vocabulary: int
    seed: int = 0
    changed: float = 0.0

    def followers(self) -> NDArray[np.int64]:
        """Return the tokens that may follow each token, the most frequent first."""
        table = self._followers(self.seed)
        if self.changed:
            which = np.random.default_rng(self.seed).random(self.vocabulary) < self.changed
            table = np.where(which[:, None], self._followers(self.seed + 1000), table)
        return table

    def _followers(self, seed: int) -> NDArray[np.int64]:
        generator = np.random.default_rng([seed, self.vocabulary])
        frequency = 1 / np.arange(1, self.vocabulary + 1)
        frequency /= frequency.sum()
        rows = [
            generator.choice(self.vocabulary, FOLLOWERS, replace=False, p=frequency)
            for _ in range(self.vocabulary)
        ]
        return np.array(rows)

    def draw(self, count: int, generator: np.random.Generator, length: int = LENGTH) -> Tensor:
        """Return sequences of the language, one to a row."""
        table = self.followers()
        chance = np.arange(1, FOLLOWERS + 1) ** -1.5
        bounds = np.cumsum(chance / chance.sum())
        tokens = np.empty((count, length), dtype=np.int64)
        tokens[:, 0] = generator.integers(self.vocabulary, size=count)
        which = np.searchsorted(bounds, generator.random((count, length)))
        which = np.minimum(which, FOLLOWERS - 1)
        for place in range(1, length):
            turned = FOLLOWERS // 2 * (tokens[:, max(place - 2, 0)] % 2)
            choice = (which[:, place] + turned) % FOLLOWERS
            tokens[:, place] = table[tokens[:, place - 1], choice]
        half = length // 2
        size = length // 3
        begin = generator.integers(half - size + 1, size=count)
        to = half + generator.integers(half - size + 1, size=count)
        for row in np.flatnonzero(generator.random(count) < REPEATED):
            segment = tokens[row, begin[row] : begin[row] + size].copy()
            tokens[row, to[row] : to[row] + size] = segment
        return torch.from_numpy(tokens)

    def unigram_entropy(self) -> float:
        """Return the entropy of single tokens in nats."""
        tokens = self.draw(2000, np.random.default_rng(7)).numpy()
        share = np.bincount(tokens.ravel(), minlength=self.vocabulary) / tokens.size
        share = share[share > 0]
        return float(-(share * np.log(share)).sum())


@dataclass(frozen=True)
class Batch:
    """What a model is called with, and what it is to say.

    Attributes:
        inputs: Arguments of the model by name.
        targets: The tokens to be named, -100 where none is asked for.
    """

    inputs: dict[str, Tensor]
    targets: Tensor

    def to(self, device: str) -> "Batch":
        """Return the batch on a device."""
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return Batch(inputs, self.targets.to(device))


def make_batch(task: str, tokens: Tensor, vocabulary: int, generator: torch.Generator) -> Batch:
    """Return a batch for a decoder, an encoder or an encoder–decoder.

    Args:
        task: "decoder", "encoder" or "encoder-decoder".
        tokens: Sequences; one token longer than what a decoder reads.
        vocabulary: Tokens of the language. The next two numbers stand for a masked token and for
            the start of what is decoded.
        generator: Chooses what is masked.
    """
    if task == "decoder":
        return Batch({"input_ids": tokens[:, :-1]}, tokens[:, 1:])
    tokens = tokens[:, :-1]
    hidden = torch.rand(tokens.shape, generator=generator) < MASKED
    masked = torch.where(hidden, torch.full_like(tokens, vocabulary), tokens)
    if task == "encoder":
        return Batch({"input_ids": masked}, torch.where(hidden, tokens, -100))
    start = torch.full_like(tokens[:, :1], vocabulary + 1)
    before = torch.cat([start, tokens[:, :-1]], dim=1)
    return Batch({"input_ids": masked, "decoder_input_ids": before}, tokens)
