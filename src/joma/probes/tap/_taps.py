"""Taps: which module of a model runs, and the calls of attention it makes, handed to handlers."""

import functools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.models import reader_path
from joma.probes.tap._call import AttentionCall, visible

_ATTENTION = re.compile(r"atten|attn", re.IGNORECASE)
_CROSS = re.compile(r"cross|encoder_attn|encdec|enc_attn|encoder_decoder", re.IGNORECASE)
_TOWER_SUFFIX = re.compile(r"_(model|tower|backbone|transformer|layers|blocks|stack)$")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


class Frame(NamedTuple):
    """One module that is running, and what it was called with."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Thread(threading.local):
    """The taps entered in this thread, and whether an attention is being handled."""

    def __init__(self) -> None:
        self.taps: list[Tap] = []
        self.handling = False
        self.cross: bool | None = None
        """Whether the `nn.MultiheadAttention` that runs attends to another sequence."""


thread = _Thread()


class _Running(threading.local):
    """What runs in this thread of one model."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.runs: Counter[str] = Counter()
        self.softmaxes: set[tuple[str, int]] = set()
        self.real_BT: dict[tuple[int, int], Tensor | None] = {}


class Tap:
    """Receives the attention calls of one model.

    Args:
        model: The model.
        handler: Called with each `AttentionCall`.
        acts: Whether what the handler returns replaces the result.
        interface_alone: Whether torch's functions are not watched.

    Attributes:
        acts: As given.
        interface_alone: As given.
        calls: How many times attention was computed.
        modules: Paths of the modules that did, in the order in which they were first seen.
    """

    def __init__(
        self,
        model: nn.Module,
        handler: Callable[[AttentionCall], Any],
        *,
        acts: bool,
        interface_alone: bool = False,
    ) -> None:
        self.acts, self.interface_alone, self.calls = acts, interface_alone, 0
        self.modules: list[str] = []
        self._handler, self._running = handler, _Running()
        self._prefix, self._towers = _towers(model)

    @property
    def running(self) -> list[Frame]:
        """The modules of the model that run in this thread, the innermost last."""
        return self._running.frames

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Keep the stack of the modules that run."""
        with ExitStack() as stack:
            for path, module in model.named_modules():
                enter = functools.partial(self._enter, reader_path(path))
                handle = module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
                handle = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(handle.remove)
            yield

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        running = self._running
        if not running.frames:
            running.runs.clear()
            running.softmaxes.clear()
            running.real_BT.clear()
        running.runs[path] += 1
        running.frames.append(Frame(path, module, args, kwargs))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        frames = self._running.frames
        while frames and frames.pop().module is not module:
            pass  # of a module whose hooks another hook's error kept from running

    def note_softmax(self, frame: Frame) -> None:
        """Note that a module takes a softmax itself.

        Raises:
            JomaError: It took one in this call already, so that it is unclear which is attention.
        """
        run = frame.path, self._running.runs[frame.path]
        if run in self._running.softmaxes:
            raise refusal("takes more than one softmax in a call", frame)
        self._running.softmaxes.add(run)

    def hand_over(
        self,
        seen: dict[str, Any],
        compute: Callable[[], Tensor] | None,
        cross: bool | None = None,
        frame: Frame | None = None,
        layer: int | None = None,
    ) -> Callable[[], Tensor] | None:
        """Call the handler; return what computes the result from now on.

        Args:
            seen: What was seen, as fields of `AttentionCall`.
            compute: Computes the result so far; None where it is not that of the module.
            cross: Whether another sequence is attended to; None to go by the module's name.
            frame: What attends; by default the innermost module that runs.
            layer: Number of its layer; None to go by the module and its path.
        """
        if not self.acts and torch._C._current_graph_task_id() != -1:
            return compute  # checkpointing computes it a second time
        running = self._running
        frame = running.frames[-1] if frame is None else frame
        cross = _is_cross(frame) if cross is None else cross
        call = AttentionCall(
            frame.path,
            self._layer_of(frame) if layer is None else layer,
            **seen,
            rows=self._real_queries(seen, cross=cross),
            kind=self._kind(frame.path, cross=cross),
            pass_index=max(0, running.runs[frame.path] - 1),
            compute=compute,
        )
        self.calls += 1
        if frame.path not in self.modules:
            self.modules.append(frame.path)
        with torch.no_grad(), torch._C.DisableTorchFunction():  # no mode sees what is measured
            given = self._handler(call)
        if given is None or not self.acts:
            return compute
        _check_replacement(call, given)
        return lambda: given

    def _layer_of(self, frame: Frame) -> int:
        """Return a module's layer: its own `layer_idx`, else the last number in its path."""
        own = getattr(frame.module, "layer_idx", None)
        if isinstance(own, int):
            return own
        if numbers := _NUMBER.findall(frame.path):
            return int(numbers[-1])
        modules = self.modules
        return modules.index(frame.path) if frame.path in modules else len(modules)

    def _kind(self, path: str, *, cross: bool) -> str:
        parts = path.split(".")
        tower = ""
        if parts[: len(self._prefix)] == self._prefix and len(parts) > len(self._prefix):
            tower = self._towers.get(parts[len(self._prefix)], "")
        return f"{tower} {'cross' if cross else 'self'}".strip()

    def _real_queries(self, seen: dict[str, Any], *, cross: bool) -> Tensor | None:
        """Return which queries are real: in self-attention, those whose key somebody sees.

        Cross-attention has the queries of the self-attention before it.
        """
        (B, _, T, _), S = seen["query"].shape, seen["key"].shape[2]
        known = self._running.real_BT
        if cross:
            return known.get((B, T))
        mask = seen.get("scores")
        mask = seen.get("mask") if mask is None else mask
        rows = None
        if mask is not None and 1 < T <= S:
            seen_BHTS = visible(mask[(None,) * (4 - mask.ndim)])
            if "scores" in seen and bool(seen_BHTS.triu(1).any()):  # XLNet's padding sees itself
                seen_BHTS = seen_BHTS & ~torch.eye(T, S, dtype=torch.bool, device=mask.device)
            seen_BS = seen_BHTS.any(-2).any(1)
            if T == S or bool(seen_BS[:, -1].any()):  # else the cache has room after the queries
                rows = seen_BS[:, S - T :].expand(B, T)
        known[B, T] = rows
        return rows


