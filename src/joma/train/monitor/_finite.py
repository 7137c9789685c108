"""Locating NaN and infinity, and reporting once which loss or weight was first."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from joma.common.sharded import local
from joma.train.monitor._faults import LOG, Faults
from joma.train.monitor._record import Row
from joma.train.monitor._selection import is_real, layer_in
from joma.train.processes import MonitoredProcesses

SHARE, FREE = 5e-4, 0.1
"""Share of the training's time, and seconds on top, that checks after single steps may take."""
NAMED = 8
"""Weights that are named in the log; what follows is the same trouble."""
LOCATING = "where numbers stop being finite"
_NEVER = 2**62
"""Step at which a weight that is finite stops being so."""


@dataclass(eq=False)
class _Flags:
    """What is known of the weights on one device.

    Attributes:
        indices: Of the weights, among all names.
        first: Step after which each was first seen not to be finite.
        some: Whether a weight or loss was, on the device.
        seen: The same in the CPU's memory, written by the device when it has come so far.
    """

    indices: list[int]
    first: Tensor
    some: Tensor
    seen: Tensor


class FiniteAlarm:
    """Follows which loss and which weights, and since which step, are not finite.

    A check reads every weight once and waits for nothing. It is made after every step, or as often
    as its share of the time allows.

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
        self._names: list[str] = []
        self._flags: list[_Flags] = []
        self._first_anywhere: list[int] = []
        self._began, self._spent, self._usual = time.perf_counter(), 0.0, 0.0

    def check(self, model: nn.Module, step: int, loss: Tensor | float | None) -> bool:
        """Check a step's loss, and the weights if there is time for it.

        Args:
            model: The model, after the step.
            step: The step.
            loss: Its loss. One on a GPU is not waited for.

        Returns:
            Whether there is something to `report`.
        """
        if (self._reported and self._located) or (LOCATING, None) in self._faults.off:
            return False
        if isinstance(loss, float) or (isinstance(loss, Tensor) and loss.device.type == "cpu"):
            self.see_loss(step, float(loss))
        allowed = FREE + SHARE * (time.perf_counter() - self._began)
        if self._spent + self._usual <= allowed or self._unreported:
            self._check_weights(model, step, loss)
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
        if self._processes.any((LOCATING, None) in self._faults.off):
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
        gradients = {name: it.grad for name, it in model.named_parameters()}
        there = _local({name: it for name, it in gradients.items() if it is not None})
        self._bad_gradients = [
            name for name, it in there.items() if it.numel() and bool(_not_finite([it]))
        ]
        sentence = self.sentence()
        if not self._processes.first or sentence is None:
            return []
        LOG.warning(sentence)
        return [
            Row("not_finite", float(step), name, layer_in(name))
            for step, name in self._weights()[:NAMED]
        ]

    def sentence(self) -> str | None:
        """Return what is not finite in one sentence, None where everything is."""
        parts = []
        weights = self._weights()
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

    @property
    def _unreported(self) -> bool:
        return self.alarmed and not self._reported

    def _weights(self) -> list[tuple[int, str]]:
        """Return step and name of weights that are not finite, in order; waits for the device."""
        steps = dict(enumerate(self._first_anywhere))
        for flags in self._flags:
            for index, step in zip(flags.indices, flags.first.tolist(), strict=True):
                steps[index] = min(step, steps.get(index, _NEVER))
        found = sorted((step, index) for index, step in steps.items() if step < _NEVER)
        self._located |= bool(found)
        return [(step, self._names[index]) for step, index in found]

    def _check_weights(self, model: nn.Module, step: int, loss: Tensor | float | None) -> None:
        """Keep the step of weights that are not finite now; they or the loss raise the alarm."""
        began = time.perf_counter()
        with self._faults.guard(LOCATING, effect="not located"):
            tensors = _local(dict(model.named_parameters(remove_duplicate=False)))
            if list(tensors) != self._names:
                self._begin(tensors)
            values = list(tensors.values())
            for flags in self._flags:
                bad = _not_finite([values[index] for index in flags.indices])
                flags.first = torch.where(bad, flags.first.clamp(max=step), flags.first)
                flags.some = flags.some | bad.any()
                if isinstance(loss, Tensor) and loss.device == bad.device:
                    flags.some = flags.some | ~loss.isfinite().all()
                flags.seen.copy_(flags.some, non_blocking=True)
                self.alarmed |= bool(flags.seen)
        self._usual = time.perf_counter() - began
        self._spent += self._usual

    def _begin(self, tensors: Mapping[str, Tensor]) -> None:
        before = {name: step for step, name in self._weights()}
        self._names, self._first_anywhere, self._flags = list(tensors), [], []
        by_device: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors.values()):
            if tensor.numel():  # otherwise another process has everything of it
                by_device.setdefault(tensor.device, []).append(index)
        for device, indices in by_device.items():
            steps = [before.get(self._names[index], _NEVER) for index in indices]
            first = torch.tensor(steps, device=device)
            seen = torch.zeros((), dtype=torch.bool, pin_memory=device.type == "cuda")
            self._flags.append(_Flags(indices, first, (first < _NEVER).any(), seen))


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
