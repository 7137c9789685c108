"""What a finding is, and what could not be judged."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Severity = Literal["note", "warning", "critical"]
"""How bad a finding is.

A note is worth knowing and asks for nothing. A warning says that the training will end worse than
it could. A critical finding says that going on is of no use.
"""

SEVERITIES: tuple[Severity, ...] = ("note", "warning", "critical")
"""From the least to the most severe."""


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


@dataclass(frozen=True)
class NotJudged:
    """A rule that could not be applied.

    Attributes:
        kind: Name of the rule.
        needs: What it needs, in plain words: "at least 4 measurements; there are 2".
    """

    kind: str
    needs: str

    def as_json(self) -> dict[str, Any]:
        """Return it as `findings.json` has it."""
        return asdict(self)


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

    def without(self, findings: Collection[Finding]) -> "Judgement":
        """Return the judgement without some of its findings."""
        rest = tuple(one for one in self.findings if one not in findings)
        return replace(self, findings=rest)

    def as_json(self) -> dict[str, Any]:
        """Return the judgement as `findings.json` has it."""
        return {
            "findings": [one.as_json() for one in self.findings],
            "not_judged": [one.as_json() for one in self.not_judged],
        }
