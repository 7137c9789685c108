"""Compile the kernels of Table 1's networks for sm_90 without a GPU; prints JSON.

python -m tests.models.compiled_blocks

Forward and backward pass of a block at the sizes of Table 1, and a step of Adam with an odd bias.
"""

# pyright: reportMissingImports=false
# Triton comes with torch's CUDA builds alone.

import json
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import nn

from joma.models import TransformerConfig
from joma.models.full_speed import (
    FastTransformer,
    _row_kernels,
    _wide_attention_kernel,
)
from joma.optim import StackedAdam, _adam_kernel
from tests.ahead_of_time import Caught

KERNELS: dict[Any, tuple[str, ...]] = {
    _row_kernels: ("_sum_norm", "_sum_norm_backward", "_relu", "_relu_backward"),
    _wide_attention_kernel: ("_attended", "_attended_backward"),
    _adam_kernel: ("_adam", "_squares"),
}
SHAPES = ((1024, 4096, 9), (1024, 4096, 27), (200, 200, 35))
"""Width, hidden nodes and positions; the first two are Table 1's."""


def block(width: int, hidden: int, positions: int) -> None:
    """Launch what a block of two layers launches."""
    config = TransformerConfig(30, 20, 2, width, hidden)
    model = FastTransformer(config, (1, 2))
    for name, parameter in model.named_parameters():
        if name in model.products():
            parameter.data = parameter.data.bfloat16()
    model.compute = torch.bfloat16
    with mock.patch.object(model, "_fits", return_value=True):
        tokens = torch.zeros(2, 3, positions, dtype=torch.int64)
        model(tokens, leading=5).sum().backward()


def adam() -> None:
    """Launch what a step of Adam launches, with clipping."""
    parameters = {
        "matrix": nn.Parameter(torch.zeros(2, 64, 64)),
        "bias": nn.Parameter(torch.zeros(2, 1, 50)),
    }
    optimizer = StackedAdam(parameters.items(), 1e-3, clip=1.0)
    optimizer.to_bfloat16_with_master_weights(["matrix"])
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
    with (
        mock.patch.object(StackedAdam, "_on_gpu", True),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
    ):
        optimizer.step()


def main() -> None:
    """Print one line for each kernel and shape."""
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for module, names in KERNELS.items():
            for name in names:
                caught = Caught(getattr(module, name), found)
                stack.enter_context(mock.patch.object(module, name, caught))
        for shape in SHAPES:
            block(*shape)
            adam()
            unique = {json.dumps(one) for one in found}
            for line in sorted(unique):
                print(json.dumps({"shape": shape, **json.loads(line)}))
            found.clear()


if __name__ == "__main__":
    main()
