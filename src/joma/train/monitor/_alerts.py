"""Findings while a training runs: judged after measurements, reported once, kept on disk.

They decide whether a training should stop.
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from joma.errors import JomaError
from joma.train import findings
from joma.train.findings import KINDS, SEVERITIES, Finding, Judgement
from joma.train.findings._finding import headline
from joma.train.monitor._faults import LOG, Faults
from joma.train.monitor._record import Recorder
from joma.train.processes import MonitoredProcesses

OnFinding = Callable[[Finding], object]
"""Called with every new finding, and again where its severity has risen."""

QUICK_SECONDS, SHARE = 5e-3, 0.1
"""Judging that takes no longer, or no more than this share of a measurement, is never put off."""
GROWTH = 1.1
"""Otherwise the number of measurements must have grown by this factor."""
REWRITE_SECONDS = 10.0
"""Seconds after which `findings.json` is rewritten where only numbers in it have changed."""
STOP_EVERY = 10
"""Steps after which several processes agree on whether to stop."""
CRITICAL, NOT_FINITE = "critical", "not_finite"
SHORT = {"nan": NOT_FINITE, "diverged": "diverged_loss", "collapse": "attention_collapse"}
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


class Alerts:
    """Judges what was recorded, reports what is new, and says when to stop.

    Args:
        recorder: Where the series are, and `findings.json` is written.
        faults: Where failures are noted.
        on_finding: Called with new findings; dropped where it raises.
        stop_on: Checked names.
        processes: The processes that train the model.

    Attributes:
        judgement: What holds now.
        stop_reason: Why the training should stop, once all processes have agreed on it.
        failed: Whether findings could not be made, because of a fault in them.
        stops_on_nan: Whether a loss or weight that is not finite is a reason to stop.
    """

    def __init__(
        self,
        recorder: Recorder,
        faults: Faults,
        on_finding: OnFinding | None,
        stop_on: Collection[str],
        processes: MonitoredProcesses,
    ) -> None:
        self.judgement, self.failed = Judgement(), False
        self.stop_reason: str | None = None
        self._recorder, self._faults, self._processes = recorder, faults, processes
        self._on_finding = on_finding
        self._stop_on = {SHORT.get(name, name) for name in stop_on}
        self.stops_on_nan = bool(self._stop_on & {NOT_FINITE, CRITICAL})
        self._own_reason: str | None = None
        self._reported: dict[tuple[Any, ...], int] = {}
        self._judged, self._took = -1, 0.0
        self._measured = self._measured_then = 0
        self._written: tuple[Any, Any] | None = None
        self._written_at = 0.0

    def resume(self) -> None:
        """Judge what was recorded before a training was resumed; none of it is reported again."""
        self._judge(ended=False)
        self._reported = dict(map(_key_and_level, self.judgement.findings))

    def after_measurement(self, seconds: float) -> None:
        """Judge, unless that takes long and was done not long ago.

        Args:
            seconds: How long the measurement took.
        """
        self._measured += 1
        quick = self._took <= max(QUICK_SECONDS, SHARE * seconds)
        if quick or self._measured >= GROWTH * self._measured_then:
            self.update()

    def update(self, *, ended: bool = False) -> None:
        """Judge what was recorded up to now, report what is new, and keep `findings.json` so.

        Args:
            ended: Whether the training has ended, so that all is judged and written once more.
        """
        if ended:
            self._judged = -1
        if self._judge(ended=ended):
            for finding in self.judgement.findings:
                self._report(finding)
            self._write(now=ended)

    def _judge(self, *, ended: bool) -> bool:
        """Judge where something was recorded since last time; return whether that was so."""
        history = self._recorder.history
        if history.changes == self._judged or self.failed:
            return False
        self._judged, self._measured_then = history.changes, self._measured
        began, self.failed = time.perf_counter(), True
        with self._faults.guard("findings", effect="not made"):
            self.judgement = findings.judge(history.series(), ended=ended)
            self.failed = False
        self._took = time.perf_counter() - began
        return not self.failed

    def _report(self, finding: Finding) -> None:
        key, level = _key_and_level(finding)
        if self._reported.get(key, -1) >= level:
            return
        self._reported[key] = level
        # Numbers that are not finite are left to the monitor's alarm, which locates them.
        if finding.kind != NOT_FINITE or finding.module is None:
            text = headline(finding) + (f" {finding.advice}" if finding.advice else "")
            LOG.log(logging.INFO if level == 0 else logging.WARNING, "%s", text)
        if (
            finding.kind != NOT_FINITE
            and level
            and {finding.kind, finding.severity} & self._stop_on
        ):
            self.ask_to_stop(finding.sentence)
        if self._on_finding is not None:
            try:
                self._on_finding(finding)
            except Exception as error:  # the user's own trouble
                self._faults.note("on_finding", error, effect="dropped")
                self._on_finding = None

    def _write(self, *, now: bool) -> None:
        """Rewrite `findings.json` at once where something came or went, otherwise now and then."""
        value = self.judgement.as_json()
        outline = (
            {_key_and_level(one) for one in self.judgement.findings},
            {one.kind for one in self.judgement.not_judged},
        )
        written, before = self._written or (None, None)
        late = time.perf_counter() - self._written_at >= REWRITE_SECONDS
        if now or late or outline != before:
            self._written_at = time.perf_counter()
            if value != written and self._recorder.run is not None:
                with self._faults.guard("findings.json", effect="not written"):
                    self._recorder.run.write_json("findings", value)
                    self._written = value, outline

    def ask_to_stop(self, reason: str) -> None:
        """Ask all processes to stop; the first reason counts."""
        self._own_reason = self._own_reason or reason

    def stops(self, step: int) -> bool:
        """Return whether to stop now; where `stop_on` names anything, all processes call this."""
        if self.stop_reason is not None or not self._stop_on:
            return self.stop_reason is not None
        asked = self._own_reason is not None
        if self._processes.several:
            if step % STOP_EVERY:
                return False
            asked = self._processes.any_of_all(asked)
        if asked:
            self.stop_reason = self._own_reason or "Another process met a condition of stop_on."
        return asked


def _key_and_level(finding: Finding) -> tuple[tuple[Any, ...], int]:
    """Return what distinguishes a finding from others, and how severe it is."""
    key = finding.kind, finding.module, finding.layer, finding.head
    return key, SEVERITIES.index(finding.severity)
