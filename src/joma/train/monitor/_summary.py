"""What a monitor says at the end of a training, or when it is asked."""

from collections.abc import Sequence

from joma.train.findings import Judgement
from joma.train.findings._words import finding_lines, not_judged_lines, nothing_line


def summary_of(
    first: str, trouble: str | None, judgement: Judgement | None, faults: Sequence[str]
) -> str:
    """Return the findings, the most severe first, what was not judged, and what failed.

    Args:
        first: The first line: how long the training was watched.
        trouble: What is not finite, None where everything is.
        judgement: What was found, None where findings could not be made.
        faults: A line for each thing that was not measured or not done.
    """
    lines = [first]
    if trouble is not None:
        lines.append(f"- critical: {trouble}")
        named = [] if judgement is None else judgement.of_kind("not_finite")
        lines += [f"    {one.advice}" for one in named[:1]]
        judgement = None if judgement is None else judgement.without(named)
    if judgement is not None:
        lines += finding_lines(judgement)
        if not judgement.findings and trouble is None:
            lines.append(nothing_line(judgement))
        lines += not_judged_lines(judgement)
    return "\n".join([*lines, *(f"- {fault}" for fault in faults)])
