"""How far kernels are from torch in bfloat16, right ones and wrong ones, in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.models.interpreted_check [FIRST LAST]

`FastTransformer.check_kernels` tells the one from the other by two thresholds. For each network
drawn from the seeds FIRST to LAST − 1 the distances are printed as JSON, then those of twins of
three layers with one thing left out. The thresholds were chosen by the seeds 0 to 23, and judged by
100 to 123.
"""

# pyright: reportMissingImports=false
# Triton comes with torch's CUDA builds alone.

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from joma.models import TransformerConfig
from joma.models.full_speed import FastTransformer, transformer
from joma.models.full_speed.transformer import Projected, fused_block
from joma.models.transformer import Seen, TransformerBlock
from tests.optim.interpreted import complete_the_interpreter

TWINS = 200, 201, 205
"""Seeds of the networks with wrong kernels, which then have three layers."""

Block = Callable[[TransformerBlock, Tensor, Projected, Seen], Tensor]


def without_biases(block: TransformerBlock, x: Tensor, p: Projected, seen: Seen) -> Tensor:
    def zero(linear: Any) -> Tensor:
        return torch.zeros_like(linear.bias)

    with mock.patch.object(transformer, "bias_of", zero):
        return fused_block(block, x, p, seen)


def without_mask(block: TransformerBlock, x: Tensor, p: Projected, seen: Seen) -> Tensor:
    return fused_block(block, x, p, Seen(seen.length, False, seen.leading, x))


def without_leading(block: TransformerBlock, x: Tensor, p: Projected, seen: Seen) -> Tensor:
    return fused_block(block, x, p, Seen(seen.length, seen.causal, 1, x))


def without_value_gradients(block: TransformerBlock, x: Tensor, p: Projected, seen: Seen) -> Tensor:
    return fused_block(block, x, p._replace(value=p.value.detach()), seen)


def without_residual_gradients(
    block: TransformerBlock, x: Tensor, p: Projected, seen: Seen
) -> Tensor:
    return fused_block(block, x.detach(), p, seen)


def drawn(seed: int, **changes: Any) -> tuple[FastTransformer, Tensor, int]:
    """Return a network in bfloat16, tokens, and how often the first of them counts."""
    choose = random.Random(seed).choice
    width, hidden = choose([32, 64, 96, 128, 256]), choose([64, 256, 512])
    vocabulary, length, layers = choose([10, 30, 100]), choose([5, 9, 16, 27]), choose([1, 2, 3])
    heads, outputs = choose([1, 1, 2]), choose([5, 20])
    config = TransformerConfig(vocabulary, outputs, layers, width, hidden, heads)
    model = FastTransformer(replace(config, **changes), (seed, seed + 1))
    for name, parameter in model.named_parameters():
        if name in model.products():
            parameter.data = parameter.data.bfloat16()
    model.compute = torch.bfloat16
    dice = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (2, choose([4, 8]), length), generator=dice)
    tokens[:, :, 0] = 0
    return model, tokens, choose([1, 3, 22])


def distances(model: FastTransformer, tokens: Tensor, leading: int) -> list[float]:
    """Return how far outputs and gradients are from torch's."""
    with mock.patch.object(FastTransformer, "_fits", lambda model, _: model.uses_kernels):
        found = model._measured(tokens, leading)
        model.uses_kernels = False
        expected = model._measured(tokens, leading)
    return [transformer.distance(*pair) for pair in zip(found, expected, strict=True)]


def main() -> None:
    complete_the_interpreter()
    first, last = map(int, sys.argv[1:]) if sys.argv[1:] else (100, 104)
    for seed in range(first, last):
        print(json.dumps({"seed": seed, "wrong": None, "apart": distances(*drawn(seed))}))
    twins: tuple[Block, ...] = (
        without_biases, without_mask, without_leading, without_value_gradients,
        without_residual_gradients,
    )  # fmt: skip
    for twin in twins:
        for seed in TWINS:
            model, tokens, _ = drawn(seed, layers=3)
            with mock.patch.object(transformer, "fused_block", twin):
                apart = distances(model, tokens, 22)
            print(json.dumps({"seed": seed, "wrong": twin.__name__, "apart": apart}))


if __name__ == "__main__":
    main()
