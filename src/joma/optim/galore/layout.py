"""How a GPU's kernels of a GaLore step lay matrices out in memory, and how many they take at once.

Kept apart from the kernels, which need a GPU to be imported: estimates of memory use it too.
"""

from collections.abc import Sequence

from joma.optim.galore.subspace import Side

ALIGNED = 16
"""Rows that the kernels read begin at multiples of so many numbers."""
MOST_NUMBERS = 1 << 31
"""Numbers of a matrix from which on the kernels, which count in 32 bits, do not take it."""
AT_ONCE = 1 << 26
"""Numbers of the matrices after which a launch is full: enough for any GPU."""


def row_length(columns: int) -> int:
    """Return the length of rows in memory of a matrix with so many columns."""
    return columns if columns % ALIGNED == 0 else -(-columns // 128) * 128


def update_shape(shape: tuple[int, int], rank: int, side: Side) -> tuple[int, int]:
    """Return the shape of a matrix's update in the subspace."""
    return (rank, row_length(shape[1])) if side == "left" else (shape[0], rank)


def buffer_numbers(shape: tuple[int, int], rank: int, side: Side) -> int:
    """Return how many numbers of type bfloat16 the step of a matrix needs between its passes.

    They are its update in the subspace and, unless its rows are aligned, a copy of its gradient.
    """
    rows, columns = update_shape(shape, rank, side)
    wide = row_length(shape[1])
    return rows * columns + (shape[0] * wide if wide != shape[1] else 0)


def launches(numbers: Sequence[int]) -> list[list[int]]:
    """Return which matrices, given by how many numbers they have, are worked on together."""
    found: list[list[int]] = [[]]
    total = 0
    for at, count in enumerate(numbers):
        if total >= AT_ONCE:
            found.append([])
            total = 0
        found[-1].append(at)
        total += count
    return found
