"""Attention of Hugging Face models: by the library's interface, or computed by a module itself.

Every model that follows the library's attention interface asks `AttentionInterface.get_interface`
for the function to use, its own eager one included. While a tap is in place, what is answered is
wrapped: the function chosen is called as it would have been, with the same arguments, and the taps
are called afterwards. Nothing of the model changes, nor the name of its implementation, by which
masks are made and some models decide; so its outputs are the same to the bit.

Bloom, Falcon, MPT, GPT-J and others call a softmax or `scaled_dot_product_attention` in a module of
their own. While such a module runs, these two functions are observed (a torch function mode, which
calls what was called with the same arguments), and the argument of the one softmax is the scores,
ALiBi and masks included. A module that takes several softmaxes per call, or one of another shape
than (batch, heads, queries, keys), is refused: it would not be certain what was measured.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from joma.errors import JomaError
from joma.probes.tap.call import HOW
from joma.probes.tap.stack import (
    Tap,
    is_attention,
    is_pretrained,
    lock,
    taps,
    wrapped_forward,
)

_Attention = Callable[..., Any]
_METHOD, _EAGER = "get_interface", "eager"
_MARK = "joma_original"

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


class _Running(threading.local):
    """What runs in this thread: wrapped attention functions, and observed modules by their id."""

    def __init__(self) -> None:
        self.depth = 0
        self.observers: dict[int, _Observer] = {}


_running = _Running()
_installed: list[_Attention] = []
"""Our wrapper of `get_interface`, while it is in place."""


@contextmanager
def tapped(model: nn.Module, tap: Tap) -> Iterator[bool]:
    """Hand every attention of a Hugging Face model to the tap; give whether some of it is one."""
    if not any(map(is_pretrained, model.modules())):
        yield False
        return
    from transformers import AttentionInterface

    _refuse_by_name(model)
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if _computes_itself(module):
                around = functools.partial(_observed, tap, path, module)
                stack.enter_context(wrapped_forward(module, around))
        with lock:  # taps may begin and end in any order: the first replaces, the last restores
            if not taps:
                _replace(AttentionInterface)
            taps.append(tap)
        stack.callback(_remove, AttentionInterface, tap)
        yield True


def _refuse_by_name(model: nn.Module) -> None:
    """Raise for a model that is known to have no attention that could be measured."""
    for module in model.modules():
        kind = str(getattr(getattr(module, "config", None), "model_type", ""))
        if kind in _REFUSED and _is_whole(model, module):
            raise JomaError(f"{kind} models cannot be watched: such a model {_REFUSED[kind]}")


def _is_whole(model: nn.Module, part: nn.Module) -> bool:
    """Return whether a part holds all parameters of a model but a head's."""
    inside = {id(parameter) for parameter in part.parameters()}
    return part is model or all(id(parameter) in inside for parameter in model.parameters())


def _replace(interface: Any) -> None:
    """Wrap the library's `get_interface`, unless a wrapper of ours is still inside it."""
    own = getattr(interface, _METHOD)
    if hasattr(own, _MARK):  # `functools.wraps` copies it to what is wrapped around ours
        return

    @functools.wraps(own)
    def get_interface(self: Any, attn_implementation: str, default: _Attention) -> _Attention:
        attention = own(self, attn_implementation, default)
        return _wrapped(attention, attn_implementation or _EAGER) if taps else attention

    setattr(get_interface, _MARK, own)
    setattr(interface, _METHOD, get_interface)
    _installed[:] = [get_interface]


def _remove(interface: Any, tap: Tap) -> None:
    """Take a tap away; after the last, restore the library's own function."""
    with lock:
        taps.remove(tap)
        current = getattr(interface, _METHOD)
        # Where somebody has wrapped our wrapper it stays, and passes everything through.
        if not taps and _installed and current is _installed[0]:
            setattr(interface, _METHOD, getattr(current, _MARK))
            _installed.clear()


def _wrapped(attention: _Attention, implementation: str) -> _Attention:
    @functools.wraps(attention)
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        _running.depth += 1
        try:
            result = attention(module, query, key, value, attention_mask, *args, **kwargs)
        finally:
            _running.depth -= 1
        if _running.depth:  # called by another wrapped function, which reports it
            return result
        given = kwargs
        if args:
            rest = list(inspect.signature(attention).parameters)[5:]
            given = dict(zip(rest, args, strict=False)) | kwargs
        for tap in tuple(taps):
            path = tap.paths.get(id(module))
            if path is not None:
                arguments = (query, key, value, attention_mask, given)
                parts = interface_parts(path, implementation, module, *arguments)
                result = tap.handle(path, module, parts, result)
        return result

    return attend


