"""Looking without being noticed: held inputs, and a model that is afterwards as it was found."""

import contextlib
import inspect
import random
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from joma.errors import JomaError

TOKENS = 2048
"""Tokens that a look reads, unless one sequence alone has more."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ABSENT = object()
_ONLY_FOR_THE_LOSS = ("labels", "num_items_in_batch", "shift_labels")


def bare(model: nn.Module) -> nn.Module:
    """The module inside what compiles it or makes it parallel."""
    while True:
        if isinstance(model, FullyShardedDataParallel):
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


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter that is somewhere, the CPU where none is."""
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Held:
    """What a model is called with, and the autocast it is called in.

    Attributes:
        calls: arguments and named arguments of each call.
        autocast: whether on, and its type.
    """

    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]
    autocast: tuple[bool, torch.dtype] | None = None

    @classmethod
    def of(cls, batches: Any) -> "Held":
        """Batches given by a person: one tensor, tuple or dict for each call, or just one."""
        several = list(batches) if isinstance(batches, list) else [batches]
        if not several:
            raise JomaError("held must be one batch at least, got none")
        return cls(tuple(_call(batch) for batch in several))

    @classmethod
    def seen(
        cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str
    ) -> tuple["Held", ...]:
        """Return the first sequences of what the model is just called with.

        Several where it is not clear which tensors hold one row for each sequence: the first that
        the model takes is right. The last one is everything.
        """
        autocast = (
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
        )
        return tuple(
            cls(((_each(args, cut), _each(dict(kwargs), cut)),), autocast)
            for cut in _cutters(model, args, kwargs)
        )

    @property
    def tensors(self) -> int:
        """How many tensors the model is called with."""
        found: list[Tensor] = []
        _each(self.calls, lambda tensor: found.append(tensor) or tensor)
        return len(found)

    def shared(self, same: Callable[[Tensor], Tensor]) -> "Held":
        """The same with what `same` makes of every tensor."""
        calls = tuple((_each(args, same), _each(kwargs, same)) for args, kwargs in self.calls)
        return Held(calls, self.autocast)

    def run(self, model: nn.Module) -> None:
        """Calls the model, or its body where the rest is for the loss alone."""
        device = device_of(model)
        target = _body(model)
        on, dtype = self.autocast or (False, torch.bfloat16)
        for args, kwargs in self.calls:
            args = _each(args, lambda tensor: tensor.to(device))
            kwargs = {name: _each(v, lambda t: t.to(device)) for name, v in kwargs.items()}
            # A cast weight that was cached without a graph would be used by training.
            autocast = torch.autocast(device.type, dtype, enabled=on, cache_enabled=False)
            with autocast, _attention_without_plans():
                target(*args, **_taken(target, kwargs))


@contextlib.contextmanager
def _attention_without_plans() -> Iterator[None]:
    """Attention by other kernels than cuDNN's, which are planned anew for every shape of inputs.

    A plan takes half a second, as long as ten looks. Plain products, which take every shape, must
    be allowed in its place.
    """
    cuda = torch.backends.cuda
    planned = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(planned and not cuda.math_sdp_enabled())
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(planned)


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
        _shard(model)
        stack.callback(_shard, model)
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


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` has been over it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _shard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _body(model: nn.Module) -> nn.Module:
    """A Hugging Face model without its head: logits are large, and nothing here looks at them."""
    body = getattr(model, "base_model", model)
    if not hasattr(model, "config") or not isinstance(body, nn.Module):
        return model
    # What gathers sharded weights hangs on the whole, and decoders may read the labels.
    if is_sharded(model) or getattr(model.config, "is_encoder_decoder", False):
        return model
    return body if hasattr(body, "get_input_embeddings") else model


def _taken(target: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    if not hasattr(target, "config"):
        return kwargs
    if getattr(target.config, "is_encoder_decoder", False):
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
        f"held must be tensors, tuples or dicts the model is called with, got {type(batch)}"
    )


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same value with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_each(item, change) for item in value)
    if isinstance(value, Mapping):
        return {key: _each(item, change) for key, item in value.items()}
    return value


def _cutters(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Callable[[Tensor], Tensor]]:
    """Return ways to take the first sequences of tensors, the likeliest first.

    Tensors that have as many sequences as the first one are cut. Sequences lie along the first
    axis, but along the second where the model has `nn.MultiheadAttention` with `batch_first=False`.
    A square tensor with as many rows and columns as there are sequences may be a mask of tokens by
    tokens, and is cut in the second way only.
    """
    found: list[Tensor] = []
    _each((args, list(kwargs.values())), lambda tensor: found.append(tensor) or tensor)
    axis = 0
    if any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in model.modules()):
        axis = 1
    first = next((tensor for tensor in found if tensor.ndim > 1), None)
    if first is None:
        return [_copied]
    count = first.shape[axis]
    length = first.shape[1 - axis]
    kept = min(count, max(1, TOKENS // max(length, 1)))
    if kept == count:
        return [_copied]

    def is_square(tensor: Tensor) -> bool:
        return tensor is not first and tensor.ndim > 1 and tensor.shape[:2] == (count, count)

    def cut(tensor: Tensor) -> Tensor:
        if tensor.ndim > axis and tensor.shape[axis] == count:
            tensor = tensor.narrow(axis, 0, kept)
        return _copied(tensor)

    def cut_but_squares(tensor: Tensor) -> Tensor:
        return _copied(tensor) if is_square(tensor) else cut(tensor)

    if not any(map(is_square, found)):
        return [cut, _copied]
    if kept == 1:  # a mask cut to one row would fit any number of rows
        return [_copied]
    return [cut_but_squares, cut, _copied]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
