"""The inputs that a model is measured on: given, or caught from its first forward pass."""

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from joma.errors import JomaError
from joma.train.monitor._faults import Faults
from joma.train.processes import MonitoredProcesses, sharded_modules

TOKENS = 2048
"""Tokens that a measurement reads, unless one sequence alone has more."""

_ONLY_FOR_THE_LOSS = ("labels", "num_items_in_batch", "shift_labels")
_UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention but cuDNN's, which is planned anew for every input shape, for half a second."""
_CALL = "_compiled_call_impl"
"""What `nn.Module.__call__` calls in place of `_call_impl`, where it is set."""


@dataclass(frozen=True, eq=False)
class MeasurementInputs:
    """What a model is called with, and the autocast it is called in.

    Attributes:
        calls: Arguments and named arguments of each call.
        autocast: Whether autocast is on, and its type.
    """

    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]
    autocast: tuple[bool, torch.dtype] | None = None

    @classmethod
    def of(cls, batches: Any) -> "MeasurementInputs":
        """Return given batches: one tensor, tuple or dict for each call, or just one."""
        several = list(batches) if isinstance(batches, list) else [batches]
        if not several:
            raise JomaError("inputs must be one batch at least, got none")
        return cls(tuple(_call(batch) for batch in several))

    @classmethod
    def seen(
        cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str
    ) -> tuple["MeasurementInputs", ...]:
        """Return the first sequences of what the model is just called with.

        Several where it is not clear which tensors hold one row for each sequence: the first that
        the model takes is right. The last one is everything.
        """
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return tuple(
            cls(((_each(args, cut), _each(dict(kwargs), cut)),), autocast)
            for cut in _cutters(model, args, kwargs)
        )

    def shared(self, same: Callable[[Tensor], Tensor]) -> "MeasurementInputs":
        """Return the inputs with what `same` makes of every tensor."""
        calls = tuple((_each(args, same), _each(kwargs, same)) for args, kwargs in self.calls)
        return MeasurementInputs(calls, self.autocast)

    def run(self, model: nn.Module, device: torch.device) -> None:
        """Call the model, or its body where the rest is for the loss alone."""
        target = _body(model)
        on, dtype = self.autocast or (False, torch.bfloat16)
        for args, kwargs in self.shared(lambda tensor: tensor.to(device)).calls:
            # A cast weight that was cached without a graph would be used by training.
            autocast = torch.autocast(device.type, dtype, enabled=on, cache_enabled=False)
            with autocast, sdpa_kernel(_UNPLANNED):
                target(*args, **_accepted(target, kwargs))


def _body(model: nn.Module) -> nn.Module:
    """Return a Hugging Face model without its head: logits are large and not measured."""
    body = getattr(model, "base_model", model)
    if not hasattr(model, "config") or not isinstance(body, nn.Module):
        return model
    # What gathers sharded weights hangs on the whole, and decoders may read the labels.
    if sharded_modules(model) or getattr(model.config, "is_encoder_decoder", False):
        return model
    return body if hasattr(body, "get_input_embeddings") else model


def _accepted(target: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the named arguments that a Hugging Face model's body takes; other models take all."""
    if not hasattr(target, "config") or getattr(target.config, "is_encoder_decoder", False):
        return kwargs
    parameters = inspect.signature(target.forward).parameters
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {
        name: value
        for name, value in kwargs.items()
        if name not in _ONLY_FOR_THE_LOSS and (any_name or name in parameters)
    } | ({"use_cache": False} if "use_cache" in parameters else {})


def _call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    raise JomaError(
        f"inputs must be tensors, tuples or dicts the model is called with, got {type(batch)}"
    )


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same value with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_each(item, change) for item in value)
    if isinstance(value, Mapping):
        return {key: _each(item, change) for key, item in value.items()}
    return value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _each(value, lambda tensor: found.append(tensor) or tensor)
    return found


