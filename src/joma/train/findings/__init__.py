"""Findings in plain words: what the recorded series of a training say, each by a written rule.

What may live here is how recorded numbers are judged, and in which words. Every rule takes series
that were recorded (by `joma.Monitor` or by anything else) and returns what its docstring defines,
the sentence and the numbers that decided. Nothing here measures a model.

- `judge`: every rule on the series of a training; returns a `Judgement`.
- `series_of`: the `RecordedSeries` in the metrics of a run folder.
- `Finding`, `NotJudged`, `SEVERITIES`, `KINDS`: what a judgement is made of.
- `RULES`: the table of rules that `judge` goes through.
- `attention_collapse`, `attention_bounce`: two rules on one series, with a threshold of one's own.
"""

from collections.abc import Iterable

from joma.train.findings import _attention, _layers, _loss
from joma.train.findings._attention import attention_bounce, attention_collapse
from joma.train.findings._finding import (
    KINDS,
    SEVERITIES,
    Finding,
    Judgement,
    NotJudged,
    Severity,
    headline,
)
from joma.train.findings._recorded import (
    CannotJudgeError,
    Recorded,
    RecordedSeries,
    check_enough,
    series_of,
)

__all__ = [
    "KINDS",
    "RULES",
    "SEVERITIES",
    "Finding",
    "Judgement",
    "NotJudged",
    "RecordedSeries",
    "Severity",
    "attention_bounce",
    "attention_collapse",
    "headline",
    "judge",
    "series_of",
]


RULES = (*_loss.RULES, *_attention.RULES, *_layers.RULES)
"""Every rule."""


def judge(series: Iterable[RecordedSeries], *, ended: bool = True) -> Judgement:
    """Return what the recorded series of one training say, by every rule.

    Args:
        series: What was recorded, as `series_of` returns it.
        ended: Whether the training has ended. While it runs, what only the end can show (a learning
            rate that is too low for the number of steps) is not judged.
    """
    recorded = Recorded(series, ended=ended)
    found: list[Finding] = []
    not_judged: list[NotJudged] = []
    for rule in RULES:
        try:
            if rule.series:
                check_enough(
                    recorded.by_name[rule.series], f"{rule.series}, which was not measured"
                )
            found += [one for one in rule.judge(recorded) if one is not None]
        except CannotJudgeError as error:
            not_judged += [NotJudged(kind, str(error)) for kind in rule.kinds]
    found.sort(key=lambda one: (-SEVERITIES.index(one.severity), one.step))
    return Judgement(tuple(found), tuple(not_judged))
