"""Measuring without a trace: the model is afterwards as it was before."""

import contextlib
import random
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from joma.common.sharded import is_fsdp1
from joma.errors import JomaError
from joma.train.processes import shard_again

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_buffers", "_modules"}
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
def evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Have the model uncompiled and in evaluation mode; restore everything when the block ends.

    That is modes, attributes, buffers, what is compiled, random states of Python, NumPy and torch,
    autocast, grad mode and warnings. Sharded weights are sharded again.
    """
    modules = list(model.modules())
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of checkpointing, that nothing needs gradients here
        stack.enter_context(torch.random.fork_rng(sorted(devices)))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002  # not ours
        for kind in {"cpu", device.type}:
            stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        for buffer in model.buffers():
            if not is_lazy(buffer) and buffer.device.type != "meta":
                stack.callback(_restore_values, buffer, buffer.detach().clone())
        for module in modules:
            for container in _containers(module):
                stack.callback(_restore, container, container.copy())
        for module in modules:
            if module.training:
                module.training = False  # the flag alone: `eval()` of adapters merges weights
            if getattr(module, "_compiled_call_impl", None) is not None:
                module._compiled_call_impl = None
            for name, child in module._modules.items():
                if name != "_orig_mod" and hasattr(child, "_orig_mod"):
                    module._modules[name] = child._orig_mod  # type: ignore[union-attr,assignment]
        shard_again(model)
        stack.callback(shard_again, model)
        yield


def _containers(module: nn.Module) -> Iterator[Any]:
    """Yield the dictionaries that hold a module together, and what it collects things in.

    Losses of experts are often collected in lists by forward passes, and enter the training's loss.
    """
    yield vars(module)
    waiting = [(value, 0) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
    while waiting:
        value, depth = waiting.pop()
        if type(value) in (list, dict, set, deque, defaultdict):
            yield value
            if depth < 2 and not isinstance(value, set):
                inside = value.values() if isinstance(value, dict) else value
                waiting += [(one, depth + 1) for one in inside]


def _restore(container: Any, before: Any) -> None:
    """Give a container the contents it had; only what changed is written."""
    if isinstance(container, dict):
        for key in [key for key in container if key not in before]:
            del container[key]
        for key, value in before.items():
            if container.get(key, _ABSENT) is not value:
                container[key] = value
    elif [id(one) for one in container] != [id(one) for one in before]:
        container.clear()
        container.update(before) if isinstance(container, set) else container.extend(before)


def _restore_values(buffer: Tensor, before: Tensor) -> None:
    """Give a buffer its values, unless it has them: a copy would be a new version for autograd."""
    same = (buffer == before) | ((buffer != buffer) & (before != before))
    if not bool(same.all()):
        buffer.copy_(before)
