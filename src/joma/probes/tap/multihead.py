"""Attention of `nn.MultiheadAttention`, alone or in torch's encoder and decoder layers.

In evaluation an encoder layer computes everything in one fused call, past its attention module, as
long as no hook hangs on it. So there are no hooks here: `forward` of the module is wrapped. The
same path is taken as without a tap, and the outputs are the same to the bit; only a tap that may
act turns the fused path off. Queries and keys are not to be had from the outside; they are
projected again. Where a layer's attention module was put into another one, as adapters do, it is
tapped there.
"""

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import BaseTorchFunctionMode

from joma.errors import JomaError
from joma.kernels.attention import hides
from joma.probes.tap.call import HOW
from joma.probes.tap.stack import Tap, wrapped_forward


@contextmanager
def tapped(model: nn.Module, tap: Tap) -> Iterator[bool]:
    """Hand every attention of `nn.MultiheadAttention` to the tap; give whether there is any."""
    running = _Running()
    attentions: dict[nn.Module, _Attention] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            attentions[module] = _Attention(path, len(attentions), module, tap, running)
    with ExitStack() as stack:
        for attention in attentions.values():
            stack.enter_context(wrapped_forward(attention.module, attention.around))
        for path, module in model.named_modules():
            if isinstance(module, nn.TransformerEncoderLayer):
                inner = [attentions[it] for it in module.modules() if it in attentions]
                layer = _Layer(path, module, inner, tap, running)
                stack.enter_context(wrapped_forward(module, layer.around))
                if layer.attention is not None and layer.attention not in attentions:
                    stack.enter_context(wrapped_forward(layer.attention, layer.around_attention))
            elif isinstance(module, nn.TransformerDecoderLayer):
                stack.enter_context(wrapped_forward(module, partial(_decoding, module, running)))
            if tap.acts and isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer):
                stack.enter_context(wrapped_forward(module, _unfused))
        yield bool(attentions)


