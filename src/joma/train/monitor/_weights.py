"""What weights, gradients and updates show: ranks, energies, overlap."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from joma.probes import embedding_overlap, stable_rank, stable_ranks
from joma.probes.gradient import measured
from joma.probes.spectrum import Anchor, EffectiveRank, StableRank, effective_rank
from joma.train.monitor._parts import Heads, Matrix
from joma.train.monitor._row import Row

LARGEST = 2048
"""Shorter sides beyond this have no effective rank measured: it needs every singular value."""
PAIRS = 2**14
"""Pairs of embeddings compared: the mean is right to about 0.005."""
_SMALL = 192
_NUMBERS = ("value", "bound", "certain", "top", "frobenius", "products")
_TOGETHER = 2**22
"""Numbers of a matrix below which those of one shape are worked on together on a GPU."""
_BATCH = 2**26
"""Numbers of matrices that are held at a time to be worked on together."""


class Named(Protocol):
    """What has the name of a parameter."""

    @property
    def name(self) -> str: ...


W = TypeVar("W", bound=Named)


def batches(weights: Iterable[W], tensor: Callable[[str], Tensor | None]) -> Iterator[list[W]]:
    """Yield weights that are measured together: small ones on a GPU, others one by one.

    Args:
        weights: Weights, in order.
        tensor: Returns the tensor of a name, sharded or not. A weight that has none under its own
            name, since it is computed from several, is measured alone.
    """
    batch: list[W] = []
    left = 0
    for weight in weights:
        held = tensor(weight.name)
        size = held.numel() if held is not None and _is_small(held) else _BATCH + 1
        if size > left:
            if batch:
                yield batch
            batch, left = [], _BATCH
        batch.append(weight)
        left -= size
    if batch:
        yield batch


def _is_small(matrix: Tensor) -> bool:
    return matrix.is_cuda and matrix.numel() < _TOGETHER


class StableRanks:
    """Stable ranks of weights look after look, each begun where the last one ended.

    Args:
        tolerance: wanted bound as a share of the value.
        seed: of the random starts.
    """

    def __init__(self, tolerance: float, seed: int) -> None:
        self._tolerance, self._seed = tolerance, seed
        self._last: dict[str, StableRank] = {}

    def of_all(self, names: Sequence[str], matrices: Sequence[Tensor]) -> list[StableRank]:
        """Of several weights; on a GPU small ones of one shape together, each time anew."""
        if not all(map(_is_small, matrices)):
            return [self.of(name, matrix) for name, matrix in zip(names, matrices, strict=True)]
        return stable_ranks(matrices, tolerance=self._tolerance, seed=self._seed)

    def of(self, name: str, matrix: Tensor) -> StableRank:
        """Of one weight."""
        last = self._last.get(name)
        if last is not None:
            found = stable_rank(matrix, start=last)
            if found.bound <= self._tolerance * found.value:
                return found
        warm = min(matrix.shape) > _SMALL  # smaller ones are solved whole in no time
        found = stable_rank(matrix, tolerance=self._tolerance, keep=warm, seed=self._seed)
        if warm and found.anchor is not None:
            self._last[name] = found
        return found

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the next measurement begins with, by name."""
        for name, rank in self._last.items():
            anchor = rank.anchor
            assert anchor is not None, "kept for it alone"
            numbers = [getattr(rank, field) for field in _NUMBERS]
            numbers += [anchor.vectors, anchor.ceiling]
            yield f"rank.{name}", torch.tensor(numbers, dtype=torch.float64)
            yield f"block.{name}", anchor.block_SB
            yield f"before.{name}", anchor.before_TB

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave; what else is in it is left alone."""
        for key, numbers in state.items():
            name = key.removeprefix("rank.")
            if not key.startswith("rank.") or f"before.{name}" not in state:
                continue
            value, bound, certain, top, frobenius, products, vectors, ceiling = numbers.tolist()
            anchor = Anchor(state[f"block.{name}"], int(vectors), state[f"before.{name}"], ceiling)
            self._last[name] = StableRank(
                value, bound, bool(certain), top, frobenius, int(products), anchor
            )


def scores_spectra(layers: Sequence[tuple[Heads, Tensor, Tensor]]) -> list[Tensor]:
    """Singular values of Wqᵀ·Wk of every head, (H, d) for each layer, in float64.

    The product, as wide as the model, has rank d at most and is never made: with Gram matrices
    Wq·Wqᵀ = R·Rᵀ of a head, its squared singular values are the eigenvalues of Rᵀ·(Wk·Wkᵀ)·R.
    Layers of one shape are worked on together, which on a GPU is most of the time saved.

    Args:
        layers: heads, and the weights that make queries and keys.
    """
    grams: dict[torch.Size, list[tuple[int, Tensor, Tensor]]] = {}
    for number, (of, query_ED, key_ED) in enumerate(layers):
        query_HDD = _gram(query_ED, of.heads)
        key_HDD = _gram(key_ED, of.key_heads).repeat_interleave(of.heads // of.key_heads, 0)
        grams.setdefault(query_HDD.shape, []).append((number, query_HDD, key_HDD))
    found: dict[int, Tensor] = {}
    for alike in grams.values():
        numbers, queries, keys = zip(*alike, strict=True)
        values, vectors = torch.linalg.eigh(torch.cat(queries))
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
        squares = torch.linalg.eigvalsh(root.mT @ torch.cat(keys) @ root)
        singular = squares.flip(-1).clamp(min=0).sqrt().chunk(len(numbers))
        found.update(zip(numbers, singular, strict=True))
    return [found[number] for number in range(len(layers))]


def _gram(weight_ED: Tensor, heads: int) -> Tensor:
    weight_HDE = weight_ED.unflatten(0, (heads, -1)).double()
    return weight_HDE @ weight_HDE.mT


def scores_rows(of: Heads, values_HD: Tensor, metrics: Sequence[str]) -> list[Row]:
    """Stable and effective rank of every head's Wqᵀ·Wk; without a head, the mean over heads."""
    rows: list[Row] = []
    squares = values_HD.square()
    stable = squares.sum(-1) / squares[:, 0].clamp(min=1e-300)
    share = values_HD / values_HD.sum(-1, keepdim=True).clamp(min=1e-300)
    entropy = -torch.xlogy(share, share).sum(-1)  # entr is compiled at its first call
    effective = entropy.exp() * (values_HD[:, 0] > 0)
    for name, ranks in (("stable_rank", stable), ("effective_rank", effective)):
        if name not in metrics:
            continue
        rows.append(Row(name, float(ranks.mean()), of.module, of.layer))
        if of.heads > 1:
            rows += [Row(name, v, of.module, of.layer, h) for h, v in enumerate(ranks.tolist())]
    return rows


