"""Watching any model learn: `Monitor`, told of every step, looks now and then.

What may live here is when to look, how to look without being noticed, and which parts of a model to
look at. What is measured of them lives in `joma.probes`, what the numbers mean in
`joma.train.findings`.

- `Monitor`: the one class.
- `METRICS`: what it measures.
- `Logger`: what is told of every look besides the run folder.
- `find`, `series_of`, `Series`: the findings of any recorded run.
"""

from joma.train.monitor._found import Series, find, series_of
from joma.train.monitor._metrics import METRICS
from joma.train.monitor._monitor import DEAR, Logger, Monitor

__all__ = ["DEAR", "METRICS", "Logger", "Monitor", "Series", "find", "series_of"]
