"""Compare the kernels of blocks and whole networks with float64, in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.models.interpreted_blocks [--all]

Each case prints a line of JSON: its name, what it was made of, and the largest relative distance of
results and gradients. With `--all` widths and lengths are those of Table 1.
"""

# pyright: reportMissingImports=false
# Triton comes with torch's CUDA builds alone.

import json
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from joma.models import Transformer, TransformerConfig
from joma.models.full_speed import FastTransformer
from joma.models.language import Dropout
from tests.optim.interpreted import complete_the_interpreter

SEEDS, STEP = (3, 2**40 + 5), 2**33 + 7


def drawn(*shape: int, seed: int, kind: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers that both precisions have exactly."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=dice).to(kind).requires_grad_()


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the relative distance; of what should be zero, the absolute one."""
    size = float(expected.double().norm()) or 1.0
    return float((found.double() - expected.double()).norm()) / size


def distances(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: list[Tensor]
) -> float:
    """Return the largest distance of results and gradients, given functions of the same inputs."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = ours(*inputs), theirs(*wide)
    dy = drawn(*found.shape, seed=99).detach()
    gradients = (
        torch.autograd.grad(found, inputs, dy.to(found.dtype)),
        torch.autograd.grad(expected, wide, dy.to(found.dtype).double()),
    )
    pairs = zip((found, *gradients[0]), (expected, *gradients[1]), strict=True)
    return max(distance(*pair) for pair in pairs)


def rows(
    width: int, share: float, *, biased: bool, kind: torch.dtype, programs: int = 1056
) -> Iterator[dict[str, Any]]:
    """Yield the layer norm of a sum, and ReLU; few programs have several tiles each."""
    from joma.models.full_speed import _row_kernels as kernels
    from joma.models.full_speed._dropping_kernel import Drop

    kernels._PROGRAMS = programs

    seeds, step = torch.tensor(SEEDS), torch.tensor(STEP)
    drop, keep = Drop(seeds, step, share), Dropout(seeds, step, share)
    case = {"width": width, "share": share, "biased": biased, "type": str(kind)}
    case["programs"] = programs
    x, residual = (drawn(2, 5, 9, width, seed=seed, kind=kind) for seed in (0, 1))
    scale, shift, bias = (drawn(2, width, seed=seed) for seed in (2, 3, 4))
    bias = bias.detach()[:, None].requires_grad_()

    def sum_norm(x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, *bias: Tensor):
        own = bias[0] if bias else None
        return kernels.sum_norm(x, own, residual, scale, shift, drop, "somewhere")

    def plain_norm(x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, *bias: Tensor):
        total = residual + keep(x + (bias[0].unsqueeze(1) if bias else 0), "somewhere")
        normal = torch.nn.functional.layer_norm(total, (width,))
        return normal * scale[:, None, None] + shift[:, None, None]

    inputs = [x, residual, scale, shift, *([bias] if biased else [])]
    yield {"of": "sum_norm", **case, "error": distances(sum_norm, plain_norm, inputs)}
    if biased:

        def relu(x: Tensor, bias: Tensor) -> Tensor:
            return kernels.relu(x, bias, drop, "a")

        def plain_relu(x: Tensor, bias: Tensor) -> Tensor:
            return keep((x + bias.unsqueeze(1)).relu(), "a")

        yield {"of": "relu", **case, "error": distances(relu, plain_relu, [x, bias])}


def attention(
    positions: int, queries: int, heads: int, width: int, leading: int, *, causal: bool,
    kind: torch.dtype,
) -> dict[str, Any]:  # fmt: skip
    """Return the distances of attention."""
    from joma.models.full_speed._wide_attention_kernel import attended

    query = drawn(2, 3, queries, width, seed=0, kind=kind)
    key, value = (drawn(2, 3, positions, width, seed=seed, kind=kind) for seed in (1, 2))
    bias = torch.zeros(positions, positions, dtype=torch.float64)
    bias[:, 0] = torch.tensor(leading).double().log()
    if causal:
        bias += torch.full_like(bias, -torch.inf).triu(1)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attended(query, key, value, heads=heads, leading=leading, causal=causal)

    def plain(*parts: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(2, 3) for x in parts)
        scores = q @ k.mT * (width // heads) ** -0.5 + bias[-queries:]
        return (scores.softmax(-1) @ v).transpose(2, 3).flatten(-2)

    shape = [positions, queries, heads, width, leading]
    error = distances(ours, plain, [query, key, value])
    return {"of": "attention", "shape": shape, "causal": causal, "type": str(kind), "error": error}


def network(config: TransformerConfig, leading: int, **options: Any) -> dict[str, Any]:
    """Return the distances of a network's outputs and gradients: its kernels' and torch's."""
    dice = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocabulary, (2, 6, config.length or 7), generator=dice)
    errors = {}
    exact = Transformer(config, SEEDS, dtype=torch.float64, **options)
    outputs = exact(tokens, leading=leading)
    loss = torch.randn(outputs.shape, generator=dice, dtype=torch.float64)
    (outputs * loss).sum().backward()
    for name, kernels in (("kernels", True), ("plain", False)):
        model = FastTransformer(config, SEEDS, **options)
        model.load_state_dict(exact.state_dict())
        for parameter_name, parameter in model.named_parameters():
            if parameter_name in model.products():
                parameter.data = parameter.data.bfloat16()
        model.compute = torch.bfloat16
        calls = 0

        def counted(*_: Any) -> bool:
            nonlocal calls
            calls += kernels  # noqa: B023
            return kernels  # noqa: B023

        with mock.patch.object(model, "_fits", counted):
            out = model(tokens, leading=leading)
            (out * loss).sum().backward()
        assert calls == kernels
        gradients = [
            distance(ours.grad, theirs.grad)
            for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True)
            if ours.grad is not None and theirs.grad is not None
        ]
        errors[name] = [distance(out, exact(tokens, leading=leading)), max(gradients)]
    return {"of": "network", "config": str(config), "options": str(options), **errors}


