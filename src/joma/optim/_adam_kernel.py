"""One pass of Adam over the memory of a stacked parameter, for the GPU."""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _adam(
    p_ptr,
    rounded_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    rates_ptr,
    decays_ptr,
    two_ptr,
    scales_ptr,
    size,
    g_stride,
    keep_one,
    keep_two,
    epsilon,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Moves one block of one member's numbers."""
    member = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    at = member * size + places
    rate = tl.load(rates_ptr + member).to(tl.float32)
    decay = tl.load(decays_ptr + member).to(tl.float32)
    root_two = tl.sqrt(tl.load(two_ptr).to(tl.float32))
    p = tl.load(p_ptr + at, mask=inside)
    g = tl.load(g_ptr + member * g_stride + places, mask=inside).to(tl.float32)
    m = tl.load(m_ptr + at, mask=inside)
    v = tl.load(v_ptr + at, mask=inside)
    g = g * tl.load(scales_ptr + member) + decay * p
    m += (1.0 - keep_one) * (g - m)
    v = keep_two * v + (1.0 - keep_two) * g * g
    p -= rate * m / (tl.sqrt(v) / root_two + epsilon)
    tl.store(p_ptr + at, p, mask=inside)
    if ROUNDED:
        tl.store(rounded_ptr + at, p.to(tl.bfloat16), mask=inside)
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(v_ptr + at, v, mask=inside)


def fused_step(
    p: Tensor,
    rounded: Tensor | None,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    rates: Tensor,
    decays: Tensor,
    two: Tensor,
    scales: Tensor,
    betas: tuple[float, float],
    epsilon: float,
) -> None:
    """Adam's update in place, as `StackedAdam` writes it out in torch operations.

    Args:
        p: parameter, (E, ...), contiguous, in float32.
        rounded: where it is written in bfloat16 too.
        grad: its gradient, of which each member's part is contiguous.
        m: first moment.
        v: second moment.
        rates: (E,) learning rate over the first moment's bias correction.
        decays: (E,) weight decay.
        two: the second moment's bias correction, without axes.
        scales: (E,) what the gradient is multiplied with, in float32.
        betas: decay of the moments.
        epsilon: added to the root of the second moment.
    """
    if p.dtype != torch.float32:
        raise ValueError(f"parameters must be float32 on the GPU, got {p.dtype}")
    size = p[0].numel()
    grid = (triton.cdiv(size, BLOCK), p.shape[0])
    _adam[grid](
        p,
        p if rounded is None else rounded,
        grad,
        m,
        v,
        rates,
        decays,
        two,
        scales,
        size,
        grad.stride(0),
        *betas,
        epsilon,
        ROUNDED=rounded is not None,
        BLOCK=BLOCK,
    )


def square_sums(grad: Tensor) -> Tensor:
    """‖g‖² of each member, (E,) in float32; each member's part is contiguous."""
    size = grad[0].numel()
    blocks = triton.cdiv(size, 8 * BLOCK)
    partial = torch.empty(len(grad), blocks, dtype=torch.float32, device=grad.device)
    _squares[(blocks, len(grad))](grad, partial, size, grad.stride(0), BLOCK=8 * BLOCK)
    return partial.sum(1)


@triton.jit
def _squares(g_ptr, out_ptr, size, stride, BLOCK: tl.constexpr):
    member = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + member * stride + places, mask=places < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + member * tl.num_programs(0) + tl.program_id(0), tl.sum(g * g, 0))