def interface_parts(
    path: str,
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what an implementation takes the softmax of, given these: parts of a call."""
    if given.get("cache") is not None:
        raise JomaError(f"model cannot be watched: {path} reads its keys from a paged cache")
    query, key, value = query.detach(), key.detach(), value.detach()
    flash = "flash" in implementation
    causal, padding, window, rows = False, None, None, None
    if flash:
        causal, window = _is_causal(module, given), given.get("sliding_window")
        padding = None if mask is None else mask[:, : key.shape[2]].bool()
        if padding is not None and query.shape[2] == key.shape[2]:
            rows = padding
        mask = _packed(query, key, given) if padding is None else None
    elif isinstance(mask, Tensor):
        mask = mask.detach()[..., : key.shape[2]]
        if mask.dtype == torch.bool and implementation.endswith(_EAGER):
            mask = mask.to(query.dtype)  # added to the scores, whatever was meant
    elif mask is not None:
        mask = _dense(mask, query, key)
    elif implementation not in (_EAGER, "flex_attention"):  # these two hide by a mask alone
        causal = _is_causal(module, given)
        if causal and 1 < query.shape[2] < key.shape[2]:
            # Room for later tokens, unused so far.
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    bias = given.get("position_bias")
    if bias is not None:
        mask = _sum(bias.detach()[..., : key.shape[2]], mask)
    return {
        "query": query,
        "key": key,
        "scale": given.get("scaling"),
        "causal": causal,
        "padding": padding,
        "window": window,
        "mask": mask,
        "softcap": None if "sdpa" in implementation else given.get("softcap"),
        "rows": rows,
        "sinks": _sinks(implementation, given),
        "value": value,
    }


def _packed(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> Tensor | None:
    """The mask of sequences packed into one, as flash attention finds them."""
    bounds, places = given.get("cu_seq_lens_q"), given.get("position_ids")
    length = query.shape[2]
    if query.shape[0] != 1 or length != key.shape[2] or length < 2:
        return None
    if isinstance(bounds, Tensor):
        return _mask_of_sequences(bounds, length)
    if isinstance(places, Tensor) and places.shape == (1, length):
        first = places.min()
        if not torch.equal(places[0], torch.arange(length, device=places.device) + first):
            starts = (places[0] == first).nonzero().squeeze(1)
            return _mask_of_sequences(torch.cat((starts, starts.new_tensor([length]))), length)
    return None


def _sinks(implementation: str, given: Mapping[str, Any]) -> Tensor | None:
    sinks = given.get("s_aux")
    if sinks is None or "sdpa" in implementation:  # which does not know them
        return None
    return sinks.detach().reshape(-1)


def _is_causal(module: nn.Module, given: Mapping[str, Any]) -> bool:
    flag = given.get("is_causal")
    return bool(getattr(module, "is_causal", True) if flag is None else flag)


def _sum(bias: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _dense(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """A flex attention block mask as truth values."""
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = mask.shape[:2]
    return create_mask(
        mask.mask_mod, batch, heads, query.shape[2], key.shape[2], device=str(query.device)
    )


def _mask_of_sequences(bounds: Tensor, length: int) -> Tensor:
    """Return which tokens of sequences packed into one see each other, (1, 1, T, T), bool.

    Args:
        bounds: Where sequences begin, and the end of the last, (N + 1,).
        length: T.
    """
    places = torch.arange(length, device=bounds.device)
    number = torch.bucketize(places, bounds.detach().to(places.dtype), right=True)
    return (number.unsqueeze(-1) == number)[None, None]


_SOFTMAX = {functional.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
_DOT_PRODUCT = functional.scaled_dot_product_attention


def _computes_itself(module: nn.Module) -> bool:
    """Whether a module is an innermost one that attends, and never asks for the interface."""
    if not is_attention(module) or isinstance(module, nn.MultiheadAttention):
        return False
    if not type(module).__module__.startswith("transformers."):
        return False
    if any(is_attention(part) for part in module.modules() if part is not module):
        return False
    return not _asks_for_interface(type(module))


@functools.cache
def _asks_for_interface(kind: type) -> bool:
    for base in kind.__mro__:
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member) if callable(member) else None, "__code__", None)
            if code is not None and "get_interface" in code.co_names:
                return True
    return False


def _observed(
    tap: Tap, path: str, module: nn.Module, forward: _Attention, *args: Any, **kwargs: Any
) -> Any:
    """Call `forward` of a module, observing the softmax it takes."""
    active = _running.observers.get(id(module))
    if active is not None:  # of a tap entered later, whose wrapper is around this one
        active.taps.insert(0, (tap, path))
        return forward(*args, **kwargs)
    observer = _running.observers[id(module)] = _Observer(tap, path, module, args, kwargs)
    try:
        with observer:
            return forward(*args, **kwargs)
    finally:
        del _running.observers[id(module)]


class _Observer(TorchFunctionMode):
    """Sees the softmax of one call of a module; everything is computed as without it.

    Attributes:
        taps: The taps on the module, the one entered first at the front, and its path in each.
    """

    def __init__(
        self,
        tap: Tap,
        path: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.taps = [(tap, path)]
        self._path, self._module, self._calls = path, module, 0
        given = [kwargs.get("hidden_states"), *args, *kwargs.values()]
        numbers = [x for x in given if isinstance(x, Tensor) and x.is_floating_point()]
        self._hidden = numbers[0] if numbers else None
        others = (kwargs.get(name) for name in ("key_value_states", "encoder_hidden_states"))
        self._cross = any(isinstance(x, Tensor) for x in others)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        softmax = func in _SOFTMAX
        listening = [(tap, path) for tap, path in self.taps if tap.listens]
        if not listening or not (softmax or func is _DOT_PRODUCT):
            return result
        self._calls += 1
        if self._calls > 1:
            raise self._refusal("takes more than one softmax in a call")
        parts = (self._of_softmax if softmax else self._of_dot_product)(args, kwargs)
        for tap, path in listening:
            result = tap.handle(path, self._module, parts, result, cross=self._cross or None)
        return result

    def _refusal(self, why: str) -> JomaError:
        """Return the error for a module whose attention is not understood."""
        kind = type(self._module).__name__
        return JomaError(f"model cannot be watched: {self._path}, a {kind}, {why}; {HOW}")

    def _of_softmax(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scores a softmax was taken of, as parts of a call."""
        scores = args[0] if args else kwargs.get("input", kwargs.get("self"))
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        hidden = self._hidden
        if not isinstance(scores, Tensor) or axis not in (-1, scores.ndim - 1) or hidden is None:
            raise self._refusal("takes a softmax over another axis than the keys")
        sizes = set(hidden.shape[:2])
        batches = [B for B in hidden.shape[:2] if {B, scores.shape[-2]} == sizes]
        if scores.ndim == 3 and batches and scores.shape[0] % batches[0] == 0:
            scores = scores.unflatten(0, (batches[0], -1))
        if scores.ndim != 4 or hidden.ndim != 3 or {scores.shape[0], scores.shape[2]} != sizes:
            raise self._refusal(f"takes a softmax of shape {tuple(scores.shape)}")
        scores = scores.detach()
        B, H, T, S = scores.shape
        query, key = scores.new_empty(B, H, T, 0), scores.new_empty(B, H, S, 0)
        return {"query": query, "key": key, "causal": False, "scores": scores}

    def _of_dot_product(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return queries and keys of `scaled_dot_product_attention`, as parts of a call."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        query, key, value = (given[name].detach() for name in ("query", "key", "value"))
        if query.ndim != 4:
            raise self._refusal(f"attends with queries of shape {tuple(query.shape)}")
        mask, causal = given.get("attn_mask"), bool(given.get("is_causal", False))
        T, S = query.shape[2], key.shape[2]
        if causal and T < S:  # aligned at the first key
            key, value = key[:, :, :T], value[:, :, :T]
        elif causal and T > S:
            mask = torch.ones(T, S, dtype=torch.bool, device=query.device).tril()
            causal = False
        return {
            "query": query,
            "key": key,
            "value": value,
            "causal": causal,
            "mask": None if mask is None else mask.detach(),
            "scale": given.get("scale"),
        }
