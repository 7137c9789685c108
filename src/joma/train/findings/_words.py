"""A judgement as lines of text, the same wherever people read it."""

from joma.train.findings._finding import Finding, Judgement
from joma.train.findings._kinds import KINDS


def headline(finding: Finding) -> str:
    """Return severity, step and sentence of a finding in one line."""
    return f"{finding.severity}, step {finding.step}: {finding.sentence}"


def finding_lines(judgement: Judgement) -> list[str]:
    """Return a line for each finding, and its advice on the next one, indented."""
    lines: list[str] = []
    for finding in judgement.findings:
        lines.append(f"- {headline(finding)}")
        if finding.advice:
            lines.append(f"    {finding.advice}")
    return lines


def not_judged_lines(judgement: Judgement) -> list[str]:
    """Return a line for each thing that is missing, with the rules that need it."""
    missing: dict[str, list[str]] = {}
    for one in judgement.not_judged:
        missing.setdefault(one.needs, []).append(one.kind)
    return [f"- not judged: {', '.join(kinds)}: needs {needs}" for needs, kinds in missing.items()]


def nothing_line(judgement: Judgement) -> str:
    """Return what is said where nothing was found: never more than what was judged."""
    if not judgement.not_judged:
        return "- nothing out of the ordinary was found"
    judged = len(set(KINDS) - {one.kind for one in judgement.not_judged})
    if judged == 0:
        return "- nothing could be judged"
    rules = "rule" if judged == 1 else f"{judged} rules"
    return f"- nothing was found by the {rules} that could be judged"
