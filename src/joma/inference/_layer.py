"""One layer of an evicting cache: read a chunk, attend, drop."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import CacheLayerMixin

from joma.errors import JomaError
from joma.inference._store import Store
from joma.inference.policies import HeavyHitter, Policy, Window
from joma.inference.support import LayerKind, in_window
from joma.kernels.heavy_hitter import heavy_hitter_step, products, scored_attention
from joma.probes import AttentionCall

_BLOCK_BYTES = 64 * 2**20
"""Scores, or a mask of scores, that are held at a time."""


class EvictingLayer(CacheLayerMixin):
    """The cache of one layer. `update` takes new keys; `attend` reads, attends and drops.

    Args:
        policy: What to keep. In a layer with a sliding window that is no longer than the policy's
            budget, the window is kept instead: no later query sees anything else.
        kind: What the layer is.

    Attributes:
        policy: What is kept.
        kind: As given.
        store: Keys and values; None before the first token.
        count: Tokens ever seen, padding among them.
        pending: Keys that were handed to attention, which has not come back with them.
    """

    is_sliding = False

    def __init__(self, policy: Policy, kind: LayerKind) -> None:
        super().__init__()
        policy = in_window(policy, kind.window)
        self.policy, self.kind = policy, kind
        self._sinks = 0 if kind.frequencies is None else policy.moving_sinks
        self._window = None if isinstance(policy, Window) or self._sinks else kind.window
        """The layer's own window, where keys may be held that it hides."""
        position = torch.zeros(1, dtype=torch.int64)
        by_position = policy.visible(position, position) is not None
        reach = policy.budget + 1 if by_position and policy.budget is not None else math.inf
        self._reach = min(reach, self._window or math.inf)
        """Up to this length every token of a text sees all before it."""
        self.reset()

    # What transformers asks of a layer

    def reset(self) -> None:
        """Forget everything."""
        self.store: Store | None = None
        self.pending: Tensor | None = None
        self.count, self._padded, self.is_initialized = 0, False, False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make an empty store for keys and values like these."""
        self.store = Store.without_slots(key_states, value_states, self.policy)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values as they are: `attend` gets them from attention.

        Raises:
            JomaError: The chunk does not fit to what is held.
        """
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        assert self.store is not None
        held = self.store.keys
        if held.device != key_states.device:
            raise JomaError(
                f"the cache of layer {self.kind.index} is on {held.device} and the model's keys "
                f"are on {key_states.device}: call reset() on the cache after the model was moved"
            )
        if (held.shape[0], held.dtype) != (key_states.shape[0], key_states.dtype):
            raise JomaError(
                f"the cache holds {held.shape[0]} rows of {held.dtype}, got {key_states.shape[0]} "
                f"of {key_states.dtype}: call reset() on the cache to begin another text"
            )
        self.pending = key_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys that `update` returns."""
        return query_length, self.count

    def get_seq_length(self) -> int:
        """Return how many tokens were ever seen: positions of the next ones follow from it."""
        return self.count

    def get_max_length(self) -> int:
        """Return -1: any number of tokens can be read."""
        return -1

    get_max_cache_shape = get_max_length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let rows continue other rows, as beam search asks."""
        if self.store is not None:
            self.store.select_rows(beam_idx)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Raise: what was dropped cannot be brought back."""
        raise JomaError(
            "an evicting cache cannot take tokens back, as assisted decoding and prompt lookup ask"
        )

    # What attention asks of a layer

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self.store is None else self.store.nbytes

    @property
    def held(self) -> int:
        """Keys per head that are held; in a padded batch, in the longest row."""
        budget = self.policy.budget
        return self.count if budget is None else min(budget, self.count)

    def attend(self, call: AttentionCall, real: Tensor | None) -> Tensor:
        """Read a chunk: return attention of its queries, (B, H, T, Dv), then drop keys.

        A pass that breaks off in here leaves keys pending, so that the next one is refused.

        Args:
            call: Queries, keys and values, and how scores are made.
            real: (B, T), bool, False for padding; None if there is none.
        """
        store, policy, query, value = self.store, self.policy, call.query, call.value
        assert store is not None
        assert value is not None
        T, is_fresh = query.shape[2], store.slots == 0
        self.count += T
        self._padded |= real is not None
        scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        plain = call.softcap is None and self._window is None
        if T == 1 and plain and type(policy) is HeavyHitter and store.empty is not None:
            assert store.received is not None
            result = heavy_hitter_step(
                query,
                call.key,
                value,
                None if real is None else real.to(query.device),
                keys=store.keys,
                values=store.values,
                position=store.position,
                seen=store.seen,
                received=store.received,
                empty=store.empty,
                scale=scale,
                recent=policy.recent,
                retention=policy.retention,
                mean=policy.score == "mean",
            )
            self.pending = None
            return result
        position = store.positions_of(T, real)
        store.add(call.key, value, position)
        sees_all = self._window is None if T == 1 else is_fresh and self.count <= self._reach
        moves_sinks = self._sinks > 0 and self.count > self.held + 1
        if sees_all and plain and not (self._padded or policy.uses_attention or moves_sinks):
            result = scaled_dot_product_attention(
                query, store.keys, store.values, is_causal=T > 1, scale=scale, enable_gqa=True
            )
        else:
            result = self._attend_blocks(store, call, position, scale, moves_sinks=moves_sinks)
        if self._window is not None:
            store.drop_before(store.seen - self._window + 1)
        store.shrink(policy, self.kind.index)
        self.pending = None
        return result

    def _attend_blocks(
        self,
        store: Store,
        call: AttentionCall,
        position: Tensor,
        scale: float,
        *,
        moves_sinks: bool,
    ) -> Tensor:
        """Return attention with its scores in memory, some queries at a time."""
        policy, (B, H, T, _) = self.policy, call.query.shape
        weight = None
        if policy.uses_attention:
            assert store.received is not None
            later = store.seen[:, None] - 1 - position  # tokens of the row after this one
            weight = (policy.retention ** later.double()).masked_fill(position < 0, 0)
            new = (position >= 0).sum(1)[:, None, None]
            store.received *= (policy.retention ** new.double()).float()
        step = max(16, _BLOCK_BYTES // (4 * B * H * store.slots))
        results: list[Tensor] = []
        for at in range(0, T, step):
            query, place = call.query[:, :, at : at + step], position[:, at : at + step]
            scores, allowed = products(query, store.keys, scale), None
            if T > 1 or self._padded or self._window is not None:
                allowed = self._allowed(store, place)
            if moves_sinks:
                scores = self._with_moved_sinks(scores, store, query, place, scale)
            own = None if weight is None else weight[:, at : at + step]
            found, received = scored_attention(
                scores, store.values, allowed, softcap=call.softcap, weight=own
            )
            results.append(found)
            if received is not None:
                store.received += received
        return results[0] if len(results) == 1 else torch.cat(results, 2)

    def _with_moved_sinks(
        self, scores: Tensor, store: Store, query: Tensor, position: Tensor, scale: float
    ) -> Tensor:
        """Return scores in which each query sees the sinks right before its window.

        Moving a query back by the tokens between them is moving the sinks onwards, for it alone.
        """
        budget, frequencies = self.policy.budget, self.kind.frequencies
        assert budget is not None
        assert frequencies is not None
        moved = rotated(query, -(position - budget).clamp(min=0), frequencies)
        is_sink = (store.position >= 0) & (store.position < self._sinks)
        return torch.where(is_sink[:, :, None], products(moved, store.keys, scale), scores)

    def _allowed(self, store: Store, position: Tensor) -> Tensor:
        """Return which slots each query sees, (B, h, T, C)."""
        query, key = position[:, None, :, None], store.position[:, :, None, :]
        allowed = (key >= 0) & (key <= query)
        visible = self.policy.visible(query, key)
        if visible is not None:
            allowed &= visible
        if self._window is not None:
            allowed &= query - key < self._window
        return allowed | (query < 0)  # padding may see anything; a row without keys has no softmax


def rotated(x: Tensor, steps: Tensor, frequencies: Tensor) -> Tensor:
    """Return keys or queries moved `steps` positions onwards.

    Rotations add up, so what was rotated for position p comes out as rotated for p + steps. Angles
    are computed in float64: after 100,000 tokens float32 is off by 0.006 radians.

    Args:
        x: (B, H, T, D); component i is paired with component i + R/2 of the first R.
        steps: (B, T) or broadcastable to it, whole numbers.
        frequencies: (R/2,), angle per position of each pair; R may be smaller than D. They may
            be on another device than x.
    """
    half = frequencies.shape[0]
    angle = steps[:, None, :, None].double() * frequencies.to(steps.device).double()
    work = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angle.cos().to(work), angle.sin().to(work)
    first, second = x[..., :half].to(work), x[..., half : 2 * half].to(work)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
    return torch.cat((turned, x[..., 2 * half :]), -1)
