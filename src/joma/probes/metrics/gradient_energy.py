"""Concentration of gradients."""

from typing import TYPE_CHECKING

from joma.probes.metrics._metric import BoundedValue, Metric

if TYPE_CHECKING:
    from joma.probes.gradient import GradientRank


def measure(found: "GradientRank") -> dict[str, BoundedValue]:
    """Return the energies in the top r directions, by r; nothing of a gradient that is zero."""
    return {
        f"gradient_energy_{rank}": BoundedValue(energy.value, energy.bound)
        for rank, energy in found.energy.items()
        if found.norm > 0
    }


METRIC = Metric(
    name="gradient_energy",
    order=180,
    sentence="share of ‖G‖_F² in a gradient's top r directions (`gradient_energy_8`, …)",
    per="weight",
    column="gradient energy",
    needs="gradients",
    measure=measure,
    collects={"ranks": True},
    probed=False,
    monitored="every tenth",
)
