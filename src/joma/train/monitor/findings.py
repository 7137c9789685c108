"""Findings while a training runs: judged after measurements, reported once, kept on disk.

They decide whether a training should stop, and make the summary at its end.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from time import perf_counter
from typing import Any

from joma.errors import JomaError
from joma.train.findings import KINDS, SEVERITIES, Finding, Judgement, judge
from joma.train.findings.finding import finding_lines, headline, not_judged_lines, nothing_line
from joma.train.monitor.faults import LOG, Faults
from joma.train.monitor.record import Recorder
from joma.train.processes import MonitoredProcesses

OnFinding = Callable[[Finding], object]
"""Called with every new finding, and again where its severity has risen."""

QUICK_SECONDS, SHARE = 5e-3, 0.1
"""Judging that takes no longer, or no more than this share of a measurement, is never put off."""
GROWTH = 1.1
"""Otherwise the number of measurements must have grown by this factor."""
REWRITE_SECONDS = 10.0
"""Seconds after which `findings.json` is rewritten where only numbers in it have changed."""

_Key = tuple[str, str | None, int | None, int | None]


class LiveFindings:
    """Judges what was recorded, and reports what is new.

    Args:
        recorder: Where the series are, and `findings.json` is written.
        faults: Where failures are noted.
        on_finding: Called with new findings; dropped where it raises.
        considers: Called with new findings, too: decides whether the training should stop.

    Attributes:
        judgement: What holds now.
    """

    def __init__(
        self,
        recorder: Recorder,
        faults: Faults,
        on_finding: OnFinding | None,
        considers: OnFinding,
    ) -> None:
        self.judgement = Judgement()
        self._recorder, self._faults = recorder, faults
        self._on_finding, self._considers = on_finding, considers
        self._reported: dict[_Key, int] = {}
        self._judged = -1
        self._ended = False
        self._took = 0.0
        self._measured = self._measured_then = 0
        self._written: tuple[Any, str] | None = None
        self._written_at = 0.0

    def resume(self) -> None:
        """Judge what was recorded before a training was resumed; none of it is reported again."""
        self._judge()
        self._reported = {_key(one): _level(one) for one in self.judgement.findings}

    def after_measurement(self, seconds: float) -> None:
        """Judge, unless that takes long and was done not long ago.

        Args:
            seconds: How long the measurement took.
        """
        self._measured += 1
        quick = self._took <= max(QUICK_SECONDS, SHARE * seconds)
        if quick or self._measured >= GROWTH * self._measured_then:
            self.update()

    def update(self) -> None:
        """Judge what was recorded up to now, report what is new, and keep `findings.json` so."""
        if self._judge():
            for finding in self.judgement.findings:
                self._report(finding)
            self._keep()

    def close(self) -> None:
        """Judge the training as one that has ended, and write `findings.json` a last time."""
        self._ended, self._judged = True, -1
        self.update()
        if not self.failed:
            self._write()

    @property
    def failed(self) -> bool:
        """Whether findings could not be made, because of a fault in them."""
        return self._faults.is_off("findings")

    def _judge(self) -> bool:
        """Judge where something was recorded since last time; return whether that was so."""
        history = self._recorder.history
        if history.changes == self._judged or self.failed:
            return False
        self._judged = history.changes
        began = perf_counter()
        found = self._faults.tried(
            "findings", lambda: judge(history.series(), ended=self._ended), effect="not made"
        )
        self._took = perf_counter() - began
        self._measured_then = self._measured
        if found is None:
            return False
        self.judgement = found
        return True

    def _report(self, finding: Finding) -> None:
        key, level = _key(finding), _level(finding)
        if self._reported.get(key, -1) >= level:
            return
        self._reported[key] = level
        if finding.kind != "not_finite" or finding.module is None:  # which the alarm has named
            text = headline(finding) + (f" {finding.advice}" if finding.advice else "")
            LOG.log(logging.INFO if level == 0 else logging.WARNING, "%s", text)
        self._considers(finding)
        if self._on_finding is not None:
            try:
                self._on_finding(finding)
            except Exception as error:  # the user's own trouble
                self._faults.note("on_finding", error, effect="dropped")
                self._on_finding = None

    def _keep(self) -> None:
        """Rewrite `findings.json` at once where something came or went, otherwise now and then."""
        changed = self._written is None or self._written[0] != self._outline()
        if changed or perf_counter() - self._written_at >= REWRITE_SECONDS:
            self._write()

    def _outline(self) -> Any:
        found = {(_key(one), one.severity) for one in self.judgement.findings}
        return found, {one.kind for one in self.judgement.not_judged}

    def _write(self) -> None:
        value = self.judgement.as_json()
        same = self._written is not None and self._written[1] == repr(value)
        if not same and self._recorder.write_findings(value):
            self._written = self._outline(), repr(value)
        self._written_at = perf_counter()


def _key(finding: Finding) -> _Key:
    return finding.kind, finding.module, finding.layer, finding.head


def _level(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity)


STOP_EVERY = 10
"""Steps after which several processes agree on whether to stop."""
CRITICAL = "critical"
SHORT = {"nan": "not_finite", "diverged": "diverged_loss", "collapse": "attention_collapse"}
"""Short names of finding kinds."""


def checked_stop_on(names: Collection[str]) -> tuple[str, ...]:
    """Return the names in their order, without repetitions.

    Raises:
        JomaError: One of them is not known.
    """
    known = (CRITICAL, *SHORT, *KINDS)
    for name in names:
        if name not in known:
            raise JomaError(f"stop_on must be among {', '.join(known)}, got {name!r}")
    return tuple(name for name in known if name in names)


class Stopping:
    """Collects reasons to stop, and lets all processes stop at the same step.

    Args:
        stop_on: Checked names.
        processes: The processes that train the model.

    Attributes:
        reason: Why the training should stop, once all processes have agreed on it.
    """

    def __init__(self, stop_on: Collection[str], processes: MonitoredProcesses) -> None:
        self.reason: str | None = None
        self._kinds = {SHORT.get(name, name) for name in stop_on}
        self._processes = processes
        self._own: str | None = None

    @property
    def on_nan(self) -> bool:
        """Whether a loss or weight that is not finite is a reason to stop."""
        return bool(self._kinds & {SHORT["nan"], CRITICAL})

    def consider(self, finding: Finding) -> None:
        """Take a new finding as a reason to stop, where `stop_on` names it.

        Numbers that are not finite are left to the monitor's alarm, which locates them. A note asks
        for nothing, and never stops a training.
        """
        if finding.kind == SHORT["nan"] or finding.severity == "note":
            return
        critical = finding.severity == "critical" and CRITICAL in self._kinds
        if critical or finding.kind in self._kinds:
            self.ask(finding.sentence)

    def ask(self, reason: str) -> None:
        """Ask all processes to stop; the first reason counts."""
        self._own = self._own or reason

    def agreed(self, step: int) -> bool:
        """Return whether to stop now; where `stop_on` names anything, all processes call this."""
        if self.reason is not None or not self._kinds:
            return self.reason is not None
        asked = self._own is not None
        if self._processes.several:
            if step % STOP_EVERY:
                return False
            asked = self._processes.any_of_all(asked)
        if asked:
            self.reason = self._own or "Another process met a condition of stop_on."
        return asked


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
