"""Findings in plain words: what the recorded series of a training say, each by a written rule.

What may live here is how recorded numbers are judged, and in which words. Every rule takes series
that were recorded (by `joma.Monitor` or by anything else) and returns what its docstring defines,
the sentence and the numbers that decided. Nothing here measures a model.

- `judge`: every rule on the series of a training; returns a `Judgement`.
- `series_of`: the `RecordedSeries` in the metrics of a run folder.
- `Finding`, `NotJudged`, `SEVERITIES`, `KINDS`: what a judgement is made of.
"""

from collections.abc import Iterable

from joma.train.findings.attention import attention_bounce, attention_collapse, judge_attention
from joma.train.findings.finding import (
    KINDS,
    SEVERITIES,
    Finding,
    Judgement,
    NotJudged,
    Severity,
    headline,
)
from joma.train.findings.layers import judge_dead_mlps, judge_ranks, judge_tied, judge_untrained
from joma.train.findings.loss import (
    bad_initialisation,
    diverged_loss,
    judge_loss,
    label_noise,
    loss_spike,
    not_finite,
    overfitting,
)
from joma.train.findings.rate import judge_rate
from joma.train.findings.recorded import Recorded, RecordedSeries, Rule, series_of

__all__ = [
    "KINDS",
    "SEVERITIES",
    "Finding",
    "Judgement",
    "NotJudged",
    "RecordedSeries",
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

RULES: tuple[Rule, ...] = (
    judge_loss,
    judge_rate,
    judge_attention,
    judge_untrained,
    judge_tied,
    judge_dead_mlps,
    judge_ranks,
)


def judge(series: Iterable[RecordedSeries], *, ended: bool = True) -> Judgement:
    """Return what the recorded series of one training say, by every rule.

    Args:
        series: What was recorded, as `series_of` returns it.
        ended: Whether the training has ended. While it runs, what only the end can show (a learning
            rate that is too low for the number of steps) is not judged.
    """
    recorded = Recorded(series, ended=ended)
    verdicts = [verdict for rule in RULES for verdict in rule(recorded)]
    found = [one for one in verdicts if isinstance(one, Finding)]
    return Judgement(
        tuple(sorted(found, key=lambda one: (-SEVERITIES.index(one.severity), one.step))),
        tuple(one for one in verdicts if isinstance(one, NotJudged)),
    )
