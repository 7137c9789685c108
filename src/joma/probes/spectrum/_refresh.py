"""The greatest singular value of a matrix that moved a little since it was measured.

Below: the greatest Rayleigh quotient within the old top vectors. Above: σ₁ moves by at most the
norm of the change, σ₁(A) ≤ σ₁(A₀) + ‖A − A₀‖, and a change D is seen in the sketch Ωᵀ·D that an old
Gaussian Ω of b columns makes of it: with g = uᵀΩ for its top singular vector u, ‖Ωᵀ·D‖ ≥ ‖D‖·‖g‖,
so ‖D‖² is at most ‖Ωᵀ·D‖² over the quantile of ‖g‖², a chi-square variable. Ω must not have
influenced the change; a measurement never does.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma.errors import JomaError
from joma.probes.spectrum._krylov import chi_square_floor
from joma.probes.spectrum._matrix import Operator

_VECTORS = 8
_SKETCH = 24
_ROUNDS = 6


@dataclass(frozen=True, eq=False)
class Anchor:
    """What is kept of a matrix: its leading vectors, a random start and what it made of it.

    Attributes:
        block_SB: leading vectors, then the columns of the start.
        vectors: how many are leading vectors.
        before_TB: zeros for the leading vectors, then Aᵀ of the start.
        ceiling: upper bound of σ₁.
        replay: on a GPU, the captured work of a refresh.
    """

    block_SB: Tensor
    vectors: int
    before_TB: Tensor
    ceiling: float
    replay: dict[str, Any] = field(default_factory=dict, repr=False)


def anchor(linear: Operator, top_S: Tensor, ceiling: float, seed: int) -> Anchor:
    """Return what to keep of a matrix whose top vector and upper bound of σ₁ are known."""
    dice = torch.Generator(linear.device).manual_seed(seed + 1)  # not the start that found them
    like = {"generator": dice, "device": linear.device, "dtype": linear.dtype}
    more = torch.randn(linear.side, min(_VECTORS, linear.side) - 1, **like)
    vectors = torch.cat([top_S.to(linear.dtype).unsqueeze(-1), more], -1)
    for _ in range(_ROUNDS):
        vectors = torch.linalg.qr(linear.apply(vectors)).Q
    start = torch.randn(linear.side, _SKETCH, **like)
    before = torch.nn.functional.pad(linear.across(start), (vectors.shape[-1], 0))
    block = torch.cat([torch.linalg.qr(vectors).Q, start], -1)
    return Anchor(block, vectors.shape[-1], before, ceiling)


def refreshed(
    linear: Operator, anchor: Anchor, failure: float, where: Hashable = None
) -> tuple[float, float, float]:
    """Return lower and upper bound of σ₁² and ‖A‖_F of the matrix as it is now.

    Args:
        linear: the matrix.
        anchor: what was kept of it.
        failure: probability that the upper bound does not hold.
        where: on a GPU, what identifies the memory of the matrix. A weight that training changes
            in place stays there, and from the second time on the work is replayed.
    """
    side, kept = linear.side, len(anchor.block_SB)
    if kept != side or anchor.block_SB.device != linear.device:
        raise JomaError(
            f"start must come from a matrix of the same shape on {linear.device}, got one with a "
            f"shorter side of {kept} on {anchor.block_SB.device}, not {side}"
        )
    packed = _replayed(linear, anchor, where).cpu().numpy()  # one wait for the device
    norm = float(packed[-1])
    if not np.isfinite(packed).all():
        return math.nan, math.nan, norm
    gram = packed[:-1].reshape(anchor.block_SB.shape[1], -1)
    k = anchor.vectors
    floor = float(np.linalg.eigvalsh(gram[:k, :k])[-1])
    seen = float(np.linalg.eigvalsh(gram[k:, k:])[-1])
    moved = math.sqrt(max(seen, 0.0) / chi_square_floor(_SKETCH, failure))
    ceiling = min(anchor.ceiling + moved, norm) * (1 + 1e-5)
    return floor, ceiling**2, norm


@cache
def _pool(device: torch.device) -> Any:
    """Return one pool of memory for all graphs, since no two of them are replayed at once."""
    del device
    return torch.cuda.graph_pool_handle()


def _packed(linear: Operator, anchor: Anchor) -> Tensor:
    """Return the Gram matrix of what the block gives, whose two halves count, and ‖A‖_F, packed."""
    image = linear.across(anchor.block_SB.to(linear.dtype))
    if len(image) != len(anchor.before_TB):
        raise JomaError(
            f"start must come from a matrix of the same shape, got one with a longer side of "
            f"{len(anchor.before_TB)}, not {len(image)}"
        )
    image = (image - anchor.before_TB).double()
    return torch.cat([(image.mT @ image).reshape(-1), linear.frobenius.reshape(1)])


def _replayed(linear: Operator, anchor: Anchor, where: Hashable) -> Tensor:
    """Return `_packed`, from a captured graph where the matrix has the same memory as last time.

    Launched one by one, its kernels take less time than their launches: the mark of 0.4 ms for a
    warm start needs the graph (`python -m benchmarks.probes`).
    """
    if where is None or torch.cuda.is_current_stream_capturing():
        return _packed(linear, anchor)
    if anchor.replay.get("where") != where:
        anchor.replay.clear()
        anchor.replay["where"] = where
        return _packed(linear, anchor)
    if "graph" not in anchor.replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, _pool(linear.device), capture_error_mode="thread_local"):
            anchor.replay["packed"] = _packed(linear, anchor)
        anchor.replay["graph"] = graph
    anchor.replay["graph"].replay()
    return anchor.replay["packed"]
