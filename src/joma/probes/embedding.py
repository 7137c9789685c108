"""Overlap of embeddings: |cosine| between vectors of different tokens.

The theory takes token embeddings to be orthogonal; here is how far real ones are from it, and the
vectors of the residual stream after each layer. All pairs are compared block by block, so that no
table of all pairs exists; of very many vectors a random sample of pairs is compared, and the
standard error says what that costs.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from joma.common.checks import whole_number
from joma.errors import JomaError
from joma.probes import _checks

_BLOCK = 1024
_PAIRS_AT_ONCE = 1024  # their vectors stay in a cache


@dataclass(frozen=True)
class EmbeddingOverlap:
    """How much vectors overlap, over pairs of them with different tokens.

    Attributes:
        mean: of |cosine|.
        standard_error: of `mean` as an estimate over all pairs; 0 where all were compared.
        pairs: how many were compared.
        exact: whether every pair of the vectors given was compared, except those with a vector of
            zeros, which has no direction.
    """

    mean: float
    standard_error: float
    pairs: int
    exact: bool


def embedding_overlap(
    embeddings: Tensor,
    *,
    tokens: Tensor | None = None,
    exact_up_to: int = 8192,
    pairs: int = 2**18,
    seed: int = 0,
) -> EmbeddingOverlap:
    """Return the mean |cosine| between vectors, over pairs of different vectors.

    Computed in float32, in float64 where the vectors are; sums are in float64.

    Args:
        embeddings: (V, d), one vector for each token, or any vectors.
        tokens: (V,), integers: which token each vector stands for; two of the same are no pair.
        exact_up_to: vectors of which all pairs are compared; of more, a sample.
        pairs: how many pairs a sample has, drawn independently; those of one token are dropped.
        seed: decides the sample.

    Raises:
        ValueError: also where no pair is left to compare.
    """
    vectors, labels = _checked(embeddings, tokens)
    if embeddings.ndim != 2:
        raise JomaError(f"embeddings must have two axes, got shape {tuple(embeddings.shape)}")
    exact_up_to = whole_number("exact_up_to", exact_up_to, 2)
    pairs, seed = whole_number("pairs", pairs, 2), whole_number("seed", seed, 0)
    kept = _not_zero(vectors)
    if len(kept) <= exact_up_to:
        mean, _, count = _all_pairs(_directions(vectors[kept]), labels[kept])
        return EmbeddingOverlap(mean, 0.0, count, True)
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(len(kept), (pairs,), generator=generator)
    steps = torch.randint(1, len(kept), (pairs,), generator=generator)
    first, second = (kept[it.to(kept.device)] for it in (first, (first + steps) % len(kept)))
    different = labels[first] != labels[second]
    parts = [
        (_directions(vectors[a]) * _directions(vectors[b])).sum(-1)
        for a, b in zip(
            first[different].split(_PAIRS_AT_ONCE),
            second[different].split(_PAIRS_AT_ONCE),
            strict=True,
        )
    ]
    sizes = torch.cat(parts).abs().clamp(max=1).double()
    if not len(sizes):
        raise _without_pairs()
    error = float(sizes.std()) / math.sqrt(len(sizes)) if len(sizes) > 1 else 0.0
    return EmbeddingOverlap(float(sizes.mean()), error, len(sizes), False)


class EmbeddingOverlapAccumulator:
    """`embedding_overlap` of vectors that come in batches, such as the residual stream of a layer.

    It keeps a uniform random sample of the vectors it has seen and compares all pairs of these.
    Where it has seen more than it keeps, the standard error is that of a sample of vectors, which
    is larger than that of as many independent pairs. Which vectors are kept depends on the seed and
    on the order in which they come, not on how they are cut into batches.

    Args:
        keep: most vectors to keep, at least 2.
        seed: Seed of the sample.
    """

    def __init__(self, *, keep: int = 2048, seed: int = 0) -> None:
        self._keep = whole_number("keep", keep, 2)
        self._generator = torch.Generator().manual_seed(whole_number("seed", seed, 0))
        self._sample: tuple[Tensor, ...] = ()
        """Random numbers, the smallest of which are kept; unit vectors (n, d); their tokens."""
        self._given = self._seen = 0

    def update(self, vectors: Tensor, tokens: Tensor | None = None) -> None:
        """Add vectors.

        Args:
            vectors: (..., d); all leading axes count as different vectors.
            tokens: (...), integers: the token at each place; two of the same are no pair.
        """
        given, labels = _checked(vectors, tokens, self._given)
        priorities = torch.rand(len(given), generator=self._generator, dtype=torch.float64)
        kept = _not_zero(given)
        self._given += len(given)
        self._seen += len(kept)
        found, rows, labels = self._cut(
            priorities.to(given.device)[kept], given[kept], labels[kept]
        )
        new = (found, _directions(rows), labels)
        if self._sample:
            new = self._cut(*map(torch.cat, zip(self._sample, new, strict=True)))
        self._sample = new

    def _cut(self, priorities: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of smallest priority, in their order."""
        if len(priorities) <= self._keep:
            return priorities, *columns
        chosen = priorities.topk(self._keep, largest=False).indices.sort().values
        return tuple(column[chosen] for column in (priorities, *columns))

    def compute(self) -> EmbeddingOverlap:
        """Return the overlap of all vectors so far."""
        if not self._sample:
            raise JomaError("compute needs vectors: call update first")
        _, units, labels = self._sample
        mean, deviation, pairs = _all_pairs(units, labels)
        left_out = 1 - len(units) / self._seen
        # A U-statistic of order two: its variance is 4/n that of a vector's mean over the others.
        error = 2 * deviation * math.sqrt(left_out / len(units))
        return EmbeddingOverlap(mean, error, pairs, len(units) == self._seen)


