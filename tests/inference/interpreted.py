"""Run the heavy-hitter kernel in Triton's interpreter next to torch operations; prints JSON.

TRITON_INTERPRET=1 python -m tests.inference.interpreted
"""

import json
from dataclasses import fields
from typing import Any

import torch
from joma.inference._attend import Scoring
from joma.inference._heavy_kernel import heavy_step
from joma.inference._kind import LayerKind

from joma.inference import HeavyHitter, _heavy_kernel
from joma.inference._layer import EvictingLayer
from joma.inference._store import Store

POLICIES = [HeavyHitter(70, 20), HeavyHitter(30, 0, "decay", 0.9), HeavyHitter(60, 4, "mean")]


def copied(store: Store) -> Store:
    """Return a store with tensors of its own."""
    found = {it.name: getattr(store, it.name) for it in fields(store)}
    clones: dict[str, Any] = {
        name: None if it is None else it.clone() for name, it in found.items()
    }
    return Store(**clones)


def case(policy: HeavyHitter, heads: int, group: int, size: int, *, padded: bool) -> dict[str, Any]:
    """Return the largest differences over several steps from the same store."""
    torch.manual_seed(0)
    layer = EvictingLayer(policy, LayerKind(0))
    batch = 2

    def drawn(H: int, T: int) -> torch.Tensor:
        return torch.randn(batch, H, T, size)

    def read(T: int, real: torch.Tensor | None) -> None:
        query, keys, values = drawn(heads * group, T), drawn(heads, T), drawn(heads, T)
        layer.update(keys, values)
        layer.attend(query, keys, values, real, Scoring())

    real = torch.ones(batch, 150, dtype=torch.bool)
    if padded:
        real[0, :120] = False
    read(150, real)
    assert layer.store is not None
    own = copied(layer.store)
    worst = {"result": 0.0, "received": 0.0}
    same = True
    for step in range(4):
        query, keys, values = drawn(heads * group, 1), drawn(heads, 1), drawn(heads, 1)
        mask = torch.tensor([[True], [not (padded and step == 2)]])
        layer.update(keys, values)
        expected = layer.attend(query, keys, values, mask, Scoring())
        real = mask if padded else None
        got = heavy_step(own, policy, query, keys, values, real, size**-0.5)
        rows = mask[:, 0]
        worst["result"] = max(worst["result"], float((got - expected)[rows].abs().max()))
        kept = layer.store
        assert kept.received is not None
        assert own.received is not None
        held = kept.position >= 0
        off = (own.received - kept.received)[held].abs().max()
        worst["received"] = max(worst["received"], float(off))
        same &= torch.equal(own.position, kept.position) and torch.equal(own.seen, kept.seen)
        same &= torch.equal(
            own.keys.masked_fill(~held[..., None], 0), kept.keys.masked_fill(~held[..., None], 0)
        )
    return {"policy": policy.spec, "group": group, "padded": padded, "same_slots": same, **worst}


def main() -> None:
    """Print one line for each case."""
    for policy in POLICIES:
        for heads, group, size in ((3, 1, 16), (2, 3, 24)):
            for padded in (False, True):
                print(json.dumps(case(policy, heads, group, size, padded=padded)))
    # Both kernels in several steps: one program for all blocks of a row, few scores at a time.
    _heavy_kernel._PROGRAMS, _heavy_kernel._SCORES = 1, 64
    for policy in POLICIES[::2]:
        for heads, group, size in ((3, 1, 16), (1, 5, 24)):
            print(json.dumps(case(policy, heads, group, size, padded=True)))


if __name__ == "__main__":
    main()
