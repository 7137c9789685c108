"""Watching any model learn: a `Monitor`, called after every step, measures now and then.

What may live here is when to measure, how to measure without being noticed, and which parts of a
model to measure. The measurements live in `joma.probes`, what the numbers mean in
`joma.train.findings`.

- `Monitor`: the one class.
- `METRICS`: what it measures.
- `Logger`: what is called with every measurement, next to the run folder.
- `OnFinding`: what is called with every new finding.
"""

from joma.train.monitor.findings import OnFinding
from joma.train.monitor.monitor import EXPENSIVE_EVERY, Monitor
from joma.train.monitor.options import METRICS
from joma.train.monitor.record import Logger

__all__ = [
    "EXPENSIVE_EVERY",
    "METRICS",
    "Logger",
    "Monitor",
    "OnFinding",
]
