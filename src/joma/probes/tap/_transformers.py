"""Attention of Hugging Face models, seen where the library's interface chooses its function."""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from joma.probes.tap._functions import fields_of
from joma.probes.tap._taps import attend, is_watched

_FUSED = ("flash", "flex", "paged", "/")
"""Parts of the names of implementations that compute attention in one piece, or read a cache."""

_lock = threading.Lock()
_originals: list[Callable[..., Any]] = []
"""The library's own `get_interface`, once for every tap in place."""


@contextmanager
def observed_interface(model: nn.Module) -> Iterator[None]:
    """Hand over what Hugging Face's attention functions are called with; run none that is fused."""
    library: Any = sys.modules.get("transformers")  # not imported: no model of its exists
    pretrained = [
        it for it in model.modules() if library and isinstance(it, library.PreTrainedModel)
    ]
    if not pretrained:
        yield
        return
    interface = library.AttentionInterface
    with ExitStack() as stack:
        for part in pretrained:
            config: Any = part.config
            if any(mark in str(config._attn_implementation) for mark in _FUSED):
                plain = "sdpa" if part._supports_sdpa else "eager"
                stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
                config._attn_implementation = plain
        with _lock:
            own = _originals[0] if _originals else interface.get_interface
            if not _originals:
                interface.get_interface = _observing(own)
            _originals.append(own)
        try:
            yield
        finally:
            with _lock:
                _originals.pop()
                if not _originals:
                    interface.get_interface = own


def _observing(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Any:
        attention = own(self, attn_implementation, default)
        if not is_watched():
            return attention
        return functools.partial(_attended, attention, str(attn_implementation))

    return get_interface


def _attended(
    attention: Callable[..., Any],
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = kwargs
    if args:
        names = list(inspect.signature(attention).parameters)[5:]
        given = dict(zip(names, args, strict=False)) | kwargs
    weights: list[Any] = []

    def compute() -> Tensor:
        found = attention(module, query, key, value, attention_mask, *args, **kwargs)
        weights[:] = found[1:]
        return found[0].transpose(1, 2)

    seen = _seen(implementation, module, query, key, value, attention_mask, given)
    found = attend(seen, compute)
    assert found is not None
    result = found().transpose(1, 2).contiguous()
    return (result, *(weights or (None,)))


def _seen(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    causal = False
    if mask is not None:
        mask = mask[..., : key.shape[2]]
    elif implementation != "eager" and query.shape[2] > 1:  # eager hides by a mask alone
        flag = given.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if flag is None else flag)
    bias = given.get("position_bias")
    if bias is not None:
        bias = bias[..., : key.shape[2]]
        if mask is not None:
            bias = torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask
        mask = bias
    seen = fields_of(query, key, value, mask, causal=causal)
    sinks = given.get("s_aux")
    return seen | {
        "scale": given.get("scaling"),
        "softcap": given.get("softcap"),
        "sinks": None if sinks is None else sinks.detach().reshape(-1),
        "dropout": given.get("dropout", 0.0),
    }
