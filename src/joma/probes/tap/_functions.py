"""The functions of torch that compute attention, seen by a torch function mode."""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from joma.errors import JomaError
from joma.probes.tap._taps import Frame, Tap, attend, is_attention, is_watched, refusal, thread

_OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states")
"""Arguments of attention modules that hold another sequence than their own."""


@contextmanager
def observed_functions(tap: Tap) -> Iterator[None]:
    """Hand what torch's own functions compute in this thread to a tap."""
    taps = thread.taps
    with ExitStack() as stack:
        if not tap.interface_alone and all(it.interface_alone for it in taps):
            stack.enter_context(_Functions())
        taps.append(tap)
        stack.callback(taps.remove, tap)
        yield


_SOFTMAX = {functional.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
_DOT_PRODUCT = functional.scaled_dot_product_attention
_MULTIHEAD = functional.multi_head_attention_forward
_DOT_PRODUCT_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


class _Functions(TorchFunctionMode):
    """Sees the functions of torch that attend; everything is computed as without it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DOT_PRODUCT and is_watched():
            return _dot_product(args, kwargs)
        if func is _MULTIHEAD and is_watched():
            return self._multihead(args, kwargs)
        if func in _SOFTMAX and is_watched():
            _softmax(args, kwargs)
        return func(*args, **kwargs)

    def _multihead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `nn.MultiheadAttention`'s function so that its dot products are seen."""
        query, key = args[:2]
        thread.cross = query.shape != key.shape or query.data_ptr() != key.data_ptr()
        try:
            return self._with_dot_products(args, kwargs)
        finally:
            thread.cross = None

    def _with_dot_products(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs.get("need_weights", True):
            with self:
                return _undispatched_multihead()(*args, **kwargs)
        plain = _MULTIHEAD(*args, **kwargs)
        acts = any(tap.acts for tap in thread.taps)
        training = acts and kwargs.get("training", True)  # else dropout would draw twice
        with self, torch.set_grad_enabled(acts and torch.is_grad_enabled()):
            unweighted = {**kwargs, "need_weights": False, "training": training}
            seen, _ = _undispatched_multihead()(*args, **unweighted)
        return (seen if acts else plain[0], plain[1])


@functools.cache
def _undispatched_multihead() -> Callable[..., Any]:
    """Return `multi_head_attention_forward` as it is where no mode is in place.

    It would hand itself to the mode again, and run without the mode afterwards.
    """
    names = {**_MULTIHEAD.__globals__, "has_torch_function": lambda tensors: False}
    copy = types.FunctionType(
        _MULTIHEAD.__code__, names, _MULTIHEAD.__name__, _MULTIHEAD.__defaults__
    )
    copy.__kwdefaults__ = _MULTIHEAD.__kwdefaults__
    return copy


def _dot_product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = dict(zip(_DOT_PRODUCT_ARGUMENTS, args, strict=False)) | kwargs
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if query.ndim not in (3, 4):
        frame = next(tap.running[-1] for tap in thread.taps if tap.running)
        raise refusal(f"attends with queries of shape {tuple(query.shape)}", frame)
    lone = query.ndim == 3  # (B, T, D) of one head

    def compute() -> Tensor:
        found = _DOT_PRODUCT(*args, **kwargs)
        return found.unsqueeze(1) if lone else found

    if lone:
        query, key, value = (it.unsqueeze(1) for it in (query, key, value))
    mask = given.get("attn_mask")
    seen = fields_of(query, key, value, mask, causal=bool(given.get("is_causal", False)))
    seen |= {"scale": given.get("scale"), "dropout": given.get("dropout_p", 0.0)}
    found = attend(seen, compute, thread.cross)
    assert found is not None
    return found().squeeze(1) if lone else found()


def fields_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool
) -> dict[str, Any]:
    """Return fields of a call whose causality torch aligns at the first key."""
    query, key, value = query.detach(), key.detach(), value.detach()
    T, S = query.shape[2], key.shape[2]
    if causal and T < S:
        key, value = key[:, :, :T], value[:, :, :T]
    elif causal and T > S:
        mask, causal = torch.ones(T, S, dtype=torch.bool, device=query.device).tril(), False
    mask = None if mask is None else mask.detach()
    return {"query": query, "key": key, "value": value, "mask": mask, "causal": causal}


def _softmax(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hand over the scores of a module that is called an attention and takes a softmax itself."""
    thread.handling = True
    try:
        for tap in thread.taps:
            frames = [it for it in tap.running if not isinstance(it.module, nn.Softmax)]
            if not frames or not is_attention(frames[-1].module):
                continue
            try:
                seen, cross = _scores(frames[-1], args, kwargs)
                tap.note_softmax(frames[-1])
            except JomaError:
                if type(frames[-1].module).__module__.startswith("transformers."):
                    raise
                continue  # something else is called an attention, such as a pooling
            tap.hand_over(seen, None, cross, frames[-1])
    finally:
        thread.handling = False


def _scores(
    frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], bool | None]:
    """Return what a softmax is taken of as fields of a call, and whether of another sequence."""
    scores: Any = args[0] if args else kwargs.get("input", kwargs.get("self"))
    axis = args[1] if len(args) > 1 else kwargs.get("dim")
    inputs = [frame.kwargs.get("hidden_states"), *frame.args, *frame.kwargs.values()]
    hidden = next((it for it in inputs if isinstance(it, Tensor) and it.is_floating_point()), None)
    if axis not in (-1, scores.ndim - 1) or hidden is None or hidden.ndim != 3:
        raise refusal("takes a softmax over another axis than the keys", frame)
    sizes = set(hidden.shape[:2])
    batches = [B for B in hidden.shape[:2] if {B, scores.shape[-2]} == sizes]
    if scores.ndim == 3 and batches and scores.shape[0] % batches[0] == 0:
        scores = scores.unflatten(0, (batches[0], -1))
    if scores.ndim != 4 or {scores.shape[0], scores.shape[2]} != sizes:
        raise refusal(f"takes a softmax of shape {tuple(scores.shape)}", frame)
    scores = scores.detach()
    query, key = (
        scores.new_empty(*scores.shape[:3], 0),
        scores.mT.new_empty(*scores.mT.shape[:3], 0),
    )
    other = any(isinstance(frame.kwargs.get(it), Tensor) for it in _OTHER_SEQUENCE)
    return {"query": query, "key": key, "causal": False, "scores": scores}, other or None