def effective(matrix: Tensor) -> EffectiveRank | None:
    """Effective rank, None of a matrix too large to have it measured."""
    return effective_rank(matrix) if min(matrix.shape) <= LARGEST else None


def overlap(embedding: Tensor, seed: int) -> float:
    """Mean |cosine| of embeddings of different tokens."""
    return embedding_overlap(embedding, exact_up_to=512, pairs=PAIRS, seed=seed).mean


def gradient_rows(
    of: Matrix, gradient: Tensor, ranks: Sequence[int], tolerance: float, seed: int
) -> list[Row]:
    """Stable rank and energy in the top r directions of one gradient.

    An r above half of the shorter side is left out, for GaLore would save nothing there.

    Raises:
        ValueError: it is not finite.
    """
    fitting = [rank for rank in ranks if 2 * rank <= min(gradient.shape)]
    found = measured(of.name, gradient, fitting, tolerance, seed)
    where = {"module": of.module, "layer": of.layer}
    stable = found.stable_rank
    rows = [Row("gradient_stable_rank", stable.value, **where, bound=stable.bound)]
    return rows + [
        Row(f"gradient_energy_{rank}", energy.value, **where, bound=energy.bound)
        for rank, energy in found.energy.items()
        if found.norm > 0
    ]


def update_rows(
    of: Sequence[Matrix], changes: Sequence[Tensor], tolerance: float, seed: int
) -> list[Row]:
    """Stable ranks of how weights moved; those that are not finite any more have none."""
    pairs = [pair for pair in zip(of, changes, strict=True) if bool(pair[1].isfinite().all())]
    found = stable_ranks([change for _, change in pairs], tolerance=tolerance, seed=seed)
    return [
        Row("update_stable_rank", rank.value, matrix.module, matrix.layer, bound=rank.bound)
        for (matrix, _), rank in zip(pairs, found, strict=True)
    ]
