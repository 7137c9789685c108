"""How many bytes a cache holds, before anything is allocated."""

from collections.abc import Sequence

import torch
from torch import nn

from joma.common.checks import whole_number
from joma.inference.policy import Policy
from joma.inference.support import (
    check_supported,
    for_layers,
    layer_frequencies,
    layer_windows,
    text_config,
)
from joma.inference.window import Window


def cache_bytes(
    model: nn.Module,
    policy: Policy | Sequence[Policy],
    *,
    tokens: int,
    batch: int = 1,
    dtype: torch.dtype | None = None,
) -> int:
    """Return the bytes a cache holds after reading some tokens.

    A layer that is full has budget + 1 slots. A slot takes 2·heads·head size numbers for key and
    value, 4 bytes for the token's position (once, or for each head where heads keep different
    tokens), and 4 bytes for each head where attention received is measured. The model may be on
    the meta device.

    Args:
        model: The model.
        policy: One policy for all layers, or one for each.
        tokens: How many tokens were read.
        batch: Rows of the batch.
        dtype: Type of keys and values; by default that of the model's weights.
    """
    whole_number("tokens", tokens, 0)
    whole_number("batch", batch, 1)
    check_supported(model, policy)
    config = text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = heads * size * (dtype or next(model.parameters()).dtype).itemsize
    windows, rotations = layer_windows(config), layer_frequencies(model, config)
    total = 0
    for given, window, rotation in zip(
        for_layers(policy, len(windows)), windows, rotations, strict=True
    ):
        kept = in_window(given, window)
        own = heads if kept.per_head else 1
        is_full = kept.budget is not None and tokens > kept.budget
        slots = kept.budget + 1 if is_full and kept.budget is not None else tokens
        per_slot = 2 * width + 4 * own + (4 * heads if kept.uses_attention else 0)
        sinks = 0 if rotation is None else kept.moving_sinks
        total += batch * (slots * per_slot + sinks * width + 8 + (8 * own if is_full else 0))
    return total if tokens else 0


def in_window(policy: Policy, window: int | None) -> Policy:
    """Return what is kept in a layer with a sliding window of its own.

    Where the budget is as large as the window, the window is kept: no later query sees more.
    """
    if window is None or window < 2 or (policy.budget is not None and policy.budget < window - 1):
        return policy
    return Window(window - 1)
