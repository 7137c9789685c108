"""The cache of a whole model: `cache` lets the model attend through it, by the attention tap."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.inference.policies import Full, Policy
from joma.inference.support import (
    LayerKind,
    check_supported,
    for_layers,
    layer_kinds,
    learned_positions,
    text_config,
)
from joma.probes import AttentionCall, tap_attention

try:
    from transformers.cache_utils import Cache

    from joma.inference._layer import EvictingLayer, rotated
except ImportError as missing:
    raise JomaError("caches need transformers: pip install 'joma[hf]'") from missing

_TESTED = ("llama", "qwen3", "mistral", "gpt_neox", "gemma3_text", "opt", "gpt2")
"""Types of models for which the tests compare every policy with the plain model."""
_TRIAL_TOKENS, _TRIAL_CHUNKS, _TRIAL_STEPS = 8, (4, 1, 3), 5

_tried: WeakKeyDictionary[nn.Module, list[tuple[bool, bool]]] = WeakKeyDictionary()
"""Whether the keys of each layer are rotated, and whether by its frequencies.

The frequencies are not kept: they change when the model is moved or gets another type.
"""


class EvictingCache(Cache):
    """Keys and values that a policy keeps, to be passed as `past_key_values`.

    It works inside the `with` block of `joma.inference.cache` that made it.

    Attributes:
        layers: The cache of each layer.
    """

    layers: list[EvictingLayer]

    def __init__(self, layers: Sequence[EvictingLayer]) -> None:
        super().__init__(layers=list(layers))
        self._is_active = False
        self._real_BT: Tensor | None = None

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

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new keys and values of one layer."""
        if not self._is_active:
            raise JomaError(
                "the cache is used outside of its with block: inside, the model attends as the "
                "cache asks"
            )
        if layer_idx and self.layers[layer_idx - 1].pending is not None:
            raise JomaError(
                f"the attention of layer {layer_idx - 1} did not come to the cache: it was given "
                "to another model than the one it was made for, or that model attends in a way "
                "of its own"
            )
        return self.layers[layer_idx].update(key_states, value_states)

    @contextmanager
    def attached(self, model: Any) -> Iterator["EvictingCache"]:
        """Let the model attend through this cache inside the block."""
        limit = learned_positions(text_config(model))

        def prepare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._prepare(kwargs | {"input_ids": args[0]} if args else kwargs, limit)

        with ExitStack() as stack:
            # A model with a head may run the decoder inside of its base model directly.
            for decoder in {model.base_model, model.get_decoder()}:
                hook = decoder.register_forward_pre_hook(prepare, with_kwargs=True)
                stack.callback(hook.remove)
            stack.enter_context(tap_attention(model, self._attend, interface_alone=True))
            self._is_active = True
            try:
                yield self
            finally:
                self._is_active = False

    def _prepare(self, given: dict[str, Any], limit: int | None) -> None:
        """Look at what a forward pass is given, before it begins."""
        if given.get("past_key_values") is not self:
            raise JomaError(
                "inside the with block of joma.inference.cache the model must be called with "
                "past_key_values set to that cache"
            )
        if len({it.count for it in self.layers}) > 1 or any(
            it.pending is not None for it in self.layers
        ):
            raise JomaError(
                "the last forward pass with this cache did not end: call reset() to begin anew"
            )
        tokens, mask = given.get("input_ids"), given.get("attention_mask")
        tokens = given["inputs_embeds"] if tokens is None else tokens
        self._real_BT = None
        length = self.seen + tokens.shape[1]
        if mask is not None:
            if mask.ndim != 2:
                raise JomaError(
                    f"attention_mask must have two dimensions with a cache, got {mask.ndim}"
                )
            real = mask[:, -tokens.shape[1] :].bool()
            self._real_BT = None if bool(real.all()) else real
            length = length if limit is None else int(mask.sum(1).max())  # padding has no position
        if limit is not None and length > limit:
            raise JomaError(
                f"the text has reached {length} tokens, and this model has learned {limit} "
                "positions: no cache can take it further"
            )

    def _attend(self, call: AttentionCall) -> Tensor:
        pending = self.layers[call.layer].pending
        if call.value is None or pending is None or pending.data_ptr() != call.key.data_ptr():
            raise JomaError(
                f"{call.module} changes keys after the cache, or computes attention in a way of "
                "its own: a cache cannot follow it"
            )
        return self.layers[call.layer].attend(call, self._real_BT)