def main() -> None:
    complete_the_interpreter()
    whole, half = torch.float32, torch.bfloat16
    every = "--all" in sys.argv
    widths = (40, 200, 1024, 1000, 4096) if every else (40, 520)
    for width, share, biased, kind in product(widths, (0.0, 0.2), (True, False), (whole, half)):
        for case in rows(width, share, biased=biased, kind=kind):
            print(json.dumps(case))
    for width, share in ((40, 0.2), (520, 0.0)):
        for case in rows(width, share, biased=True, kind=half, programs=7):
            print(json.dumps(case))
    shapes = [(9, 9, 1, 40, 3), (9, 1, 1, 40, 3), (7, 7, 2, 48, 1), (27, 5, 1, 136, 4)]
    if every:
        shapes += [
            (9, 9, 1, 1024, 22),
            (28, 28, 1, 1024, 3),
            (28, 1, 1, 1024, 3),
            (64, 64, 4, 256, 1),
        ]
    for shape, causal, kind in product(shapes, (True, False), (whole, half)):
        print(json.dumps(attention(*shape, causal=causal, kind=kind)))
    # Few tokens have their rows of the first layer computed once, many at each place.
    for vocabulary, layers in ((12, 3), (40, 2), (12, 1)):
        config = TransformerConfig(vocabulary, 5, layers, width=48, hidden=272, length=9)
        print(json.dumps(network(config, 3)))
    config = TransformerConfig(12, 5, width=48, hidden=272, positions="learned", length=9)
    print(json.dumps(network(config, 1, depths=(1, 3))))
    config = TransformerConfig(12, 5, width=48, hidden=272, length=9, readout="all")
    print(json.dumps(network(config, 2)))
    config = TransformerConfig(12, 5, 2, width=24, hidden=40, length=66)
    print(json.dumps(network(config, 4)))
    config = TransformerConfig(12, 5, 2, 64, 40, 2, length=6, projection=True, causal=False)
    print(json.dumps(network(config, 1)))


if __name__ == "__main__":
    main()
