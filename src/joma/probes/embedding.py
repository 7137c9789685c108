"""Overlap of embeddings: |cosine| between vectors of different tokens.

The theory takes token embeddings to be orthogonal; here is how far real ones are from it, and the
vectors of the residual stream after each layer. All pairs are compared block by block, so that no
table of all pairs exists; of very many vectors a random sample of pairs is compared, and the
standard error says what that costs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from joma.common.checks import whole_number
from joma.errors import JomaError
from joma.probes import _checks

QUANTILES = (0.5, 0.9, 0.99)
BINS = 2**16
"""Quantiles are read from this many bins of [0, 1], so they are right to 1/BINS."""

_BLOCK = 1024
_PAIRS_AT_ONCE = 1024  # their vectors stay in a cache


@dataclass(frozen=True, eq=False)
class EmbeddingOverlap:
    """How much vectors overlap, over pairs of them with different tokens.

    Attributes:
        mean: of |cosine|.
        standard_error: of `mean` as an estimate over all pairs; 0 where all were compared.
        signed: mean of the cosine itself; far from 0 where vectors share a direction.
        quantiles: of |cosine|, by their share: 0.9 is exceeded by a tenth of the pairs.
        pairs: how many were compared.
        rows: how many vectors they were taken from.
        seen: how many vectors were given.
        zeros: how many of those were zero, which have no direction and are left out.
        exact: whether every pair of the vectors given was compared.
    """

    mean: float
    standard_error: float
    signed: float
    quantiles: Mapping[float, float]
    pairs: int
    rows: int
    seen: int
    zeros: int
    exact: bool


def embedding_overlap(
    embeddings: Tensor,
    *,
    tokens: Tensor | None = None,
    exact_up_to: int = 8192,
    pairs: int = 2**18,
    quantiles: Sequence[float] = QUANTILES,
    seed: int = 0,
) -> EmbeddingOverlap:
    """|cosine| between vectors, over pairs of different vectors.

    Computed in float32, in float64 where the vectors are; sums are in float64.

    Args:
        embeddings: (V, d), one vector for each token, or any vectors.
        tokens: (V,), integers: which token each vector stands for; two of the same are no pair.
        exact_up_to: vectors of which all pairs are compared; of more, a sample.
        pairs: how many pairs a sample has, drawn independently; those of one token are dropped.
        quantiles: which to give, from 0 to 1.
        seed: decides the sample.

    Raises:
        ValueError: also where no pair is left to compare.
    """
    vectors, labels = _vectors(embeddings, tokens)
    if embeddings.ndim != 2:
        raise JomaError(f"embeddings must have two axes, got shape {tuple(embeddings.shape)}")
    exact_up_to = whole_number("exact_up_to", exact_up_to, 2)
    pairs = whole_number("pairs", pairs, 2)
    seed = whole_number("seed", seed, 0)
    shares = _shares(quantiles)
    kept = _not_zero(vectors)
    if len(kept) <= exact_up_to:
        units = _directions(vectors[kept])
        sums, error = _all_pairs(units, None if labels is None else labels[kept]), 0.0
    else:
        sums = _some_pairs(vectors, kept, labels, pairs, seed)
        error = sums.deviation / math.sqrt(max(sums.pairs, 1))
    return EmbeddingOverlap(
        **_summary(sums, shares, len(vectors)),
        standard_error=error,
        rows=len(kept),
        seen=len(vectors),
        zeros=len(vectors) - len(kept),
        exact=len(kept) <= exact_up_to,
    )


class EmbeddingOverlapAccumulator:
    """`embedding_overlap` of vectors that come in batches, such as the residual stream of a layer.

    It keeps a uniform random sample of the vectors it has seen and compares all pairs of these.
    Where it has seen more than it keeps, the standard error is that of a sample of vectors, which
    is larger than that of as many independent pairs. Which vectors are kept depends on the seed and
    on the order in which they come, not on how they are cut into batches.

    Args:
        keep: most vectors to keep, at least 2.
        quantiles: as of `embedding_overlap`.
        seed: Seed of the sample.
    """

    def __init__(
        self, *, keep: int = 2048, quantiles: Sequence[float] = QUANTILES, seed: int = 0
    ) -> None:
        self._keep = whole_number("keep", keep, 2)
        self._quantiles = _shares(quantiles)
        self._generator = torch.Generator().manual_seed(whole_number("seed", seed, 0))
        self._sample: _Sample | None = None
        self._seen = self._zeros = 0

    def update(self, vectors: Tensor, tokens: Tensor | None = None) -> None:
        """Adds vectors.

        Args:
            vectors: (..., d); all leading axes count as different vectors.
            tokens: (...), integers: the token at each place; two of the same are no pair.
        """
        given, labels = _vectors(vectors, tokens)
        priorities = torch.rand(len(given), generator=self._generator, dtype=torch.float64)
        kept = _not_zero(given)
        labels = None if labels is None else labels[kept]
        sample = _Sample(priorities.to(given.device)[kept], given[kept], labels).cut(self._keep)
        self._add(replace(sample, units=_directions(sample.units)))
        self._seen += len(given)
        self._zeros += len(given) - len(kept)

    def compute(self) -> EmbeddingOverlap:
        """The overlap of all vectors so far."""
        if self._sample is None:
            raise JomaError("compute needs vectors: call update first")
        sample = self._sample
        sums = _all_pairs(sample.units, sample.tokens)
        rows, all_rows = len(sample.units), self._seen - self._zeros
        left_out = 1 - rows / max(all_rows, 1)
        # A U-statistic of order two: its variance is 4/n that of a vector's mean over the others.
        error = 2 * sums.deviation_of_rows * math.sqrt(left_out / max(rows, 1))
        return EmbeddingOverlap(
            **_summary(sums, self._quantiles, self._seen),
            standard_error=error,
            rows=rows,
            seen=self._seen,
            zeros=self._zeros,
            exact=rows == all_rows,
        )

    def _add(self, new: "_Sample") -> None:
        have = self._sample
        if have is None:
            self._sample = new
            return
        if (have.tokens is None) != (new.tokens is None):
            raise JomaError("tokens must be given in every update or in none")
        if have.units.shape[1:] != new.units.shape[1:] or have.units.device != new.units.device:
            raise JomaError(
                f"vectors must have {have.units.shape[1]} components on {have.units.device} as "
                f"before, got {new.units.shape[1]} on {new.units.device}"
            )
        tokens = None
        if have.tokens is not None and new.tokens is not None:
            tokens = torch.cat([have.tokens, new.tokens])
        both = _Sample(
            torch.cat([have.priorities, new.priorities]),
            torch.cat([have.units, new.units.to(have.units.dtype)]),
            tokens,
        )
        self._sample = both.cut(self._keep)


@dataclass(frozen=True, eq=False)
class _Sample:
    """Unit vectors (n, d), the token of each, and the random numbers whose smallest are kept."""

    priorities: Tensor
    units: Tensor
    tokens: Tensor | None

    def cut(self, keep: int) -> "_Sample":
        """The `keep` vectors of smallest priority, in their order."""
        if len(self.priorities) <= keep:
            return self
        chosen = self.priorities.topk(keep, largest=False).indices.sort().values
        tokens = None if self.tokens is None else self.tokens[chosen]
        return _Sample(self.priorities[chosen], self.units[chosen], tokens)


@dataclass
class _PairSums:
    """Added up over pairs: |cosine|, cosine, its square, the bins; and |cosine| of each row."""

    bins: Tensor
    by_row: Tensor
    pairs_of_row: Tensor
    absolute: float = 0.0
    signed: float = 0.0
    squares: float = 0.0
    pairs: int = 0

    @property
    def deviation(self) -> float:
        """Standard deviation of |cosine| over pairs, with n − 1."""
        if self.pairs < 2:
            return 0.0
        centred = self.squares - self.absolute**2 / self.pairs
        return math.sqrt(max(centred, 0.0) / (self.pairs - 1))

    @property
    def deviation_of_rows(self) -> float:
        """Standard deviation over vectors of their mean |cosine| with the others."""
        means = (self.by_row / self.pairs_of_row)[self.pairs_of_row > 0]
        return float(means.std()) if len(means) > 1 else 0.0

    def add(self, cosines: Tensor) -> None:
        """Adds pairs, (n,)."""
        absolute = cosines.abs().clamp_(max=1)
        self.bins += torch.histc(absolute, BINS, 0, 1).to(torch.int64)
        self.absolute += float(absolute.sum(dtype=torch.float64))
        self.signed += float(cosines.sum(dtype=torch.float64))
        self.squares += float(absolute.square().sum(dtype=torch.float64))
        self.pairs += cosines.numel()


def _no_sums(units: Tensor) -> _PairSums:
    bins = torch.zeros(BINS, dtype=torch.int64, device=units.device)
    rows = torch.zeros(len(units), dtype=torch.float64, device=units.device)
    return _PairSums(bins, rows, rows.clone())


def _all_pairs(units: Tensor, tokens: Tensor | None) -> _PairSums:
    sums = _no_sums(units)
    for first, second in _blocks(len(units)):
        cosines = units[first] @ units[second].mT
        counts = None
        if first == second or tokens is not None:
            counts = torch.ones_like(cosines, dtype=torch.bool)
            counts = counts.triu_(1) if first == second else counts
            if tokens is not None:
                counts &= tokens[first, None] != tokens[second]
        sums.add(cosines.flatten() if counts is None else cosines[counts])
        absolute = cosines.abs_().clamp_(max=1)
        if counts is not None:
            absolute *= counts
        for axis, rows in ((1, first), (0, second)):
            sums.by_row[rows] += absolute.sum(axis, dtype=torch.float64)
            sums.pairs_of_row[rows] += cosines.shape[axis] if counts is None else counts.sum(axis)
    return sums


def _blocks(rows: int) -> Iterator[tuple[slice, slice]]:
    """Pairs of blocks of rows, the first not after the second."""
    starts = range(0, rows, _BLOCK)
    for first in starts:
        for second in starts[first // _BLOCK :]:
            yield slice(first, first + _BLOCK), slice(second, second + _BLOCK)


def _some_pairs(
    vectors: Tensor, kept: Tensor, tokens: Tensor | None, pairs: int, seed: int
) -> _PairSums:
    """Independent pairs of different vectors among those kept."""
    sums, rows = _no_sums(vectors[:0]), len(kept)
    generator = torch.Generator().manual_seed(seed)
    firsts = torch.randint(rows, (pairs,), generator=generator)
    steps = torch.randint(1, rows, (pairs,), generator=generator)
    seconds = (firsts + steps) % rows
    first, second = (kept[of.to(kept.device)] for of in (firsts, seconds))
    if tokens is not None:
        different = tokens[first] != tokens[second]
        first, second = first[different], second[different]
    parts = [
        (_directions(vectors[a]) * _directions(vectors[b])).sum(-1)
        for a, b in zip(first.split(_PAIRS_AT_ONCE), second.split(_PAIRS_AT_ONCE), strict=True)
    ]
    sums.add(torch.cat(parts))
    return sums


def _summary(sums: _PairSums, shares: tuple[float, ...], seen: int) -> dict[str, Any]:
    """What all pairs say together."""
    if sums.pairs == 0:
        raise JomaError(
            "embeddings must hold two vectors that are not zero and stand for different tokens, "
            f"got none among {seen}"
        )
    cumulated = sums.bins.cumsum(0)
    wanted = [max(1, math.ceil(share * sums.pairs)) for share in shares]
    places = torch.searchsorted(cumulated, torch.tensor(wanted, device=cumulated.device))
    values = ((place + 0.5) / BINS for place in places.tolist())
    return {
        "mean": sums.absolute / sums.pairs,
        "signed": sums.signed / sums.pairs,
        "quantiles": dict(zip(shares, values, strict=True)),
        "pairs": sums.pairs,
    }


def _vectors(vectors: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Vectors as (n, d) and the token of each as (n,), checked."""
    vectors = _checks.tensor("embeddings", vectors, 2)
    if not vectors.is_floating_point():
        raise JomaError(f"embeddings must be floating-point numbers, got {vectors.dtype}")
    if vectors.shape[-1] == 0:
        raise JomaError(f"embeddings must have components, got shape {tuple(vectors.shape)}")
    labels = None
    if tokens is not None:
        labels = _checks.integers("tokens", tokens, 1)
        if labels.shape != vectors.shape[:-1]:
            raise JomaError(
                f"tokens must have shape {tuple(vectors.shape[:-1])}, one for each vector, got "
                f"{tuple(labels.shape)}"
            )
        labels = labels.reshape(-1).to(vectors.device)
    return vectors.reshape(-1, vectors.shape[-1]), labels


def _not_zero(vectors: Tensor) -> Tensor:
    """Places of the vectors that are not zero."""
    largest = torch.linalg.vector_norm(vectors, torch.inf, dim=-1)
    if not largest.isfinite().all():
        raise JomaError("embeddings must be finite, got NaN or infinity")
    return largest.nonzero().squeeze(-1)


def _directions(vectors: Tensor) -> Tensor:
    """Unit vectors of vectors that are not zero."""
    if vectors.dtype != torch.float64:
        vectors = vectors.float()
    # By the largest component first: the squares of very large or small ones leave the range.
    vectors = vectors / vectors.abs().amax(-1, keepdim=True)
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)


def _shares(quantiles: Sequence[float]) -> tuple[float, ...]:
    shares = tuple(float(share) for share in quantiles)
    for share in shares:
        if not 0 <= share <= 1:
            raise JomaError(f"quantiles must lie from 0 to 1, got {share:g}")
    return shares
