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
    """Where columns lie and how far they spread, all (..., K).

    The mean is kept as a distance from the origin because it is known better than it could be
    written next to a large offset. Each column has its own unit, a power of two near its largest
    distance from the origin, so that no square over- or underflows.

    Attributes:
        origin: value in the heaviest row.
        unit: what distances from the origin are divided by.
        mean: (mean − origin) / unit.
        squares: Σ w ((x − mean) / unit)².
    """

    origin: Tensor
    unit: Tensor
    mean: Tensor
    squares: Tensor

    def inverse_norm(self) -> Tensor:
        """1 / √squares, and 0 for a constant column: it correlates with nothing."""
        return torch.where(self.squares > 0, self.squares.rsqrt(), 0.0)


@dataclass(frozen=True, eq=False)
class Moments:
    """Total weight (...), the spread of latents and of nodes, Σ w (y − ȳ)(f − f̄) of (..., N, H).

    The products are in the units of both.
    """

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
    """Columns (..., S, K) minus their weighted mean, in their units, and where they lie."""
    heaviest = weights.argmax(-1)[..., None, None].expand(*weights.shape[:-1], 1, values.shape[-1])
    origin = values.gather(-2, heaviest)
    columns = values - origin
    if not columns.isfinite().all():
        raise JomaError(
            "latents and activations must differ by less than float64 holds from row to row, got "
            f"{values.abs().max().item():.3g}"
        )
    unit = _powers_of_two(columns.abs().amax(-2, keepdim=True))
    columns = columns / unit
    weights = weights.unsqueeze(-2)
    mean = weights @ columns / weights.sum(-1, keepdim=True)
    columns -= mean
    squares = weights @ columns.square()
    flat = (part.squeeze(-2) for part in (origin, unit, mean, squares))
    return columns, Spread(*flat)


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
    parts = (
        part.products
        * (part.latents.unit / latents.unit).unsqueeze(-1)
        * (part.activations.unit / activations.unit).unsqueeze(-2)
        for part in (first, second)
    )
    products = sum(parts, cross[..., None, None] * step)
    return Moments(weight, latents, activations, products)


def _joined(first: Spread, second: Spread, part: Tensor, cross: Tensor) -> tuple[Spread, Tensor]:
    """The spread of both, and how far the second's mean lies from the first's, in its unit."""
    apart = second.origin - first.origin
    unit = torch.maximum(torch.maximum(first.unit, second.unit), _powers_of_two(apart.abs()))
    one, two = first.unit / unit, second.unit / unit
    step = apart / unit + (second.mean * two - first.mean * one)
    squares = first.squares * one.square() + second.squares * two.square()
    squares = squares + cross.unsqueeze(-1) * step.square()
    return Spread(first.origin, unit, first.mean * one + part.unsqueeze(-1) * step, squares), step


def _powers_of_two(sizes: Tensor) -> Tensor:
    """The powers of two at or just below sizes ≥ 0; the least normal number where they are 0.

    To divide by one loses no digit.
    """
    mantissas = torch.where(sizes > 0, torch.frexp(sizes).mantissa, 0.5)
    return torch.where(sizes > 0, sizes / (2 * mantissas), torch.finfo(sizes.dtype).tiny)
