"""Locating NaN and infinity, and reporting once which loss or weight was first."""

import math
from collections.abc import Mapping, Sequence
from time import perf_counter

import torch
from torch import Tensor, nn

from joma.common.sharded import local
from joma.train.monitor.faults import LOG, Faults
from joma.train.monitor.parts import is_real, layer_in, named_parameters
from joma.train.monitor.record import Row
from joma.train.processes import MonitoredProcesses

SHARE, FREE = 5e-4, 0.1
"""Share of the training's time, and seconds on top, that checks after single steps may take."""
NAMED = 8
"""Weights that are named in the log; what follows is the same trouble."""
NOT_FINITE = "where numbers stop being finite"
_NEVER = 2**62
"""Step at which a weight that is finite stops being so."""


class FiniteAlarm:
    """Follows which loss and which weights, and since which step, are not finite.

    A check reads every weight once, starts no transfer from the device and waits for nothing. It is
    made after every step, or as often as its share of the time allows.

    Args:
        processes: The processes that train the model.
        faults: Where failures are noted.

    Attributes:
        alarmed: Whether a check has seen a weight or loss that is not finite. Of a GPU this is
            known one check later, so that nothing waits for it.
    """

    def __init__(self, processes: MonitoredProcesses, faults: Faults) -> None:
        self._processes, self._faults = processes, faults
        self.alarmed = self._reported = self._located = False
        self._bad_loss: tuple[int, float] | None = None
        self._bad_gradients: list[str] = []
        self._pending: list[tuple[Tensor, torch.cuda.Event]] = []
        self._names: list[str] = []
        self._indices: dict[torch.device, list[int]] = {}
        self._first: dict[torch.device, Tensor] = {}
        self._first_anywhere: list[int] = []
        self._began, self._spent, self._usual = perf_counter(), 0.0, 0.0
        self._first_wait: int | None = None
        self._quiet_until = 0

    def is_quiet(self, step: int, loss: Tensor | float | None) -> bool:
        """Return whether `check` would do nothing now: the loss is on a GPU and no check is due.

        Args:
            step: The step.
            loss: Its loss.
        """
        return step < self._quiet_until and isinstance(loss, Tensor) and loss.is_cuda

    def check(self, model: nn.Module, step: int, loss: Tensor | float | None) -> bool:
        """Check a step's loss, and the weights if there is time for it.

        Args:
            model: The model, after the step.
            step: The step.
            loss: Its loss. One on a GPU is not waited for.

        Returns:
            Whether there is something to `report`.
        """
        if (self._reported and self._located) or self._faults.is_off(NOT_FINITE):
            return False
        if isinstance(loss, Tensor) and loss.device.type == "cpu":
            loss = float(loss)
        if isinstance(loss, float):
            self.see_loss(step, loss)
        seconds = perf_counter() - self._began
        wait = (self._spent + self._usual - FREE) / SHARE - seconds
        if wait <= 0 or self._unreported:
            self._check_weights(model, step, loss)
        elif self._first_wait is None:
            self._first_wait = step
        elif step > self._first_wait:  # be quiet for half of the steps until the next check
            self._quiet_until = step + int(0.5 * wait * (step - self._first_wait) / seconds)
        return self._unreported

    def share(self, model: nn.Module, step: int) -> bool:
        """Learn of weights that are not finite in the shards of other processes.

        Args:
            model: The model, after the step.
            step: The step.

        Returns:
            Whether there is something to `report`.
        """
        if not self._processes.together:
            return False
        self._check_weights(model, step, None)
        if self._processes.any(self._faults.is_off(NOT_FINITE)):
            return False
        steps = [_NEVER] * len(self._names)
        for first, name in self._weights():
            steps[self._names.index(name)] = first
        self._first_anywhere = self._processes.least(steps)
        self.alarmed |= min(self._first_anywhere, default=_NEVER) < _NEVER
        return self._unreported

    def see_loss(self, step: int, loss: float) -> None:
        """Check a loss that is known by now."""
        if not math.isfinite(loss) and self._bad_loss is None:
            self._bad_loss = (step, loss)
            self.alarmed = True

    def report(self, model: nn.Module) -> list[Row]:
        """Say once what is not finite, and since when; return the rows to record.

        Args:
            model: The model, whose gradients are checked, too.
        """
        self._reported = True
        gradients = {name: it.grad for name, it in named_parameters(model).items()}
        there = _local({name: it for name, it in gradients.items() if it is not None})
        self._bad_gradients = [
            name for name, it in there.items() if it.numel() and bool(_not_finite([it]))
        ]
        weights = self._weights()
        sentence = self._sentence(weights)
        if not self._processes.first or sentence is None:
            return []
        LOG.warning(sentence)
        return [
            Row("not_finite", float(step), name, layer_in(name)) for step, name in weights[:NAMED]
        ]

    def sentence(self) -> str | None:
        """Return what is not finite in one sentence, None where everything is."""
        return self._faults.tried(
            NOT_FINITE, lambda: self._sentence(self._weights()), effect="not located"
        )

    @property
    def _unreported(self) -> bool:
        return self.alarmed and not self._reported

    def _sentence(self, weights: Sequence[tuple[int, str]]) -> str | None:
        parts = []
        if self._bad_loss is not None:
            step, value = self._bad_loss
            word = "NaN" if math.isnan(value) else "infinite"
            parts.append(f"the loss is {word} since step {step}")
        if weights:
            step, name = weights[0]
            parts.append(
                f"the first weight that is not finite is {name}{_and_more(weights)}, "
                f"seen after step {step}"
            )
        elif parts:
            parts.append("all weights are finite")
        if self._bad_gradients and parts:
            more = _and_more(self._bad_gradients)
            parts.append(f"the gradient of {self._bad_gradients[0]}{more} is not finite")
        sentence = "; ".join(parts)
        return sentence[:1].upper() + sentence[1:] + "." if sentence else None

    def _weights(self) -> list[tuple[int, str]]:
        """Return step and name of weights that are not finite, in order; waits for the device."""
        steps = dict(enumerate(self._first_anywhere))
        for device, indices in self._indices.items():
            for index, step in zip(indices, self._first[device].tolist(), strict=True):
                steps[index] = min(step, steps.get(index, _NEVER))
        found = sorted((step, index) for index, step in steps.items() if step < _NEVER)
        self._located |= bool(found)
        return [(step, self._names[index]) for step, index in found]

    def _check_weights(self, model: nn.Module, step: int, loss: Tensor | float | None) -> None:
        self._faults.tried(NOT_FINITE, lambda: self._flag(model, step, loss), effect="not located")

    def _flag(self, model: nn.Module, step: int, loss: Tensor | float | None) -> None:
        """Keep the step of weights that are not finite now; they or the loss raise the alarm."""
        began = perf_counter()
        flags: list[Tensor] = []
        pending, self._pending = self._pending, []
        for flag, event in pending:
            flags.append(flag) if event.query() else self._pending.append((flag, event))
        tensors = _local(named_parameters(model))
        if list(tensors) != self._names:
            self._begin(tensors)
        values = list(tensors.values())
        for device, indices in self._indices.items():
            first = self._first[device]
            bad = _not_finite([values[index] for index in indices])
            self._first[device] = first = torch.where(bad, first.clamp(max=step), first)
            flags.append((first < _NEVER).any())
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
        self._usual = perf_counter() - began
        self._spent += self._usual

    def _begin(self, tensors: Mapping[str, Tensor]) -> None:
        before = {name: step for step, name in self._weights()}
        self._names, self._first_anywhere, self._indices = list(tensors), [], {}
        for index, tensor in enumerate(tensors.values()):
            if tensor.numel():  # otherwise another process has everything of it
                self._indices.setdefault(tensor.device, []).append(index)
        self._first = {
            device: torch.tensor(
                [before.get(self._names[index], _NEVER) for index in indices], device=device
            )
            for device, indices in self._indices.items()
        }


def _and_more(several: Sequence[object]) -> str:
    return f" and {len(several) - 1} more" if len(several) > 1 else ""


def _local(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what this process has of each tensor that can be checked."""
    return {name: local(tensor.detach()) for name, tensor in tensors.items() if is_real(tensor)}


def _not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return a flag for each tensor, on their device: whether an entry is not finite."""
    with torch.no_grad():
        norms = torch._foreach_norm(list(tensors), torch.inf)  # pyright: ignore[reportPrivateImportUsage]
        return ~torch.stack([norm.float() for norm in norms]).isfinite()
