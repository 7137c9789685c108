"""The keys and values that one layer holds, in slots."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from joma.inference.policy import Held, Policy


@dataclass(eq=False)
class Store:
    """Slots of one layer: a token is written into a slot and stays there until it is dropped.

    A store that is full has one slot more than the budget, and in each row and head one slot that
    is empty between steps: the next token is written there and, when its attention was computed,
    the slot of what is dropped becomes the empty one. So nothing is moved while tokens come one by
    one, and the tensors stay the same ones.

    Attributes:
        keys: (B, Hk, C, D).
        values: (B, Hk, C, Dv).
        position: (B, h, C), int32, place of the token in its row, -1 for an empty slot.
        seen: (B,), int64, real tokens of each row.
        received: (B, Hk, C), float32, attention received; None if the policy does not ask for it.
        empty: (B, h), the slot for the next token; None while the store is not full.
        sinks: (B, Hk, S, D), keys of the first tokens as they were made; None without sinks.
    """

    keys: Tensor
    values: Tensor
    position: Tensor
    seen: Tensor
    received: Tensor | None = None
    empty: Tensor | None = None
    sinks: Tensor | None = None

    @classmethod
    def for_keys(cls, keys: Tensor, values: Tensor, policy: Policy, *, sinks: int) -> "Store":
        """Return a store without slots for keys and values like these."""
        B, heads, _, D = keys.shape
        own = heads if policy.per_head else 1
        return cls(
            keys=keys.new_empty(B, heads, 0, D),
            values=values.new_empty(B, heads, 0, values.shape[-1]),
            position=torch.empty(B, own, 0, dtype=torch.int32, device=keys.device),
            seen=torch.zeros(B, dtype=torch.int64, device=keys.device),
            received=keys.new_empty(B, heads, 0, dtype=torch.float32)
            if policy.uses_attention
            else None,
            sinks=keys.new_zeros(B, heads, sinks, D) if sinks else None,
        )

    @property
    def slots(self) -> int:
        """How many slots there are, empty ones among them."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(it.nbytes for it in self._tensors().values())

    def _tensors(self) -> dict[str, Tensor]:
        found = {it.name: getattr(self, it.name) for it in fields(self)}
        return {name: it for name, it in found.items() if it is not None}

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may be taken more than once."""
        for name, tensor in self._tensors().items():
            setattr(self, name, tensor.index_select(0, rows.to(tensor.device)))

    def append(
        self, keys: Tensor, values: Tensor, position: Tensor, *, has_sinks: bool = False
    ) -> None:
        """Add slots at the end for the tokens of a chunk.

        Args:
            keys: (B, Hk, T, D).
            values: (B, Hk, T, Dv).
            position: (B, T).
            has_sinks: Whether no token is a sink, as each row has them all; False if not known.
        """
        own = position[:, None].expand(-1, self.position.shape[1], -1).to(torch.int32)
        if self.sinks is not None and not has_sinks:
            self._remember(keys, position)
        self.keys = torch.cat((self.keys, keys.detach()), 2)
        self.values = torch.cat((self.values, values.detach()), 2)
        self.position = torch.cat((self.position, own), 2)
        if self.received is not None:
            new = self.received.new_zeros(*keys.shape[:3])
            self.received = torch.cat((self.received, new), 2)
        self.empty = None

    def write(
        self, keys: Tensor, values: Tensor, position: Tensor, *, has_sinks: bool = False
    ) -> None:
        """Write one token of each row into the empty slots of a full store; arguments as above."""
        assert self.empty is not None
        if self.sinks is not None and not has_sinks:
            self._remember(keys, position)
        slot = self.empty[:, :, None]
        self.position.scatter_(2, slot, position[:, None].expand_as(slot).to(torch.int32))
        slot = slot.expand(-1, keys.shape[1], -1)
        if self.received is not None:
            self.received.scatter_(2, slot, 0.0)
        self.keys.scatter_(2, slot[..., None].expand_as(keys), keys)
        self.values.scatter_(2, slot[..., None].expand_as(values), values)

    def shrink(self, policy: Policy, layer: int, budget: int) -> None:
        """Drop slots until `budget` are left, and add the empty one."""
        if self.slots <= budget:
            return
        kept = self._priority(policy, layer).topk(budget, 2, sorted=False).indices
        if self.sinks is not None:  # in the order of the text: see `place_sinks`
            kept = kept.gather(2, self.position.gather(2, kept).argsort(2))
        self.position = _with_empty(self.position.gather(2, kept), -1)
        kept = kept.expand(-1, self.keys.shape[1], -1)
        if self.received is not None:
            self.received = _with_empty(self.received.gather(2, kept), 0)
        self.keys = _gathered(self.keys, kept)
        self.values = _gathered(self.values, kept)
        self.empty = torch.full_like(self.position[..., 0], budget, dtype=torch.int64)

    def drop_one(self, policy: Policy, layer: int) -> None:
        """Empty the slot of lowest priority in each row and head."""
        lowest = self._priority(policy, layer).argmin(2)
        # In place where it can be, so that a captured graph reads what it has written.
        self.empty = lowest if self.empty is None else self.empty.copy_(lowest)
        self.position.scatter_(2, self.empty[:, :, None], -1)

    def drop_before(self, position: Tensor) -> None:
        """Empty the slots of tokens before these positions, (B,): no later query sees them."""
        self.position.masked_fill_(self.position < position[:, None, None], -1)

    def _priority(self, policy: Policy, layer: int) -> Tensor:
        held = Held(self.position, self.seen[:, None, None], self.received, layer)
        priority = policy.priority(held)
        lowest = -torch.inf if priority.is_floating_point() else torch.iinfo(priority.dtype).min
        return priority.masked_fill(self.position < 0, lowest)

    def _remember(self, keys: Tensor, position: Tensor) -> None:
        """Keep the keys of the first tokens of each row as they are."""
        assert self.sinks is not None
        place = torch.arange(self.sinks.shape[2], device=keys.device)
        here = position[:, None, :] == place[:, None]  # (B, S, T)
        arrived = here.any(2)[:, None, :, None]
        found = _gathered_at(keys, here.int().argmax(2))
        self.sinks.copy_(torch.where(arrived, found, self.sinks))

    def place_sinks(self, sinks: Tensor, *, in_front: bool = False) -> None:
        """Write keys of the first tokens, (B, Hk, S, D), into the slots where they are held.

        Args:
            sinks: The keys.
            in_front: Whether they are in the first slots, in order; if not, they are searched for.
                Without padding they are there: tokens stay in the order of the text, and none is
                written over a sink.
        """
        if in_front:
            self.keys[:, :, : sinks.shape[2]] = sinks
            return
        place = torch.arange(sinks.shape[2], device=sinks.device, dtype=torch.int32)
        here = self.position == place[:, None]  # (B, S, C): all heads hold the same tokens
        # A row too short to have all its sinks has an empty slot, which nobody reads.
        here = torch.where(here.any(2, keepdim=True), here, self.position < 0)
        slot = here.int().argmax(2)[:, None, :, None].expand_as(sinks)
        self.keys.scatter_(2, slot, sinks)


def _with_empty(x: Tensor, value: int) -> Tensor:
    return torch.cat((x, x.new_full((*x.shape[:2], 1), value)), 2)


def _gathered(x: Tensor, slots: Tensor) -> Tensor:
    """Return the rows of x, (B, H, C, D), at some slots, (B, H, K), and an empty one."""
    B, H, K = slots.shape
    found = x.new_zeros(B, H, K + 1, x.shape[-1])
    index = slots[..., None].expand(-1, -1, -1, x.shape[-1])
    found[:, :, :K] = x.gather(2, index)
    return found


def _gathered_at(x: Tensor, place: Tensor) -> Tensor:
    """Return the rows of x, (B, H, T, D), at some places, (B, S), alike for all heads."""
    index = place[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.gather(2, index)
