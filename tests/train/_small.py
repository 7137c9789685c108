"""A small ensemble that learns a small hierarchy; every member has its own everything."""

import torch

from joma.data import LatentHierarchy
from joma.models import Transformer, TransformerConfig
from joma.optim import StackedAdam
from joma.train import Ensemble

SEEDS, RATES, DECAYS = (5, 0, 9), (1e-3, 3e-3, 1e-2), (1e-4, 0.0, 1e-2)
CLASSES, CHILDREN, LATENTS = 8, 2, (6, 8)


def hierarchy(seeds=SEEDS, device="cpu") -> LatentHierarchy:
    return LatentHierarchy(
        CLASSES, CHILDREN, LATENTS, tokens=20, length=12, seeds=seeds, device=device
    )


def ensemble(
    seeds=SEEDS, rates=RATES, decays=DECAYS, *, batches=None, device="cpu", precision="float64"
) -> Ensemble:
    config = TransformerConfig(vocabulary=21, outputs=CLASSES, layers=2, width=16, hidden=32)
    dtype = torch.float64 if precision == "float64" else torch.float32
    model = Transformer(config, seeds, device=device, dtype=dtype)
    optimizer = StackedAdam(model.named_parameters(), rates, decays)
    data = hierarchy(seeds, device)
    batches = batches or (lambda step: data.distinct(128, step))
    return Ensemble(model, optimizer, batches, precision=precision)


def losses(trained: Ensemble, steps: int) -> torch.Tensor:
    """The loss curves, (steps, E)."""
    curves = []
    while trained.step < steps:
        trained.advance(min(100, steps - trained.step))
        curves.append(trained.losses()[1])
    return torch.cat(curves)
