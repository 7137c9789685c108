"""Stable ranks of weights as a metric: of one matrix, of a spectrum, and measured repeatedly."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from joma.probes.metrics._metric import Effort

if TYPE_CHECKING:
    from torch import Tensor

    from joma.probes.spectrum import StableRank

_SMALL = 192
"""Shorter side up to which a matrix is solved whole in no time."""
_TOGETHER = 2**22
"""Numbers of a matrix below which those of one shape are measured together on a GPU."""
_NUMBERS = ("value", "bound", "certain", "top", "frobenius", "products")


def measure(matrix: "Tensor", effort: Effort) -> "StableRank":
    """Return ‖W‖_F² / ‖W‖₂² of a matrix, with its bound."""
    from joma.probes.spectrum import stable_rank

    return stable_rank(matrix, tolerance=effort.tolerance, seed=effort.seed)


def of_spectrum(values_ND: "Tensor") -> "Tensor":
    """Return the stable ranks of matrices with these singular values."""
    squares = values_ND.square()
    return squares.sum(-1) / squares[:, 0].clamp(min=1e-300)


class StableRanks:
    """Stable ranks of weights, measured repeatedly, each begun where the last one ended."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort
        self._last: dict[str, StableRank] = {}

    @staticmethod
    def is_small(matrix: "Tensor") -> bool:
        """Return whether a matrix is measured together with others."""
        return matrix.is_cuda and matrix.numel() < _TOGETHER

    def of_all(self, names: Sequence[str], matrices: Sequence["Tensor"]) -> list["StableRank"]:
        """Return those of several weights; on a GPU small ones together, each time from scratch."""
        from joma.probes.spectrum import stable_ranks

        if not all(map(self.is_small, matrices)):
            return [self.of(name, matrix) for name, matrix in zip(names, matrices, strict=True)]
        return stable_ranks(matrices, tolerance=self._effort.tolerance, seed=self._effort.seed)

    def of(self, name: str, matrix: "Tensor") -> "StableRank":
        """Return that of one weight."""
        from joma.probes.spectrum import stable_rank

        tolerance, last = self._effort.tolerance, self._last.get(name)
        if last is not None:
            found = stable_rank(matrix, start=last)
            if found.bound <= tolerance * found.value:
                return found
        warm = min(matrix.shape) > _SMALL
        found = stable_rank(matrix, tolerance=tolerance, keep=warm, seed=self._effort.seed)
        if warm and found.anchor is not None:
            self._last[name] = found
        return found

    def state(self) -> Iterator[tuple[str, "Tensor"]]:
        """Yield what the next measurement begins with, by name."""
        import torch

        for name, rank in self._last.items():
            anchor = rank.anchor
            assert anchor is not None, "kept for it alone"
            numbers = [getattr(rank, field) for field in _NUMBERS]
            numbers += [anchor.vectors, anchor.ceiling, anchor.scale]
            yield f"rank.{name}", torch.tensor(numbers, dtype=torch.float64)
            yield f"block.{name}", anchor.block_SB
            yield f"before.{name}", anchor.before_TB

    def load(self, state: Mapping[str, "Tensor"]) -> None:
        """Take what `state` gave; what else is in it is left alone."""
        from joma.probes.spectrum import Anchor, StableRank

        for key, numbers in state.items():
            name = key.removeprefix("rank.")
            if not key.startswith("rank.") or f"before.{name}" not in state:
                continue
            value, bound, certain, top, frobenius, products, vectors, *rest = numbers.tolist()
            anchor = Anchor(state[f"block.{name}"], int(vectors), state[f"before.{name}"], *rest)
            self._last[name] = StableRank(
                value, bound, bool(certain), top, frobenius, int(products), anchor
            )
