"""One pass of Adam over the memory of all stacked parameters, for the GPU (Triton).

All parameters are moved by one launch: a network has a hundred, most of them small, and a launch
for each would take longer than the work. A table on the device says where each lies.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


class Part(NamedTuple):
    """A parameter (E, ...), contiguous in float32, its bfloat16 copy or None, and its moments."""

    original: Tensor
    rounded: Tensor | None
    first: Tensor
    second: Tensor


class Table:
    """Where the parameters lie, and which block of numbers is whose.

    Args:
        parts: all of one number of members and on one GPU.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.original.dtype != torch.float32:
                raise ValueError(
                    f"parameters must be float32 on the GPU, got {part.original.dtype}"
                )
        self.parts = list(parts)
        self.device, self.members = parts[0].original.device, len(parts[0].original)
        sizes = [part.original[0].numel() for part in parts]
        blocks = [triton.cdiv(size, BLOCK) for size in sizes]
        owners = [[at, k * BLOCK] for at, count in enumerate(blocks) for k in range(count)]
        places = [
            [p.data_ptr(), 0 if half is None else half.data_ptr(), m.data_ptr(), v.data_ptr(), size]
            for (p, half, m, v), size in zip(parts, sizes, strict=True)
        ]
        self.owners = torch.tensor(owners, dtype=torch.int64, device=self.device)
        self.places = torch.tensor(places, dtype=torch.int64, device=self.device)
        self.gradients = torch.zeros(len(parts), 3, dtype=torch.int64, device=self.device)
        """Of each: address, 0 for none; numbers from one member to the next; 1 for bfloat16."""

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        """Notes where the gradients lie; each member's part of one is contiguous."""
        rows = [
            [0, 0, 0]
            if gradient is None
            else [gradient.data_ptr(), gradient.stride(0), int(gradient.dtype == torch.bfloat16)]
            for gradient in gradients
        ]
        self.gradients.copy_(torch.tensor(rows, dtype=torch.int64))

    def square_sums(self) -> Tensor:
        """‖g‖² of each member over all gradients, (E,) in float32."""
        partial = torch.empty(
            self.members, len(self.owners), dtype=torch.float32, device=self.device
        )
        grid = len(self.owners), self.members
        _squares[grid](self.owners, self.places, self.gradients, partial, BLOCK=BLOCK)
        return partial.sum(1)

    def step(
        self,
        rates: Tensor,
        decays: Tensor,
        two: Tensor,
        scales: Tensor,
        betas: tuple[float, float],
        epsilon: float,
    ) -> None:
        """Adam's update in place, as `StackedAdam` writes it out in torch operations.

        Args:
            rates: (E,) learning rate over the first moment's bias correction.
            decays: (E,) weight decay.
            two: the second moment's bias correction, without axes.
            scales: (E,) what the gradient is multiplied with, in float32.
            betas: decay of the moments.
            epsilon: added to the root of the second moment.
        """
        settings: tuple[Any, ...] = (rates, decays, two, scales, *betas, epsilon)
        grid = len(self.owners), self.members
        _adam[grid](self.owners, self.places, self.gradients, *settings, BLOCK=BLOCK)


@triton.jit
def _gradient(gradients, item, member, place, inside):
    """Numbers of a gradient in float32."""
    start = tl.load(gradients + item * 3)
    offset = member * tl.load(gradients + item * 3 + 1) + place
    if tl.load(gradients + item * 3 + 2) == 1:
        half = start.to(tl.pointer_type(tl.bfloat16))
        g = tl.load(half + offset, mask=inside, other=0.0).to(tl.float32)
    else:
        whole = start.to(tl.pointer_type(tl.float32))
        g = tl.load(whole + offset, mask=inside, other=0.0)
    return g


@triton.jit
def _squares(owners, places, gradients, partial, BLOCK: tl.constexpr):
    member = tl.program_id(1).to(tl.int64)
    item = tl.load(owners + tl.program_id(0) * 2)
    place = tl.load(owners + tl.program_id(0) * 2 + 1) + tl.arange(0, BLOCK)
    total = 0.0
    if tl.load(gradients + item * 3) != 0:
        inside = place < tl.load(places + item * 5 + 4)
        g = _gradient(gradients, item, member, place, inside)
        total = tl.sum(g * g, 0)
    tl.store(partial + member * tl.num_programs(0) + tl.program_id(0), total)


@triton.jit
def _adam(
    owners,
    places,
    gradients,
    rates,
    decays,
    two,
    scales,
    keep_one,
    keep_two,
    epsilon,
    BLOCK: tl.constexpr,
):
    """Moves one block of one member's numbers."""
    member = tl.program_id(1).to(tl.int64)
    item = tl.load(owners + tl.program_id(0) * 2)
    if tl.load(gradients + item * 3) != 0:
        place = tl.load(owners + tl.program_id(0) * 2 + 1) + tl.arange(0, BLOCK)
        size = tl.load(places + item * 5 + 4)
        inside = place < size
        at = member * size + place
        p_at = tl.load(places + item * 5).to(tl.pointer_type(tl.float32)) + at
        m_at = tl.load(places + item * 5 + 2).to(tl.pointer_type(tl.float32)) + at
        v_at = tl.load(places + item * 5 + 3).to(tl.pointer_type(tl.float32)) + at
        rate = tl.load(rates + member).to(tl.float32)
        decay = tl.load(decays + member).to(tl.float32)
        root_two = tl.sqrt(tl.load(two).to(tl.float32))
        g = _gradient(gradients, item, member, place, inside) * tl.load(scales + member)
        p = tl.load(p_at, mask=inside, other=0.0)
        m = tl.load(m_at, mask=inside, other=0.0)
        v = tl.load(v_at, mask=inside, other=0.0)
        g += decay * p
        m += (1.0 - keep_one) * (g - m)
        v = keep_two * v + (1.0 - keep_two) * g * g
        p -= rate * m / (tl.sqrt(v) / root_two + epsilon)
        tl.store(p_at, p, mask=inside)
        tl.store(m_at, m, mask=inside)
        tl.store(v_at, v, mask=inside)
        rounded = tl.load(places + item * 5 + 1)
        if rounded != 0:
            half = rounded.to(tl.pointer_type(tl.bfloat16)) + at
            tl.store(half, p.to(tl.bfloat16), mask=inside)