def _check_replacement(call: AttentionCall, given: Any) -> None:
    if call.compute is None or call.value is None:
        raise call.no_result()
    (B, H, T, _), value = call.query.shape, call.value
    wanted = (B, H, T, value.shape[-1]), value.dtype, value.device
    if isinstance(given, Tensor) and (given.shape, given.dtype, given.device) == wanted:
        return
    got = type(given).__name__
    if isinstance(given, Tensor):
        got = f"{given.dtype} of shape {tuple(given.shape)} on {given.device}"
    raise JomaError(
        f"handler must return None or a tensor for {call.module}, {wanted[1]} of shape "
        f"{wanted[0]} on {wanted[2]}, got {got}"
    )


def attend(
    seen: dict[str, Any], compute: Callable[[], Tensor] | None, cross: bool | None = None
) -> Callable[[], Tensor] | None:
    """Hand one attention to the taps of this thread; return what computes its result.

    Args:
        seen: What was seen, as fields of `AttentionCall`.
        compute: Computes the result as the model would, (B, H, T, Dv); None where it is not that.
        cross: Whether another sequence is attended to; None to go by the module's name.
    """
    if compute is not None:
        compute = _once(compute)
    thread.handling = True
    try:
        for tap in thread.taps:
            if tap.running:  # else somebody attends outside of this model
                compute = tap.hand_over(seen, compute, cross)
    finally:
        thread.handling = False
    return compute


def _once(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function that computes at most once, with gradients where the model has them."""
    found: list[Tensor] = []
    graded = torch.is_grad_enabled()

    def result() -> Tensor:
        if not found:
            before, thread.handling = thread.handling, True
            try:
                with torch.set_grad_enabled(graded):
                    found.append(compute())
            finally:
                thread.handling = before
        return found[0]

    return result


def is_watched() -> bool:
    """Return whether what attends in this thread now is to be handed over."""
    return not thread.handling and any(tap.running for tap in thread.taps)


def refusal(why: str, frame: Frame) -> JomaError:
    """Return the error for a module whose attention is not understood."""
    return JomaError(
        f"model cannot be watched: {frame.path or 'it'}, a {type(frame.module).__name__}, {why}; "
        "say where its queries and keys are made (AttentionMap)"
    )


def is_attention(module: nn.Module) -> bool:
    return _ATTENTION.search(type(module).__name__) is not None


def _is_cross(frame: Frame) -> bool:
    """Return whether a module attends to another sequence than its own, by its name."""
    if getattr(frame.module, "is_cross_attention", None) is True:
        return True
    parts = frame.path.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    inside = parts[numbers[-1] + 1 :] if numbers else parts[-2:]
    return any(_CROSS.search(part) for part in inside)


def _towers(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Return what precedes the names of a model's towers, and the names as they are shown.

    A tower, "encoder" or "vision", is a branch of the module tree with a list of layers that
    attend. A model with one such list has none.
    """
    lists = [path.split(".") for path in _lists(model, "")]
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*lists, strict=False))
    prefix = [parts[0] for parts in common]
    names = {
        path[len(prefix)]: _TOWER_SUFFIX.sub("", path[len(prefix)]).replace("_", " ").strip()
        for path in lists
        if len(path) > len(prefix)
    }
    return prefix, names if len(names) > 1 else {}


def _lists(module: nn.Module, path: str) -> Iterator[str]:
    """Yield the paths of the outermost lists of layers that attend."""
    for name, child in module.named_children():
        inner = reader_path(f"{path}.{name}" if path else name)
        if not isinstance(child, nn.ModuleList):
            yield from _lists(child, inner)
        elif any(is_attention(part) for part in child.modules()):
            yield inner
