"""Normalised correlation of latents with hidden nodes: do nodes learn the latents (JoMA, Table 1)?

NCorr of a latent is the largest signed, centred correlation between it and the activation of any
hidden node over samples; a node's activation is its maximum over the sequence. The largest of
thousands of correlations is large by chance alone: read it beside `joma.probes.controls`.

All is batched over leading axes, which broadcast, and computed in float64 on the device of the
input. A member of an ensemble gets the same numbers whatever its neighbours are.
"""

from dataclasses import dataclass

from torch import Tensor

from joma.errors import JomaError
from joma.probes._checks import rows
from joma.probes._moments import Moments, combine, moments


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
        self._add(moments(rows(latents, activations, weights)))

    def merge(self, other: "NCorrAccumulator") -> None:
        """Adds the rows another accumulator has seen, which itself stays as it is."""
        if other._moments is not None:
            self._add(other._moments)

    def compute(self) -> NCorr:
        """`ncorr` of all rows so far."""
        if self._moments is None:
            raise JomaError("compute needs rows: call update first")
        return _best(self._moments)

    def _add(self, new: Moments) -> None:
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


def _best(moments: Moments) -> NCorr:
    values, nodes = moments.correlations().max(-1)
    varying = moments.latents.squares > 0
    return NCorr(values, nodes.where(varying, -1), varying)
