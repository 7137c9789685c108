"""What a monitor could not do: each reason is logged once and kept for the summary."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from joma.common.text import first_line

LOG = logging.getLogger("joma.monitor")


@dataclass(eq=False)
class _Fault:
    """One thing that is not done, altogether or for some modules."""

    what: str
    effect: str
    step: int
    why: str
    modules: list[str] = field(default_factory=list)

    @property
    def subject(self) -> str:
        if not self.modules:
            return self.what
        more = f" and {len(self.modules) - 1} more" if len(self.modules) > 1 else ""
        return f"{self.what} of {self.modules[0]}{more}"


class Faults:
    """Collects faults; a training never sees the exceptions behind them.

    Args:
        begun: Step at which the monitor began.
        speaks: Whether this process logs warnings; one of several does.

    Attributes:
        step: The current step, kept up to date by the monitor.
        off: What failed before, with the path of the module, or with None for all of it.
    """

    def __init__(self, begun: int, speaks: bool) -> None:
        self.step = self._begun = begun
        self._speaks = speaks
        self._known: dict[tuple[str, bool], _Fault] = {}
        self._remarks: dict[str, None] = {}
        self.off: set[tuple[str, str | None]] = set()

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
            what: The metric or the action, "attention" or "writing to the run folder".
            why: The exception, or a reason in words.
            module: Path of the module it failed for, None for all. The first one is logged.
            effect: What that means for the user.
        """
        self.off.add((what, module))
        fault = self._known.get((what, module is not None))
        if fault is None:
            reason = why if isinstance(why, str) else _reason(why)
            fault = _Fault(what, effect, self.step, reason, [] if module is None else [module])
            self._known[what, module is not None] = fault
            if self._speaks:
                verb = "is " if effect.startswith("not ") else ""
                LOG.warning("%s %s%s: %s", fault.subject, verb, effect, fault.why)
        elif module is not None and module not in fault.modules:
            fault.modules.append(module)

    @contextlib.contextmanager
    def guard(
        self, what: str, *, module: str | None = None, effect: str = "not measured"
    ) -> Iterator[None]:
        """End the block at an exception, which is noted: the training must not end for it."""
        try:
            yield
        except Exception as error:
            self.note(what, error, module=module, effect=effect)

    def remark(self, sentence: str) -> None:
        """Keep a sentence for the summary that is no fault."""
        self._remarks[sentence] = None

    def lines(self) -> list[str]:
        """Return a line of the summary for each fault and remark; a fault names its first step."""
        faults = [
            f"- {it.subject} {it.effect}"
            f"{f' since step {it.step}' if it.step > self._begun else ''}: {it.why}"
            for it in self._known.values()
        ]
        return [*faults, *(f"- {sentence}" for sentence in self._remarks)]


def _reason(error: BaseException) -> str:
    """Return the first line of an exception's message; a KeyError's own is just the key."""
    line, name = first_line(error), type(error).__name__
    plain = line == name or isinstance(error, ValueError | RuntimeError | OSError)
    return line if plain else f"{name}: {line}"
