"""Locating NaN and infinity, and reporting once which loss or weight was first."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from joma.train.monitor.faults import LOG, Faults
from joma.train.monitor.parts import is_real, layer_in, named_parameters
from joma.train.monitor.processes import MonitoredProcesses
from joma.train.monitor.record import Recorder, Row

SHARE, FREE = 5e-4, 0.1
"""Share of the training's time, and seconds on top, that checks after single steps may take."""
NAMED = 8
"""Weights that are named in the log; what follows is the same trouble."""


@dataclass(frozen=True)
class BadWeight:
    """A weight that is not finite.

    Attributes:
        name: Name of the parameter.
        layer: Layer index, or None for what is in no layer.
        step: First step after which it was seen not to be finite.
    """

    name: str
    layer: int | None
    step: int


class FiniteWatch:
    """Follows which weights, and since which step, are not finite.

    A check reads every weight once, starts no transfer from the device and waits for nothing. It is
    made after every step, or as often as its share of the time allows.

    Attributes:
        bad_loss: Step and value of the first loss that was not finite, or None.
        bad_gradients: Names of gradients that were not finite at the step they were scanned.
        reported: Whether the monitor has logged it.
        alarmed: Whether a check has seen a weight or loss that is not finite. Of a GPU this is
            known one check later, so that nothing waits for it.
    """

    def __init__(self) -> None:
        self.bad_loss: tuple[int, float] | None = None
        self.bad_gradients: list[str] = []
        self.alarmed = self.reported = False
        self._pending: list[tuple[Tensor, torch.cuda.Event]] = []
        self._found = False
        self._others: list[float] = []
        self._names: list[str] = []
        self._first: dict[torch.device, Tensor] = {}
        self._indices: dict[torch.device, list[int]] = {}
        self._began = perf_counter()
        self._spent = self._usual = 0.0

    @property
    def due(self) -> bool:
        """Whether weights are checked after this step: there is time left to pay for it."""
        return self.seconds_until_due <= 0

    @property
    def seconds_until_due(self) -> float:
        """How long training must go on to pay for the next check of the weights."""
        return (self._spent + self._usual - FREE) / SHARE - self.seconds

    @property
    def seconds(self) -> float:
        """Time since the training began."""
        return perf_counter() - self._began

    def check(self, model: nn.Module, step: int, loss: Tensor | float | None = None) -> None:
        """Flag the weights that are not finite now.

        Args:
            model: The model, after the step.
            step: The step.
            loss: Its loss, which raises the alarm as a weight does.
        """
        began = perf_counter()
        self._collect_flags()
        tensors = _local(named_parameters(model))
        if list(tensors) != self._names:
            self._begin(tensors)
        values = list(tensors.values())
        for device, indices in self._indices.items():
            flags = _not_finite([values[index] for index in indices])
            first = self._first[device]
            now = torch.full_like(first, step)
            self._first[device] = torch.where(flags & (first < 0), now, first)
        self._raise_alarm(loss)
        self._usual = perf_counter() - began
        self._spent += self._usual

    @property
    def located(self) -> bool:
        """Whether there is nothing left to find: a weight that is not finite was reported."""
        return self.reported and self._found

    def share(self, processes: MonitoredProcesses) -> None:
        """Take the earliest step of any process for each weight; all call this, or none."""
        steps = [math.inf] * len(self._names)
        for bad in self.weights():
            steps[self._names.index(bad.name)] = bad.step
        self._others = processes.least(steps)
        self.alarmed |= any(map(math.isfinite, self._others))

    def weights(self) -> list[BadWeight]:
        """Return the weights that are not finite, the first one first; waits for the device."""
        steps = {index: int(step) for index, step in enumerate(self._others) if math.isfinite(step)}
        for device, indices in self._indices.items():
            for index, step in zip(indices, self._first[device].tolist(), strict=True):
                if step >= 0:
                    steps[index] = min(int(step), steps.get(index, int(step)))
        self._found |= bool(steps)
        names = {index: self._names[index] for index in steps}
        return [
            BadWeight(names[index], layer_in(names[index]), step)
            for step, index in sorted((step, index) for index, step in steps.items())
        ]

    def scan_gradients(self, model: nn.Module) -> None:
        """Note which gradients are not finite now."""
        gradients = {
            name: parameter.grad
            for name, parameter in named_parameters(model).items()
            if parameter.grad is not None
        }
        local = {name: part for name, part in _local(gradients).items() if part.numel()}
        by_device: dict[torch.device, list[str]] = {}
        for name, tensor in local.items():
            by_device.setdefault(tensor.device, []).append(name)
        for names in by_device.values():
            flags = _not_finite([local[name] for name in names]).tolist()
            self.bad_gradients += [name for name, flag in zip(names, flags, strict=True) if flag]

    def sentence(self, weights: list[BadWeight]) -> str | None:
        """Return one sentence on what is not finite, None where everything is.

        Args:
            weights: Those that are not finite, the first one first.
        """
        parts = []
        if self.bad_loss is not None:
            step, value = self.bad_loss
            word = "NaN" if math.isnan(value) else "infinite"
            parts.append(f"the loss is {word} since step {step}")
        if weights:
            first = weights[0]
            others = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
            parts.append(
                f"the first weight that is not finite is {first.name}{others}, "
                f"seen after step {first.step}"
            )
        elif parts:
            parts.append("all weights are finite")
        if self.bad_gradients and parts:
            others = len(self.bad_gradients) - 1
            more = f" and {others} more" if others else ""
            parts.append(f"the gradient of {self.bad_gradients[0]}{more} is not finite")
        sentence = "; ".join(parts)
        return sentence[:1].upper() + sentence[1:] + "." if sentence else None

    def _raise_alarm(self, loss: Tensor | float | None) -> None:
        flags = [(first >= 0).any() for first in self._first.values()]
        if isinstance(loss, Tensor):
            flags.append(~loss.isfinite().all())
        elif loss is not None:
            self.alarmed |= not math.isfinite(loss)
        for flag in flags:
            if flag.is_cuda:
                copied = torch.empty((), dtype=torch.bool, pin_memory=True)
                copied.copy_(flag, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(flag.device))
                self._pending.append((copied, event))
            else:
                self.alarmed |= bool(flag)

    def _collect_flags(self) -> None:
        """Take the flags that have arrived from a GPU."""
        waiting = []
        for copied, event in self._pending:
            if event.query():
                self.alarmed |= bool(copied)
            else:
                waiting.append((copied, event))
        self._pending = waiting

    def _begin(self, tensors: Mapping[str, Tensor]) -> None:
        before = {bad.name: bad.step for bad in self.weights()}
        self._names, self._others, self._indices = list(tensors), [], {}
        for index, tensor in enumerate(tensors.values()):
            if tensor.numel() == 0:  # of which another process has everything
                continue
            self._indices.setdefault(tensor.device, []).append(index)
        self._first = {
            device: torch.tensor(
                [before.get(self._names[index], -1) for index in indices],
                dtype=torch.long,
                device=device,
            )
            for device, indices in self._indices.items()
        }


