"""Run the kernels of gathered rows in Triton's interpreter next to float64; prints JSON.

TRITON_INTERPRET=1 python -m tests.inference.sparsify.interpreted_rows
"""

import json
from itertools import product

import torch

from joma.inference.sparsify._rows_kernel import rows_times, times_rows

SHAPES = ((1, 40, 16, 7), (3, 300, 24, 290), (2, 150, 520, 129), (2, 50, 1100, 16), (0, 9, 8, 4))
"""Tokens, rows, numbers of each, rows that each token has; rows may come twice."""


def main() -> None:
    """Print one line for each shape and type: relative errors of both products."""
    for (tokens, rows, width, kept), dtype in product(SHAPES, (torch.float32, torch.float16)):
        dice = torch.Generator().manual_seed(0)
        matrix = torch.randn(rows, width + 8, generator=dice).to(dtype)[:, :width]
        given = torch.randn(tokens, width, generator=dice).to(dtype)
        weights = torch.randn(tokens, kept, generator=dice).to(dtype)
        index = torch.randint(rows, (tokens, kept), generator=dice)
        own = matrix.double()[index]
        pairs = (
            (rows_times(matrix, given, index), (own @ given.double().unsqueeze(2)).squeeze(2)),
            (times_rows(weights, matrix, index), (weights.double().unsqueeze(1) @ own).squeeze(1)),
        )
        errors = []
        for found, expected in pairs:
            assert found.dtype == dtype
            assert found.shape == expected.shape
            size = float(expected.norm()) or 1.0
            errors.append(float((found.double() - expected).norm()) / size)
        print(json.dumps({"type": str(dtype), "tokens": tokens, "width": width, "errors": errors}))


if __name__ == "__main__":
    main()