def _cutters(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Callable[[Tensor], Tensor]]:
    """Return ways to take the first sequences of tensors: cut, and whole where a model needs that.

    Tensors that have as many sequences as the first one are cut. Sequences lie along the first
    axis, but along the second where the model has `nn.MultiheadAttention` with `batch_first=False`.
    A square tensor with as many rows and columns as there are sequences may be a mask of tokens by
    tokens, and is left whole.
    """
    found = _tensors((args, list(kwargs.values())))
    of_torch = (it for it in model.modules() if isinstance(it, nn.MultiheadAttention))
    axis = int(any(not it.batch_first for it in of_torch))
    first = next((tensor for tensor in found if tensor.ndim > 1), None)
    if first is None:
        return [_copied]
    count, length = first.shape[axis], first.shape[1 - axis]
    kept = min(count, max(1, TOKENS // max(length, 1)))
    squares = {id(it) for it in found if it is not first and it.shape[:2] == (count, count)}
    if kept == count or (squares and kept == 1):  # one sequence would fit any number of rows
        return [_copied]

    def cut(tensor: Tensor) -> Tensor:
        if tensor.ndim > axis and tensor.shape[axis] == count and id(tensor) not in squares:
            tensor = tensor.narrow(axis, 0, kept)
        return _copied(tensor)

    return [cut, _copied]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


class Inputs:
    """What a model is called with to be measured.

    Args:
        model: What the training loop calls; it is not kept alive.
        inner: The model inside what compiles it or makes it parallel; it is not kept alive.
        given: Inputs that a user chose, or None to catch those of the first forward pass.
        processes: The processes that train the model.
        faults: Where failures are noted.

    Attributes:
        batches: Inputs of which the first that the model takes are right; None before there are
            any.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        given: MeasurementInputs | None,
        processes: MonitoredProcesses,
        faults: Faults,
    ) -> None:
        self.batches: tuple[MeasurementInputs, ...] | None = None if given is None else (given,)
        self._called, self._inner = weakref.ref(model), weakref.ref(inner)
        self._processes, self._faults = processes, faults
        self._settled = False
        self._calls: list[_FirstCall] = []
        if self.batches is None and processes.measures:
            self._await()

    def settle(self) -> None:
        """Stop catching once there are inputs; all processes take those of the first."""
        if self.batches is not None and not self._settled:
            self.close()
            self.batches = self._shared(self.batches)
            self._settled = True
        elif self._calls and not self._calls[-1].in_place:
            self._await()  # the model was compiled in place meanwhile

    def close(self) -> None:
        """Leave the model alone."""
        for call in self._calls:
            call.remove()
        self._calls.clear()

    def _shared(self, batches: tuple[MeasurementInputs, ...]) -> tuple[MeasurementInputs, ...]:
        """Return the first process's inputs; each keeps its own where they differ in number.

        Batches may be of another length in each process, and then of another number of candidates.
        """
        if not self._processes.together:
            return batches
        number = self._processes.agree([len(batches)])[0]
        batches = (*batches, *[batches[-1]] * number)[:number]
        tensors = sum(len(_tensors(one.calls)) for one in batches)
        if self._processes.any(self._processes.agree([tensors])[0] != tensors):
            self._faults.remark("every process is measured on inputs of its own, which differ")
            return batches
        return tuple(one.shared(self._processes.same) for one in batches)

    def _await(self) -> None:
        called = self._called()
        if called is not None:
            self._calls.append(_FirstCall(called, weakref.WeakMethod(self._catch)))

    def _catch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        inner, device = self._inner(), self._processes.device.type
        # A validation before the first step is not training.
        if self.batches is None and inner is not None and torch.is_grad_enabled():
            with self._faults.guard("catching inputs", effect="failed"):
                self.batches = MeasurementInputs.seen(inner, args, kwargs, device)


class _FirstCall:
    """Reports the calls of a module until it is removed.

    It takes the place of the module's `_compiled_call_impl`, which is what PyTorch calls for a
    module compiled in place. Pickling, saving and deep-copying a module turn it into None, so that
    the copy has no trace of it. Code compiled around the module does not contain it either.

    Args:
        module: The module whose calls are reported. It is not kept alive.
        caught: Returns what takes the positional and the named arguments of a call.
    """

    _torchdynamo_disable = True

    def __init__(self, module: nn.Module, caught: Callable[[], Any]) -> None:
        self._module, self._caught = weakref.ref(module), caught
        self._before = module.__dict__.get(_CALL)
        module.__dict__[_CALL] = self  # not setattr, which torch.compile's wrapper hands on

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Report the call, and make it."""
        catch, module = self._caught(), self._module()
        if catch is not None:
            catch(args, kwargs)
        if self._before is not None:
            return self._before(*args, **kwargs)
        assert module is not None, "it is being called"
        return module._call_impl(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @property
    def is_uncompiled(self) -> bool:
        """Whether what it calls is the module as it was written: `watch_attention` asks."""
        return self._before is None

    @property
    def in_place(self) -> bool:
        """Whether the module still calls it: compiling the module in place replaces it."""
        module = self._module()
        return module is not None and module.__dict__.get(_CALL) is self

    def remove(self) -> None:
        """Put back what was there before, unless it was replaced meanwhile."""
        module = self._module()
        if module is None or not self.in_place:
            return
        if self._before is None:
            del module.__dict__[_CALL]
        else:
            module.__dict__[_CALL] = self._before
