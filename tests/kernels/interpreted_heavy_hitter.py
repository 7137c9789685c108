"""Run the heavy-hitter kernel in Triton's interpreter next to torch operations; prints JSON.

TRITON_INTERPRET=1 python -m tests.kernels.interpreted_heavy_hitter
"""

import json
from typing import Any
from unittest import mock

import torch

from joma.kernels import _heavy_hitter_kernel, heavy_hitter

SCORES: tuple[dict[str, Any], ...] = (
    {"recent": 20},
    {"recent": 0, "retention": 0.9},
    {"recent": 4, "mean": True},
)
ROWS, SLOTS, STEPS = 2, 91, 4


def held(heads: int, size: int, *, padded: bool) -> dict[str, torch.Tensor]:
    """Return a full store of which the first row has read little more than padding."""
    position = torch.rand(ROWS, heads, 150).argsort(2)[:, :, :SLOTS].int()
    if padded:
        position[0].masked_fill_(position[0] >= 30, -1)
    empty = torch.randint(0, SLOTS, (ROWS, heads))
    position.scatter_(2, empty[..., None], -1)
    return {
        "keys": torch.randn(ROWS, heads, SLOTS, size),
        "values": torch.randn(ROWS, heads, SLOTS, size),
        "position": position,
        "seen": torch.tensor([30 if padded else 150, 150]),
        "received": torch.rand(ROWS, heads, SLOTS),
        "empty": empty,
    }


def case(how: dict[str, Any], heads: int, group: int, size: int, *, padded: bool) -> dict[str, Any]:
    """Return the largest differences over several steps from the same store."""
    torch.manual_seed(0)
    stores = [held(heads, size, padded=padded)]
    stores.append({name: tensor.clone() for name, tensor in stores[0].items()})
    worst, same = 0.0, True
    for step in range(STEPS):
        query = torch.randn(ROWS, heads * group, 1, size)
        key, value = torch.randn(ROWS, heads, 1, size), torch.randn(ROWS, heads, 1, size)
        mask = torch.tensor([[True], [not (padded and step == 2)]])
        found = []
        for store, kernels in zip(stores, (False, True), strict=True):
            with mock.patch.object(heavy_hitter, "has_kernels", lambda device, use=kernels: use):
                real = mask if padded else None
                found.append(
                    heavy_hitter.heavy_hitter_step(
                        query, key, value, real, scale=size**-0.5, **store, **how
                    )
                )
        expected, got = stores
        here = expected["position"] >= 0
        differences = (found[0] - found[1])[mask[:, 0]], (expected["received"] - got["received"])
        worst = max(worst, float(differences[0].abs().max()))
        worst = max(worst, float(differences[1][here].abs().max()))
        same &= all(torch.equal(expected[it], got[it]) for it in ("position", "seen", "empty"))
        same &= torch.equal(expected["keys"][here], got["keys"][here])
    return {**how, "group": group, "padded": padded, "same_slots": same, "error": worst}


def main() -> None:
    """Print one line for each case."""
    for how in SCORES:
        for heads, group, size in ((3, 1, 16), (2, 3, 24)):
            for padded in (False, True):
                print(json.dumps(case(how, heads, group, size, padded=padded)))
    # Both kernels in several steps: one program for all blocks of a row, few scores at a time.
    _heavy_hitter_kernel._PROGRAMS, _heavy_hitter_kernel._SCORES = 1, 64
    for how in SCORES[::2]:
        for heads, group, size in ((3, 1, 16), (1, 5, 24)):
            print(json.dumps(case(how, heads, group, size, padded=True)))


if __name__ == "__main__":
    main()
