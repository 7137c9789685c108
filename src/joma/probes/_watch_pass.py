"""Forward passes of a watched model: how often a module ran in one, and which queries are padding.

Hooks on the model, and on the models inside it, note when a pass begins and which masks they were
called with. They change nothing and can be removed in any order.
"""

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from joma.probes._watch_call import AttentionCall, Watch
from joma.probes._watch_kind import Towers, is_attention

_MASK, _DECODER_MASK = "attention_mask", "decoder_attention_mask"


@dataclass(eq=False)
class _Frame:
    """One module that is running, and the masks it was called with."""

    module: nn.Module
    path: str
    masks: Mapping[str, Any]


class _State(threading.local):
    """What is running in this thread."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.calls: Counter[str] = Counter()
        self.runs: Counter[str] = Counter()


class _Hook:
    """A hook that does nothing in a copy of the model."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*args: Any) -> None:
    pass


class Passes:
    """Forward passes of one model under one watch.

    Args:
        model: The model watched.
        watch: Receives completed calls.
    """

    def __init__(self, model: nn.Module, watch: Watch) -> None:
        self._watch, self._towers, self._state = watch, Towers(model), _State()
        self._entries = dict(_entries(model))
        self._attentions = dict(_attentions(model))

    def report(self, call: AttentionCall, *, cross: bool) -> None:
        """Pass a call on with its kind, its place in the pass and its real queries."""
        state, number = self._state, 0
        if state.frames:  # outside of a pass of the model nothing can be counted
            # A module may attend several times in one run, once for each image of a batch.
            number = state.runs.get(call.module, state.calls[call.module] + 1) - 1
            state.calls[call.module] += 1
        rows = call.rows
        if rows is None:
            rows = self._rows(call, cross=cross)
        kind = self._towers.kind(call.module, cross=cross)
        self._watch.report(replace(call, kind=kind, pass_index=number, rows=rows))

    @property
    def seen(self) -> list[str]:
        """Paths of the modules seen so far."""
        return self._watch.modules

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the passes of the model."""
        with ExitStack() as stack:
            for path, module in self._entries.items():
                for handle in (
                    module.register_forward_pre_hook(_Hook(self._entered(path)), with_kwargs=True),
                    module.register_forward_hook(_Hook(self._left), always_call=True),
                ):
                    stack.callback(handle.remove)
            for path, module in self._attentions.items():
                stack.callback(module.register_forward_pre_hook(_Hook(self._ran(path))).remove)
            yield

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Follow one call of a module that must have no hooks."""
        self._enter(module, "", {})
        try:
            yield
        finally:
            self._leave(module)

    def _ran(self, path: str) -> Any:
        def count(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._state.runs[path] += 1

        return count

    def _entered(self, path: str) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._enter(module, path, _masks(module, args, kwargs))

        return enter

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._leave(module)

    def _enter(self, module: nn.Module, path: str, masks: Mapping[str, Any]) -> None:
        state = self._state
        if not state.frames:
            state.calls.clear()
            state.runs.clear()
        state.frames.append(_Frame(module, path, masks))

    def _leave(self, module: nn.Module) -> None:
        frames = self._state.frames
        for place in reversed(range(len(frames))):
            if frames[place].module is module:
                del frames[place:]
                break

    def _rows(self, call: AttentionCall, *, cross: bool) -> Tensor | None:
        """The real queries by the innermost 2-D attention mask that is about this sequence."""
        (B, _, T, _), S = call.query.shape, call.key.shape[2]
        for frame in reversed(self._state.frames):
            inner = call.module.removeprefix(frame.path)
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
            if mask.shape[0] != B or not fits or mask.device != call.query.device:
                return None
            return _real(mask.detach()[:, length - T :])
        return None


def _real(mask: Tensor) -> Tensor:
    """A mask of tokens, 1 for real ones, or of numbers to add, 0 for real ones, as bool."""
    if mask.is_floating_point() and bool((mask < 0).any()):
        return mask >= 0
    return mask != 0


def _masks(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = _parameters(type(module))
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return {name: given.get(name) for name in (_MASK, _DECODER_MASK) if name in (*names, *given)}


@cache
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """Names of what `forward` takes, in order."""
    try:
        return tuple(inspect.signature(kind.forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


def _entries(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model, what it wraps, models inside it, and stacks of layers that take a mask."""
    for path, module in _without_fused(model):
        wraps = path in ("module", "_orig_mod", "module._orig_mod", "_orig_mod.module")
        stack = _MASK in _parameters(type(module)) and any(
            isinstance(child, nn.ModuleList) for child in module.children()
        )
        if not path or wraps or stack or _is_pretrained(module):
            yield path, module


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Attention modules of Hugging Face models."""
    for path, module in _without_fused(model):
        if path and is_attention(module) and type(module).__module__.startswith("transformers."):
            yield path, module


def _without_fused(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules but those that take another path where a hook is on them."""
    fused: set[nn.Module] = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            fused |= set(module.modules())
        if module not in fused:
            yield path, module


def _is_pretrained(module: nn.Module) -> bool:
    library: Any = sys.modules.get("transformers")
    return library is not None and isinstance(module, library.PreTrainedModel)


def mask_of_sequences(bounds: Tensor, length: int) -> Tensor:
    """Return which tokens of sequences packed into one see each other, (1, 1, T, T), bool.

    Args:
        bounds: Where sequences begin, and the end of the last, (N + 1,).
        length: T.
    """
    places = torch.arange(length, device=bounds.device)
    number = torch.bucketize(places, bounds.detach().to(places.dtype), right=True)
    return (number.unsqueeze(-1) == number)[None, None]
