"""Seeing the attention of Hugging Face models.

Every model that follows the library's attention interface asks `AttentionInterface.get_interface`
for the function to use, its own eager one included. While somebody watches, what is answered is
wrapped: the function chosen is called as it would have been, with the same arguments, and queries
and keys are looked at afterwards. Nothing of the model changes, nor the name of its implementation,
by which masks are made and some models decide; so its outputs are the same to the bit.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.probes._watch_call import AttentionCall, Watch, layer_of

_Attention = Callable[..., Any]
_METHOD = "get_interface"
_EAGER = "eager"


class _Watcher:
    """One watch of one model."""

    def __init__(self, model: nn.Module, watch: Watch) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._watch = watch

    def told(
        self,
        implementation: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        mask: Any,
        given: Mapping[str, Any],
    ) -> None:
        """Hands on the call if the module is one of the model's."""
        path = self._paths.get(id(module))
        if path is None:
            return
        seen = self._watch.modules
        layer = layer_of(path, module, seen.index(path) if path in seen else len(seen))
        self._watch.tell(_call(path, layer, implementation, module, query, key, mask, given))


_watchers: list[_Watcher] = []
_own: list[Callable[[Any, str, _Attention], _Attention]] = []
"""The library's `get_interface` while it is replaced."""
_lock = threading.Lock()


def is_watchable(model: nn.Module) -> bool:
    """Whether some of it is a Hugging Face model."""
    library = sys.modules.get("transformers")  # where it is not imported, no model of its exists
    if library is None:
        return False
    return any(isinstance(module, library.PreTrainedModel) for module in model.modules())


@contextmanager
def watching(model: nn.Module, watch: Watch) -> Iterator[None]:
    """Tells the watch of every attention the model computes."""
    from transformers import AttentionInterface

    watcher = _Watcher(model, watch)
    with _lock:  # watches may begin and end in any order: the first replaces, the last puts back
        if not _watchers:
            _own.append(getattr(AttentionInterface, _METHOD))
            setattr(AttentionInterface, _METHOD, _get_interface)
        _watchers.append(watcher)
    try:
        yield
    finally:
        with _lock:
            _watchers.remove(watcher)
            if not _watchers:
                setattr(AttentionInterface, _METHOD, _own.pop())


def _get_interface(interface: Any, attn_implementation: str, default: _Attention) -> _Attention:
    attention = _own[0](interface, attn_implementation, default)

    def seen(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        result = attention(module, query, key, value, attention_mask, *args, **kwargs)
        given = kwargs
        if args:
            rest = list(inspect.signature(attention).parameters)[5:]
            given = dict(zip(rest, args, strict=False)) | kwargs
        for watcher in tuple(_watchers):
            watcher.told(attn_implementation or _EAGER, module, query, key, attention_mask, given)
        return result

    return seen


_REFUSED = {
    "s_aux": "has attention sinks, which take mass and are no keys",
    "cache": "reads its keys from a paged cache",
    "cu_seq_lens_q": "works on sequences packed into one",
}


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
    if flash:
        causal, window = _is_causal(module, given), given.get("sliding_window")
        padding, mask = (None if mask is None else mask[:, : key.shape[2]].bool()), None
    elif isinstance(mask, Tensor):
        mask = mask.detach()[..., : key.shape[2]]
        if mask.dtype == torch.bool and "sdpa" not in implementation:
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
    )


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
