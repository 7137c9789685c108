"""What a monitor could not do: each reason is logged once and kept for the summary."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from joma.common.text import first_line

LOG = logging.getLogger("joma.monitor")
T = TypeVar("T")


@dataclass(eq=False)
class Fault:
    """One thing that is not done, or not done for some modules.

    Attributes:
        what: The metric or the action, "attention" or "writing to the run folder".
        effect: What that means for the user, "not measured".
        step: Optimizer step at which it was first noticed.
        why: The reason, one line.
        modules: Paths of the modules concerned; none for everything.
    """

    what: str
    effect: str
    step: int
    why: str
    modules: list[str] = field(default_factory=list)

    @property
    def subject(self) -> str:
        """What is concerned, with the first module and how many more."""
        if not self.modules:
            return self.what
        more = f" and {len(self.modules) - 1} more" if len(self.modules) > 1 else ""
        return f"{self.what} of {self.modules[0]}{more}"

    def sentence(self, begun: int) -> str:
        """Return the line of the summary.

        Args:
            begun: Step at which the monitor began; a fault from the start names no step.
        """
        since = f" since step {self.step}" if self.step > begun else ""
        return f"{self.subject} {self.effect}{since}: {self.why}"


class Faults:
    """Collects faults; a training never sees the exceptions behind them.

    Args:
        begun: Step at which the monitor began.
        speaks: Whether this process logs warnings; one of several does.

    Attributes:
        step: The current step, kept up to date by the monitor.
    """

    def __init__(self, begun: int, speaks: bool) -> None:
        self.step = self._begun = begun
        self._speaks = speaks
        self._known: dict[tuple[str, bool], Fault] = {}
        self._remarks: dict[str, None] = {}

    def is_off(self, what: str, module: str | None = None) -> bool:
        """Return whether something failed before, altogether or for a module."""
        if (what, False) in self._known:
            return True
        some = self._known.get((what, True))
        return some is not None and module in some.modules

    def note(
        self,
        what: str,
        why: BaseException | str,
        *,
        module: str | None = None,
        effect: str = "not measured",
    ) -> None:
        """Log a fault the first time it occurs, and keep it.

        Args:
            what: The metric or the action.
            why: The exception, or a reason in words.
            module: Path of the module it failed for, None for all. The first one is logged.
            effect: What that means for the user.
        """
        fault = self._known.get((what, module is not None))
        if fault is None:
            why = why if isinstance(why, str) else _reason(why)
            fault = Fault(what, effect, self.step, why, [] if module is None else [module])
            self._known[what, module is not None] = fault
            if self._speaks:
                verb = "is " if effect.startswith("not ") else ""
                LOG.warning("%s %s%s: %s", fault.subject, verb, effect, fault.why)
        elif module is not None and module not in fault.modules:
            fault.modules.append(module)

    def tried(
        self,
        what: str,
        action: Callable[[], T],
        *,
        module: str | None = None,
        effect: str = "not measured",
    ) -> T | None:
        """Return what the action returns, or None where it raised; the reason is noted."""
        try:
            return action()
        except Exception as error:  # any: the training must not end for the monitor's sake
            self.note(what, error, module=module, effect=effect)
            return None

    def remark(self, sentence: str) -> None:
        """Keep a sentence for the summary that is no fault."""
        self._remarks[sentence] = None

    def sentences(self) -> list[str]:
        """Return a line for each fault and remark."""
        return [*(fault.sentence(self._begun) for fault in self._known.values()), *self._remarks]


def _reason(error: BaseException) -> str:
    """Return the first line of an exception's message; a KeyError's own is just the key."""
    line, name = first_line(error), type(error).__name__
    plain = line == name or isinstance(error, ValueError | RuntimeError | OSError)
    return line if plain else f"{name}: {line}"
