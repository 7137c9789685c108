"""Compile the heavy-hitter kernels for sm_90 without a GPU; prints registers and spills as JSON.

python -m tests.inference.compiled
"""

# pyright: reportMissingImports=false

import json
from typing import Any
from unittest import mock

import torch

from joma.inference import HeavyHitter, _heavy_kernel
from joma.inference._store import Store
from tests.ahead_of_time import Caught

SHAPES = (
    (1, 16, 1, 3276, 128), (16, 16, 1, 3276, 128), (1, 8, 4, 3276, 128), (2, 3, 1, 90, 80),
    (2, 2, 2, 8, 8),
)  # fmt: skip
"""Batch, key heads, queries of each, budget, numbers of a head; the first two are a benchmark's."""


def step(batch: int, heads: int, group: int, budget: int, size: int, real: Any) -> list[Any]:
    """Return what the kernels of one step take."""
    found: list[Any] = []
    slots = budget + 1
    new: dict[str, Any] = {"dtype": torch.bfloat16}
    store = Store(
        keys=torch.empty(batch, heads, slots, size, **new),
        values=torch.empty(batch, heads, slots, size, **new),
        position=torch.empty(batch, heads, slots, dtype=torch.int32),
        seen=torch.zeros(batch, dtype=torch.int64),
        received=torch.empty(batch, heads, slots),
        empty=torch.zeros(batch, heads, dtype=torch.int64),
    )
    policy = HeavyHitter(budget // 2, budget // 2, "sum" if real is None else "mean")
    query = torch.empty(batch, heads * group, 1, size, **new)
    key = torch.empty(batch, heads, 1, size, **new)
    with (
        mock.patch.object(_heavy_kernel, "_parts", Caught(_heavy_kernel._parts, found)),
        mock.patch.object(_heavy_kernel, "_joined", Caught(_heavy_kernel._joined, found)),
    ):
        _heavy_kernel.heavy_step(store, policy, query, key, key, real, 1.0)
    return found


def main() -> None:
    """Print one line for each kernel and shape."""
    for shape in SHAPES:
        for real in (None, torch.ones(shape[0], 1, dtype=torch.bool)):
            for found in step(*shape, real):
                print(json.dumps({"shape": shape, "padded": real is not None, **found}))


if __name__ == "__main__":
    main()
