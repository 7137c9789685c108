"""A float16 copy of a matrix with random rounding, and the matrix's norms on the way (Triton)."""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.kernels.launch import Launcher

_LANES = 1024
_PARTS = 8  # four random words of 32 bits are dice for eight entries


def frobenius(matrix: Tensor) -> Tensor:
    """Return ‖A‖_F of a contiguous matrix, in float64, at two launches."""
    count = blocks(matrix.numel())
    squares, largest = torch.empty(2, 1, count, dtype=torch.float32, device=matrix.device)
    launch_norms(matrix, squares, largest)
    norm = torch.empty((), dtype=torch.float64, device=matrix.device)
    _total[(1,)](squares, largest, norm, count, LANES=_LANES)
    return norm


def blocks(size: int) -> int:
    """Return how many blocks a matrix of that many entries has."""
    return triton.cdiv(size, _LANES * _PARTS)


def launch_norms(matrix: Tensor, squares: Tensor, largest: Tensor) -> None:
    """Write each block's largest entry, and its sum of squares over that entry's square."""
    size = matrix.numel()
    _norms[(blocks(size),)](matrix, squares, largest, size, LANES=_LANES, PARTS=_PARTS)


def launch_known(
    squares: Tensor,
    largest: Tensor,
    scale: Tensor,
    factor: Tensor,
    numbers: Tensor,
    full: float,
    *,
    guessed: bool,
) -> None:
    """Write what is known of a matrix, in one launch.

    Args:
        squares: each block's sum of squares.
        largest: each block's largest entry.
        scale: what brings entries to the range of float16, (1,): read if it was guessed, and the
            blocks then are of scaled entries, else written.
        factor: where to write the inverse of ‖A‖_F, scale and `full`, (1,).
        numbers: where to write ‖A‖_F, a power of two ≥ max|A|, and 1 where the scaled entries fit
            in float16, else 0; (3,), float64. They fit where the largest lies from 2¹⁰ to 2¹⁵: what
            is lost of the small ones is below 2⁻³⁵ of the largest.
        full: what brings entries of a basis to the range of float16.
        guessed: whether the copy was made with an older scale.
    """
    _known[(1,)](
        squares,
        largest,
        scale,
        factor,
        numbers,
        squares.numel(),
        full,
        GUESSED=guessed,
        LANES=4 * _LANES,
        num_warps=16,
    )


def launch_dither(
    matrix: Tensor,
    copy: Tensor,
    scale: Tensor,
    seed: int,
    norms: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the copy.

    Each entry of a float32 matrix goes to one of its two neighbours in float16, with probabilities
    that make it right on average. Entries of half precision are copied as they are, but for those
    below 2⁻²⁸ of the largest.

    Args:
        matrix: the matrix, contiguous.
        copy: where to write A times the scale in float16.
        scale: what brings entries to the range of float16, (1,).
        seed: of the rounding.
        norms: where to write each block's sum of squares and largest entry, scaled, not rounded.
    """
    size = matrix.numel()
    squares, largest = norms or (scale, scale)
    dice, with_norms = matrix.dtype == torch.float32, norms is not None
    arguments = {
        "matrix": matrix,
        "copy": copy,
        "scale": scale,
        "squares": squares,
        "largest": largest,
        "size": size,
        "seed": seed,
        "DICE": dice,
        "NORMS": with_norms,
        "LANES": _LANES,
        "PARTS": _PARTS,
    }
    kind = (matrix.device.index, matrix.dtype, with_norms)
    _launch_dither((blocks(size), 1, 1), kind, arguments, {})


@triton.jit
def _norms(matrix, squares, largest, size, LANES: tl.constexpr, PARTS: tl.constexpr):
    """Largest entry of a block, and its sum of squares over that entry's square."""
    at = tl.program_id(0).to(tl.int64) * (LANES * PARTS) + tl.arange(0, LANES * PARTS)
    inside = at < size
    x = tl.abs(tl.load(matrix + at, mask=inside, other=0.0).to(tl.float32))
    most = tl.max(x, 0)
    y = x / tl.where(most > 0.0, most, 1.0)
    tl.store(largest + tl.program_id(0), most)
    tl.store(squares + tl.program_id(0), tl.sum(y * y, 0))


@triton.jit
def _total(squares, largest, norm, count, LANES: tl.constexpr):
    """‖A‖_F from what is known of the blocks of a matrix."""
    found = tl.zeros([LANES], tl.float64)
    for start in range(0, count, LANES):
        at = start + tl.arange(0, LANES)
        most = tl.load(largest + at, mask=at < count, other=0.0).to(tl.float64)
        found += tl.load(squares + at, mask=at < count, other=0.0).to(tl.float64) * most * most
    tl.store(norm, tl.sqrt(tl.sum(found, 0)))


@triton.jit
def _known(
    squares,
    largest,
    scale,
    factor,
    numbers,
    count,
    full,
    GUESSED: tl.constexpr,
    LANES: tl.constexpr,
):
    total, top = tl.zeros([LANES], tl.float64), tl.zeros([LANES], tl.float32)
    for start in range(0, count, LANES):
        at = start + tl.arange(0, LANES)
        most = tl.load(largest + at, mask=at < count, other=0.0)
        part = tl.load(squares + at, mask=at < count, other=0.0).to(tl.float64)
        if not GUESSED:  # each is over the square of its largest entry
            part *= most.to(tl.float64) * most.to(tl.float64)
        # A NaN is not greater than anything, but shows in the sum.
        total, top = total + part, tl.maximum(top, most)
    norm, most = tl.sqrt(tl.sum(total, 0)), tl.max(top, 0)
    # 2^(e − 126) is above all numbers with the exponent e, of which float64 has the power.
    exponent = (most.to(tl.int32, bitcast=True) >> 23).to(tl.int64)
    power = ((exponent + 897) << 52).to(tl.float64, bitcast=True)
    power = tl.where(most == 0.0, 1.0, power)
    if GUESSED:
        own = tl.load(scale).to(tl.float64)
        norm, power = norm / own, power / own
        fits = ((most >= 1024.0) & (most <= 32768.0)).to(tl.float64)
    else:
        own = (16384.0 / power).to(tl.float32).to(tl.float64)
        tl.store(scale, own.to(tl.float32))
        fits = tl.full([], 1.0, tl.float64)
    tl.store(factor, (1.0 / (norm * own * full)).to(tl.float32))
    tl.store(numbers, norm)
    tl.store(numbers + 1, power)
    tl.store(numbers + 2, fits)


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
    block = tl.program_id(0).to(tl.int64)
    factor = tl.load(scale)
    most, total = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    word0, word1, word2, word3 = tl.randint4x(seed, (block * LANES + lane).to(tl.uint32))
    for part in tl.static_range(PARTS):
        at = block * (LANES * PARTS) + part * LANES + lane
        x = tl.load(matrix + at, mask=at < size, other=0.0).to(tl.float32) * factor
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
        tl.store(copy + at, x.to(tl.float16), mask=at < size)
    if NORMS:
        tl.store(largest + tl.program_id(0), tl.max(most, 0))
        tl.store(squares + tl.program_id(0), tl.sum(total, 0))


_launch_dither = Launcher(
    _dither, ("matrix", "copy", "scale", "squares", "largest", "size", "seed")
)
