"""Models whose attention is far from uniform."""

import torch
from torch import nn


def sharpen(model: nn.Module, seed: int = 0) -> nn.Module:
    """Larger random weights, so that attention is neither even nor the same in all heads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()
