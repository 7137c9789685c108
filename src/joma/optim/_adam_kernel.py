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

from joma.errors import JomaError

BLOCK = 2048
_EVEN = 8
"""Numbers of which members' parts must be multiples for several to be read at once: 16 bytes."""


class AdamParameter(NamedTuple):
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

    def __init__(self, parts: Sequence[AdamParameter]) -> None:
        for part in parts:
            if part.original.dtype != torch.float32:
                raise JomaError(f"parameters must be float32 on the GPU, got {part.original.dtype}")
        self.parts = list(parts)
        self.device, self.members = parts[0].original.device, len(parts[0].original)
        sizes = [part.original[0].numel() for part in parts]
        blocks = [triton.cdiv(size, BLOCK) for size in sizes]
        owners = [[at, k * BLOCK] for at, count in enumerate(blocks) for k in range(count)]
        places = [
            [p.data_ptr(), 0 if half is None else half.data_ptr(), m.data_ptr(), v.data_ptr(), size]
            for (p, half, m, v), size in zip(parts, sizes, strict=True)
        ]
        even = [_part_is_even(part, size) for part, size in zip(parts, sizes, strict=True)]
        # A bias of 50 numbers must not slow down the matrices: parts that cannot be read several
        # numbers at a time come last and have a launch of their own.
        self._even_blocks = sum(even[at] for at, _ in owners)
        owners.sort(key=lambda owner: not even[owner[0]])
        self._even_parts = even
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

    def is_even(self, gradients: Sequence[Tensor | None]) -> bool:
        """Return whether gradients lie so where parameters can be read several at a time."""
        each = zip(gradients, self._even_parts, strict=True)
        return all(gradient is None or not even or _is_even(gradient) for gradient, even in each)

    def square_sums(self, even: bool) -> Tensor:
        """‖g‖² of each member over all gradients, (E,) in float32."""
        partial = torch.empty(
            self.members, len(self.owners), dtype=torch.float32, device=self.device
        )
        count = len(self.owners)
        with torch.cuda.device_of(partial):  # Triton launches on the current device
            for first, blocks, shape in self._launches(even):
                kernel = _squares[blocks, self.members]
                kernel(self.owners, self.places, self.gradients, partial, first, count, **shape)
        return partial.sum(1)

    def step(
        self,
        rates: Tensor,
        decays: Tensor,
        two: Tensor,
        scales: Tensor,
        betas: tuple[float, float],
        epsilon: float,
        even: bool,
    ) -> None:
        """Adam's update in place, as `StackedAdam` writes it out in torch operations.

        Args:
            rates: (E,) learning rate over the first moment's bias correction.
            decays: (E,) weight decay.
            two: the second moment's bias correction, without axes.
            scales: (E,) what the gradient is multiplied with, in float32.
            betas: decay of the moments.
            epsilon: added to the root of the second moment.
            even: what `is_even` says of the gradients.
        """
        settings: tuple[Any, ...] = (rates, decays, two, scales, *betas, epsilon)
        with torch.cuda.device_of(self.owners):
            for first, blocks, shape in self._launches(even):
                kernel = _adam[blocks, self.members]
                kernel(self.owners, self.places, self.gradients, *settings, first, **shape)

    def _launches(self, even: bool) -> list[tuple[int, int, dict[str, int]]]:
        """Return the first block, the number of blocks and the constants of each launch."""
        split = self._even_blocks if even else 0
        parts = (0, split, _EVEN), (split, len(self.owners) - split, 1)
        return [(at, n, {"BLOCK": BLOCK, "EVEN": kind}) for at, n, kind in parts if n]


def _part_is_even(part: AdamParameter, size: int) -> bool:
    return size % _EVEN == 0 and all(_is_even(tensor) for tensor in part if tensor is not None)


def _is_even(tensor: Tensor) -> bool:
    return all(
        at % (2 * _EVEN) == 0 for at in (tensor.data_ptr(), tensor.stride(0) * tensor.itemsize)
    )


@triton.jit
def _numbers(address, offset, kind: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Where a block of numbers lies: `offset` of them after an address."""
    start = address.to(tl.pointer_type(kind)) + offset
    return tl.multiple_of(start, 2 * EVEN) + tl.arange(0, BLOCK)


@triton.jit
def _block(owners, places, number, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Whose block this is, its first number, the size of a member's part, and what is inside."""
    item = tl.load(owners + number * 2)
    first = tl.multiple_of(tl.load(owners + number * 2 + 1), EVEN)
    size = tl.multiple_of(tl.load(places + item * 5 + 4), EVEN)
    return item, first, size, first + tl.arange(0, BLOCK) < size


@triton.jit
def _gradient(gradients, item, member, first, inside, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Numbers of a gradient in float32."""
    start = tl.load(gradients + item * 3)
    offset = member * tl.load(gradients + item * 3 + 1) + first
    if tl.load(gradients + item * 3 + 2) == 1:
        half = _numbers(start, offset, tl.bfloat16, BLOCK, EVEN)
        g = tl.load(half, mask=inside, other=0.0).to(tl.float32)
    else:
        whole = _numbers(start, offset, tl.float32, BLOCK, EVEN)
        g = tl.load(whole, mask=inside, other=0.0)
    return g


@triton.jit
def _squares(
    owners, places, gradients, partial, before, count, BLOCK: tl.constexpr, EVEN: tl.constexpr
):
    member, number = tl.program_id(1).to(tl.int64), before + tl.program_id(0)
    item, first, _, inside = _block(owners, places, number, BLOCK, EVEN)
    total = 0.0
    if tl.load(gradients + item * 3) != 0:
        g = _gradient(gradients, item, member, first, inside, BLOCK, EVEN)
        total = tl.sum(g * g, 0)
    tl.store(partial + member * count + number, total)


@triton.jit
def _adam(
    owners, places, gradients, rates, decays, two, scales, keep_one, keep_two, epsilon, before,
    BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Moves one block of one member's numbers."""
    member = tl.program_id(1).to(tl.int64)
    item, first, size, inside = _block(owners, places, before + tl.program_id(0), BLOCK, EVEN)
    if tl.load(gradients + item * 3) != 0:
        at = member * size + first
        p_at = _numbers(tl.load(places + item * 5), at, tl.float32, BLOCK, EVEN)
        m_at = _numbers(tl.load(places + item * 5 + 2), at, tl.float32, BLOCK, EVEN)
        v_at = _numbers(tl.load(places + item * 5 + 3), at, tl.float32, BLOCK, EVEN)
        rate = tl.load(rates + member).to(tl.float32)
        decay = tl.load(decays + member).to(tl.float32)
        root_two = tl.sqrt(tl.load(two).to(tl.float32))
        g = _gradient(gradients, item, member, first, inside, BLOCK, EVEN)
        g *= tl.load(scales + member)
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
            half = _numbers(rounded, at, tl.bfloat16, BLOCK, EVEN)
            tl.store(half, p.to(tl.bfloat16), mask=inside)
