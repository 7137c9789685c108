"""Seeing the attention of Hugging Face models.

Every model that follows the library's attention interface asks `AttentionInterface.get_interface`
for the function to use, its own eager one included. While somebody watches, what is answered is
wrapped: the function chosen is called as it would have been, with the same arguments, and queries
and keys are looked at afterwards. Nothing of the model changes, nor the name of its implementation,
by which masks are made and some models decide; so its outputs are the same to the bit.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.probes import _watch_inside
from joma.probes._watch_call import AttentionCall, layer_of, recomputing
from joma.probes._watch_kind import is_cross
from joma.probes._watch_pass import Passes, mask_of_sequences

_Attention = Callable[..., Any]
_METHOD = "get_interface"
_EAGER = "eager"


class _Watcher:
    """One watch of one model."""

    def __init__(self, model: nn.Module, passes: Passes) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._passes = passes

    def receive(
        self,
        implementation: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        mask: Any,
        given: Mapping[str, Any],
    ) -> None:
        """Pass on the call if the module is one of the model's."""
        path = self._paths.get(id(module))
        if path is None or recomputing():
            return
        seen = self._passes.seen
        layer = layer_of(path, module, seen.index(path) if path in seen else len(seen))
        call = _call(path, layer, implementation, module, query, key, mask, given)
        self._passes.report(call, cross=is_cross(path, module))


_MARK = "joma_original"
_watchers: list[_Watcher] = []
_installed: list[_Attention] = []
"""Our wrapper of `get_interface`, while it is in place."""
_lock = threading.Lock()


class _Running(threading.local):
    """Whether an attention function that is wrapped runs in this thread."""

    depth = 0


_running = _Running()


def is_watchable(model: nn.Module) -> bool:
    """Return whether some of it is a Hugging Face model."""
    library = sys.modules.get("transformers")  # where it is not imported, no model of its exists
    if library is None:
        return False
    return any(isinstance(module, library.PreTrainedModel) for module in model.modules())


@contextmanager
def watching(model: nn.Module, passes: Passes) -> Iterator[None]:
    """Report every attention the model computes."""
    from transformers import AttentionInterface

    _watch_inside.refuse_by_name(model)
    watcher = _Watcher(model, passes)
    with ExitStack() as stack:
        stack.enter_context(_watch_inside.watching(model, passes))
        with _lock:  # watches may begin and end in any order: the first replaces, the last restores
            if not _watchers:
                _replace(AttentionInterface)
            _watchers.append(watcher)
        stack.callback(_remove, AttentionInterface, watcher)
        yield


def _replace(interface: Any) -> None:
    """Wrap the library's `get_interface`, unless a wrapper of ours is still inside it."""
    own = getattr(interface, _METHOD)
    if hasattr(own, _MARK):  # `functools.wraps` copies it to what is wrapped around ours
        return

    @functools.wraps(own)
    def get_interface(self: Any, attn_implementation: str, default: _Attention) -> _Attention:
        attention = own(self, attn_implementation, default)
        return _wrapped(attention, attn_implementation or _EAGER) if _watchers else attention

    setattr(get_interface, _MARK, own)
    setattr(interface, _METHOD, get_interface)
    _installed[:] = [get_interface]


def _remove(interface: Any, watcher: _Watcher) -> None:
    """End a watch; after the last, restore the library's own function."""
    with _lock:
        _watchers.remove(watcher)
        current = getattr(interface, _METHOD)
        # Where somebody has wrapped our wrapper it stays, and passes everything through.
        if not _watchers and _installed and current is _installed[0]:
            setattr(interface, _METHOD, getattr(current, _MARK))
            _installed.clear()


def _wrapped(attention: _Attention, implementation: str) -> _Attention:
    @functools.wraps(attention)
    def seen(
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
        for watcher in tuple(_watchers):
            watcher.receive(implementation, module, query, key, attention_mask, given)
        return result

    return seen


_REFUSED = {"cache": "reads its keys from a paged cache"}


def _call(
    path: str,
    layer: int,
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Any,
    given: Mapping[str, Any],
) -> AttentionCall:
    """What the implementation takes the softmax of, given these arguments."""
    for argument, why in _REFUSED.items():
        if given.get(argument) is not None:
            raise JomaError(f"model cannot be watched: {path} {why}")
    query, key = query.detach(), key.detach()
    flash = "flash" in implementation
    causal, padding, window = False, None, None
    rows = None
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
            key = key[:, :, : query.shape[2]]  # room for later tokens, unused so far
    bias = given.get("position_bias")
    if bias is not None:
        mask = _sum(bias.detach()[..., : key.shape[2]], mask)
    return AttentionCall(
        module=path,
        layer=layer,
        query=query,
        key=key,
        scale=given.get("scaling"),
        causal=causal,
        padding=padding,
        window=window,
        mask=mask,
        softcap=None if "sdpa" in implementation else given.get("softcap"),
        rows=rows,
        sinks=_sinks(implementation, given),
    )


def _packed(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> Tensor | None:
    """The mask of sequences packed into one, as flash attention finds them."""
    bounds, places = given.get("cu_seq_lens_q"), given.get("position_ids")
    length = query.shape[2]
    if query.shape[0] != 1 or length != key.shape[2] or length < 2:
        return None
    if isinstance(bounds, Tensor):
        return mask_of_sequences(bounds, length)
    if isinstance(places, Tensor) and places.shape == (1, length):
        first = places.min()
        if not torch.equal(places[0], torch.arange(length, device=places.device) + first):
            starts = (places[0] == first).nonzero().squeeze(1)
            return mask_of_sequences(torch.cat((starts, starts.new_tensor([length]))), length)
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
