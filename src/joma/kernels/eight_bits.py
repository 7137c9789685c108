"""Numbers in eight bits: blocks along the last axis, each with a scale of its own.

Moments are stored on a logarithmic scale, because what matters of them is their relative error: a
code is a sign and a magnitude for the first moment, a magnitude alone for the root of the second.
They are rounded up or down at random, so that the mean is right. Rounded to the nearest code, a
second moment that changes by a thousandth a step would never change: neighbouring codes are several
per cent apart. The random numbers are a hash of position and step, and a training that resumes
draws the same ones.

A basis is stored on a linear scale: its entries have one size.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BLOCK = 256
Code = Literal["signed", "root", "linear"]

_OCTAVES = {"signed": 13.0, "root": 15.0}
"""Range of the magnitudes of a block, as a power of two."""
_LEVELS = {"signed": 127, "root": 255}


@dataclass(frozen=True)
class EightBits:
    """A tensor in eight bits.

    Attributes:
        codes: uint8, of the shape of the tensor.
        scales: float32, (..., number of blocks): the largest magnitude of each block.
    """

    codes: Tensor
    scales: Tensor

    def decode(self, code: Code) -> Tensor:
        """Return the numbers in float32."""
        codes = self.codes.float()
        if code == "linear":
            values = (codes - 128) / 127
        else:
            if code == "signed":
                sign = torch.where(codes >= 128, -1.0, 1.0)
                codes = codes - 128 * (sign < 0)
            else:
                sign = torch.ones((), device=codes.device)
            levels = _LEVELS[code]
            exponents = (codes - levels) * (_OCTAVES[code] / (levels - 1))
            values = torch.where(codes > 0, sign * torch.exp2(exponents), 0.0)
        values = values * _spread(self.scales, codes.shape[-1])
        return values.square() if code == "root" else values


def encode(values: Tensor, code: Code, seed: int = 0) -> EightBits:
    """Return numbers in eight bits.

    Args:
        values: The numbers, not negative for "root", which stores their roots.
        code: "signed" and "root" are logarithmic, "linear" has equal steps.
        seed: Chooses the random numbers of the rounding; "linear" rounds to the nearest.
    """
    values = values.float()
    if code == "root":
        values = values.sqrt()
    scales = _largest(values)
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
    shares = values / _spread(divisors, values.shape[-1])
    if code == "linear":
        return EightBits((shares * 127).round().add(128).to(torch.uint8), scales)
    levels, per_octave = _LEVELS[code], (_LEVELS[code] - 1) / _OCTAVES[code]
    sizes = shares.abs()
    positions = torch.log2(sizes.clamp(min=2.0**-126)) * per_octave
    below = positions.floor().clamp(min=1 - levels)
    lower = torch.exp2(below / per_octave)
    up = (sizes / lower - 1) / (2 ** (1 / per_octave) - 1)
    random = _uniform(values.shape, seed, values.device)
    codes = (below + levels + (random < up)).clamp(max=levels)
    # Below the smallest magnitude: zero or that, at random; a second moment is never rounded to 0,
    # because the update is divided by it.
    smallest = sizes < 2.0 ** -_OCTAVES[code]
    kept = sizes > 0 if code == "root" else random < sizes * 2.0 ** _OCTAVES[code]
    codes = torch.where(smallest, kept.float(), codes)
    if code == "signed":
        codes = codes + 128 * ((shares < 0) & (codes > 0))
    return EightBits(codes.to(torch.uint8), scales)


def scale_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor."""
    return (*shape[:-1], math.ceil(shape[-1] / BLOCK))


def _largest(values: Tensor) -> Tensor:
    columns = values.shape[-1]
    blocks = math.ceil(columns / BLOCK)
    padded = torch.nn.functional.pad(values.abs(), (0, blocks * BLOCK - columns))
    return padded.unflatten(-1, (blocks, BLOCK)).amax(-1)


def _spread(scales: Tensor, columns: int) -> Tensor:
    return scales.repeat_interleave(BLOCK, dim=-1)[..., :columns]


def _uniform(shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """Return numbers in [0, 1) that are a hash of their position and a seed."""
    mixed = torch.arange(math.prod(shape), device=device, dtype=torch.int64)
    mixed = (mixed * 0x9E3779B1 + (seed % 2**32) * 0x85EBCA77) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    mixed = mixed ^ (mixed >> 16)
    return ((mixed >> 8).float() / 2**24).reshape(shape)
