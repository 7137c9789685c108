"""MLP nodes that are never active."""

from typing import TYPE_CHECKING

from joma.probes.metrics._metric import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from joma.probes.activations import ActivationStatistics


def measure(statistics: "ActivationStatistics") -> float:
    """Return the share of nodes that were active at no token."""
    return statistics.dead / len(statistics.activity)


class DeadNodes:
    """The same share over activations that come in batches, at the cost of one comparison each."""

    def __init__(self) -> None:
        self._alive: Tensor | None = None

    def update(self, hidden: "Tensor") -> None:
        """Add the activations (tokens, nodes) of a batch."""
        from joma.probes.activations import NEAR

        near = NEAR * hidden.square().mean(-1, keepdim=True).sqrt()
        alive = (hidden.abs() > near).any(0)
        self._alive = alive if self._alive is None else self._alive | alive

    def compute(self) -> float:
        """Return the share of nodes that were near zero at every token."""
        assert self._alive is not None, "update comes first"
        return 1 - float(self._alive.float().mean())


METRIC = Metric(
    name="mlp_dead",
    order=70,
    sentence="share of MLP nodes that are near zero at every token",
    per="MLP, expert",
    column="MLP dead",
    needs="activations",
    measure=measure,
    monitored="every measurement",
    streamed=DeadNodes,
)
