"""What a search will take, before it is begun."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from joma.analysis.superposition._observe import batches, run
from joma.analysis.superposition._search import check
from joma.analysis.superposition._settings import Settings
from joma.models import Loaded

_MODELS = 2
_READINGS = 4
"""The text is read twice, by the model and by an untrained one."""

_BESIDE = 1.6
"""How much longer all takes than the bare readings, as measured on a CPU."""

_AROUND = 5e8
"""Bytes that Python, torch and one batch take."""


def estimate(
    loaded: Loaded,
    windows: Tensor,
    *,
    layers: Sequence[int] | None = None,
    nodes: int | None = None,
    settings: Settings | None = None,
) -> tuple[float, float]:
    """Seconds and bytes that `search` will take; one batch is read for it, twice."""
    settings = settings or Settings()
    chosen = check(loaded, windows, layers=layers, nodes=nodes, settings=settings)
    _, batch = next(batches(loaded, windows))
    run(loaded, batch)
    if batch.is_cuda:
        torch.cuda.synchronize(batch.device)
    start = time.perf_counter()
    run(loaded, batch)
    if batch.is_cuda:
        torch.cuda.synchronize(batch.device)
    reading = (time.perf_counter() - start) * len(windows) / len(batch)
    weights = sum(weight.numel() * weight.element_size() for weight in loaded.model.parameters())
    most = windows.numel() if nodes is None else nodes * settings.contexts
    rows = min(most, windows.numel()) * (windows.shape[1] + settings.directions) * 4
    return (
        reading * _READINGS * _BESIDE,
        _MODELS * (weights + len(chosen) * rows) + _AROUND,
    )
