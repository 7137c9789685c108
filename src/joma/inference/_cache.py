"""The cache of a whole model, and its place in transformers."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from joma.errors import JomaError
from joma.inference._attend import Scoring
from joma.inference._kind import LayerKind
from joma.inference._layer import EvictingLayer, marked
from joma.inference.policy import Policy
from joma.inference.support import (
    TESTED,
    check_supported,
    for_layers,
    layer_frequencies,
    layer_windows,
    learned_positions,
    rotary_modules,
    text_config,
)

_NAME, _EAGER_NAME = "joma_cache", "joma_cache_eager"
_REBASE_EVERY = 4096
"""Tokens after which positions begin anew: far positions lose precision in float32."""


F = TypeVar("F", bound=Callable[..., Any])


def _out_of_graphs(function: F) -> F:
    """Let `torch.compile` leave a function alone: which slots are kept is data."""
    return cast(F, torch.compiler.disable(function))


class EvictingCache(Cache):
    """Keys and values that a policy keeps, to be passed as `past_key_values`.

    It works inside the `with` block of `joma.inference.cache` that made it.

    Attributes:
        policies: What each layer keeps.
    """

    layers: list[EvictingLayer]

    def __init__(self, layers: Sequence[EvictingLayer]) -> None:
        super().__init__(layers=list(layers))
        self.is_active = False

    @property
    def policies(self) -> list[Policy]:
        """What each layer keeps, its own sliding window considered."""
        return [it.policy for it in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes held now: keys, values and what is kept about them."""
        return sum(it.nbytes for it in self.layers)

    @property
    def held(self) -> list[int]:
        """Keys per head that each layer holds."""
        return [it.held for it in self.layers]

    @property
    def seen(self) -> int:
        """Tokens ever seen, padding among them."""
        return self.layers[0].count

    @property
    def offset(self) -> int:
        """By how much the model's positions are lowered."""
        return self.layers[0].offset

    @_out_of_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new keys and values of one layer."""
        if not self.is_active:
            raise JomaError(
                "the cache is used outside of its with block: inside, the model attends as the "
                "cache asks"
            )
        if layer_idx and self.layers[layer_idx - 1].is_waiting:
            raise JomaError(
                f"the attention of layer {layer_idx - 1} did not come to the cache: it was given "
                "to another model than the one it was made for, or that model attends in a way "
                "of its own"
            )
        return self.layers[layer_idx].update(key_states, value_states)

    def prepare(self) -> None:
        """Check that the last pass was complete, and begin positions anew now and then."""
        counts = {it.count for it in self.layers}
        if len(counts) > 1 or any(it.is_waiting for it in self.layers):
            raise JomaError(
                "the last forward pass with this cache did not end: call reset() to begin anew"
            )
        if all(it.kind.frequencies is not None or not it.kind.is_turned for it in self.layers):
            moving = [it for it in self.layers if it.has_moving_sinks]
            # Positions begin anew where a whole window lies beyond them, and once each row has its
            # sinks: their keys are kept with the positions they were read at.
            due = self.offset + _REBASE_EVERY
            if (
                moving
                and self.seen - max(it.held for it in moving) >= due
                and all(it.has_all_sinks for it in moving)
            ):
                for layer in self.layers:
                    layer.rebase(_REBASE_EVERY)


@contextmanager
def installed(
    model: nn.Module, policies: Policy | Sequence[Policy], kinds: Sequence[LayerKind] | None = None
) -> Iterator[EvictingCache]:
    """Let a model attend through a cache inside the block.

    Args:
        model: A decoder of transformers.
        policies: One policy for all layers, or one for each.
        kinds: What the layers are; by default as the model's configuration says.
    """
    check_supported(model, policies)
    config = text_config(model)
    if model.training:
        raise JomaError("model must be in evaluation mode to use a cache: call model.eval()")
    limit = learned_positions(config)
    before = config._attn_implementation
    if before in (_NAME, _EAGER_NAME):
        raise JomaError("model is inside the with block of another cache already")
    if kinds is None:
        kinds = layer_kinds(model, config)
        if config.model_type not in TESTED:
            from joma.inference._trial import tried_kinds  # which reads tokens through a cache

            kinds = tried_kinds(model, kinds)
    given = for_layers(policies, len(kinds))
    for policy, kind in zip(given, kinds, strict=True):
        if policy.moving_sinks and kind.frequencies is None and limit is None and kind.is_turned:
            raise JomaError(
                f"positions must be 'absolute' for {config.model_type}: how it rotates its keys is "
                "not known"
            )
    found = EvictingCache(
        [EvictingLayer(policy, kind) for policy, kind in zip(given, kinds, strict=True)]
    )
    name = _EAGER_NAME if before in (None, "eager") else _NAME
    AttentionInterface.register(name, _attention_eager if name == _EAGER_NAME else _attention)
    AttentionMaskInterface.register(name, _mask)
    with ExitStack() as stack:
        for decoder in _decoders(model):
            prepare = _Preparation(found, decoder, limit)
            stack.callback(decoder.register_forward_pre_hook(prepare, with_kwargs=True).remove)
        for module in rotary_modules(model):
            hook = _Rebased(found)
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        config._attn_implementation = name
        stack.callback(setattr, config, "_attn_implementation", before)
        found.is_active = True
        try:
            yield found
        finally:
            found.is_active = False


def layer_kinds(model: nn.Module, config: Any) -> list[LayerKind]:
    """Return what the layers of a model are."""
    windows, frequencies = layer_windows(config), layer_frequencies(model, config)
    return [
        LayerKind(index, window, frequency)
        for index, (window, frequency) in enumerate(zip(windows, frequencies, strict=True))
    ]


def _decoders(model: Any) -> list[nn.Module]:
    """Return the modules that a forward pass may begin with, below the head.

    There are two where a model with a head passes its base model by, as OPT's does.
    """
    inner = model.get_decoder() if hasattr(model, "get_decoder") else None
    found = [getattr(model, "base_model", model), inner]
    return list(dict.fromkeys(it for it in found if isinstance(it, nn.Module)))


class _Preparation:
    """Looks at each forward pass of the decoder before it begins."""

    def __init__(self, cache: EvictingCache, decoder: nn.Module, limit: int | None) -> None:
        self._cache, self._limit = cache, limit
        self._names = tuple(inspect.signature(decoder.forward).parameters)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if given.get("past_key_values") is not self._cache:
            raise JomaError(
                "inside the with block of joma.inference.cache the model must be called with "
                "past_key_values set to that cache"
            )
        self._cache.prepare()
        if self._limit is None:
            return
        tokens, mask = given.get("input_ids"), given.get("attention_mask")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        length = self._cache.seen + (0 if tokens is None else tokens.shape[1])
        if length > self._limit and isinstance(mask, Tensor) and mask.ndim == 2:
            length = int(mask.sum(1).max())  # padding has no position
        if length > self._limit:
            raise JomaError(
                f"the text has reached {length} tokens, and this model has learned "
                f"{self._limit} positions: no cache can take it further"
            )


class _Rebased:
    """Lowers the positions that a rotary embedding is asked for."""

    def __init__(self, cache: EvictingCache) -> None:
        self._cache = cache

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        offset = self._cache.offset
        if not offset:
            return None
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": kwargs["position_ids"] - offset}
        return (args[0], args[1] - offset, *args[2:]), kwargs


def _mask(
    batch_size: int,
    q_length: int,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """Return which of the new tokens are real, (B, T), or None if all are."""
    if use_vmap:
        raise JomaError("a cache cannot serve a model that asks for a mask of its own")
    if attention_mask is None:
        return None
    real = attention_mask[:, -q_length:].bool()
    return None if bool(real.all()) else real


@_out_of_graphs
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    written_out: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend through the cache that the keys are marked with."""
    layer = marked(key)
    if layer is None:
        raise JomaError(
            f"{type(module).__name__} changes keys after the cache, or attends to other keys than "
            "its own: a cache cannot follow it"
        )
    if dropout:
        raise JomaError("model must be in evaluation mode to use a cache: call model.eval()")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise JomaError(
            f"attention_mask must have two dimensions with a cache, got {attention_mask.ndim}"
        )
    for name in ("s_aux", "position_bias", "cache"):
        if kwargs.get(name) is not None:
            raise JomaError(f"a cache cannot serve attention with {name}")
    scoring = Scoring(scaling, softcap, written_out)
    result = layer.attend(query, key, value, attention_mask, scoring)
    if query.requires_grad:
        result = _WithoutGradient.apply(result, query)
    return result.transpose(1, 2).contiguous(), None


class _WithoutGradient(torch.autograd.Function):
    """Attention through a cache, which no gradient passes: said when one is asked for."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, query: Tensor) -> Tensor:
        """Return the result as it is."""
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        """Raise."""
        raise JomaError("a cache is for inference: no gradient passes attention through it")


def _attention_eager(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _attention(*args, **kwargs, written_out=True)
