"""One step of Adam for a parameter of E networks, each with its own learning rate."""

import torch
from torch import Tensor

from joma.kernels.arguments import AdamStep
from joma.kernels.choice import has_kernels


def adam_(
    p: Tensor, gradient: Tensor, m: Tensor, v: Tensor, step: AdamStep, rounded: Tensor | None = None
) -> None:
    """Move a parameter and its moments in place, all (E, ...) and contiguous.

    The kernel takes one pass over them: 16 bytes read and 12 written for each float32 number.

    Args:
        p: The parameter.
        gradient: Its gradient.
        m: First moment.
        v: Second moment.
        step: What all parameters have in common.
        rounded: Copy of the parameter in bfloat16, which is written too.
    """
    halves = torch.float32, torch.bfloat16
    if has_kernels(p.device) and p.dtype == torch.float32 and gradient.dtype in halves:
        from joma.kernels import _adam_kernel

        _adam_kernel.adam_(p, gradient, m, v, step, rounded)
        return
    each = (-1, *[1] * (p.ndim - 1))
    g = gradient.to(p.dtype)
    if step.scales_E is not None:
        g = g * step.scales_E.to(p.dtype).view(each)
    g = g + step.decays_E.to(p.dtype).view(each) * p
    m.lerp_(g, 1 - step.betas[0])
    v.mul_(step.betas[1]).addcmul_(g, g, value=1 - step.betas[1])
    denominator = (v.sqrt() / step.second.sqrt().to(p.dtype)).add_(step.epsilon)
    p.sub_(step.rates_E.to(p.dtype).view(each) * m / denominator)
    if rounded is not None:
        rounded.copy_(p)
