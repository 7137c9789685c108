"""How far GaLore's subspaces turn: the mean angle."""

from typing import Any

from joma.probes.metrics._metric import Metric


def measure(matrix: Any) -> float | None:
    """Return the angle, or None before the second subspace."""
    return None if matrix.angles is None else matrix.angles[1]


METRIC = Metric(
    name="projection_angle_mean",
    order=230,
    sentence="mean principal angle between the last two subspaces of a GaLore optimizer",
    per="weight",
    column="mean angle",
    needs="projection",
    unit="degrees",
    measure=measure,
    probed=False,
    monitored="every measurement",
)
