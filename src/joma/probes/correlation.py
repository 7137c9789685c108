"""Normalised correlation of latents with hidden nodes: do nodes learn the latents (JoMA, Table 1)?

NCorr of a latent is the largest signed, centred correlation between it and the activation of any
hidden node over samples; a node's activation is its maximum over the sequence. The largest of
thousands of correlations is large by chance alone: read it next to `joma.probes.controls`.

All is batched over leading axes, which broadcast, and computed in float64 on the device of the
input. A member of an ensemble gets the same numbers whatever its neighbours are.

Underneath are weighted centred co-moments that are exact where a column is constant: columns are
measured from their value in the heaviest row before anything is added up. A constant column is then
exactly 0, so constancy needs no tolerance, and a large common offset costs no digits: the heaviest
row holds at least 1/S of the weight and so lies within √S standard deviations of the mean.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from joma.errors import JomaError
from joma.probes import _checks


@dataclass(frozen=True, eq=False)
class NCorr:
    """How well the best node follows each latent.

    Attributes:
        values: signed maximum over nodes of the correlation, (..., N); 0 where the latent does not
            vary.
        nodes: which node that is, (..., N), the first of equals; −1 where the latent does not vary.
        varying: whether the latent takes more than one value in the rows that count, (..., N).
    """

    values: Tensor
    nodes: Tensor
    varying: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean over all latents, (...); those that do not vary count as 0."""
        return self.values.mean(-1)


def ncorr(latents: Tensor, activations: Tensor, weights: Tensor | None = None) -> NCorr:
    """The best node for every latent, by signed centred (Pearson) correlation.

    A node that is constant over the rows that count correlates 0 with everything.

    Args:
        latents: (..., S, N), truth values or numbers.
        activations: (..., S, H), of each node on each row.
        weights: (..., S), ≥ 0, how much each row counts; equally where None. C classes drawn n
            times are exactly C rows weighted by how often each was drawn.

    Raises:
        ValueError: where shapes do not fit, there are no rows that count, or numbers are not
            finite.
    """
    return _best(moments(rows(latents, activations, weights)))


class NCorrAccumulator:
    """`ncorr` over rows that come in batches: equal to one call on all rows, to rounding.

    It keeps moments of (..., N, H), not rows.
    """

    def __init__(self) -> None:
        self._moments: Moments | None = None

    def update(self, latents: Tensor, activations: Tensor, weights: Tensor | None = None) -> None:
        """Adds rows; arguments as of `ncorr`, leading axes, N and H as in earlier updates."""
        new = moments(rows(latents, activations, weights))
        if self._moments is None:
            self._moments = new
            return
        have, given = self._moments.products, new.products
        if have.shape != given.shape or have.device != given.device:
            raise JomaError(
                f"latents and activations must make correlations of shape {tuple(have.shape)} on "
                f"{have.device} as before, got {tuple(given.shape)} on {given.device}"
            )
        self._moments = combine(self._moments, new)

    def compute(self) -> NCorr:
        """`ncorr` of all rows so far."""
        if self._moments is None:
            raise JomaError("compute needs rows: call update first")
        return _best(self._moments)


def _best(moments: "Moments") -> NCorr:
    values, nodes = moments.correlations().max(-1)
    varying = moments.latents.squares > 0
    return NCorr(values, nodes.where(varying, -1), varying)


class CorrelationRows(NamedTuple):
    """Latents (..., S, N), activations (..., S, H) and weights (..., S) in float64.

    They have one leading shape. Axes are expanded, not copied, so nothing here may be written to.
    """

    latents: Tensor
    activations: Tensor
    weights: Tensor


def rows(latents: Tensor, activations: Tensor, weights: Tensor | None) -> CorrelationRows:
    """What every measurement of latents against nodes takes, checked and of one leading shape."""
    given = {
        "latents": _checks.tensor("latents", latents, 2),
        "activations": _checks.tensor("activations", activations, 2),
    }
    if weights is not None:
        given["weights"] = _checks.tensor("weights", weights, 1)
    _checks.one_device(**given)
    numbers = {name: _checks.numbers(name, value) for name, value in given.items()}
    latents, activations = numbers["latents"], numbers["activations"]
    samples = latents.shape[-2]
    if activations.shape[-2] != samples:
        raise JomaError(
            f"activations must have the {samples} rows of latents, got shape "
            f"{tuple(activations.shape)}"
        )
    if 0 in (samples, latents.shape[-1], activations.shape[-1]):
        raise JomaError(
            "latents and activations must have at least one row, one latent and one node, got "
            f"shapes {tuple(latents.shape)} and {tuple(activations.shape)}"
        )
    weights = numbers.get("weights", latents.new_ones(samples))
    if weights.shape[-1] != samples:
        raise JomaError(f"weights must be {samples}, one per row, got shape {tuple(weights.shape)}")
    if (weights < 0).any():
        raise JomaError(f"weights must be ≥ 0, got {weights.min().item():g}")
    if not (weights.sum(-1) > 0).all():
        raise JomaError("weights must be > 0 in at least one row, got rows that all count nothing")
    lead = _checks.together(
        latents=latents.shape[:-2], activations=activations.shape[:-2], weights=weights.shape[:-1]
    )
    return CorrelationRows(
        latents.expand(*lead, *latents.shape[-2:]),
        activations.expand(*lead, *activations.shape[-2:]),
        weights.expand(*lead, samples),
    )


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


def moments(rows: CorrelationRows) -> Moments:
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
