"""What the sources of data share: members' seeds, and random choices without repetition."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from joma import random
from joma.errors import JomaError


def seed_tensor(seeds: Sequence[int], device: torch.device | str) -> Tensor:
    """One seed for each member, shape (E,)."""
    if len(seeds) == 0:
        raise JomaError("seeds must hold at least one seed, got none")
    for seed in seeds:
        if int(seed) != seed or not -(2**63) <= seed < 2**63:
            raise JomaError(f"seeds must be whole, from -2**63 to 2**63 - 1, got {seed}")
    return torch.tensor([int(seed) for seed in seeds], dtype=torch.int64, device=device)


def distinct_sets(seed: int, stream: str, population: int, size: int, count: int) -> Tensor:
    """Different random subsets of 0 … population − 1, as members, shape (count, population), bool.

    The caller sees to it that there are as many.
    """
    seed_1 = torch.tensor([seed])

    def draw(attempt: int) -> Tensor:
        keys = random.words(seed_1, stream, attempt, count * population).view(count, population)
        return keys.argsort(dim=-1, stable=True)[:, :size].sort(dim=-1).values

    chosen = torch.tensor(_distinct_rows(draw, count))
    return torch.zeros(count, population, dtype=torch.bool).scatter_(1, chosen, value=True)


def spread_codes(seed: int, stream: str, bits: int, count: int) -> Tensor:
    """Random codes of 0 and 1, repeating only once all of them are used, shape (count, bits)."""
    seed_1 = torch.tensor([seed])

    def draw(attempt: int) -> Tensor:
        return random.words(seed_1, name, attempt, count * bits).view(count, bits) >> 31

    codes: list[tuple[int, ...]] = []
    while len(codes) < count:
        name = f"{stream}{len(codes)}"
        codes += _distinct_rows(draw, min(count - len(codes), 2**bits))
    return torch.tensor(codes)


def _distinct_rows(draw: Callable[[int], Tensor], count: int) -> list[tuple[int, ...]]:
    """The first different rows that come up in attempt after attempt."""
    rows: dict[tuple[int, ...], None] = {}
    attempt = 0
    while len(rows) < count:
        rows |= dict.fromkeys(tuple(row) for row in draw(attempt).tolist())
        attempt += 1
    return list(rows)[:count]
