"""What a monitor measures."""

from collections.abc import Mapping, Sequence

from joma.errors import JomaError
from joma.probes.metrics import MONITORED, checked

METRICS: Mapping[str, str] = {name: metric.sentence for name, metric in MONITORED.items()}
"""What is measured, by name."""


def chosen_metrics(metrics: Sequence[str] | None, theorem1: int | None) -> tuple[str, ...]:
    """Return the names of the metrics asked for, each once; otherwise of all that can be measured.

    Raises:
        JomaError: One is not known, or needs the layer on which Theorem 1 is measured.
    """
    chosen = checked(MONITORED if metrics is None else metrics, MONITORED)
    of_layer = [metric for metric in chosen if metric.needs == "theorem1"]
    if metrics is not None and of_layer and theorem1 is None:
        name = of_layer[0].name
        raise JomaError(f"theorem1 must be the layer to measure {name} on, got None")
    return tuple(it.name for it in chosen if theorem1 is not None or it not in of_layer)