def _all_pairs(units: Tensor, tokens: Tensor) -> tuple[float, float, int]:
    """Compare unit vectors of different tokens.

    Returns:
        Mean of |cosine|, standard deviation over vectors of their mean with the others, and the
        number of pairs.
    """
    by_row = torch.zeros(len(units), dtype=torch.float64, device=units.device)
    pairs_of_row = by_row.clone()
    starts = range(0, len(units), _BLOCK)
    for i, one in enumerate(starts):
        for other in starts[i:]:
            first, second = slice(one, one + _BLOCK), slice(other, other + _BLOCK)
            sizes = (units[first] @ units[second].mT).abs_().clamp_(max=1)
            counted = tokens[first, None] != tokens[second]
            counted = counted.triu_(1) if one == other else counted
            sizes *= counted
            for axis, rows in ((1, first), (0, second)):
                by_row[rows] += sizes.sum(axis, dtype=torch.float64)
                pairs_of_row[rows] += counted.sum(axis)
    pairs = int(pairs_of_row.sum()) // 2
    if not pairs:
        raise _without_pairs()
    means = (by_row / pairs_of_row)[pairs_of_row > 0]
    return float(by_row.sum()) / (2 * pairs), float(means.std()), pairs


def _without_pairs() -> JomaError:
    return JomaError(
        "embeddings must hold two vectors that are not zero and stand for different tokens"
    )


def _checked(vectors: Tensor, tokens: Tensor | None, before: int = 0) -> tuple[Tensor, Tensor]:
    """Return vectors as (n, d) and the token of each as (n,); without tokens each has its own."""
    vectors = _checks.tensor("embeddings", vectors, 2)
    if not vectors.is_floating_point() or vectors.shape[-1] == 0:
        raise JomaError(
            "embeddings must be floating-point numbers with components, got "
            f"{vectors.dtype} of shape {tuple(vectors.shape)}"
        )
    flat = vectors.reshape(-1, vectors.shape[-1])
    if tokens is None:
        return flat, torch.arange(before, before + len(flat), device=flat.device)
    labels = _checks.integers("tokens", tokens, 1)
    if labels.shape != vectors.shape[:-1]:
        raise JomaError(
            f"tokens must have shape {tuple(vectors.shape[:-1])}, one for each vector, got "
            f"{tuple(labels.shape)}"
        )
    return flat, labels.reshape(-1).to(flat.device)


def _not_zero(vectors: Tensor) -> Tensor:
    """Return the places of the vectors that are not zero."""
    largest = torch.linalg.vector_norm(vectors, torch.inf, dim=-1)
    if not largest.isfinite().all():
        raise JomaError("embeddings must be finite, got NaN or infinity")
    return largest.nonzero().squeeze(-1)


def _directions(vectors: Tensor) -> Tensor:
    """Return unit vectors of vectors that are not zero."""
    if vectors.dtype != torch.float64:
        vectors = vectors.float()
    # By the largest component first: the squares of very large or small ones leave the range.
    vectors = vectors / vectors.abs().amax(-1, keepdim=True)
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
