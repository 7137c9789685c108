"""How far GaLore's subspaces turn: the largest angle."""

from typing import Any

from joma.probes.metrics._metric import Metric


def measure(matrix: Any) -> float | None:
    """Return the angle, or None before the second subspace."""
    return None if matrix.angles is None else matrix.angles[0]


METRIC = Metric(
    name="projection_angle_max",
    order=220,
    sentence="largest principal angle between the last two subspaces of a GaLore optimizer",
    per="weight",
    column="largest angle",
    needs="projection",
    unit="degrees",
    measure=measure,
    probed=False,
    monitored="every measurement",
)