def _unfused(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward` without its fused path, which torch leaves out under a function mode."""
    with BaseTorchFunctionMode():
        return forward(*args, **kwargs)


class _Running(threading.local):
    """What happens in this thread: calls so far, and padding of the sequence being decoded."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.padding: list[tuple[nn.Module, Tensor | None]] = []


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `forward` of the module by name."""
    signature = inspect.signature(type(module).forward)
    return dict(signature.bind(module, *args, **kwargs).arguments)


class _Attention:
    """One attention module while it is watched."""

    def __init__(
        self,
        path: str,
        order: int,
        module: nn.MultiheadAttention,
        tap: Tap,
        running: _Running,
    ) -> None:
        extra = {"add_bias_kv": module.bias_k is not None, "add_zero_attn": module.add_zero_attn}
        if any(extra.values()):
            raise JomaError(
                f"model cannot be watched: {path or 'it'} has a key of its own besides those of "
                f"the sequence ({', '.join(name for name, on in extra.items() if on)})"
            )
        self.path, self.layer, self.module = path, tap.layer_of(path, module, order), module
        self._tap, self._running = tap, running

    @property
    def calls(self) -> int:
        """How many calls this thread has reported."""
        return self._running.calls[id(self)]

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `forward` of the module, then report."""
        result = forward(*args, **kwargs)
        given = _arguments(self.module, args, kwargs)
        if "query" not in given or "key" not in given:
            raise JomaError(
                f"model cannot be watched: {self.path or 'it'}, a {type(self.module).__name__}, "
                f"takes no arguments called query and key: {HOW}"
            )
        return self.report(
            given["query"],
            given["key"],
            given.get("key_padding_mask"),
            given.get("attn_mask"),
            result,
            is_causal=given.get("is_causal", False) and not given.get("need_weights", True),
        )

    def report(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        result: Any = None,
        *,
        is_causal: bool,
    ) -> Any:
        """Project what the module attends with; return its result, or what the tap put there."""
        self._running.calls[id(self)] += 1
        if not self._tap.listens:
            return result
        cross = key is not query and self._is_cross(query, key)
        rows = self._decoded() if cross else None
        with torch.no_grad():
            padding = None
            if query.is_nested:
                query, padding = _padded(query)
                key, rows = query, padding
            query, key = self._sequences(query), self._sequences(key)
            query, key = self._projected(query, key)
            (B, H, T, _), S = query.shape, key.shape[2]
            mask = _mask(attn_mask, (B, H, T, S))
            causal = is_causal and key_padding_mask is None and T == S
            if causal:  # the mask is said to be just that
                mask = None
            if key_padding_mask is not None:
                hidden = key_padding_mask.view(-1, S)
                padding, mask = _with_padding(hidden, mask)
                if not cross and T == S:
                    rows = ~(hidden if hidden.dtype == torch.bool else hides(hidden))
            if rows is not None and rows.shape != (B, T):
                rows = None
        parts = {"query": query, "key": key, "causal": causal, "padding": padding}
        parts |= {"mask": mask, "rows": rows}
        return self._tap.handle(
            self.path, self.module, parts, result, layer=self.layer, cross=cross
        )

    def _is_cross(self, query: Tensor, key: Tensor) -> bool:
        """Whether the keys are of another sequence: a decoder says so, else the shapes do."""
        for layer, _ in reversed(self._running.padding):
            if layer.self_attn is self.module:
                return False
            if layer.multihead_attn is self.module:
                return True
        return query.shape != key.shape or query.data_ptr() != key.data_ptr()

    def _decoded(self) -> Tensor | None:
        """Which queries of cross-attention in a decoder are real."""
        for layer, hidden in reversed(self._running.padding):
            if layer.multihead_attn is self.module and hidden is not None:
                hidden = hidden.view(-1, hidden.shape[-1])
                return ~(hidden if hidden.dtype == torch.bool else hides(hidden))
        return None

    def _sequences(self, inputs: Tensor) -> Tensor:
        """(B, T, E), whatever order the module takes."""
        if inputs.ndim == 2:
            return inputs.unsqueeze(0)
        return inputs if self.module.batch_first else inputs.transpose(0, 1)

    def _projected(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        module, width = self.module, self.module.embed_dim
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight[:width], module.in_proj_weight[width : 2 * width]
        else:
            weights = module.q_proj_weight, module.k_proj_weight
        biases = (None, None)
        if module.in_proj_bias is not None:
            biases = module.in_proj_bias[:width], module.in_proj_bias[width : 2 * width]
        query, key = (
            linear(inputs, weight, bias)
            .unflatten(-1, (module.num_heads, module.head_dim))
            .transpose(1, 2)
            for inputs, weight, bias in zip((query, key), weights, biases, strict=True)
        )
        return query, key


def _decoding(
    layer: nn.TransformerDecoderLayer, running: _Running, forward: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call `forward` of a decoder layer, noting which of its tokens are padding."""
    padding = _arguments(layer, args, kwargs).get("tgt_key_padding_mask")
    running.padding.append((layer, padding))
    try:
        return forward(*args, **kwargs)
    finally:
        running.padding.pop()


class _Layer:
    """One encoder layer while it is watched: it may compute attention without calling `inner`."""

    def __init__(
        self,
        path: str,
        module: nn.TransformerEncoderLayer,
        inner: list[_Attention],
        tap: Tap,
        running: _Running,
    ) -> None:
        self.module, self.attention = module, getattr(module, "self_attn", None)
        self._unseen = (
            f"model cannot be watched: attention of {path or 'its layer'} is computed by a "
            f"{type(self.attention).__name__} in a way of its own: {HOW}"
        )
        if not inner:
            raise JomaError(self._unseen)
        for one in inner:  # a number behind the layer's, inside what wraps it, is none of a layer
            one.layer = tap.layer_of(path, module, one.layer)
        self._inner, self._running = inner, running

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `forward` of the layer, and report if the attention modules were not called."""
        calls = self._running.calls
        before, inside = calls[id(self)], [one.calls for one in self._inner]
        result = forward(*args, **kwargs)
        if [one.calls for one in self._inner] == inside:
            fused = None if calls[id(self)] > before else self._fused()
            if fused is None:
                raise JomaError(self._unseen)
            given = _arguments(self.module, args, kwargs)
            source = given["src"]
            with torch.no_grad():
                inputs = self.module.norm1(source) if self.module.norm_first else source
            padding, mask = given.get("src_key_padding_mask"), given.get("src_mask")
            fused.report(inputs, inputs, padding, mask, is_causal=False)
        return result

    def around_attention(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `forward` of what stands in the place of the attention module: no fused call."""
        self._running.calls[id(self)] += 1
        return forward(*args, **kwargs)

    def _fused(self) -> _Attention | None:
        """The attention of a fused call: the one whose weights the layer hands to it."""
        given = getattr(self.attention, "in_proj_weight", None)
        for one in self._inner:
            weight = one.module.in_proj_weight
            if one.module is self.attention or (weight is not None and weight is given):
                return one
        return None


def _padded(nested: Tensor) -> tuple[Tensor, Tensor]:
    """A nested tensor as (B, T, E), and which of it is real."""
    lengths = torch.tensor([len(sequence) for sequence in nested.unbind()], device=nested.device)
    padded = torch.nested.to_padded_tensor(nested, 0.0)
    return padded, torch.arange(padded.shape[1], device=nested.device) < lengths[:, None]


def _mask(attn_mask: Tensor | None, shape: tuple[int, int, int, int]) -> Tensor | None:
    """The module's mask, where True hides, as ours, where it shows; numbers as they are."""
    if attn_mask is None:
        return None
    mask = attn_mask.view(shape) if attn_mask.ndim == 3 and attn_mask.shape[0] > 1 else attn_mask
    return ~mask if mask.dtype == torch.bool else mask


def _with_padding(
    key_padding_mask: Tensor, mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Padding and mask, where padding may be numbers to add."""
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask, mask
    added = key_padding_mask[:, None, None]
    if mask is None:
        return None, added
    if mask.dtype == torch.bool:
        return None, torch.where(mask, added, -torch.inf)
    return None, mask + added
