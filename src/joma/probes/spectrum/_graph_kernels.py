"""Kernels of `_graph`: a step of block Lanczos around its two products, and its bound (Triton)."""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import triton
import triton.language as tl


@triton.jit
def _store_parts(x, out, row, inside, FULL: tl.constexpr, LOW: tl.constexpr, B: tl.constexpr):
    """A block as two float16 parts side by side, 22 bits."""
    x = x * FULL
    high = x.to(tl.float16)
    low = ((x - high.to(tl.float32)) * LOW).to(tl.float16)
    at = out + row[:, None] * (2 * B) + tl.arange(0, B)[None, :]
    tl.store(at, high, mask=inside)
    tl.store(at + B, low, mask=inside)


@triton.jit
def _load_parts(product, factor, row, inside, LOW: tl.constexpr, B: tl.constexpr):
    """The sum of the products of both parts."""
    at = product + row[:, None] * (2 * B) + tl.arange(0, B)[None, :]
    x = tl.load(at, mask=inside, other=0.0) + tl.load(at + B, mask=inside, other=0.0) / LOW
    return x * tl.load(factor)


@triton.jit
def split(
    block,
    out,
    stride,
    rows,
    FULL: tl.constexpr,
    LOW: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    at = block + row[:, None] * stride + tl.arange(0, B)[None, :]
    _store_parts(tl.load(at, mask=inside, other=0.0), out, row, inside, FULL, LOW, B)


@triton.jit
def middle(
    product,
    out,
    factor,
    rows,
    FULL: tl.constexpr,
    LOW: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    _store_parts(_load_parts(product, factor, row, inside, LOW, B), out, row, inside, FULL, LOW, B)


@triton.jit
def gathered(
    product,
    basis,
    roots,
    factor,
    partial,
    j,
    stride,
    rows,
    FIRST: tl.constexpr,
    LOW: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
):
    """W = M·V_j − V_{j−1}·R_jᵀ in the place of V_{j+1}, and a part of V_jᵀV_j, V_jᵀW and WᵀW."""
    row, place = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, B)
    inside = (row < rows)[:, None]
    at = basis + row[:, None].to(tl.int64) * stride + j * B + place[None, :]
    out = partial + tl.program_id(0) * (3 * B * B) + place[:, None] * B + place[None, :]
    now = tl.load(at, mask=inside, other=0.0)
    x = _load_parts(product, factor, row, inside, LOW, B)
    if not FIRST:
        root = tl.load(roots + j * B * B + place[None, :] * B + place[:, None])  # transposed
        before = tl.load(at - B, mask=inside, other=0.0)
        x -= tl.dot(before, root, input_precision="ieee")
    tl.store(at + B, x, mask=inside)
    tl.store(out, _inner(now, now))
    tl.store(out + B * B, _inner(now, x))
    tl.store(out + 2 * B * B, _inner(x, x))


@triton.jit
def _inner(x, y):
    return tl.dot(tl.trans(x.to(tl.float64)), y.to(tl.float64), out_dtype=tl.float64)


@triton.jit
def added(partial, total, count, SIZE: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr):
    """The sum of the parts, always in the same order."""
    place = tl.program_id(0) * EACH + tl.arange(0, EACH)
    found = tl.zeros([EACH], tl.float64)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        at = partial + row[:, None] * SIZE + place[None, :]
        found += tl.sum(tl.load(at, mask=(row < count)[:, None], other=0.0), 0)
    tl.store(total + place, found)


@triton.jit
def formed(
    total,
    columns,
    roots,
    gram,
    narrow,
    sizes,
    j,
    RIDGE: tl.constexpr,
    STEEP: tl.constexpr,
    FIRST: tl.constexpr,
    B: tl.constexpr,
):
    """A = V_jᵀW, the Gram matrix of W − V_j·A in both precisions, and what is small in it.

    The three-term recurrence alone is stable: once V_{j−1} is taken out of W a second time, the
    projection has false eigenvalues where orthogonality is lost.
    """
    row, place = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    area: tl.constexpr = B * B
    at, turned = row * B + place, place * B + row
    vw = tl.load(total + area + at)
    own = vw.to(tl.float32)
    wide = own.to(tl.float64)
    twice = 2 * vw - tl.dot(
        tl.load(total + at), wide, out_dtype=tl.float64
    )  # V: nearly orthonormal
    found = tl.load(total + 2 * area + at) - tl.dot(tl.trans(wide), twice, out_dtype=tl.float64)
    found = 0.5 * (found + tl.trans(found))  # `own` is rounded, which makes it not quite symmetric
    tl.store(gram + at, found)
    tl.store(narrow + at, found.to(tl.float32))
    tl.store(columns + (2 * j + 1) * area + at, own)
    longest = tl.max(tl.max(tl.where(row == place, found, 0.0), 1), 0)
    most = tl.maximum(tl.max(tl.max(tl.where(row == place, wide, 0.0), 1), 0), tl.sqrt(longest))
    if not FIRST:
        tl.store(columns + 2 * j * area + at, tl.load(roots + j * area + turned))
        most = tl.maximum(most, tl.load(sizes))
    ridge = RIDGE * most * most
    tl.store(sizes, most)
    tl.store(sizes + 1, ridge)
    tl.store(sizes + 2, tl.maximum(STEEP * longest, 100.0 * ridge))


@triton.jit
def _eliminated(rest, B: tl.constexpr):
    """R and R⁻ᵀ without their scale, and the pivots, which are the squares of the scale."""
    row, place = tl.arange(0, B)[:, None], tl.arange(0, B)
    factor = tl.where(row == place[None, :], 1.0, 0.0).to(rest.dtype)
    pivots = tl.full([B], 1.0, rest.dtype)
    for k in range(B):
        line = tl.sum(tl.where(row == k, rest, 0.0), 0)
        pivot = tl.sum(tl.where(place == k, line, 0.0), 0)
        pivots = tl.where(place == k, pivot, pivots)
        share = tl.where(place > k, line * (1.0 / pivot), 0.0)[:, None]  # one division
        rest -= share * line[None, :]
        factor -= share * tl.sum(tl.where(row == k, factor, 0.0), 0)[None, :]
    return rest, factor, pivots


@triton.jit
def _store_root(rest, factor, pivots, root, inverse, B: tl.constexpr):
    row, place = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    scale = (1.0 / tl.sqrt(pivots))[:, None]
    upper = tl.where(row <= place, rest * scale, 0.0)
    tl.store(root + row * B + place, upper.to(tl.float32))
    tl.store(inverse + place * B + row, (factor * scale).to(tl.float32))


@triton.jit
def rooted(gram, narrow, sizes, roots, inverses, j, B: tl.constexpr):
    """R and R⁻¹ of the next block, for RᵀR the Gram matrix, by elimination.

    A block whose columns nearly depend on each other, or are short, is eliminated in float64, and
    with a ridge: directions of the size of rounding stay short.
    """
    row, place = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    root, inverse = roots + (j + 1) * B * B, inverses + (j + 1) * B * B
    rest, factor, pivots = _eliminated(tl.load(narrow + row * B + place), B)
    needed = tl.load(sizes + 2).to(tl.float32)
    if tl.sum((pivots > needed).to(tl.int32), 0) == B:  # a NaN is not greater
        _store_root(rest, factor, pivots, root, inverse, B)
    else:
        ridge = tl.where(row == place, tl.load(sizes + 1), 0.0)
        wide, factor64, pivots64 = _eliminated(tl.load(gram + row * B + place) + ridge, B)
        _store_root(wide, factor64, pivots64, root, inverse, B)


@triton.jit
def turned(
    basis,
    inverses,
    columns,
    thin,
    j,
    stride,
    rows,
    FULL: tl.constexpr,
    LOW: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
):
    """V_{j+1} = (W − V_j·A)·R⁻¹ in place of W, and as two float16 parts."""
    row, place = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, B)
    inside = (row < rows)[:, None]
    square = place[:, None] * B + place[None, :]
    at = basis + row[:, None].to(tl.int64) * stride + j * B + place[None, :]
    x = tl.load(at + B, mask=inside, other=0.0)
    now, own = tl.load(at, mask=inside, other=0.0), tl.load(columns + (2 * j + 1) * B * B + square)
    x -= tl.dot(now, own, input_precision="ieee")
    x = tl.dot(x, tl.load(inverses + (j + 1) * B * B + square), input_precision="ieee")
    tl.store(at + B, x, mask=inside)
    _store_parts(x, thin, row, inside, FULL, LOW, B)


