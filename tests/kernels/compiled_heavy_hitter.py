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


def step(batch: int, heads: int, group: int, budget: int, size: int, real: Any) -> list[Any]:
    """Return what the kernels of one step take."""
    found: list[Any] = []

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    heads_and_slots = batch, heads, budget + 1
    attend = Caught(_heavy_hitter_kernel._attend_slots, found)
    join = Caught(_heavy_hitter_kernel._join_and_choose, found)
    with (
        mock.patch.object(_heavy_hitter_kernel, "_attend_slots", attend),
        mock.patch.object(_heavy_hitter_kernel, "_join_and_choose", join),
    ):
        _heavy_hitter_kernel.heavy_hitter_step(
            new(batch, heads * group, 1, size),
            new(batch, heads, 1, size),
            new(batch, heads, 1, size),
            real,
            keys=new(*heads_and_slots, size),
            values=new(*heads_and_slots, size),
            position=new(*heads_and_slots, dtype=torch.int32),
            seen=new(batch, dtype=torch.int64),
            received=new(*heads_and_slots, dtype=torch.float32),
            empty=new(batch, heads, dtype=torch.int64),
            scale=1.0,
            recent=budget // 2,
            retention=1.0,
            mean=real is not None,
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
