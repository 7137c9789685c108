"""Keep keys at random: the control for every policy that claims to know which ones matter."""

from dataclasses import dataclass

import torch
from torch import Tensor

from joma.inference.policy import Held, Policy, check_count

_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Random(Policy):
    """Keep `n` keys of each head: the last `recent` ones, and a uniform sample of the others.

    The sample depends on the seed, the layer, the head and the token's position alone: not on the
    batch, the device or the size of the chunks.

    Args:
        n: How many keys are held.
        recent: How many of them are the last ones.
        seed: Another seed draws another sample.
    """

    n: int
    recent: int = 0
    seed: int = 0
    name = "random"
    per_head = True

    def __post_init__(self) -> None:
        check_count("n", self.n)
        check_count("recent", self.recent, least=0)
        check_count("seed", self.seed, least=0)
        check_count("n", self.n, least=max(1, self.recent))

    @property
    def budget(self) -> int:
        """`n`."""
        return self.n

    def priority(self, held: Held) -> Tensor:
        """Recent keys first, then by a number that is drawn once for each token."""
        heads = torch.arange(held.position.shape[1], device=held.position.device)[:, None]
        drawn = _mixed(_mixed(_mixed(heads + 1009 * self.seed) + held.layer) + held.position)
        return drawn.masked_fill(held.position >= held.seen - self.recent, _LARGEST + 1)


def _mixed(number: Tensor) -> Tensor:
    """Return a number below 2^31 in which every bit depends on all bits of the argument.

    It is the 32-bit finaliser of MurmurHash3, with products kept inside 64 bits.
    """
    x = number.long() & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return (x ^ (x >> 16)) & _LARGEST
