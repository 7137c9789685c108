"""The taps in place: wrapping of `forward`, forward passes under a tap, and handing calls over.

All taps of a process are kept here, under one lock, in the order in which they were entered. A tap
follows forward passes of its model: how often a module ran in one, and which queries are padding.
"""

import functools
import inspect
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.probes.tap.call import AttentionCall

_MASK, _DECODER_MASK = "attention_mask", "decoder_attention_mask"
_WRAPPERS = ("module", "_orig_mod", "module._orig_mod", "_orig_mod.module")
_CROSS = re.compile(r"cross|encoder_attn|encdec|enc_attn|encoder_decoder", re.IGNORECASE)
_ATTENTION = re.compile(r"atten|attn", re.IGNORECASE)
_TOWER_SUFFIX = re.compile(r"_(model|tower|backbone|transformer|layers|blocks|stack)$")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")

lock = threading.RLock()
"""Guards the list of taps, every wrapper of `forward`, and what Hugging Face's interface is."""
taps: list["Tap"] = []
"""Every tap on a Hugging Face model, in the order in which they were entered."""


class _Frame(NamedTuple):
    """One module that is running, and the masks it was called with."""

    path: str
    masks: Mapping[str, Any]


class _Running(threading.local):
    """What is running in this thread: modules, and how often each has attended and run."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.calls: Counter[str] = Counter()
        self.runs: Counter[str] = Counter()


class Tap:
    """Receives the attention calls of one model.

    Args:
        model: The model.
        handler: Called with each `AttentionCall`.
        acts: Whether what the handler returns replaces the result.

    Attributes:
        acts: As given.
        calls: How many times attention was computed.
        modules: Paths of the modules that did, in the order in which they were first seen.
        paths: Path of every module of the model, by its id.
    """

    def __init__(
        self, model: nn.Module, handler: Callable[[AttentionCall], Any], *, acts: bool
    ) -> None:
        self.acts, self.calls = acts, 0
        self.modules: list[str] = []
        self.paths = {id(module): path for path, module in model.named_modules()}
        self._handler, self._towers, self._running = handler, _Towers(model), _Running()

    @property
    def listens(self) -> bool:
        """Whether a call is handled now: one that checkpointing repeats is not observed again."""
        return self.acts or torch._C._current_graph_task_id() == -1

    def layer_of(self, path: str, module: nn.Module, otherwise: int | None = None) -> int:
        """Return a module's layer: its own `layer_idx`, else the last number in its path.

        Args:
            path: Path of the module.
            module: The module.
            otherwise: What to return where neither is there; by default how many modules were seen
                before it.
        """
        own = getattr(module, "layer_idx", None)
        if isinstance(own, int):
            return own
        numbers = _NUMBER.findall(path)
        if numbers:
            return int(numbers[-1])
        if otherwise is not None:
            return otherwise
        return self.modules.index(path) if path in self.modules else len(self.modules)

    def handle(
        self,
        path: str,
        module: nn.Module,
        parts: Mapping[str, Any],
        result: Any = None,
        *,
        layer: int | None = None,
        cross: bool | None = None,
    ) -> Any:
        """Call the handler, and return the result or its replacement.

        Args:
            path: Path of the module that attends.
            module: The module.
            parts: What else an `AttentionCall` takes, without kind, pass and result.
            result: What the attention returned, a tensor or a tuple that begins with one.
            layer: Number of its layer; by default what `layer_of` says.
            cross: Whether it attends to another sequence than its own; by default by its name.
        """
        if not self.listens:
            return result
        running, number = self._running, 0
        if running.frames:  # outside of a pass of the model nothing can be counted
            # A module may attend several times in one run, once for each image of a batch.
            number = running.runs.get(path, running.calls[path] + 1) - 1
            running.calls[path] += 1
        output = result[0] if isinstance(result, tuple) else result
        layer = self.layer_of(path, module) if layer is None else layer
        cross = is_cross(path, module) if cross is None else cross
        rows = parts.get("rows")
        if rows is None:
            rows = self._rows(path, parts["query"], parts["key"], cross=cross)
        call = AttentionCall(
            path,
            layer,
            **{**parts, "rows": rows},
            kind=self._towers.kind(path, cross=cross),
            pass_index=number,
            result=output.detach() if isinstance(output, Tensor) else None,
        )
        with lock:
            self.calls += 1
            if path not in self.modules:
                self.modules.append(path)
        with torch.no_grad():
            given = self._handler(call)
        if given is None or not self.acts:
            return result
        _check_replacement(call, given)
        return (given, *result[1:]) if isinstance(result, tuple) else given

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Follow the forward passes of the model, and how often a module runs in each."""
        with ExitStack() as stack:
            for path, module in model.named_modules():
                kind = type(module)
                layers = _MASK in _parameters(kind) and any(
                    isinstance(child, nn.ModuleList) for child in module.children()
                )
                if not path or path in _WRAPPERS or layers or is_pretrained(module):
                    enter = functools.partial(self._enter, path, kind)
                    stack.enter_context(wrapped_forward(module, enter))
                if path and is_attention(module) and kind.__module__.startswith("transformers."):
                    count = functools.partial(self._count, path)
                    stack.enter_context(wrapped_forward(module, count))
            yield

    def _enter(self, path: str, kind: type, forward: Any, *args: Any, **kw: Any) -> Any:
        running = self._running
        if not running.frames:
            running.calls.clear()
            running.runs.clear()
        names = _parameters(kind)
        given = dict(zip(names, args, strict=False)) | kw
        masks = {it: given.get(it) for it in (_MASK, _DECODER_MASK) if it in (*names, *given)}
        running.frames.append(_Frame(path, masks))
        try:
            return forward(*args, **kw)
        finally:
            running.frames.pop()

    def _count(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._running.runs[path] += 1
        return forward(*args, **kwargs)

    def _rows(self, path: str, query: Tensor, key: Tensor, *, cross: bool) -> Tensor | None:
        """Return the real queries by the innermost 2-D attention mask about this sequence."""
        (B, _, T, _), S = query.shape, key.shape[2]
        for frame in reversed(self._running.frames):
            inner = path.removeprefix(frame.path)
            name = _MASK
            if _DECODER_MASK in frame.masks and "decoder" in inner:
                name = _DECODER_MASK
            mask = frame.masks.get(name)
            if mask is None:
                return None
            if not isinstance(mask, Tensor) or mask.ndim != 2:
                continue  # made from the mask of an outer module
            length = mask.shape[1]
            fits = length == T or (length >= T if cross else length == S or (length > S and T < S))
            if mask.shape[0] != B or not fits or mask.device != query.device:
                return None
            return _real(mask.detach()[:, length - T :])
        return None


def _check_replacement(call: AttentionCall, given: Any) -> None:
    if call.result is None:
        raise JomaError(f"the result of {call.module} cannot be replaced: it is not to be had here")
    like = call.result
    if not isinstance(given, Tensor) or (given.shape, given.dtype, given.device) != (
        like.shape,
        like.dtype,
        like.device,
    ):
        got = type(given).__name__
        if isinstance(given, Tensor):
            got = f"{given.dtype} of shape {tuple(given.shape)} on {given.device}"
        raise JomaError(
            f"handler must return None or a tensor for {call.module}, {like.dtype} of shape "
            f"{tuple(like.shape)} on {like.device}, got {got}"
        )


def _real(mask: Tensor) -> Tensor:
    """Return a mask of tokens, 1 for real ones, or of numbers to add, 0 for real ones, as bool."""
    if mask.is_floating_point() and bool((mask < 0).any()):
        return mask >= 0
    return mask != 0


@functools.cache
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of what `forward` takes, in order."""
    try:
        return tuple(inspect.signature(kind.forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


Around = Callable[..., Any]
"""Takes the function to call, which is `forward` or wraps it, and its arguments."""

_MARK = "joma_wrapper"


class _Wrapper:
    """Our replacement of `forward` of one module; a copy of the module gets its own `forward`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own = vars(module).get("forward")
        self.inner = module.forward
        self.arounds: list[Around] = []
        functools.update_wrapper(self, self.inner)
        setattr(self, _MARK, self)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.inner
        for around in tuple(self.arounds):
            call = functools.partial(around, call)
        return call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _forward_of, (self.module,)


def _forward_of(module: nn.Module) -> Any:
    return MethodType(type(module).forward, module)


@contextmanager
def wrapped_forward(module: nn.Module, around: Around) -> Iterator[None]:
    """Call `around(forward, …)` instead of `forward(…)` of this one module.

    Unlike a hook this leaves the module's fused path alone, and a call that has begun ends as it
    began even where the tap ends meanwhile in another thread.
    """
    with lock:
        # `functools.wraps` copies the mark to what is wrapped around ours.
        wrapper = getattr(vars(module).get("forward"), _MARK, None) or _Wrapper(module)
        wrapper.arounds.append(around)
    try:
        yield
    finally:
        with lock:
            wrapper.arounds.remove(around)
            # Where somebody has wrapped our wrapper it stays, and passes everything through.
            if not wrapper.arounds and vars(module).get("forward") is wrapper:
                del module.forward
                if wrapper.own is not None:
                    module.forward = wrapper.own


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a Hugging Face model."""
    library: Any = sys.modules.get("transformers")  # not imported: no model of its exists
    return library is not None and isinstance(module, library.PreTrainedModel)


def is_attention(module: nn.Module) -> bool:
    """Return whether the name of a module's class says that it attends."""
    return _ATTENTION.search(type(module).__name__) is not None


def is_cross(path: str, module: nn.Module) -> bool:
    """Return whether a module attends to another sequence than its own, by its name."""
    if getattr(module, "is_cross_attention", None) is True:
        return True
    parts = path.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    inside = parts[numbers[-1] + 1 :] if numbers else parts[-2:]
    return any(_CROSS.search(part) for part in inside)


class _Towers:
    """The names of a model's towers, "encoder" and "decoder" or "text" and "vision".

    A tower is a branch of the module tree with a list of layers that attend. A model with one such
    list has no towers.
    """

    def __init__(self, model: nn.Module) -> None:
        stacks = [path.split(".") for path in _stacks(model, "")]
        common = takewhile(lambda parts: len(set(parts)) == 1, zip(*stacks, strict=False))
        self._prefix = [parts[0] for parts in common]
        self._names: dict[str, str] = {}
        for path in stacks:
            part = self._branch(path)
            self._names[part] = _TOWER_SUFFIX.sub("", part).replace("_", " ").strip()

    def _branch(self, path: list[str]) -> str:
        return path[len(self._prefix)] if len(path) > len(self._prefix) else ""

    def kind(self, path: str, *, cross: bool) -> str:
        """Return "self" or "cross", after the name of the tower where there are several."""
        what = "cross" if cross else "self"
        parts = path.split(".")
        if len(self._names) < 2 or parts[: len(self._prefix)] != self._prefix:
            return what
        return f"{self._names.get(self._branch(parts), '')} {what}".strip()


def _stacks(module: nn.Module, path: str) -> Iterator[str]:
    """Yield the paths of the outermost lists of layers that attend."""
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if not isinstance(child, nn.ModuleList):
            yield from _stacks(child, inner)
        elif any(is_attention(part) for part in child.modules()):
            yield inner