@contextmanager
def cache(model: nn.Module, policy: Policy | Sequence[Policy]) -> Iterator[EvictingCache]:
    """Let a model read and generate through a cache of a policy.

        with joma.inference.cache(model, HeavyHitter(64, 64)) as kv:
            model.generate(**inputs, past_key_values=kv)

    What is dropped is freed. Rows of a batch may be padded on the left, and each is kept as if it
    were alone. Inside the block, pass the cache with every call of the model; to begin another text
    call `kv.reset()`. No gradient passes attention. At the end of the block, also after an error,
    the model is as it was.

    Args:
        model: A decoder of Hugging Face's transformers, in evaluation mode.
        policy: What to keep, for all layers or one for each.

    Raises:
        JomaError: A cache cannot serve this model, or not with this policy.
    """
    check_supported(model, policy)
    config, kinds = text_config(model), layer_kinds(model)
    if model.training:
        raise JomaError("model must be in evaluation mode to use a cache: call model.eval()")
    if config.model_type not in _TESTED:
        kinds = _tried_kinds(model, kinds, config.model_type)
    layers = []
    for one, kind in zip(for_layers(policy, len(kinds)), kinds, strict=True):
        if one.moving_sinks and kind.frequencies is None and kind.is_rotated:
            raise JomaError(
                f"positions must be 'absolute' for {config.model_type}: how it rotates its keys is "
                "not known"
            )
        layers.append(EvictingLayer(one, kind))
    with EvictingCache(layers).attached(model) as kv:
        yield kv


def _tried_kinds(model: nn.Module, kinds: list[LayerKind], name: str) -> list[LayerKind]:
    """Return what the layers of a model are that the tests do not know, by reading a few tokens.

    A cache that keeps everything must give the logits of the plain model, and the same text read a
    few positions further on must give the same keys, rotated by the rotary frequencies. A layer
    whose keys stay as they are has no positions, and gets no frequencies.

    Raises:
        JomaError: A cache cannot serve the model.
    """
    if model not in _tried:
        try:
            _tried[model] = _trial(model, kinds, name)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as failure:
            if isinstance(failure, JomaError):
                raise
            reason = str(failure).partition("\n")[0]
            raise JomaError(f"a trial of {name} with a cache failed: {reason}") from failure
    return [
        replace(it, is_rotated=rotates, frequencies=it.frequencies if by_frequencies else None)
        for it, (rotates, by_frequencies) in zip(kinds, _tried[model], strict=True)
    ]


@torch.no_grad()
def _trial(model: Any, kinds: Sequence[LayerKind], name: str) -> list[tuple[bool, bool]]:
    device = next(model.parameters()).device
    ids = torch.arange(1, _TRIAL_TOKENS + 1, device=device)[None] * 7
    ids %= int(text_config(model).vocab_size)
    plain = model(ids, use_cache=False).logits
    keys: list[list[Tensor]] = []
    with EvictingCache([EvictingLayer(Full(), it) for it in kinds]).attached(model) as kv:
        chunks = [model(it, past_key_values=kv).logits for it in ids.split(_TRIAL_CHUNKS, 1)]
        if not _alike(torch.cat(chunks, 1), plain):
            raise JomaError(
                f"a cache that keeps everything changes what {name} computes: it cannot serve it"
            )
        for first in (0, _TRIAL_STEPS):
            kv.reset()
            place = torch.arange(first, first + _TRIAL_TOKENS, device=device)[None]
            model(ids, past_key_values=kv, position_ids=place)
            keys.append([it.store.keys for it in kv.layers if it.store is not None])
    steps = torch.full((1, 1), _TRIAL_STEPS, device=device)
    found = []
    for kind, here, moved in zip(kinds, *keys, strict=True):
        own = kind.frequencies
        known = own is not None and _alike(moved, rotated(here, steps.to(here.device), own))
        found.append((not _alike(moved, here), known))
    return found


def _alike(x: Tensor, y: Tensor) -> bool:
    tolerance = 1e-3 if x.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((x - y).abs().max() <= tolerance * y.abs().max())
