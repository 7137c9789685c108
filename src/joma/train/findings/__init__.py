"""Findings in plain words: what the recorded series of a training say, each by a written rule.

What may live here is how recorded numbers are judged, and in which words. Every rule takes series
that were recorded (by `joma.Monitor` or by anything else) and returns what its docstring defines,
with the numbers that decided beside the sentence. Nothing here looks at a model.

- `judge`: every rule on the series of a training; returns a `Judgement`.
- `series_of`: the `Series` in the metrics of a run folder.
- `Finding`, `NotJudged`, `SEVERITIES`: what a judgement is made of.
"""

from joma.train.findings._attention import attention_bounce, attention_collapse
from joma.train.findings._finding import (
    SEVERITIES,
    Finding,
    Judgement,
    NotJudged,
    Severity,
)
from joma.train.findings._judge import judge
from joma.train.findings._loss import (
    bad_initialisation,
    diverged_loss,
    label_noise,
    loss_spike,
    not_finite,
    overfitting,
)
from joma.train.findings._series import Series, series_of
from joma.train.findings._words import headline

__all__ = [
    "SEVERITIES",
    "Finding",
    "Judgement",
    "NotJudged",
    "Series",
    "Severity",
    "attention_bounce",
    "attention_collapse",
    "bad_initialisation",
    "diverged_loss",
    "headline",
    "judge",
    "label_noise",
    "loss_spike",
    "not_finite",
    "overfitting",
    "series_of",
]
