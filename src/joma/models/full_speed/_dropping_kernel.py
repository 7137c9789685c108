"""What is dropped of activations on a GPU (Triton): the words that `joma.random` draws."""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

import zlib

import triton
import triton.language as tl
from torch import Tensor


def stream_number(place: str) -> int:
    """The number of a stream of random words, as `joma.random` has it."""
    return zlib.crc32(f"dropout.{place}".encode())


class Drop:
    """Which numbers are dropped, for the functions here.

    Args:
        seeds_E: of the members.
        step: of the training, a tensor that counts on the device.
        share: of the numbers, dropped; 0 where nothing is.
    """

    def __init__(self, seeds_E: Tensor, step: Tensor, share: float) -> None:
        self.seeds_E, self.step, self.share = seeds_E, step, share

    @classmethod
    def nothing(cls, like: Tensor) -> "Drop":
        """Return what drops nothing, for tensors on the device of another."""
        unread = like.detach()
        return cls(unread, unread, 0.0)

    def at(self, place: str) -> tuple[Tensor, Tensor, int, float]:
        """Seeds, step, stream and share for a kernel."""
        return self.seeds_E, self.step, stream_number(place), self.share


@triton.jit
def words(seeds, member, step, stream, block):
    """The four random words of each block, as `joma.random` has them."""
    seed, count = tl.load(seeds + member), tl.load(step)
    low = (count & 0xFFFFFFFF).to(tl.uint32)
    high = ((count >> 32) & 0xFFFFFFFF).to(tl.uint32)
    block = block.to(tl.uint32)
    zero = block * 0
    return tl.philox(seed, block, zero + stream.to(tl.uint32), zero + low, zero + high)


@triton.jit
def at_least(word, share):
    """Whether a word stands for a number of at least `share`, between 0 and 1."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08 >= share


@triton.jit
def kept(seeds, member, step, stream, row, share, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """1 where a number of some rows is kept; each begins with a block, which has four words."""
    block = row[:, None] * ((D + 3) // 4) + tl.arange(0, BLOCK_D // 4)[None, :]
    w0, w1, w2, w3 = words(seeds, member, step, stream, block)
    return at_least(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)), share)
