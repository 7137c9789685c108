"""Findings while a training runs: judged after measurements, reported once, kept on disk."""

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any

from joma.train.findings import SEVERITIES, Finding, Judgement, judge
from joma.train.findings._words import headline
from joma.train.monitor._faults import LOG, Faults
from joma.train.monitor._recorder import Recorder

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
