"""Whether a training should stop: what `stop_on` names, and agreement of all processes."""

from collections.abc import Collection

from joma.errors import JomaError
from joma.train.findings import Finding
from joma.train.findings._kinds import KINDS
from joma.train.monitor._processes import Processes

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

    def __init__(self, stop_on: tuple[str, ...], processes: Processes) -> None:
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
