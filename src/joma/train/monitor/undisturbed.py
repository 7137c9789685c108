"""Measuring without a trace: the model is afterwards as it was before."""

import contextlib
import random
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from joma.common.sharded import is_fsdp1
from joma.errors import JomaError
from joma.train.processes import device_of, shard_again

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


_ABSENT = object()


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers of torch.compile and DDP.

    Raises:
        JomaError: It is in FullyShardedDataParallel, which cannot be monitored.
    """
    while True:
        if is_fsdp1(model):
            raise JomaError(
                "model must be sharded with fully_shard (FSDP2) to be monitored, got one in "
                "FullyShardedDataParallel"
            )
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """The model uncompiled and in evaluation mode; everything as it was when the block ends.

    Modes, buffers, gradients, random states of Python, NumPy and torch, autocast, warnings and what
    is compiled are put back, and sharded weights are sharded again.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of checkpointing, that nothing needs gradients here
        stack.enter_context(_random_states(model))
        stack.enter_context(_uncompiled(model))
        stack.enter_context(_evaluating(model))
        for kind in {"cpu", device_of(model).type}:
            stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        shard_again(model)
        stack.callback(shard_again, model)
        yield


@contextlib.contextmanager
def _random_states(model: nn.Module) -> Iterator[None]:
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # the model's, not ours
    with torch.random.fork_rng(sorted(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    # The flags alone: `eval()` of adapters merges weights.
    modules = list(model.modules())
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if _holds(buffer)]
    registered = {module: dict(module._buffers) for module in modules if any(module._buffers)}
    attributes = [(module, dict(vars(module))) for module in modules]
    contents = [pair for module in modules for pair in _contents(module)]
    for module in modules:
        if module.training:
            module.training = False
    try:
        yield
    finally:
        for buffer, before in buffers:
            # Only what changed: a copy is a new version, which a graph kept for later would mind.
            if not _same(buffer, before):
                buffer.copy_(before)
        for module, there in registered.items():
            module._buffers.clear()
            module._buffers.update(there)
        for module, there in attributes:
            _put_back(module, there)
        for container, before in contents:
            _refill(container, before)


def _contents(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the lists, dicts and sets a module collects things in, with copies of them.

    Losses of experts are often collected so by forward passes, and enter the training's loss.
    """
    waiting = [(value, 0) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
    while waiting:
        value, depth = waiting.pop()
        if type(value) in (list, dict, set, deque, defaultdict):
            yield value, value.copy()
            if depth < 2 and not isinstance(value, set):
                inside = value.values() if isinstance(value, dict) else value
                waiting += [(one, depth + 1) for one in inside]


def _refill(container: Any, before: Any) -> None:
    """Give a list, dict, set or deque the contents it had, if they changed."""
    now, then = (list(it.items()) if isinstance(it, dict) else it for it in (container, before))
    if len(now) == len(then) and all(
        one is other or (type(one) is tuple and all(map(is_, one, other)))
        for one, other in zip(now, then, strict=True)
    ):
        return
    container.clear()
    container.extend(before) if isinstance(container, list | deque) else container.update(before)


def _put_back(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Give a module the attributes it had; counters and cached tensors are part of the training."""
    now = vars(module)
    for name in [name for name in now if name not in attributes]:
        del now[name]
    for name, value in attributes.items():
        if now.get(name, _ABSENT) is not value:
            now[name] = value


def _holds(buffer: Tensor) -> bool:
    return not is_lazy(buffer) and buffer.device.type != "meta"


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, NaN in the same places included."""
    if torch.equal(one, other):
        return True
    same = (one == other) | ((one != one) & (other != other))
    return bool(same.all())


@contextlib.contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Everything within the model as it was written."""
    in_place = [
        (module, module._compiled_call_impl)
        for module in model.modules()
        if getattr(module, "_compiled_call_impl", None) is not None
    ]
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and name != "_orig_mod" and hasattr(child, "_orig_mod")
    ]
    for module, _ in in_place:
        module._compiled_call_impl = None
    for parent, name, child in wrapped:
        parent._modules[name] = child._orig_mod  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, compiled in in_place:
            module._compiled_call_impl = compiled
        for parent, name, child in wrapped:
            parent._modules[name] = child
