"""Every metric: what it needs, how it is measured, and what people call it (see `_table`).

Probes, the monitor, the command line, reports and the docs read this registry; none of them keeps a
list of names. Importing this package imports no torch.

- `METRICS`: every `Metric` by name, in their order.
- `PROBED`, `MONITORED`: those that a probe, and a monitor, can measure.
- `checked`: names of a user, as metrics.
"""

from collections.abc import Collection, Iterable, Mapping

from joma.errors import JomaError
from joma.probes.metrics._metric import BoundedValue, Cadence, Effort, Metric, Needs
from joma.probes.metrics._table import TABLE

__all__ = [
    "METRICS",
    "MONITORED",
    "PROBED",
    "BoundedValue",
    "Cadence",
    "Effort",
    "Metric",
    "Needs",
    "checked",
    "collected",
]


METRICS: Mapping[str, Metric] = {metric.name: metric for metric in TABLE}
"""Every metric by name."""

PROBED = {name: metric for name, metric in METRICS.items() if metric.probed}
"""Those that a probe of a model can measure."""

MONITORED = {name: metric for name, metric in METRICS.items() if metric.monitored is not None}
"""Those that a monitor can measure while a model is trained."""


def checked(names: Iterable[str], available: Collection[str] = PROBED) -> tuple[Metric, ...]:
    """Return the metrics of these names, each once.

    Raises:
        JomaError: There are none, or one is not available.
    """
    listed = None if isinstance(names, str) else list(names)
    if not listed:
        raise JomaError(f"metrics must be a list of {', '.join(available)}, got {names!r}")
    for name in listed:
        if name not in available:
            raise JomaError(f"metrics must be among {', '.join(available)}, got {name!r}")
    return tuple(METRICS[name] for name in dict.fromkeys(listed))


def collected(metrics: Iterable[Metric]) -> dict[str, object]:
    """Return everything that has to be collected for some metrics; tuples are joined."""
    found: dict[str, object] = {}
    for metric in metrics:
        for name, value in metric.collects.items():
            before = found.get(name)
            joined = isinstance(value, tuple) and isinstance(before, tuple)
            found[name] = (*before, *value) if joined else value  # type: ignore[misc]
    return found
