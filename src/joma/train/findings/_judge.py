"""Every rule on the series of one training."""

from collections.abc import Iterable

from joma.train.findings._attention import judge_attention
from joma.train.findings._finding import SEVERITIES, Finding, Judgement, NotJudged
from joma.train.findings._layers import judge_dead_mlps, judge_ranks, judge_tied, judge_untrained
from joma.train.findings._loss import judge_loss
from joma.train.findings._rate import judge_rate
from joma.train.findings._recorded import Recorded, Rule
from joma.train.findings._series import Series

RULES: tuple[Rule, ...] = (
    judge_loss,
    judge_rate,
    judge_attention,
    judge_untrained,
    judge_tied,
    judge_dead_mlps,
    judge_ranks,
)


def judge(series: Iterable[Series], *, ended: bool = True) -> Judgement:
    """Return what the recorded series of one training say, by every rule.

    Args:
        series: What was recorded, as `series_of` returns it.
        ended: Whether the training has ended. While it runs, what only the end can tell (a learning
            rate that is too low for the number of steps) is not judged.
    """
    recorded = Recorded(series, ended=ended)
    verdicts = [verdict for rule in RULES for verdict in rule(recorded)]
    found = [one for one in verdicts if isinstance(one, Finding)]
    return Judgement(
        tuple(sorted(found, key=lambda one: (-SEVERITIES.index(one.severity), one.step))),
        tuple(one for one in verdicts if isinstance(one, NotJudged)),
    )
