"""A GaLore step of many bfloat16 matrices on a GPU (Triton, and torch's products).

One kernel multiplies gradients by bases and advances Adam's moments while the products are still in
registers. Tiles of all matrices are worked on by one launch: those of one matrix would leave most
of the GPU idle. Weights then move by torch's own products, whose tiles are shared between
processors, which Triton cannot do.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import contextvars
import functools
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from joma.kernels.arguments import ALIGNED, Work
from joma.kernels.choice import Fitting
from joma.kernels.eight_bits import BLOCK

AT_ONCE = 1 << 26
"""Numbers of the matrices after which a launch is full: enough for any GPU."""
_TILES = {
    "eight": {"BM": 64, "BN": 256, "BK": 64, "num_warps": 8},
    "wide": {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8},
    "narrow": {"BM": 128, "BN": 128, "BK": 64, "num_warps": 4},
}
"""Tiles for moments in eight bits, and otherwise for ranks above 128 and up to it."""
_STAGES = {"eight": (4, 3, 2, 1), "wide": (4, 3, 2, 1), "narrow": (3, 2, 1)}
"""Tiles that are loaded ahead, and the one that is worked on, as many as a GPU has room for."""
_fit = Fitting()
_NUMBERS = tl.constexpr(9)
"""Numbers of each matrix in the table that `_numbers` fills."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FIELDS = tl.constexpr(12)
"""Numbers of each matrix in the table of addresses and sides, as `_launch` fills it."""


def step(works: Sequence[Work]) -> None:
    """Move matrices, all on one GPU and with moments of one type."""
    for some in _launches(works):
        with torch.cuda.device_of(some[0].weights):  # Triton launches on the current device
            # Triton asks an allocator for descriptors' memory; that of others stays as it is.
            contextvars.copy_context().run(_launch, some)


def _launches(works: Sequence[Work]) -> Iterator[list[Work]]:
    """Yield the matrices that are worked on together."""
    some: list[Work] = []
    for work in works:
        some.append(work)
        if sum(one.weights.numel() for one in some) >= AT_ONCE:
            yield some
            some = []
    if some:
        yield some


def _launch(works: Sequence[Work]) -> None:
    triton.set_allocator(_scratch)
    device, eight = works[0].weights.device, "exp_avg_scale" in works[0].state
    most = max(work.basis.shape[1] for work in works)
    kind = "eight" if eight else "wide" if most > 128 else "narrow"
    tile = _TILES[kind]
    rows, updates, gradients = [], [], []
    for work in works:
        (m, n), rank = work.weights.shape, work.basis.shape[1]
        left, wide, state = work.side == "left", _row_length(n), work.state
        for key in _MOMENTS:
            state[key] = _aligned_rows(state[key])
        state["moment_step"] = state["moment_step"] + 1
        gradients.append(_aligned_rows(work.gradient))
        updates.append(gradients[-1].new_empty((rank, wide) if left else (m, rank)))
        tensors = gradients[-1], work.basis, state["exp_avg"], state["exp_avg_sq"], updates[-1]
        scales = [state[f"{key}_scale"].data_ptr() if eight else 0 for key in _MOMENTS]
        rows.append([*(one.data_ptr() for one in tensors), *scales, m, n, rank, wide, int(left)])
    places = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
    numbers = torch.tensor([_numbers(work) for work in works]).to(device, non_blocking=True)
    tiles = _tiles(tuple(tuple(one.shape) for one in updates), tile["BM"], tile["BN"], device)
    flags = {"EIGHT": eight, "SCALES": BLOCK}

    def launch(stages: int) -> None:
        _project[(len(tiles),)](tiles, places, numbers, **flags, **tile, num_stages=stages)

    _fit.launch((device, kind), _STAGES[kind], launch)
    for work, update, gradient in zip(works, updates, gradients, strict=True):
        _lift(work, update, gradient)


