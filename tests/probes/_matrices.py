"""Matrices, and what is true of them by LAPACK."""

import pytest
import torch
from torch import Tensor

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def true_stable_rank(matrix: Tensor) -> float:
    values = torch.linalg.svdvals(matrix.double().cpu())
    return float(values.square().sum() / values[0] ** 2) if values[0] > 0 else 0.0


def gaussian(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def diagonal(values: Tensor, columns: int | None = None) -> Tensor:
    matrix = torch.zeros(len(values), columns or len(values), dtype=values.dtype)
    matrix.diagonal().copy_(values)
    return matrix


def noisy(rows: int, columns: int, rank: int, noise: float, seed: int = 0) -> Tensor:
    """Return `rank` singular values of 1 plus Gaussian noise of that norm."""
    left = torch.linalg.qr(gaussian(rows, rank, seed)).Q
    right = torch.linalg.qr(gaussian(columns, rank, seed + 1)).Q
    return left @ right.mT + gaussian(rows, columns, seed + 2) * (
        noise / (rows**0.5 + columns**0.5)
    )
