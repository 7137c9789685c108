"""One layer of an evicting cache: read a chunk, attend, drop."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from joma.errors import JomaError
from joma.inference._attend import (
    Scoring,
    causal_attention,
    masked_attention,
    query_block,
    written_attention,
)
from joma.inference._kind import LayerKind
from joma.inference._rotation import rotated
from joma.inference._store import Store
from joma.inference.heavy_hitter import HeavyHitter
from joma.inference.policy import Policy
from joma.inference.size import in_window
from joma.inference.window import Window
from joma.kernels.choice import has_kernels


class EvictingLayer(CacheLayerMixin):
    """The cache of one layer. `update` takes new keys, `attend` reads, attends and drops.

    Args:
        policy: What to keep. In a layer with a sliding window that is no longer than the policy's
            budget, the window is kept instead: no later query sees anything else.
        kind: What the layer is.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, policy: Policy, kind: LayerKind) -> None:
        super().__init__()
        policy = in_window(policy, kind.window)
        self.policy, self.kind = policy, kind
        self._sinks = 0 if kind.frequencies is None else policy.moving_sinks
        probe = torch.zeros(1, dtype=torch.int64)
        self._exact = policy.visible(probe, probe) is not None
        """Whether what a query sees follows from positions alone."""
        self.store: Store | None = None
        self.offset = 0
        """By how much keys in the store are at lower positions than they were read at."""
        self.count = 0
        """Tokens ever seen, padding among them."""
        self.is_waiting = False
        self._padded = False

    # What transformers asks of a layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make an empty store for keys and values like these."""
        sinks = self._sinks
        self.store = Store.for_keys(key_states, value_states, self.policy, sinks=sinks)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values, marked for the attention function, which calls `attend`.

        Raises:
            JomaError: The model's last attention did not come here, or the chunk does not fit to
                what is held.
        """
        if self.is_waiting:
            raise JomaError(
                f"layer {self.kind.index} computes attention in a way of its own, which the cache "
                "cannot follow"
            )
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
        self.is_waiting = True
        mark(key_states, self)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the sizes of a mask over everything; the attention function makes its own."""
        return self.count + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many tokens were ever seen: positions of the next ones follow from it."""
        return self.count

    def get_max_length(self) -> int:
        """Return -1: any number of tokens can be read."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget everything."""
        self.store, self.is_initialized = None, False
        self.offset, self.count = 0, 0
        self.is_waiting = self._padded = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let rows go on from other rows, as beam search asks."""
        if self.store is not None:
            self.store.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows of the batch."""
        if self.store is not None:
            rows = torch.arange(self.store.keys.shape[0], device=indices.device)[indices]
            self.store.select_rows(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        if self.store is not None:
            rows = torch.arange(self.store.keys.shape[0], device=self.store.keys.device)
            self.store.select_rows(rows.repeat_interleave(repeats))

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Raise: what was dropped cannot be brought back."""
        raise JomaError(
            "an evicting cache cannot take tokens back, as assisted decoding and prompt lookup ask"
        )

    def offload(self) -> None:
        """Raise: a layer stays where the model's layer is."""
        raise JomaError("an evicting cache cannot be offloaded: it stays on the model's device")

    prefetch = offload

    # What the attention function asks of a layer

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self.store is None else self.store.nbytes

    @property
    def has_moving_sinks(self) -> bool:
        """Whether first tokens are shown right before the window."""
        return self._sinks > 0

    @property
    def has_all_sinks(self) -> bool:
        """Whether each row has read as many tokens as it has sinks; padding is none."""
        if not self._padded or self.store is None:
            return self.count >= self._sinks
        return bool((self.store.seen >= self._sinks).all())

    @property
    def held(self) -> int:
        """Keys per head that are held; in a padded batch, in the longest row."""
        budget, count = self.policy.budget, self.count
        return count if budget is None else min(budget, count)

    @torch.no_grad()
    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, real: Tensor | None, scoring: Scoring
    ) -> Tensor:
        """Read a chunk: return attention of its queries, (B, H, T, Dv), then drop keys.

        A pass that breaks off in here leaves the layer waiting, so that the next one is refused.

        Args:
            query: (B, H, T, D).
            keys: (B, Hk, T, D).
            values: (B, Hk, T, Dv).
            real: (B, T), bool, False for padding; None if there is none.
            scoring: How scores are made.
        """
        assert self.is_waiting
        result = self._attend(query, keys, values, real, scoring)
        self.is_waiting = False
        return result

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, real: Tensor | None, scoring: Scoring
    ) -> Tensor:
        store = self.store
        assert store is not None
        policy, budget, T = self.policy, self.policy.budget, query.shape[2]
        fresh = store.slots == 0
        self.count += T
        self._padded |= real is not None
        if T == 1 and self._has_kernel(query, scoring):
            return self._step_on_gpu(store, query, keys, values, real, scoring)
        position = self._positions(store, T, real)
        has_sinks = not self._padded and self.count - T >= self._sinks
        if T == 1 and store.empty is not None:
            store.write(keys, values, position, has_sinks=has_sinks)
        else:
            store.append(keys, values, position, has_sinks=has_sinks)
        plain = fresh and not self._padded and self._sees_all
        if plain and not (scoring.written_out or scoring.softcap or policy.uses_attention):
            result = causal_attention(query, store.keys, store.values, scoring)
        elif T == 1:
            result = self._attend_one(store, query, position, scoring)
        else:
            result = self._attend_chunk(store, query, position, scoring)
        if budget is None:
            return result
        if self._is_far_sighted:
            assert self.kind.window is not None
            store.drop_before(store.seen - self.kind.window + 1)
        if T == 1 and store.slots == budget + 1:
            store.drop_one(policy, self.kind.index)
        else:
            store.shrink(policy, self.kind.index, budget)
        return result

    def rebase(self, steps: int) -> None:
        """Move all keys to lower positions, with the queries that come."""
        self.offset += steps
        if self.store is not None and self.kind.is_turned:
            assert self.kind.frequencies is not None
            back = torch.full_like(self.store.seen, -steps)[:, None]
            self.store.keys = rotated(self.store.keys, back, self.kind.frequencies)

    @property
    def _is_far_sighted(self) -> bool:
        """Whether keys are held that are out of sight by the layer's own sliding window."""
        return (
            self.kind.window is not None and not isinstance(self.policy, Window) and not self._sinks
        )

    @property
    def _sees_all(self) -> bool:
        """Whether no token of the text so far is out of sight of a later one."""
        window, budget = self.kind.window, self.policy.budget
        near = window is None or self.count <= window
        limited = budget is not None and self._exact and self.count > budget + 1
        return near and not limited

    def _positions(self, store: Store, T: int, real: Tensor | None) -> Tensor:
        """Return the place of each new token in its row, (B, T), -1 for padding, and count it."""
        if real is None:
            position = store.seen[:, None] + torch.arange(T, device=store.seen.device)
            store.seen += T
            return position
        real = real.to(store.seen.device)
        position = (store.seen[:, None] + real.cumsum(1) - 1).masked_fill(~real, -1)
        store.seen += real.sum(1)
        return position

    def _attend_one(
        self, store: Store, query: Tensor, position: Tensor, scoring: Scoring
    ) -> Tensor:
        """Return attention of one query per row: nothing that is held comes after it."""
        policy, allowed = self.policy, None
        if self._sinks:
            self._place_moved_sinks(store, position)
        if self._padded or self._is_far_sighted:
            allowed = self._allowed(store, position)
        if not (scoring.written_out or scoring.softcap or policy.uses_attention):
            return masked_attention(query, store.keys, store.values, allowed, scoring)
        weight = (position >= 0).float() if policy.uses_attention else None
        result, received = written_attention(
            query, store.keys, store.values, allowed, scoring, weight
        )
        if received is not None:
            assert store.received is not None
            self._fade(store, position)
            store.received += received
        return result

    def _has_kernel(self, query: Tensor, scoring: Scoring) -> bool:
        """Whether the whole step of one token is done by a kernel."""
        return (
            query.is_cuda
            and type(self.policy) is HeavyHitter
            and self.store is not None
            and self.store.empty is not None
            and scoring.softcap is None
            and not self._is_far_sighted
            and query.dtype != torch.float64
            and has_kernels(query.device)
        )

    def _step_on_gpu(
        self,
        store: Store,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        real: Tensor | None,
        scoring: Scoring,
    ) -> Tensor:
        from joma.inference._heavy_kernel import heavy_step

        assert isinstance(self.policy, HeavyHitter)
        scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
        real = None if real is None else real.to(query.device)
        with torch.cuda.device(query.device):
            return heavy_step(store, self.policy, query, keys, values, real, scale)

    def _attend_chunk(
        self, store: Store, query: Tensor, position: Tensor, scoring: Scoring
    ) -> Tensor:
        """Return attention of a chunk, in blocks of queries."""
        keys, moved = store.keys, None
        if self._sinks and (self.offset or self.count > self.held + 1):
            keys, moved = self._separated(store, query, position)
        weight = None
        if self.policy.uses_attention:
            assert store.received is not None
            self._fade(store, position)
            later = store.seen[:, None] - 1 - position  # tokens of the row after this one
            weight = (self.policy.retention ** later.double()).masked_fill(position < 0, 0)
        if scoring.scale is None:
            scoring = Scoring(query.shape[-1] ** -0.5, scoring.softcap, scoring.written_out)
        written = scoring.written_out or scoring.softcap is not None or weight is not None
        per_key = 4 * query.shape[1] if written else store.position.shape[1]  # scores, or a mask
        step = query_block(query.shape[0] * store.slots * per_key)
        results: list[Tensor] = []
        for at in range(0, query.shape[2], step):
            here = slice(at, at + step)
            allowed = self._allowed(store, position[:, here])
            some = query[:, :, here]
            if moved is not None:
                some = torch.cat((some, moved[:, :, here]), -1)
            if not written:
                results.append(masked_attention(some, keys, store.values, allowed, scoring))
                continue
            part = None if weight is None else weight[:, here]
            found, received = written_attention(some, keys, store.values, allowed, scoring, part)
            results.append(found)
            if received is not None:
                assert store.received is not None
                store.received += received
        return results[0] if len(results) == 1 else torch.cat(results, 2)

    def _fade(self, store: Store, position: Tensor) -> None:
        """Lower the weight of attention received before these tokens."""
        if self.policy.retention != 1:
            assert store.received is not None
            new = (position >= 0).sum(1)[:, None, None]
            store.received *= (self.policy.retention ** new.double()).float()

    def _allowed(self, store: Store, position: Tensor) -> Tensor:
        """Return which slots each query sees, (B, h, T, C)."""
        query, key = position[:, None, :, None], store.position[:, :, None, :]
        allowed = (key >= 0) & (key <= query)
        visible = self.policy.visible(query, key)
        if visible is not None:
            allowed &= visible
        if self._is_far_sighted or (isinstance(self.policy, Window) and self.kind.window):
            assert self.kind.window is not None
            allowed &= query - key < self.kind.window
        return allowed | (query < 0)  # padding may see anything; a row without keys has no softmax

    # Positions in the cache: sinks move along with the window

    def _dropped(self, position: Tensor) -> Tensor:
        """Return how many tokens lie between sinks and window for queries at these positions."""
        budget = self.policy.budget
        assert budget is not None
        return (position - budget).clamp(min=0)

    def _place_moved_sinks(self, store: Store, position: Tensor) -> None:
        """Show one query per row the sinks right before its window."""
        if self.count - 1 <= self.held and not self.offset:
            return
        assert store.sinks is not None
        assert self.kind.frequencies is not None
        steps = self._dropped(position) - self.offset
        found = rotated(store.sinks, steps, self.kind.frequencies)
        store.place_sinks(found, in_front=not self._padded)

    def _separated(self, store: Store, query: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and moved queries so that each query has its own distance to the sinks.

        Products of (q, q moved back) with (k, 0) for other keys and (0, k) for sinks are those of
        each query with the sinks moved onwards for it alone.
        """
        assert store.sinks is not None
        assert self.kind.frequencies is not None
        store.place_sinks(store.sinks, in_front=not self._padded)
        steps = self.offset - self._dropped(position)
        moved = rotated(query, steps, self.kind.frequencies)
        sink = ((store.position >= 0) & (store.position < self._sinks))[..., None]
        keys = torch.cat((store.keys.masked_fill(sink, 0), store.keys.masked_fill(~sink, 0)), -1)
        return keys, moved


_MARK = "joma_cache_layer"


def mark(keys: Tensor, layer: EvictingLayer) -> None:
    """Note on a tensor of keys which layer it belongs to."""
    setattr(keys, _MARK, layer)


def marked(keys: Tensor) -> EvictingLayer | None:
    """Return the layer a tensor of keys belongs to, and take the note off."""
    layer = getattr(keys, _MARK, None)
    if layer is not None:
        delattr(keys, _MARK)
    return layer