@triton.jit
def _white(kernel, factor, now, before, BLOCK: tl.constexpr):
    """L⁻¹ of factor and polynomials, for the Cholesky factor L of K, by elimination."""
    row, place = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)
    pivots = tl.full([BLOCK], 1.0, tl.float64)
    for k in range(BLOCK):
        line = tl.sum(tl.where(row == k, kernel, 0.0), 0)
        pivot = tl.sum(tl.where(place == k, line, 0.0), 0)
        pivots = tl.where(place == k, pivot, pivots)
        share = tl.where(place > k, line * (1.0 / pivot), 0.0)[:, None]  # one division
        kernel -= share * line[None, :]
        factor -= share * tl.sum(tl.where(row == k, factor, 0.0), 0)[None, :]
        now -= share * tl.sum(tl.where(row == k, now, 0.0), 0)[None, :]
        before -= share * tl.sum(tl.where(row == k, before, 0.0), 0)[None, :]
    scale = (1.0 / tl.sqrt(pivots))[:, None]
    return factor * scale, now * scale, before * scale


@triton.jit
def grown(
    columns,
    inverse,
    top,
    excess,
    kernels,
    factors,
    count,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    RAISED: tl.constexpr,
):
    """K(λ), one λ per program, and the change of basis F that kept it small.

    K(λ) = Σ P_j·P_jᵀ with P_{j+1} = (λ·P_j − P_j·A_j − P_{j−1}·B_j)·R⁻¹, in float64.
    """
    row, place = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)
    at = row * BLOCK + place[None, :]
    size: tl.constexpr = BLOCK * BLOCK
    one = tl.where(row == place[None, :], 1.0, 0.0).to(tl.float64)
    level = tl.load(top).to(tl.float64)
    level *= 1.0 + tl.load(excess + tl.program_id(0)).to(tl.float64)
    before = tl.zeros([BLOCK, BLOCK], tl.float64)
    now = tl.load(inverse + at).to(tl.float64)
    total = tl.dot(now, tl.trans(now), out_dtype=tl.float64)
    factor = one
    for j in range(count):
        cross = tl.load(columns + j * 2 * size + at).to(tl.float64)
        own = tl.load(columns + j * 2 * size + size + at).to(tl.float64)
        back = tl.load(inverse + (j + 1) * size + at).to(tl.float64)
        new = level * now - tl.dot(now, own, out_dtype=tl.float64)
        new -= tl.dot(before, cross, out_dtype=tl.float64)
        new = tl.dot(new, back, out_dtype=tl.float64)
        gain = tl.dot(new, tl.trans(new), out_dtype=tl.float64)
        # A share of what is too large is added: less than K is a bound, too.
        total += gain * tl.minimum(1.0, LARGEST / tl.max(tl.max(tl.abs(gain), 1), 0))
        before, now = now, new
        if tl.max(tl.max(tl.abs(total), 1), 0) > RAISED:
            factor, now, before = _white(total, factor, now, before, BLOCK)
            total = one
    tl.store(kernels + tl.program_id(0) * size + at, total)
    tl.store(factors + tl.program_id(0) * size + at, factor)


