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


def _best(moments: "Moments") -> NCorr:
    values, nodes = moments.correlations().max(-1)
    varying = moments.latents > 0
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


class Moments(NamedTuple):
    """Centred co-moments in units of each column; 0 exactly where a column is constant.

    Attributes:
        latents: Σ w (y − ȳ)², (..., N).
        activations: Σ w (f − f̄)², (..., H).
        products: Σ w (y − ȳ)(f − f̄), (..., N, H).
    """

    latents: Tensor
    activations: Tensor
    products: Tensor

    def correlations(self) -> Tensor:
        """Return Pearson's correlation of every latent with every node, (..., N, H)."""
        latents = inverse_root(self.latents).unsqueeze(-1)
        activations = inverse_root(self.activations).unsqueeze(-2)
        return (self.products * latents).mul_(activations).clamp_(-1, 1)


def inverse_root(squares: Tensor) -> Tensor:
    """Return 1 / √squares, and 0 for a constant column: it correlates with nothing."""
    return torch.where(squares > 0, squares.rsqrt(), 0.0)


def centre(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns (..., S, K) minus their weighted mean, and their squares added up, (..., K).

    Each column is in a unit of its own, a power of two, so that no square over- or underflows.
    """
    heaviest = weights.argmax(-1)[..., None, None].expand(*weights.shape[:-1], 1, values.shape[-1])
    columns = values - values.gather(-2, heaviest)
    if not columns.isfinite().all():
        raise JomaError(
            "latents and activations must differ by less than float64 holds from row to row, got "
            f"{values.abs().max().item():.3g}"
        )
    columns = columns / _powers_of_two(columns.abs().amax(-2, keepdim=True))
    weights = weights.unsqueeze(-2)
    columns -= weights @ columns / weights.sum(-1, keepdim=True)
    return columns, (weights @ columns.square()).squeeze(-2)


def moments(rows: CorrelationRows) -> Moments:
    """Return the moments of one set of rows."""
    return against(rows.latents, rows.weights, *centre(rows.activations, rows.weights))


def against(latents: Tensor, weights: Tensor, columns: Tensor, squares: Tensor) -> Moments:
    """Return the moments of latents with nodes that are centred already."""
    latent_columns, latent_squares = centre(latents, weights)
    products = (latent_columns * weights.unsqueeze(-1)).mT @ columns
    return Moments(latent_squares, squares, products)


def _powers_of_two(sizes: Tensor) -> Tensor:
    """The powers of two at or just below sizes ≥ 0; the least normal number where they are 0.

    To divide by one loses no digit.
    """
    mantissas = torch.where(sizes > 0, torch.frexp(sizes).mantissa, 0.5)
    return torch.where(sizes > 0, sizes / (2 * mantissas), torch.finfo(sizes.dtype).tiny)
