"""Weighted centred co-moments of latents and nodes: exact where a column is constant.

Columns are measured from their value in the heaviest row before anything is added up. A constant
column is then exactly 0, so constancy needs no tolerance, and a large common offset costs no
digits: the heaviest row holds at least 1/S of the weight and so lies within √S standard deviations
of the mean.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from joma.errors import JomaError
from joma.probes._checks import Rows


@dataclass(frozen=True, eq=False)
class Spread:
    """Where columns lie and how far they spread: origin, mean − origin, Σ w (x − mean)², (..., K).

    The mean is kept as a distance from the origin because it is known better than it could be
    written beside a large offset.
    """

    origin: Tensor
    mean: Tensor
    squares: Tensor

    def inverse_norm(self) -> Tensor:
        """1 / √Σ w (x − mean)², and 0 for a constant column: it correlates with nothing."""
        return torch.where(self.squares > 0, self.squares.rsqrt(), 0.0)


@dataclass(frozen=True, eq=False)
class Moments:
    """Total weight (...), the spread of latents and of nodes, Σ w (y − ȳ)(f − f̄) of (..., N, H)."""

    weight: Tensor
    latents: Spread
    activations: Spread
    products: Tensor

    def correlations(self) -> Tensor:
        """Pearson's correlation of every latent with every node, (..., N, H)."""
        latents = self.latents.inverse_norm().unsqueeze(-1)
        activations = self.activations.inverse_norm().unsqueeze(-2)
        return (self.products * latents).mul_(activations).clamp_(-1, 1)


def centre(values: Tensor, weights: Tensor) -> tuple[Tensor, Spread]:
    """Columns (..., S, K) minus their weighted mean, and where they lie."""
    heaviest = weights.argmax(-1)[..., None, None].expand(*weights.shape[:-1], 1, values.shape[-1])
    origin = values.gather(-2, heaviest)
    columns = values - origin
    weights = weights.unsqueeze(-2)
    mean = weights @ columns / weights.sum(-1, keepdim=True)
    columns -= mean
    squares = weights @ columns.square()
    if not squares.isfinite().all():
        raise JomaError(
            "latents and activations must be small enough for their squares to be added up, got "
            f"{values.abs().max().item():.3g}"
        )
    return columns, Spread(origin.squeeze(-2), mean.squeeze(-2), squares.squeeze(-2))


def moments(rows: Rows) -> Moments:
    """Moments of one set of rows."""
    return against(rows.latents, rows.weights, *centre(rows.activations, rows.weights))


def against(latents: Tensor, weights: Tensor, columns: Tensor, spread: Spread) -> Moments:
    """Moments of latents with nodes that are centred already."""
    latent_columns, latent_spread = centre(latents, weights)
    products = (latent_columns * weights.unsqueeze(-1)).mT @ columns
    return Moments(weights.sum(-1), latent_spread, spread, products)


def combine(first: Moments, second: Moments) -> Moments:
    """Moments of the rows of both (Chan, Golub and LeVeque 1979): means are subtracted."""
    weight = first.weight + second.weight
    part = second.weight / weight
    cross = first.weight * part
    latents, latent_step = _joined(first.latents, second.latents, part, cross)
    activations, activation_step = _joined(first.activations, second.activations, part, cross)
    step = latent_step.unsqueeze(-1) * activation_step.unsqueeze(-2)
    products = first.products + second.products + cross[..., None, None] * step
    return Moments(weight, latents, activations, products)


def _joined(first: Spread, second: Spread, part: Tensor, cross: Tensor) -> tuple[Spread, Tensor]:
    """The spread of both, and how far the second's mean lies from the first's."""
    step = (second.origin - first.origin) + (second.mean - first.mean)
    squares = first.squares + second.squares + cross.unsqueeze(-1) * step.square()
    return Spread(first.origin, first.mean + part.unsqueeze(-1) * step, squares), step
