"""What the operations of a device allocate that the meta device does not show."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ATEN = torch.ops.aten
_FUSED_BACKWARD = (
    _ATEN._scaled_dot_product_flash_attention_backward.default,
    _ATEN._scaled_dot_product_efficient_attention_backward.default,
)
_FEW_TOKENS = 3072
"""Up to so many tokens, gradients of embeddings are added up on a GPU without a workspace."""
_FLASH_SIZE = 256
"""Largest size of a head in flash attention."""


def run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation, also of one that the meta device lacks for some types.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    if func is not _ATEN._grouped_mm.default or not args[0].is_meta:
        return func(*args, **kwargs)
    # Products of experts: devices multiply all types, the meta device bfloat16 alone.
    low = (torch.empty_like(one, dtype=torch.bfloat16) for one in args[:2])
    made = func(*low, *args[2:], **{**kwargs, "out_dtype": None})
    return torch.empty_like(made, dtype=args[0].dtype)


def workspace_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return bytes that an operation takes for the time it runs.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    if func in _FUSED_BACKWARD:
        # The gradient of the queries is summed in float32; each row has a sum of its own.
        query = args[1]
        copy = 0 if query.dtype == torch.float32 else 4 * query.numel()
        return copy + 4 * query.numel() // query.shape[-1]
    if func is _ATEN.linalg_vector_norm.default:
        # torch reads bfloat16 as float32 without a copy on a GPU, and makes a copy for float64.
        kind = kwargs.get("dtype")
        return 8 * args[0].numel() if kind == torch.float64 != args[0].dtype else 0
    if func is _ATEN.embedding_dense_backward.default and args[1].numel() > _FEW_TOKENS:
        return 4 * args[0].numel()
    return 0


class GpuKernels(TorchFunctionMode):
    """Makes attention and dropout on the meta device save what they save on a GPU.

    On the meta device attention would be computed by the formula, with a matrix of all pairs of
    positions, and dropout would save factors where the GPU saves a mask of bytes.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function, or in its place what runs on a GPU."""
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        if func is torch.nn.functional.dropout:
            return _dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class CpuKernels(TorchFunctionMode):
    """Makes attention on the meta device save what it saves on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function, or in its place what runs on the CPU."""
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _cpu_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_formula = torch.nn.functional.scaled_dot_product_attention
"""Attention on the meta device, where it keeps the weights of all pairs of positions."""


def _needs_formula(query: Tensor, key: Tensor, enable_gqa: bool) -> bool:
    """Return whether no kernel takes the heads: keys that are spread over the queries' heads."""
    return not enable_gqa and query.shape[:-2] != key.shape[:-2]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if _needs_formula(query, key, enable_gqa):
        return _formula(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    sizes = {query.shape[-1], value.shape[-1]}
    is_flash = attn_mask is None and query.dtype != torch.float32
    if is_flash and len(sizes) == 1 and max(sizes) <= _FLASH_SIZE:
        return _ATEN._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    if attn_mask is not None:
        shape = (*query.shape[:-1], key.shape[-2])
        attn_mask = attn_mask.to(query.dtype).expand(shape)
    return _ATEN._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


def _cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p or _needs_formula(query, key, enable_gqa):
        more = {"scale": scale, "enable_gqa": enable_gqa}
        return _formula(query, key, value, attn_mask, dropout_p, is_causal, **more)
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype)
    return _ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input
