"""Compare the kernels of a language model's step with torch's operations.

    TRITON_INTERPRET=1 python -m tests.kernels.compared

Each case prints a line of JSON: its name and the largest distance of results and gradients, as a
share of the largest number. In the interpreter tensors lie on the CPU.
"""

# pyright: reportMissingImports=false
# Triton comes with torch's CUDA builds alone.

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from joma.kernels.language import Dropout, cross_entropies, norm_of_sum
from joma.optim import StackedAdam

SEEDS, STEP = (3, 2**40 + 5), 2**33 + 7


def choosing(kernels: bool) -> ExitStack:
    """Let functions choose kernels or torch's operations in the block."""
    stack = ExitStack()
    for module in ("language", "adam"):
        name = f"joma.kernels.{module}.has_kernels"
        stack.enter_context(mock.patch(name, return_value=kernels))
    return stack


def distance(work: Callable[..., list[Tensor]], *inputs: Any) -> float:
    """Return how far the results by kernels are from those by torch's operations."""
    results = []
    for kernels in (True, False):
        with choosing(kernels):
            results.append(work(*inputs))
    pairs = zip(*results, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def with_gradients(work: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    given = [tensor.clone().requires_grad_() for tensor in inputs]
    out = work(*given)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    found = [out.detach(), *torch.autograd.grad(out, given, dy)]
    return [tensor.double() for tensor in found]


def cases(device: str) -> Iterator[tuple[str, float]]:
    dice = torch.Generator().manual_seed(1)
    seeds, step = torch.tensor(SEEDS, device=device), torch.tensor(STEP, device=device)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice).to(device)

    for share in (0.0, 0.2):
        drop = Dropout(seeds, step, share)
        for width in (2, 35, 200):
            work = partial(drop, place="a")
            found = distance(with_gradients, work, draw(2, 3, 9, width))
            yield f"dropout {share} {width}", found
        for width in (40, 200):
            parts = [draw(2, 3, 9, 24), draw(2, 24, width), draw(2, 1, width)]
            parts += [draw(2, 3, 9, width), draw(2, width), draw(2, width)]

            def normed(
                x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, scale: Tensor,
                shift: Tensor, drop: Dropout = drop,
            ) -> Tensor:  # fmt: skip
                return norm_of_sum(x, (weight, bias), residual, (scale, shift), drop, "b")

            found = distance(with_gradients, normed, *parts)
            yield f"norm {share} {width}", found
    x, weight, bias = draw(2, 7, 16), draw(2, 16, 1152), draw(2, 1, 1152)
    targets = torch.randint(1100, (7,), generator=dice).to(device)
    weights = torch.rand(7, generator=dice).to(device)

    def losses(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return cross_entropies(x, (weight, bias), targets, weights, 1100)

    yield "cross-entropy", distance(with_gradients, losses, x, weight, bias)
    with torch.no_grad():
        yield "cross-entropy alone", distance(lambda: [losses(x, weight, bias).double()])
    for clip in (None, 0.5):
        for rounded in ((), ("matrix", "long")):
            name = f"Adam, clip {clip}, rounded {len(rounded)}"
            yield name, distance(adam, device, clip, rounded)


def adam(device: str, clip: float | None, rounded: tuple[str, ...]) -> list[Tensor]:
    """Return parameters and moments after some steps; some have odd sizes and strides."""
    dice = torch.Generator().manual_seed(0)
    shapes = {"matrix": (3, 40, 80), "bias": (3, 1, 50), "long": (3, 5001)}
    given = {
        name: nn.Parameter(torch.randn(shape, generator=dice).to(device))
        for name, shape in shapes.items()
    }
    optimizer = StackedAdam(given.items(), (1e-3, 1e-2, 0.3), (0.0, 1e-4, 0.5), clip=clip)
    optimizer.to_bfloat16_with_master_weights(rounded)
    for _ in range(4):
        for p in given.values():
            shape = (*p.shape[:-2], p.shape[-2] + 8, p.shape[-1]) if p.ndim == 3 else p.shape
            wide = torch.randn(shape, generator=dice).to(p)
            p.grad = wide[:, : p.shape[1]]
        optimizer.warm_up()
        optimizer.step()
    for name in rounded:
        assert torch.equal(given[name].data, optimizer.master_weights()[name].bfloat16())
    state = {**optimizer.state_dict(), **optimizer.master_weights()}
    return [tensor.double() for tensor in state.values()]


if __name__ == "__main__":
    from tests.optim.interpreted import complete_the_interpreter

    complete_the_interpreter()
    for name, apart in cases("cpu"):
        print(json.dumps({"case": name, "distance": apart}))
