"""Compare the kernel of stacked Adam with its torch operations, in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.optim.interpreted_adam

Each case prints a line of JSON: what parameters there are, the launches of a step, and the largest
distance of parameters and moments. Sizes and addresses are such that all, some or none of the
parameters can be read several numbers at a time.
"""

# pyright: reportMissingImports=false
# Triton comes with torch's CUDA builds alone.

import json
from collections.abc import Mapping
from itertools import product
from unittest import mock

import torch
from torch import Tensor, nn

from joma.optim import StackedAdam
from tests.optim.interpreted import complete_the_interpreter

SHAPES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "all even": {"matrix": (3, 40, 80), "bias": (3, 1, 48), "norm": (3, 16)},
    "an odd bias": {"bias": (3, 1, 50), "matrix": (3, 40, 80), "long": (3, 5001), "norm": (3, 16)},
    "none even": {"bias": (3, 1, 50), "vector": (3, 37)},
}
RATES, DECAYS = (1e-3, 1e-2, 0.3), (0.0, 1e-4, 0.5)
ROUNDED = {"matrix", "long"}


def gradient(like: Tensor, seed: int, *, shifted: bool) -> Tensor:
    """Return a gradient; a shifted one lies at an address that is no multiple of 16 bytes."""
    memory = torch.empty(like.numel() + 1, dtype=like.dtype)
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    return memory[int(shifted) :][: like.numel()].view(like.shape).copy_(drawn)


def trained(shapes: Mapping[str, tuple[int, ...]], *, rounded: bool, shifted: bool) -> StackedAdam:
    """Return an optimizer after four steps; in two of them one parameter has no gradient."""
    dice = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=dice) for name, shape in shapes.items()}
    parameters = {name: nn.Parameter(start) for name, start in drawn.items()}
    optimizer = StackedAdam(parameters.items(), RATES, DECAYS, clip=0.5)
    if rounded:
        optimizer.to_bfloat16_with_master_weights(ROUNDED & shapes.keys())
    for step in range(4):
        for number, p in enumerate(parameters.values()):
            given = number > 0 or step > 1
            p.grad = gradient(p, 10 * step + number, shifted=shifted) if given else None
        optimizer.step()
    return optimizer


def main() -> None:
    complete_the_interpreter()
    for (name, shapes), rounded, shifted in product(SHAPES.items(), (False, True), (False, True)):
        plain = trained(shapes, rounded=rounded, shifted=shifted)
        with (
            mock.patch.object(StackedAdam, "_on_gpu", True),
            mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
        ):
            fused = trained(shapes, rounded=rounded, shifted=shifted)
        launches = fused._table()._launches(fused._is_even())
        evens = [constants["EVEN"] for _, _, constants in launches]
        pairs = [(fused.master_weights(), plain.master_weights())]
        pairs += [(fused.state_dict(), plain.state_dict())]
        error = max(
            float(((ours[key] - theirs[key]).abs() / (1e-2 + theirs[key].abs())).max())
            for ours, theirs in pairs
            for key in theirs
        )
        copies = all(
            torch.equal(fused.parameters[key].data, master.to(fused.parameters[key].dtype))
            for key, master in fused.master_weights().items()
        )
        case = {"parameters": name, "rounded": rounded, "shifted": shifted}
        print(json.dumps(case | {"evens": evens, "error": error, "copies": copies}))


if __name__ == "__main__":
    main()
