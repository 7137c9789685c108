"""Which models a cache can serve, what their layers are, and how many bytes a cache takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from joma.common.checks import whole_number
from joma.errors import JomaError
from joma.inference.policies import Policy, Streaming, Window

_LEARNED = {
    "opt": "max_position_embeddings",
    "gpt2": "n_positions",
    "gpt_bigcode": "n_positions",
    "biogpt": "max_position_embeddings",
}
"""Types of models with learned positions, and where their configuration says how many."""


@dataclass(frozen=True)
class LayerKind:
    """What a model's layer is, as far as its cache is concerned.

    Attributes:
        index: Number of the layer.
        window: Keys are seen at a smaller distance; None without a sliding window.
        frequencies: Angle per position of each pair of rotated components, (R/2,); None where keys
            are not rotated, or not in a way that is known.
        is_rotated: Whether keys are rotated by their position at all.
    """

    index: int
    window: int | None = None
    frequencies: Tensor | None = None
    is_rotated: bool = True


def text_config(model: nn.Module) -> Any:
    """Return the configuration of a model's decoder.

    Raises:
        JomaError: The model is none of Hugging Face's decoders.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise JomaError(
            f"model must be a decoder of transformers to use a cache, got {type(model).__name__}"
        )
    if config.is_encoder_decoder:
        raise JomaError(
            f"model must be a decoder alone, got {config.model_type}, an encoder with a decoder"
        )
    return config.get_text_config(decoder=True)


def learned_positions(config: Any) -> int | None:
    """Return how many positions a model has learned; None where positions are rotations."""
    name = _LEARNED.get(config.model_type)
    return None if name is None else int(getattr(config, name))


def layer_windows(config: Any) -> list[int | None]:
    """Return the sliding window of each layer, None where a layer sees everything.

    Raises:
        JomaError: A layer is of a kind that a cache cannot serve.
    """
    window = getattr(config, "sliding_window", None)
    for index, kind in enumerate(types := _layer_types(config)):
        if kind not in ("full_attention", "sliding_attention"):
            raise JomaError(
                f"layers must attend to everything or to a sliding window to use a cache, got "
                f"{kind!r} in layer {index} of {config.model_type}"
            )
    return [window if kind == "sliding_attention" else None for kind in types]


def _layer_types(config: Any) -> Sequence[str]:
    types = getattr(config, "layer_types", None)
    if types is not None:
        return types
    only = (
        "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    )
    return [only] * int(config.num_hidden_layers)


def layer_kinds(model: nn.Module) -> list[LayerKind]:
    """Return what the layers of a model are, by its configuration.

    Raises:
        JomaError: A layer is of a kind that a cache cannot serve.
    """
    config = text_config(model)
    windows = layer_windows(config)
    rotary = [it for it in model.modules() if type(it).__name__.endswith("RotaryEmbedding")]
    if not rotary and learned_positions(config) is None:
        raise JomaError(
            f"model must have rotary or learned positions to use a cache, got {config.model_type}"
        )
    kinds = []
    for index, (kind, window) in enumerate(zip(_layer_types(config), windows, strict=True)):
        names = (f"{kind}_inv_freq", "inv_freq") if rotary else ()
        found = [getattr(rotary[0], it, None) for it in names]
        frequencies = next((it for it in found if it is not None), None)
        kinds.append(LayerKind(index, window, frequencies, bool(rotary)))
    return kinds


def check_supported(model: nn.Module, policies: Policy | Sequence[Policy]) -> None:
    """Raise unless a cache with these policies can serve a model.

    Args:
        model: A model.
        policies: One policy for all layers, or one for each.

    Raises:
        JomaError: With the reason.
    """
    config = text_config(model)
    name = config.model_type
    if getattr(config, "num_kv_shared_layers", 0):
        raise JomaError(f"layers that share keys cannot use a cache, as those of {name}")
    rope: Any = getattr(config, "rope_parameters", None) or {}
    for one in [it for it in rope.values() if isinstance(it, Mapping)] or [rope]:
        if one.get("rope_type") in ("dynamic", "longrope"):
            raise JomaError(
                f"{name} with {one['rope_type']} positions cannot use a cache: rotations change "
                "with the length of the text"
            )
    given = for_layers(policies, len(layer_kinds(model)))
    in_cache = any(isinstance(it, Streaming) and it.positions == "cache" for it in given)
    if in_cache and learned_positions(config) is not None:
        raise JomaError(
            f"positions must be 'absolute' or 'auto' for {name}, whose positions are learned, got "
            "'cache', which needs rotary embeddings"
        )


def for_layers(policies: Policy | Sequence[Policy], count: int) -> list[Policy]:
    """Return one policy for each layer.

    Raises:
        JomaError: There are more or fewer policies than layers.
    """
    if isinstance(policies, Policy):
        return [policies] * count
    given = list(policies)
    if len(given) != count or not all(isinstance(it, Policy) for it in given):
        raise JomaError(
            f"policy must be one policy, or one for each of {count} layers, got {len(given)}"
        )
    return given


def in_window(policy: Policy, window: int | None) -> Policy:
    """Return what is kept in a layer with a sliding window of its own.

    Where the budget is as large as the window, the window is kept: no later query sees more.
    """
    if window is None or window < 2 or (policy.budget is not None and policy.budget < window - 1):
        return policy
    return Window(window - 1)


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
    if not whole_number("tokens", tokens, 0):
        return 0
    whole_number("batch", batch, 1)
    check_supported(model, policy)
    config, kinds = text_config(model), layer_kinds(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_head = 2 * size * (dtype or next(model.parameters()).dtype).itemsize
    total = 0
    for given, kind in zip(for_layers(policy, len(kinds)), kinds, strict=True):
        kept = in_window(given, kind.window)
        own = heads if kept.per_head else 1
        is_full = kept.budget is not None and tokens > kept.budget
        slots = kept.budget + 1 if is_full and kept.budget is not None else tokens
        per_slot = heads * per_head + 4 * own + (4 * heads if kept.uses_attention else 0)
        total += batch * (slots * per_slot + 8 + (8 * own if is_full else 0))
    return total
