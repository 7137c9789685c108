"""Watching any model learn: a `Monitor`, called after every step, measures now and then.

What may live here is when to measure, how to measure without being noticed, and which parts of a
model to measure. The measurements live in `joma.probes`, what the numbers mean in
`joma.train.findings`.

- `Monitor`: the one class.
- `METRICS`: what it measures.
- `Logger`: what is called with every measurement, next to the run folder.
- `OnFinding`: what is called with every new finding.
- `unwrapped_optimizer`: the optimizer inside the wrappers of trainers.
"""

from joma.train.monitor._alerts import OnFinding
from joma.train.monitor._monitor import EXPENSIVE_EVERY, Monitor
from joma.train.monitor._optimizer import unwrapped_optimizer
from joma.train.monitor._options import METRICS
from joma.train.monitor._record import Logger

__all__ = [
    "EXPENSIVE_EVERY",
    "METRICS",
    "Logger",
    "Monitor",
    "OnFinding",
    "unwrapped_optimizer",
]