def _numbers(work: Work) -> tuple[float, ...]:
    """Return −η/(1 − β₁ᵗ), 1/√(1 − β₂ᵗ), ε, decay factor, β₁, β₂, scale, both halves of a seed."""
    group, state = work.group, work.state
    steps, (one, two) = int(state["moment_step"]), group["betas"]
    rate, root = -group["lr"] / (1 - one**steps), 1 / (1 - two**steps) ** 0.5
    halves = float(work.seed % 2**32 >> 16), float(work.seed % 2**16)  # exact in float32
    return rate, root, group["eps"], work.kept, one, two, group["scale"], *halves


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _row_length(columns: int) -> int:
    """Return the length of rows in memory of a matrix with so many columns."""
    return columns if columns % ALIGNED == 0 else -(-columns // 128) * 128


def _aligned_rows(matrix: Tensor) -> Tensor:
    """Return a matrix whose rows lie as the kernel reads them, which may be the one given."""
    rows, columns = matrix.shape
    if matrix.stride() == (_row_length(columns), 1) and matrix.data_ptr() % 16 == 0:
        return matrix
    padded = matrix.new_empty(rows, _row_length(columns))
    padded[:, :columns].copy_(matrix)
    return padded[:, :columns]


def _lift(work: Work, update: Tensor, gradient: Tensor) -> None:
    """Move weights by an update in the subspace."""
    weights, kept = work.weights, work.kept
    columns, scale = weights.shape[1], kept * work.group["scale"]
    update = update[:, :columns] if work.side == "left" else update
    factors = (work.basis, update) if work.side == "left" else (update, work.basis.mT)
    if gradient is work.gradient:
        weights.addmm_(*factors, beta=kept, alpha=scale)
        return
    # Rows that begin anywhere slow a product down fourfold; those of the copy do not.
    torch.addmm(gradient, *factors, beta=0, alpha=scale, out=gradient)
    torch.add(gradient, weights, alpha=kept, out=weights)


@functools.lru_cache(256)
def _tiles(
    shapes: tuple[tuple[int, ...], ...], height: int, width: int, device: torch.device
) -> Tensor:
    """Return item, tile row and tile column of all tiles of matrices."""
    found = [
        (item, row, column)
        for item, (rows, columns) in enumerate(shapes)
        for row in range(-(-rows // height))
        for column in range(-(-columns // width))
    ]
    return torch.tensor(found, dtype=torch.int32, device=device)


@triton.jit
def _address(places, item, field: tl.constexpr, kind: tl.constexpr):
    start = tl.load(places + item * _FIELDS + field).to(tl.pointer_type(kind))
    return tl.multiple_of(start, 16)


@triton.jit
def _side(places, item, field: tl.constexpr):
    return tl.load(places + item * _FIELDS + field).to(tl.int32)


@triton.jit
def _aligned_side(places, item, field: tl.constexpr):
    size = tl.load(places + item * _FIELDS + field).to(tl.int32)
    return tl.multiple_of(size, 16)


@triton.jit
def _multiply(
    a, b, a_rows, a_columns, a_stride, b_rows, b_columns, b_stride, row, column, length,
    TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return a tile of AB, or of AᵀB, in float32; outside of the matrices are zeros."""
    result = tl.zeros((BM, BN), dtype=tl.float32)
    left = tl.make_tensor_descriptor(
        a, [a_rows, a_columns], [a_stride, 1], [BK, BM] if TRANSPOSED else [BM, BK]
    )
    right = tl.make_tensor_descriptor(b, [b_rows, b_columns], [b_stride, 1], [BK, BN])
    for inner in range(0, length, BK):
        part = left.load([inner, row]).T if TRANSPOSED else left.load([row, inner])
        result = tl.dot(part, right.load([inner, column]), result)
    return result


@triton.jit
def _halves(tile, BM: tl.constexpr, BN: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _advance(first, second, projected, number):
    """Return both moments after a gradient, √v, and the update."""
    rate, root, epsilon = tl.load(number), tl.load(number + 1), tl.load(number + 2)
    one, two = tl.load(number + 4), tl.load(number + 5)
    first = first * one + projected * (1 - one)
    second = second * two + projected * projected * (1 - two)
    deviation = tl.sqrt(second)
    return first, second, deviation, first / (deviation * root + epsilon) * rate


@triton.jit
def _adam(projected, m1, m2, out, number, row, start, rows, length, BN: tl.constexpr):
    """Advance moments in bfloat16, and write the update."""
    column = start + tl.arange(0, BN)
    place = row[:, None] * length + column[None, :]
    inside = (row < rows)[:, None] & (column < length)[None, :]
    first = tl.load(m1 + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(m2 + place, mask=inside, other=0.0).to(tl.float32)
    first, second, _, update = _advance(first, second, projected, number)
    tl.store(out + place, update.to(tl.bfloat16), mask=inside)
    tl.store(m1 + place, first.to(tl.bfloat16), mask=inside)
    tl.store(m2 + place, second.to(tl.bfloat16), mask=inside)


@triton.jit
def _random(positions, seed):
    """Return numbers in [0, 1) that are a hash of position and seed, as in `eight_bits`."""
    mixed = positions.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32) * 0x85EBCA77
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    mixed = mixed ^ (mixed >> 16)
    return (mixed >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _encode(sizes, random, LEVELS: tl.constexpr, OCTAVES: tl.constexpr, ROOT: tl.constexpr):
    """Return codes of magnitudes that are shares of their block's largest, as in `eight_bits`."""
    per_octave: tl.constexpr = (LEVELS - 1) / OCTAVES
    smallest: tl.constexpr = 2.0**-OCTAVES
    step: tl.constexpr = 2.0 ** (OCTAVES / (LEVELS - 1)) - 1
    below = tl.floor(tl.log2(tl.maximum(sizes, 1e-37)) * per_octave)
    below = tl.maximum(below, 1.0 - LEVELS)
    up = (sizes / tl.exp2(below / per_octave) - 1) / step
    codes = tl.minimum(below + LEVELS + tl.where(random < up, 1.0, 0.0), LEVELS * 1.0)
    kept = sizes > 0 if ROOT else random < sizes / smallest
    return tl.where(sizes < smallest, tl.where(kept, 1.0, 0.0), codes)


@triton.jit
def _adam_in_eight_bits(
    projected, m1, m2, s1, s2, out, number, row, start, rows, columns, length,
    SCALES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Advance moments in eight bits, one block of a scale to a tile's row; write the update."""
    column = start + tl.arange(0, BN)
    place = row[:, None] * length + column[None, :]
    inside = (row < rows)[:, None] & (column < length)[None, :]
    block = row * tl.cdiv(columns, SCALES) + start // SCALES
    codes = tl.load(m1 + place, mask=inside, other=0).to(tl.float32)
    sign = tl.where(codes >= 128, -1.0, 1.0)
    codes = tl.where(codes >= 128, codes - 128, codes)
    scale = tl.load(s1 + block, mask=row < rows, other=0.0)
    first = tl.exp2((codes - 127) * (13.0 / 126)) * sign * scale[:, None]
    first = tl.where(codes > 0, first, 0.0)
    codes = tl.load(m2 + place, mask=inside, other=0).to(tl.float32)
    scale = tl.load(s2 + block, mask=row < rows, other=0.0)
    second = tl.exp2((codes - 255) * (15.0 / 254)) * scale[:, None]
    second = tl.where(codes > 0, second, 0.0)
    first, _, deviation, update = _advance(first, second * second, projected, number)
    tl.store(out + place, update.to(tl.bfloat16), mask=inside)
    counted = (row < rows)[:, None] & (column < columns)[None, :]
    first, deviation = tl.where(counted, first, 0.0), tl.where(counted, deviation, 0.0)
    position = row[:, None] * columns + column[None, :]
    seed = tl.load(number + 7).to(tl.uint32) * 65536 + tl.load(number + 8).to(tl.uint32)
    largest = tl.max(tl.abs(first), 1)
    tl.store(s1 + block, largest, mask=row < rows)
    sizes = tl.abs(first) / tl.where(largest > 0, largest, 1.0)[:, None]
    codes = _encode(sizes, _random(position, seed * 2), 127, 13.0, False)
    codes = tl.where((first < 0) & (codes > 0), codes + 128, codes)
    tl.store(m1 + place, codes.to(tl.uint8), mask=inside)
    largest = tl.max(deviation, 1)
    tl.store(s2 + block, largest, mask=row < rows)
    sizes = deviation / tl.where(largest > 0, largest, 1.0)[:, None]
    codes = _encode(sizes, _random(position, seed * 2 + 1), 255, 15.0, True)
    tl.store(m2 + place, codes.to(tl.uint8), mask=inside)


@triton.jit
def _project(
    tiles, places, numbers,
    EIGHT: tl.constexpr, SCALES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Project gradients, advance the moments and write the updates in the subspace.

    The moments of a tile are worked on in quarters, one after the other, for they would not all fit
    into the registers with the product.
    """
    tile = tiles + tl.program_id(0) * 3
    item = tl.load(tile)
    m, n = _side(places, item, 7), _side(places, item, 8)
    r, wide = _aligned_side(places, item, 9), _aligned_side(places, item, 10)
    g = _address(places, item, 0, tl.bfloat16)
    p = _address(places, item, 1, tl.bfloat16)
    top, start = tl.load(tile + 1) * BM, tl.load(tile + 2) * BN
    left = tl.load(places + item * _FIELDS + 11) != 0
    if left:  # R = PᵀG, (r, n)
        projected = _multiply(p, g, m, r, r, m, n, wide, top, start, m, True, BM, BN, BK)
    else:  # R = GP, (m, r)
        projected = _multiply(g, p, m, n, wide, n, r, r, top, start, n, False, BM, BN, BK)
    rows, columns = tl.where(left, r, m), tl.where(left, n, r)
    length = tl.where(left, wide, r)
    row = top + tl.arange(0, BM)
    number = numbers + item * _NUMBERS
    out = _address(places, item, 4, tl.bfloat16)
    if EIGHT:
        m1 = _address(places, item, 2, tl.uint8)
        m2 = _address(places, item, 3, tl.uint8)
        s1 = _address(places, item, 5, tl.float32)
        s2 = _address(places, item, 6, tl.float32)
        _adam_in_eight_bits(
            projected, m1, m2, s1, s2, out, number, row, start, rows, columns, length, SCALES, BN
        )
    else:
        m1 = _address(places, item, 2, tl.bfloat16)
        m2 = _address(places, item, 3, tl.bfloat16)
        quarter: tl.constexpr = BN // 4
        half_1, half_2 = _halves(projected, BM, BN)
        part_1, part_2 = _halves(half_1, BM, BN // 2)
        part_3, part_4 = _halves(half_2, BM, BN // 2)
        _adam(part_1, m1, m2, out, number, row, start, rows, length, quarter)
        _adam(part_2, m1, m2, out, number, row, start + quarter, rows, length, quarter)
        _adam(part_3, m1, m2, out, number, row, start + 2 * quarter, rows, length, quarter)
        _adam(part_4, m1, m2, out, number, row, start + 3 * quarter, rows, length, quarter)