@triton.jit
def excluded(kernels, factors, top, defect, out, quantile, BLOCK: tl.constexpr):
    """Whether λ is more than the top eigenvalue, one λ per program: whether r·F·K·Fᵀ ≻ F·Fᵀ."""
    row, place = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)
    at = tl.program_id(0) * BLOCK * BLOCK + row * BLOCK + place[None, :]
    factor = tl.load(factors + at)
    # Gaussian elimination: positive definite if and only if all pivots are positive.
    rest = tl.load(kernels + at) * (quantile / tl.load(defect))
    rest -= tl.dot(factor, tl.trans(factor), out_dtype=tl.float64)
    positive = tl.load(top) > 0
    for k in range(BLOCK):
        line = tl.sum(tl.where(row == k, rest, 0.0), 0)
        pivot = tl.sum(tl.where(place == k, line, 0.0), 0)
        positive &= pivot > 0  # false for NaN too
        rest -= (line * (1.0 / pivot))[:, None] * line[None, :]
    tl.store(out + tl.program_id(0), positive.to(tl.int32))


@triton.jit
def concluded(flags, excess, top, defect, numbers, count, PLACES: tl.constexpr):
    """The first excess from which on all are excluded, ∞ where the last is not; and what led there.

    The excess, the estimate of the top eigenvalue, and the norm of Qᵀ·Q, in float64.
    """
    place = tl.arange(0, PLACES)
    flag = tl.load(flags + place, mask=place < count, other=1)
    first = tl.max(tl.where(flag == 0, place + 1, 0), 0)
    found = tl.load(excess + first, mask=first < count, other=float("inf"))
    tl.store(numbers, found.to(tl.float64))
    tl.store(numbers + 1, tl.load(top).to(tl.float64))
    tl.store(numbers + 2, tl.load(defect).to(tl.float64))


@triton.jit
def quotients(power, image, out, size, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Rayleigh quotient of each column, given what a matrix makes of them, all (size, size).

    Columns that vanished have none, and get 0; NaN is passed on, to be found.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    square, turned = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    for start in range(0, size, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < size)[:, None] & (column < size)[None, :]
        at = row[:, None] * size + column[None, :]
        x = tl.load(power + at, mask=inside, other=0.0)
        square += tl.sum(x * x, 0)
        turned += tl.sum(x * tl.load(image + at, mask=inside, other=0.0), 0)
    tl.store(out + column, tl.where(square <= 1e-20, 0.0, turned / square), mask=column < size)
