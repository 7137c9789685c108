"""Adam in one pass over a parameter's memory (Triton)."""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.kernels.arguments import AdamStep

_BLOCK = 2048


def adam_(
    p: Tensor, gradient: Tensor, m: Tensor, v: Tensor, step: AdamStep, rounded: Tensor | None
) -> None:
    """Do what `joma.kernels.adam.adam_` does."""
    if not gradient[0].is_contiguous():
        gradient = gradient.contiguous()
    E, size = len(p), p[0].numel()
    scales_E = torch.ones_like(step.rates_E) if step.scales_E is None else step.scales_E
    with torch.cuda.device_of(p):  # Triton launches on the current device
        _adam[(triton.cdiv(size, _BLOCK), E)](
            p, p if rounded is None else rounded, gradient, m, v, step.rates_E, step.decays_E,
            step.second, scales_E, *step.betas, step.epsilon, size, gradient.stride(0),
            ROUNDED=rounded is not None, BLOCK=_BLOCK,
        )  # fmt: skip


@triton.jit
def _adam(
    parameter, half, gradient, first, second, rates, decays, correction, scales, keep_one, keep_two,
    epsilon, size, next_gradient, ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, at = place < size, member * size + place
    rate = tl.load(rates + member).to(tl.float32)
    decay = tl.load(decays + member).to(tl.float32)
    root = tl.sqrt(tl.load(correction).to(tl.float32))
    g = tl.load(gradient + member * next_gradient + place, mask=inside, other=0.0).to(tl.float32)
    g *= tl.load(scales + member).to(tl.float32)
    p = tl.load(parameter + at, mask=inside, other=0.0)
    m = tl.load(first + at, mask=inside, other=0.0)
    v = tl.load(second + at, mask=inside, other=0.0)
    g += decay * p
    m += (1.0 - keep_one) * (g - m)
    v = keep_two * v + (1.0 - keep_two) * g * g
    p -= rate * m / (tl.sqrt(v) / root + epsilon)
    tl.store(parameter + at, p, mask=inside)
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)
    if ROUNDED:
        tl.store(half + at, p.to(tl.bfloat16), mask=inside)
