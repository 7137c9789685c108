"""Rotary position embeddings: turn a key that was rotated for one position to another one."""

import torch
from torch import Tensor


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
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), -1)
