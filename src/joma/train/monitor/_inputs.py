"""The inputs that a model is measured on: given, or caught from its first forward pass."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from joma.train.monitor._faults import Faults
from joma.train.monitor._first_call import FirstCall
from joma.train.monitor._held import Held
from joma.train.monitor._processes import Processes


class Inputs:
    """What a model is called with to be measured.

    Args:
        model: What the training loop calls; it is not kept alive.
        inner: The model inside what compiles it or makes it parallel; it is not kept alive.
        given: Inputs that a user chose, or None to catch those of the first forward pass.
        processes: The processes that train the model.
        faults: Where failures are noted.

    Attributes:
        held: Inputs of which the first that the model takes are right; None before there are any.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        given: Held | None,
        processes: Processes,
        faults: Faults,
    ) -> None:
        self.held: tuple[Held, ...] | None = None if given is None else (given,)
        self._called, self._inner = weakref.ref(model), weakref.ref(inner)
        self._processes, self._faults = processes, faults
        self._settled = False
        self._first_calls: list[FirstCall] = []
        if self.held is None and processes.looks:
            self._await()

    def settle(self) -> None:
        """Stop catching once there are inputs; all processes take those of the first."""
        if self.held is not None and not self._settled:
            self.close()
            self.held = self._shared(self.held)
            self._settled = True
        elif self._first_calls and not self._first_calls[-1].in_place:
            self._await()  # the model was compiled in place meanwhile

    def _shared(self, held: tuple[Held, ...]) -> tuple[Held, ...]:
        """Return the first process's inputs; each keeps its own where they cannot be told apart.

        Batches may be of another length in each process, and then of another number of candidates.
        """
        if not self._processes.together:
            return held
        number = self._processes.agree([len(held)])[0]
        held = (*held, *[held[-1]] * number)[:number]
        tensors = sum(one.tensors for one in held)
        if self._processes.any(self._processes.agree([tensors])[0] != tensors):
            self._faults.remark("every process is measured on inputs of its own, which differ")
            return held
        return tuple(one.shared(self._processes.same) for one in held)

    def close(self) -> None:
        """Leave the model alone."""
        for call in self._first_calls:
            call.remove()
        self._first_calls.clear()

    def _await(self) -> None:
        called, this = self._called(), weakref.ref(self)
        if called is None:
            return

        def caught(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = this()
            if inputs is not None:
                catch = inputs._catch
                inputs._faults.tried(
                    "catching inputs", lambda: catch(args, kwargs), effect="failed"
                )

        self._first_calls.append(FirstCall(called, caught))

    def _catch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        inner = self._inner()
        # A validation before the first step is not training.
        if self.held is None and inner is not None and torch.is_grad_enabled():
            self.held = Held.seen(inner, args, kwargs, self._processes.device.type)
