"""Seeing attention that Hugging Face models compute themselves, past the library's interface.

Bloom, Falcon, MPT, GPT-J and others call a softmax or `scaled_dot_product_attention` in a module of
their own. While such a module runs, these two functions are observed (a torch function mode, which
calls what was called with the same arguments), and the argument of the one softmax is the scores,
ALiBi and masks included. A module that takes several softmaxes per call, or one of another shape
than (batch, heads, queries, keys), is refused: it would not be certain what was measured.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from joma.errors import JomaError
from joma.probes._watch_call import HOW, AttentionCall, layer_of, recomputing
from joma.probes._watch_forward import wrapped_forward
from joma.probes._watch_kind import is_attention, is_cross
from joma.probes._watch_pass import Passes

_SPARSE = "computes attention over blocks of keys, never a whole row"
_RECURRENT = "has no softmax attention"
_REFUSED: Mapping[str, str] = {
    "longformer": _SPARSE,
    "led": _SPARSE,
    "reformer": _SPARSE,
    "bigbird_pegasus": _SPARSE,
    "mra": _SPARSE,
    "nystromformer": "approximates attention by landmarks",
    "yoso": "approximates attention by hashing",
    "fnet": "mixes tokens by Fourier transforms, not by attention",
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "falcon_mamba": _RECURRENT,
    "rwkv": _RECURRENT,
    "xlstm": _RECURRENT,
}
"""Models that cannot be measured, by the type their configuration names."""

_SOFTMAX = {functional.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
_DOT_PRODUCT = functional.scaled_dot_product_attention


def refuse_by_name(model: nn.Module) -> None:
    """Raise for a model that is known to have no attention that could be measured."""
    for module in model.modules():
        kind = str(getattr(getattr(module, "config", None), "model_type", ""))
        if kind in _REFUSED and _is_whole(model, module):
            raise JomaError(f"{kind} models cannot be watched: such a model {_REFUSED[kind]}")


def _is_whole(model: nn.Module, part: nn.Module) -> bool:
    """Whether a part holds all parameters of a model but a head's."""
    inside = {id(parameter) for parameter in part.parameters()}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    return not outside or part is model


@contextmanager
def watching(model: nn.Module, passes: Passes) -> Iterator[None]:
    """Report attention of modules that do not use the library's interface."""
    taps = [
        _Tap(path, module, passes)
        for path, module in model.named_modules()
        if _computes_itself(module)
    ]
    with ExitStack() as stack:
        for tap in taps:
            stack.enter_context(wrapped_forward(tap.module, tap.around))
        yield


def _computes_itself(module: nn.Module) -> bool:
    """Whether a module is an innermost one that attends, and never asks for the interface."""
    if not is_attention(module) or isinstance(module, nn.MultiheadAttention):
        return False
    if not type(module).__module__.startswith("transformers."):
        return False
    if any(is_attention(part) for part in module.modules() if part is not module):
        return False
    return not _asks_for_interface(type(module))


@cache
def _asks_for_interface(kind: type) -> bool:
    for base in kind.__mro__:
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member) if callable(member) else None, "__code__", None)
            if code is not None and "get_interface" in code.co_names:
                return True
    return False


@dataclass(eq=False)
class _Tap:
    """One attention module while it is watched."""

    path: str
    module: nn.Module
    passes: Passes

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `forward`, observing the softmax it takes."""
        with _Observer(self, args, kwargs):
            return forward(*args, **kwargs)

    def report(self, query: Tensor, key: Tensor, *, cross: bool, **given: Any) -> None:
        """Pass on what was seen in one call."""
        seen = self.passes.seen
        otherwise = seen.index(self.path) if self.path in seen else len(seen)
        layer = layer_of(self.path, self.module, otherwise)
        call = AttentionCall(self.path, layer, query, key, **given)
        self.passes.report(call, cross=cross)

    def refusal(self, why: str) -> JomaError:
        """The error for a module that computes attention in a way that is not understood."""
        kind = type(self.module).__name__
        return JomaError(f"model cannot be watched: {self.path}, a {kind}, {why}; {HOW}")


class _Observer(TorchFunctionMode):
    """Sees the softmax of one call of a module; everything is computed as without it."""

    def __init__(self, tap: _Tap, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self._tap, self._calls = tap, 0
        given = [kwargs.get("hidden_states"), *args, *kwargs.values()]
        numbers = [x for x in given if isinstance(x, Tensor) and x.is_floating_point()]
        self._hidden = numbers[0] if numbers else None
        others = (kwargs.get(name) for name in ("key_value_states", "encoder_hidden_states"))
        self._cross = is_cross(tap.path, tap.module) or any(isinstance(x, Tensor) for x in others)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        softmax = func in _SOFTMAX
        if (softmax or func is _DOT_PRODUCT) and not recomputing():
            self._calls += 1
            if self._calls > 1:
                raise self._tap.refusal("takes more than one softmax in a call")
            (self._see_softmax if softmax else self._see_dot_product)(args, kwargs)
        return result

    def _see_softmax(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Report the scores a softmax was taken of."""
        scores = args[0] if args else kwargs.get("input", kwargs.get("self"))
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        hidden = self._hidden
        if not isinstance(scores, Tensor) or axis not in (-1, scores.ndim - 1) or hidden is None:
            raise self._tap.refusal("takes a softmax over another axis than the keys")
        sizes = set(hidden.shape[:2])
        batches = [B for B in hidden.shape[:2] if {B, scores.shape[-2]} == sizes]
        if scores.ndim == 3 and batches and scores.shape[0] % batches[0] == 0:
            scores = scores.unflatten(0, (batches[0], -1))
        if scores.ndim != 4 or hidden.ndim != 3 or {scores.shape[0], scores.shape[2]} != sizes:
            raise self._tap.refusal(f"takes a softmax of shape {tuple(scores.shape)}")
        scores = scores.detach()
        B, H, T, S = scores.shape
        query, key = scores.new_empty(B, H, T, 0), scores.new_empty(B, H, S, 0)
        self._tap.report(query, key, cross=self._cross, causal=False, scores=scores)

    def _see_dot_product(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Report queries and keys of `scaled_dot_product_attention`."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        query, key = given["query"].detach(), given["key"].detach()
        if query.ndim != 4:
            raise self._tap.refusal(f"attends with queries of shape {tuple(query.shape)}")
        mask, causal = given.get("attn_mask"), bool(given.get("is_causal", False))
        T, S = query.shape[2], key.shape[2]
        if causal and T < S:  # aligned at the first key
            key = key[:, :, :T]
        elif causal and T > S:
            mask = torch.ones(T, S, dtype=torch.bool, device=query.device).tril()
            causal = False
        mask, scale = None if mask is None else mask.detach(), given.get("scale")
        self._tap.report(query, key, cross=self._cross, causal=causal, mask=mask, scale=scale)
