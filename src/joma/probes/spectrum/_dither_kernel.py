"""A float16 copy of a matrix with random rounding, and the matrix's norms on the way (Triton)."""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import torch
import triton
import triton.language as tl
from torch import Tensor

_LANES = 1024
_PARTS = 8  # four random words of 32 bits are dice for eight entries


def half_copy(matrices_LMN: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """‖A‖_F and a power of two ≥ max|A|, (L,) in float64, and A·2¹⁴ over that power in float16.

    Each entry of a float32 matrix goes to one of its two neighbours in float16, with probabilities
    that make it right on average. Entries of half precision are copied as they are, but for those
    below 2⁻²⁸ of the largest.
    """
    matrices_LMN = matrices_LMN.contiguous()
    norm_L, most_L, scale_L = norms(matrices_LMN)
    copy = torch.empty_like(matrices_LMN, dtype=torch.float16)
    blocks = grid(matrices_LMN[0].numel(), len(matrices_LMN))
    launch_dither(matrices_LMN, copy, scale_L, blocks, seed)
    return norm_L, most_L, copy


def norms(matrices_LMN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `scales` tells of contiguous matrices."""
    return scales(*_of_blocks(matrices_LMN))


def frobenius(matrices_LMN: Tensor) -> Tensor:
    """‖A‖_F of contiguous matrices, (L,) in float64, at two launches."""
    squares, largest = _of_blocks(matrices_LMN)
    norm_L = torch.empty(len(squares), dtype=torch.float64, device=squares.device)
    _total[(len(squares),)](squares, largest, norm_L, squares.shape[1], LANES=_LANES)
    return norm_L


def _of_blocks(matrices_LMN: Tensor) -> tuple[Tensor, Tensor]:
    blocks = grid(matrices_LMN[0].numel(), len(matrices_LMN))
    squares, largest = torch.empty(
        2, *blocks[::-1], dtype=torch.float32, device=matrices_LMN.device
    )
    launch_norms(matrices_LMN, squares, largest, blocks)
    return squares, largest


def grid(size: int, count: int) -> tuple[int, int]:
    """Blocks of one matrix of that many entries, and matrices."""
    return triton.cdiv(size, _LANES * _PARTS), count


def launch_norms(
    matrices: Tensor, squares: Tensor, largest: Tensor, blocks: tuple[int, int]
) -> None:
    """Writes each block's largest entry, and its sum of squares over that entry's square."""
    size = matrices.numel() // blocks[1]
    _norms[blocks](matrices, squares, largest, size, LANES=_LANES, PARTS=_PARTS)


def scales(squares: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """‖A‖_F, a power of two ≥ max|A|, and what brings entries to the range of float16."""
    most_L = torch.exp2(torch.frexp(largest.amax(-1)).exponent.double())
    norm_L = (squares.double() * largest.double().square()).sum(-1).sqrt()
    return norm_L, most_L, (16384.0 / most_L).float()


def unscaled(squares: Tensor, largest: Tensor, scale_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """‖A‖_F, a power of two ≥ max|A|, and 1 where the scaled entries fit in float16, else 0.

    They fit where the largest lies from 2¹⁰ to 2¹⁵: what is lost of the small ones is below 2⁻³⁵ of
    the largest.
    """
    scale_L, most_L = scale_L.double(), largest.amax(-1)
    norm_L = squares.double().sum(-1).sqrt() / scale_L
    fits_L = (most_L >= 1024.0) & (most_L <= 32768.0)
    most_L = torch.exp2(torch.frexp(most_L).exponent.double()) / scale_L
    return norm_L, most_L, fits_L.double()


def launch_dither(
    matrices: Tensor, copy: Tensor, scale_L: Tensor, blocks: tuple[int, int], seed: int
) -> None:
    """Writes the copy."""
    _launch(matrices, copy, scale_L, scale_L, scale_L, blocks, seed, norms=False)


def launch_both(
    matrices: Tensor,
    copy: Tensor,
    scale_L: Tensor,
    squares: Tensor,
    largest: Tensor,
    blocks: tuple[int, int],
    seed: int,
) -> None:
    """Writes the copy, and each block's sum of squares and largest entry, scaled, not rounded."""
    _launch(matrices, copy, scale_L, squares, largest, blocks, seed, norms=True)


def _launch(
    matrices: Tensor,
    copy: Tensor,
    scale_L: Tensor,
    squares: Tensor,
    largest: Tensor,
    blocks: tuple[int, int],
    seed: int,
    *,
    norms: bool,
) -> None:
    _dither[blocks](
        matrices,
        copy,
        scale_L,
        squares,
        largest,
        matrices.numel() // blocks[1],
        seed,
        DICE=matrices.dtype == torch.float32,
        NORMS=norms,
        LANES=_LANES,
        PARTS=_PARTS,
    )


@triton.jit
def _norms(matrix, squares, largest, size, LANES: tl.constexpr, PARTS: tl.constexpr):
    """Largest entry of a block, and its sum of squares over that entry's square."""
    at = tl.program_id(0).to(tl.int64) * (LANES * PARTS) + tl.arange(0, LANES * PARTS)
    inside = at < size
    x = tl.load(matrix + tl.program_id(1).to(tl.int64) * size + at, mask=inside, other=0.0)
    x = tl.abs(x.to(tl.float32))
    most = tl.max(x, 0)
    y = x / tl.where(most > 0.0, most, 1.0)
    out = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(largest + out, most)
    tl.store(squares + out, tl.sum(y * y, 0))


@triton.jit
def _total(squares, largest, norm, count, LANES: tl.constexpr):
    """‖A‖_F from what is known of the blocks of a matrix."""
    base = tl.program_id(0).to(tl.int64) * count
    found = tl.zeros([LANES], tl.float64)
    for start in range(0, count, LANES):
        at = start + tl.arange(0, LANES)
        most = tl.load(largest + base + at, mask=at < count, other=0.0).to(tl.float64)
        found += (
            tl.load(squares + base + at, mask=at < count, other=0.0).to(tl.float64) * most * most
        )
    tl.store(norm + tl.program_id(0), tl.sqrt(tl.sum(found, 0)))


@triton.jit
def _dither(
    matrix,
    copy,
    scale,
    squares,
    largest,
    size,
    seed,
    DICE: tl.constexpr,
    NORMS: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
):
    lane = tl.arange(0, LANES)
    block = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    start = tl.program_id(0).to(tl.int64) * (LANES * PARTS)
    base = tl.program_id(1).to(tl.int64) * size
    factor = tl.load(scale + tl.program_id(1))
    most, total = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    word0, word1, word2, word3 = tl.randint4x(seed, (block * LANES + lane).to(tl.uint32))
    for part in tl.static_range(PARTS):
        at = start + part * LANES + lane
        x = tl.load(matrix + base + at, mask=at < size, other=0.0).to(tl.float32) * factor
        if NORMS:
            # A NaN is not greater than anything, but shows in the sum.
            most, total = tl.maximum(most, tl.abs(x)), total + x * x
        if DICE:
            if part // 2 == 0:
                word = word0
            elif part // 2 == 1:
                word = word1
            elif part // 2 == 2:
                word = word2
            else:
                word = word3
            dice = (word.to(tl.int32, bitcast=True) >> (16 * (part % 2))) & 0x1FFF
            # float16 keeps 10 of 23 bits: carry with the probability the other 13 say, then cut.
            bits = (x.to(tl.int32, bitcast=True) + dice) & -8192
            x = bits.to(tl.float32, bitcast=True)
        tl.store(copy + base + at, x.to(tl.float16), mask=at < size)
    if NORMS:
        out = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.store(largest + out, tl.max(most, 0))
        tl.store(squares + out, tl.sum(total, 0))
