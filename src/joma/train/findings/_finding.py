"""What a finding is, what could not be judged, and both as lines of text for people."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Severity = Literal["note", "warning", "critical"]
"""How bad a finding is.

A note is worth knowing and asks for nothing. A warning says that the training will end worse than
it could. A critical finding says that going on is of no use.
"""

SEVERITIES: tuple[Severity, ...] = ("note", "warning", "critical")
"""From the least to the most severe."""

_WORDS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("words.toml").read_text(encoding="utf-8")
)

KINDS = tuple(sorted(_WORDS))
"""Every `Finding.kind` that `judge` may return; each is either judged or listed as not judged."""


@dataclass(frozen=True)
class Finding:
    """One thing found in a training.

    Attributes:
        kind: Name of the rule that found it, "attention_collapse".
        severity: How bad it is.
        step: Step since which it shows.
        sentence: What was found, in plain words.
        advice: What it means for this training, and what to try.
        evidence: The numbers that decided.
        module: Path of the module, or the key of the attention; None for the whole model.
        layer: Layer index, None where it is in no single layer.
        head: Head index, None where it is of no single head.
    """

    kind: str
    severity: Severity
    step: int
    sentence: str
    advice: str
    evidence: Mapping[str, float] = field(default_factory=dict)
    module: str | None = None
    layer: int | None = None
    head: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the finding as `findings.json` has it."""
        return {**asdict(self), "evidence": dict(self.evidence)}


def found(
    kind: str,
    severity: Severity,
    step: int,
    evidence: Mapping[str, float],
    module: str | None = None,
    layer: int | None = None,
    *,
    case: str = "",
    **others: Any,
) -> Finding:
    """Return a finding in the words that `words.toml` has for its kind.

    Args:
        kind: Name of the rule.
        severity: How bad it is.
        step: Step since which it shows.
        evidence: The numbers that decided.
        module: Path of the module, or None.
        layer: Layer index, or None.
        case: Which of several sentences or pieces of advice to take.
        **others: What a sentence names besides.
    """
    known = {**evidence, "step": step, "module": module, "layer": layer, **others}
    sentence = _words("sentence", kind, case).format_map(known)
    advice = _words("advice", kind, case)
    return Finding(kind, severity, step, sentence, advice, evidence, module, layer)


def as_harmless(finding: Finding) -> Finding:
    """Return a finding as a note, with the advice for what does no harm."""
    advice = _words("advice", finding.kind, "harmless")
    return replace(finding, severity="note", advice=advice)


def _words(what: str, kind: str, case: str) -> str:
    words = _WORDS[kind][what]
    return words if isinstance(words, str) else words[case]


@dataclass(frozen=True)
class NotJudged:
    """A rule that could not be applied.

    Attributes:
        kind: Name of the rule.
        needs: What it needs, in plain words: "at least 4 measurements; there are 2".
    """

    kind: str
    needs: str


@dataclass(frozen=True)
class Judgement:
    """What the recorded series of a training say.

    Attributes:
        findings: The most severe first, then in the order of their steps.
        not_judged: Which rules could not be applied, and what they need.
    """

    findings: tuple[Finding, ...] = ()
    not_judged: tuple[NotJudged, ...] = ()

    def of_kind(self, kind: str) -> list[Finding]:
        """Return the findings of one kind."""
        return [one for one in self.findings if one.kind == kind]

    def as_json(self) -> dict[str, Any]:
        """Return the judgement as `findings.json` has it."""
        return {
            "findings": [one.as_json() for one in self.findings],
            "not_judged": [asdict(one) for one in self.not_judged],
        }


def headline(finding: Finding) -> str:
    """Return severity, step and sentence of a finding in one line."""
    return f"{finding.severity}, step {finding.step}: {finding.sentence}"


def judgement_lines(judgement: Judgement, trouble: str | None) -> list[str]:
    """Return findings with their advice, and what could not be judged, as lines of a summary.

    Args:
        judgement: What holds now.
        trouble: A sentence on what is not finite, which takes the place of such findings.
    """
    lines: list[str] = []
    shown = judgement.findings
    if trouble is not None:
        lines.append(f"- critical: {trouble}")
        lines += [f"    {one.advice}" for one in judgement.of_kind("not_finite")[:1]]
        shown = tuple(one for one in shown if one.kind != "not_finite")
    for finding in shown:
        lines.append(f"- {headline(finding)}")
        lines += [f"    {finding.advice}"] if finding.advice else []
    if not lines:
        lines.append(_nothing_line(judgement))
    missing: dict[str, list[str]] = {}
    for one in judgement.not_judged:
        missing.setdefault(one.needs, []).append(one.kind)
    for needs, kinds in missing.items():
        lines.append(f"- not judged: {', '.join(kinds)}: needs {needs}")
    return lines


def _nothing_line(judgement: Judgement) -> str:
    """Return what is said where nothing was found: never more than what was judged."""
    if not judgement.not_judged:
        return "- nothing out of the ordinary was found"
    judged = len(set(KINDS) - {one.kind for one in judgement.not_judged})
    if judged == 0:
        return "- nothing could be judged"
    rules = "rule" if judged == 1 else f"{judged} rules"
    return f"- nothing was found by the {rules} that could be judged"
