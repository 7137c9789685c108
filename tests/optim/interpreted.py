"""Compares the optimizers' Triton kernels with torch operations on the CPU, in an interpreter.

    TRITON_INTERPRET=1 python -m tests.optim.interpreted CASE...

Each case prints a line of JSON. What the interpreter lacks is added here: it has no products of
bfloat16, cuts numbers to bfloat16 instead of rounding them, and does not know the newest NumPy.
"""

# pyright: reportMissingImports=false
# Triton comes with torch's CUDA builds alone.

import json
import sys
import time
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from joma.kernels.moments import read_moments
from joma.optim import GaLoreAdamW

SHAPES = (64, 96), (101, 70), (48, 333), (130, 77)
"""Both shapes, with rows that are aligned and rows that are not."""
STEPS = 4
DECAY = 0.78125
"""Leaves 127/128 of the weights: torch's sums on a CPU round that factor to bfloat16."""


def complete_the_interpreter() -> None:
    """Add what the interpreter lacks, and leave out what makes it slow."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    convert, replace_tensor = interpreter._convert_float, interpreter._patch_lang_tensor
    replace, replaced = interpreter._patch_lang, set[tuple[int, ...]]()

    def widened(values):
        return (values.astype(np.uint32) << 16).view(np.float32)

    def converted(values, source, target, rounding):
        if (source, target) == (tl.bfloat16, tl.float32):
            return widened(values).view(np.uint32)
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(values, source, target, rounding)
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(bits.view(np.float32)), np.uint16(0x7FC0), rounded)

    def dot(self, a, b, total, *_):
        factors = (
            widened(one.data) if one.dtype.scalar == tl.bfloat16 else one.data for one in (a, b)
        )
        product = np.matmul(*factors, dtype=total.data.dtype)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    def tensor_replaced(tensor, scope):
        replace_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def replaced_once(function):
        """Replace the language once in a launch, not in each function that it calls."""
        languages = (one for one in function.__globals__.values() if one in (tl, tl.core))
        key = tuple(id(one) for one in languages)
        if key in replaced:
            return None
        replaced.add(key)
        scope = replace(function)
        restore = scope.restore
        scope.restore = lambda: (replaced.clear(), restore())
        return scope

    interpreter._convert_float = converted
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter._patch_lang_tensor = tensor_replaced
    interpreter._patch_lang = replaced_once
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_, **__: None  # pyright: ignore[reportAttributeAccessIssue]


def gradient(shape, seed, rank=None):
    random = torch.Generator().manual_seed(seed)
    if rank is None:
        return torch.randn(shape, generator=random).bfloat16()
    whole = torch.zeros(shape)  # rows and columns of zeros: bfloat16 has this rank exactly
    whole[:rank, :rank] = torch.randn(rank, rank, generator=random)
    return whole.bfloat16()


def made(shapes=SHAPES, **settings):
    torch.manual_seed(0)
    weights = [nn.Parameter((0.02 * torch.randn(shape)).bfloat16()) for shape in shapes]
    settings = {"rank": 16, "gap": 2, "stagger": False, "verbose": False} | settings
    return weights, GaLoreAdamW(weights, 1e-2, **settings)


def with_kernels(there):
    return mock.patch("joma.kernels.galore.has_kernels", return_value=there)


def trained(weights, optimizer, kernels=True, steps=STEPS, first=0, rank=None):
    with with_kernels(kernels):
        for step in range(first, first + steps):
            for number, weight in enumerate(weights):
                new = gradient(weight.shape, 100 * step + number, rank)
                if optimizer.per_layer:
                    (weight * new).sum().backward()
                else:
                    weight.grad = new
            optimizer.step()


@torch.no_grad()
def distance(one, other, start=0.0):
    return float((one.float() - other.float()).norm() / (other.float() - start).norm())


def compared(shapes=SHAPES, at_once=None, rank_of_gradient=None, **settings):
    """Return the largest relative distance of weights' changes and of both moments."""
    from joma.kernels import _galore_step as kernels

    at_once = mock.patch.object(kernels, "AT_ONCE", at_once or kernels.AT_ONCE)
    fast, slow = made(shapes, **settings), made(shapes, **settings | {"per_layer": False})
    start = [one.detach().float().clone() for one in fast[0]]
    with at_once, mock.patch.object(kernels, "_launch", wraps=kernels._launch) as launch:
        trained(*fast, rank=rank_of_gradient)
    trained(*slow, kernels=False, rank=rank_of_gradient)
    pairs = list(zip(*(ws for ws, _ in (fast, slow)), start, strict=True))
    moments = [
        [distance(*two) for two in zip(*(read_moments(state) for state in states), strict=True)]
        for states in ([fast[1].state[a], slow[1].state[b]] for a, b, _ in pairs)
    ]
    return {
        "launches": launch.call_count,
        "moved_by_kernels": sum(len(call.args[0]) for call in launch.call_args_list),
        "weights": max(distance(*three) for three in pairs),
        "moments": [max(one) for one in zip(*moments, strict=True)],
    }


CASES: dict[str, Any] = {
    "bfloat16": lambda: compared(weight_decay=DECAY, scale=0.25, at_once=1 << 13),
    "eight": lambda: compared(bits=8, weight_decay=DECAY, scale=0.25),
    "left": lambda: compared(side="left", rank=32),
    "right": lambda: compared(side="right", rank=32),
    "left_eight": lambda: compared(side="left", rank=32, bits=8, moments="rotate"),
    "right_eight": lambda: compared(side="right", rank=32, bits=8, moments="reset"),
    "wide": lambda: compared(((200, 300), (300, 200), (150, 517)), rank=144),
    "wide_eight": lambda: compared(((90, 300), (300, 90), (150, 517)), rank=80, bits=8),
    "per_layer": lambda: compared(per_layer=True, betas=(0.8, 0.95)),
    "null_directions": lambda: compared(rank_of_gradient=5, eps=1e-30),
}


def main() -> None:
    torch.set_num_threads(1)
    complete_the_interpreter()
    for case in sys.argv[1:] or CASES:
        begun = time.perf_counter()
        found = CASES[case]()
        took = round(time.perf_counter() - begun, 1)
        print(json.dumps({"case": case, "seconds": took, **found}), flush=True)


if __name__ == "__main__":
    main()
