"""Run the iteration of `_graph` on a CPU, its kernels in Triton's interpreter; prints JSON.

TRITON_INTERPRET=1 python -m tests.probes.interpreted_spectrum
"""

import builtins
import json
from typing import Any

import torch
from torch import Tensor

from joma.probes.spectrum import _dither_kernel, _graph, _graph_kernels, _graph_plan
from tests.probes._matrices import noisy, true_stable_rank

ROWS, COLUMNS, FAILURE = 200, 260, 4e-7


def spectra() -> dict[str, Tensor]:
    """Return matrices whose blocks lose rank, lose orthogonality, or neither."""
    return {
        "rank 3 + noise 0.01": noisy(ROWS, COLUMNS, 3, 0.01).mT.contiguous(),
        "rank 3": noisy(ROWS, COLUMNS, 3, 0.0),
        "rank 40 + noise 0.3": noisy(ROWS, COLUMNS, 40, 0.3),
        "zero": torch.zeros(ROWS, COLUMNS),
    }


def residual(plan: _graph_plan.Plan, count: int) -> float:
    """Return by how much V_{j+1} = (M·V_j − V_{j−1}·R_jᵀ − V_j·A_j)·R⁻¹ fails, over ‖R⁻¹‖·‖M‖."""
    b = _graph_plan._COLUMNS
    half = plan._half.double() * float(plan._factor) * _graph_plan._FULL
    matrix = half if plan._wide else half.mT
    gram = matrix @ matrix.mT
    top = float(torch.linalg.matrix_norm(gram, 2))
    blocks = [plan._block(j).double() for j in range(count + 1)]
    worst = 0.0
    for j in range(count):
        columns, inverse = plan._columns[j].double(), plan._inverses[j + 1].double()
        rest = gram @ blocks[j] - blocks[j] @ columns[b:]
        if j > 0:
            rest -= blocks[j - 1] @ columns[:b]
        wrong = torch.linalg.matrix_norm(blocks[j + 1] - rest @ inverse, 2)
        worst = max(worst, float(wrong / torch.linalg.matrix_norm(inverse, 2)) / top)
    return worst


def case(name: str, matrix: Tensor) -> dict[str, Any]:
    """Return what the iteration says of a matrix, and whether that is so."""
    found = _graph.iterate(matrix, 1e-3, 0, FAILURE)
    assert found is not None, name
    plan = _graph.plan(*matrix.shape, matrix.device, FAILURE * 0.9)
    true = true_stable_rank(matrix)
    value = 1 / found.floor if found.norm else 0.0
    count = (found.products - 1) // 2
    return {
        "name": name,
        "steps": count,
        "share": found.share,
        "holds": abs(value - true) <= found.share * value,
        "error": abs(value - true) / max(true, 1e-30),
        "residual": residual(plan, count) if found.norm else 0.0,
    }


def _whole(number: Any) -> int:
    return int(number.handle.data.item()) if hasattr(number, "handle") else int(number)


def main() -> None:
    torch.set_num_threads(1)
    # The interpreter does not take its own numbers for the bounds of a loop.
    kernels: tuple[Any, ...] = (_graph_kernels, _dither_kernel)
    for module in kernels:
        module.range = lambda *bounds: builtins.range(*map(_whole, bounds))
    shares: Any = _graph_plan
    shares.SHARES = (0.15, 0.6, 1.0, 100.0)  # each is a program, which takes a while here
    for name, matrix in spectra().items():
        _graph.plan.cache_clear()
        print(json.dumps(case(name, matrix)), flush=True)


if __name__ == "__main__":
    main()
