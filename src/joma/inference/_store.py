"""The keys and values that one layer holds, in slots."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from joma.inference.policies import Held, Policy


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
    """

    keys: Tensor
    values: Tensor
    position: Tensor
    seen: Tensor
    received: Tensor | None = None
    empty: Tensor | None = None

    @classmethod
    def without_slots(cls, keys: Tensor, values: Tensor, policy: Policy) -> "Store":
        """Return a store that holds nothing yet, for keys and values like these."""
        B, heads = keys.shape[:2]
        own = heads if policy.per_head else 1
        received = keys.new_empty(B, heads, 0, dtype=torch.float32)
        return cls(
            keys=keys[:, :, :0],
            values=values[:, :, :0],
            position=keys.new_empty(B, own, 0, dtype=torch.int32),
            seen=keys.new_zeros(B, dtype=torch.int64),
            received=received if policy.uses_attention else None,
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

    def positions_of(self, count: int, real: Tensor | None) -> Tensor:
        """Return the places in their rows of the next `count` tokens, (B, T), and count them.

        Args:
            count: Tokens of each row.
            real: (B, T), bool, False for padding, whose place is -1; None if there is none.
        """
        if real is None:
            position = self.seen[:, None] + torch.arange(count, device=self.seen.device)
            self.seen += count
            return position
        real = real.to(self.seen.device)
        position = (self.seen[:, None] + real.cumsum(1) - 1).masked_fill(~real, -1)
        self.seen += real.sum(1)
        return position

    def add(self, keys: Tensor, values: Tensor, position: Tensor) -> None:
        """Add tokens, one to the empty slots of a full store, and otherwise new slots at the end.

        Args:
            keys: (B, Hk, T, D).
            values: (B, Hk, T, Dv).
            position: (B, T).
        """
        if self.empty is not None and keys.shape[2] == 1:
            slot = self.empty[:, :, None]
            self.position.scatter_(2, slot, position[:, None].expand_as(slot).to(torch.int32))
            slot = slot.expand(-1, keys.shape[1], -1)
            if self.received is not None:
                self.received.scatter_(2, slot, 0.0)
            self.keys.scatter_(2, slot[..., None].expand_as(keys), keys)
            self.values.scatter_(2, slot[..., None].expand_as(values), values)
            return
        own = position[:, None].expand(-1, self.position.shape[1], -1).to(torch.int32)
        self.position = torch.cat((self.position, own), 2)
        self.keys = torch.cat((self.keys, keys), 2)
        self.values = torch.cat((self.values, values), 2)
        if self.received is not None:
            self.received = torch.cat((self.received, self.received.new_zeros(keys.shape[:3])), 2)
        self.empty = None

    def shrink(self, policy: Policy, layer: int) -> None:
        """Drop what a policy has no room for."""
        budget = policy.budget
        if budget is None or self.slots <= budget:
            return
        held = Held(self.position, self.seen[:, None, None], self.received, layer)
        priority = policy.priority(held)
        lowest = -torch.inf if priority.is_floating_point() else torch.iinfo(priority.dtype).min
        priority = priority.masked_fill(self.position < 0, lowest)
        if self.empty is not None and self.slots == budget + 1:
            # In place, so that a captured graph reads what it has written.
            self.empty.copy_(priority.argmin(2))
            self.position.scatter_(2, self.empty[:, :, None], -1)
            return
        kept = priority.topk(budget, 2, sorted=False).indices
        self.position = _with_empty(self.position.gather(2, kept), -1)
        self.empty = torch.full_like(self.position[..., 0], budget, dtype=torch.int64)
        kept = kept.expand(-1, self.keys.shape[1], -1)
        if self.received is not None:
            self.received = _with_empty(self.received.gather(2, kept), 0)
        self.keys, self.values = (
            _with_empty(it.gather(2, kept[..., None].expand(-1, -1, -1, it.shape[-1])), 0)
            for it in (self.keys, self.values)
        )

    def drop_before(self, position: Tensor) -> None:
        """Empty the slots of tokens before these positions, (B,): no later query sees them."""
        self.position.masked_fill_(self.position < position[:, None, None], -1)


def _with_empty(x: Tensor, value: int) -> Tensor:
    return torch.cat((x, x.new_full((*x.shape[:2], 1, *x.shape[3:]), value)), 2)
