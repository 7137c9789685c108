"""Compile the heavy-hitter kernels for sm_90 without a GPU; prints registers and spills as JSON.

python -m tests.kernels.compiled_heavy_hitter
"""

import json
from typing import Any
from unittest import mock

import torch

from joma.kernels import _heavy_hitter_kernel
from tests.ahead_of_time import Caught

SHAPES = (
    (1, 16, 1, 3276, 128), (16, 16, 1, 3276, 128), (1, 8, 4, 3276, 128), (2, 3, 1, 90, 80),
    (2, 2, 2, 8, 8),
)  # fmt: skip
"""Batch, key heads, queries of each, budget, numbers of a head; the first two are a benchmark's."""
KERNELS = ("_attend_slots", "_join_and_choose")


def step(batch: int, heads: int, group: int, budget: int, size: int, real: Any) -> list[Any]:
    """Return what the kernels of one step take."""
    found: list[Any] = []

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    patches = {it: Caught(getattr(_heavy_hitter_kernel, it), found) for it in KERNELS}
    with mock.patch.multiple(_heavy_hitter_kernel, **patches):
        _heavy_hitter_kernel.heavy_hitter_step(
            new(batch, heads * group, 1, size),
            *(new(batch, heads, 1, size) for _ in range(2)),
            real,
            *(new(batch, heads, budget + 1, size) for _ in range(2)),
            new(batch, heads, budget + 1, dtype=torch.int32),
            new(batch, dtype=torch.int64),
            new(batch, heads, budget + 1, dtype=torch.float32),
            new(batch, heads, dtype=torch.int64),
            1.0,
            budget // 2,
            1.0,
            real is not None,
        )
    return found


def main() -> None:
    """Print one line for each kernel and shape."""
    for shape in SHAPES:
        for real in (None, torch.ones(shape[0], 1, dtype=torch.bool)):
            for found in step(*shape, real):
                print(json.dumps({"shape": shape, "padded": real is not None, **found}))


if __name__ == "__main__":
    main()
