"""Which models a cache can serve, and what their layers are."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from joma.errors import JomaError
from joma.inference.policy import Policy
from joma.inference.streaming import Streaming

TESTED = frozenset({"llama", "qwen3", "mistral", "gpt_neox", "gemma3_text", "opt", "gpt2"})
"""Types of models for which the tests compare every policy with the plain model."""

_LEARNED: Mapping[str, str] = {
    "opt": "max_position_embeddings",
    "gpt2": "n_positions",
    "gpt_bigcode": "n_positions",
    "biogpt": "max_position_embeddings",
}
"""Types of models with learned positions, and where their configuration says how many."""

_REFUSED_ROPE: Mapping[str, str] = {
    "dynamic": "rotations change with the length of the text",
    "longrope": "rotations change with the length of the text",
}
_KINDS = ("full_attention", "sliding_attention")


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
    count = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * count
    for index, kind in enumerate(types):
        if kind not in _KINDS:
            raise JomaError(
                f"layers must attend to everything or to a sliding window to use a cache, got "
                f"{kind!r} in layer {index} of {config.model_type}"
            )
    return [window if kind == "sliding_attention" else None for kind in types]


def layer_frequencies(model: nn.Module, config: Any) -> list[Tensor | None]:
    """Return the rotary frequencies of each layer, None where positions are learned."""
    count = int(config.num_hidden_layers)
    if learned_positions(config) is not None:
        return [None] * count
    types: Sequence[str] = getattr(config, "layer_types", None) or [""] * count
    modules = rotary_modules(model)
    if not modules:
        raise JomaError(
            f"model must have rotary or learned positions to use a cache, got {config.model_type}"
        )
    found: list[Tensor | None] = []
    for kind in types:
        names = (f"{kind}_inv_freq", "inv_freq")
        buffers = [getattr(modules[0], it, None) for it in names]
        found.append(next((it for it in buffers if it is not None), None))
    return found


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that make rotations."""
    return [it for it in model.modules() if type(it).__name__.endswith("RotaryEmbedding")]


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
    if not getattr(model, "_supports_attention_backend", True):
        raise JomaError(
            f"{name} computes attention in a way of its own, which the cache cannot follow"
        )
    for rope in _rope_types(config):
        if rope in _REFUSED_ROPE:
            raise JomaError(
                f"{name} with {rope} positions cannot use a cache: {_REFUSED_ROPE[rope]}"
            )
    layer_windows(config)
    layer_frequencies(model, config)
    if learned_positions(config) is not None:
        for policy in for_layers(policies, int(config.num_hidden_layers)):
            if isinstance(policy, Streaming) and policy.positions == "cache":
                raise JomaError(
                    f"positions must be 'absolute' or 'auto' for {name}, whose positions are "
                    "learned, got 'cache', which needs rotary embeddings"
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


def _rope_types(config: Any) -> set[str]:
    rope: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return set()
    parts = [it for it in rope.values() if isinstance(it, Mapping)] or [rope]
    return {str(it.get("rope_type", "default")) for it in parts}