def _local(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what this process holds of each tensor that can be checked."""
    found = {}
    for name, tensor in tensors.items():
        if not is_real(tensor):
            continue
        tensor = tensor.detach()
        found[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def _not_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return a flag for each tensor, on their device: whether an entry is not finite."""
    with torch.no_grad():
        norms = torch._foreach_norm(list(tensors), torch.inf)  # pyright: ignore[reportPrivateImportUsage]
        return ~torch.stack([norm.float() for norm in norms]).isfinite()


NOT_FINITE = "where numbers stop being finite"


class Alarm:
    """Watches losses and weights, and reports the first that is not finite.

    Args:
        processes: The processes that train the model.
        faults: Where failures are noted.
    """

    def __init__(self, processes: MonitoredProcesses, faults: Faults) -> None:
        self._processes, self._faults = processes, faults
        self._finite = FiniteWatch()
        self._begun: int | None = None
        self._quiet_until = 0

    @property
    def alarmed(self) -> bool:
        """Whether a loss or weight was seen that is not finite."""
        return self._finite.alarmed

    def is_quiet(self, step: int, loss: Tensor | float | None) -> bool:
        """Return whether `check` would do nothing now: the loss is on a GPU and no check is due.

        Args:
            step: The step.
            loss: Its loss.
        """
        return step < self._quiet_until and isinstance(loss, Tensor) and loss.is_cuda

    def check(
        self,
        model: nn.Module,
        step: int,
        loss: Tensor | float | None,
        report: Callable[[], object],
    ) -> None:
        """Check a step's loss, and the weights if there is time for it.

        Args:
            model: The model, after the step.
            step: The step.
            loss: Its loss. One on a GPU is not waited for.
            report: Called where the alarm is raised.
        """
        finite = self._finite
        if finite.located or self._faults.is_off(NOT_FINITE):
            return
        if isinstance(loss, Tensor) and loss.device.type == "cpu":
            loss = float(loss)
        if isinstance(loss, float):
            self.see_loss(step, loss)
        if finite.due or (finite.alarmed and not finite.reported):
            self._faults.tried(
                NOT_FINITE, lambda: finite.check(model, step, loss), effect="not located"
            )
        else:
            self._wait(step)
        if finite.alarmed and not finite.reported:
            report()

    def _wait(self, step: int) -> None:
        """Be quiet for half of the steps until the next check, by what a step has taken so far."""
        if self._begun is None:
            self._begun = step
        elif step > self._begun:
            a_step = self._finite.seconds / (step - self._begun)
            self._quiet_until = step + int(0.5 * self._finite.seconds_until_due / a_step)

    def share(self, model: nn.Module, step: int, report: Callable[[], object]) -> None:
        """Learn of weights that are not finite in the shards of other processes."""
        finite = self._finite
        if not self._processes.together:
            return
        self._faults.tried(NOT_FINITE, lambda: finite.check(model, step), effect="not located")
        if self._processes.any(self._faults.is_off(NOT_FINITE)):
            return
        finite.share(self._processes)
        if finite.alarmed and not finite.reported:
            report()

    def see_loss(self, step: int, loss: float) -> None:
        """Check a loss that is known by now."""
        if not math.isfinite(loss) and self._finite.bad_loss is None:
            self._finite.bad_loss = (step, loss)
            self._finite.alarmed = True

    def report(self, model: nn.Module, step: int, recorder: Recorder) -> None:
        """Say once what is not finite, and since when."""
        finite = self._finite
        finite.reported = True
        with torch.no_grad():
            finite.scan_gradients(model)
        weights = finite.weights()
        sentence = finite.sentence(weights)
        if not self._processes.first or sentence is None:
            return
        LOG.warning(sentence)
        rows = [Row("not_finite", float(bad.step), bad.name, bad.layer) for bad in weights[:NAMED]]
        recorder.rows(step, rows)

    def sentence(self) -> str | None:
        """Return what is not finite in one sentence, None where everything is."""
        finite = self._finite
        return self._faults.tried(
            NOT_FINITE, lambda: finite.sentence(finite.weights()), effect="not located"
        )
