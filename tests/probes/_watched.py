"""What the tests of watching share."""

import torch
from torch import Tensor, nn

from joma.probes.tap import AttentionCall


def entropy_of(attention: Tensor) -> Tensor:
    attention = attention.double()
    return -torch.special.xlogy(attention, attention).sum(-1)


def sharpen(model: nn.Module, seed: int = 0) -> nn.Module:
    """Larger random weights, so that attention is neither even nor the same in all heads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def assert_entropies(call: AttentionCall, attention: Tensor, real: Tensor | None = None) -> None:
    """Entropies are those of the attention, (B, H, T, S), at real queries, and no others count."""
    found = call.statistics()
    sees = ~found.logsumexp.isneginf()
    if real is None:
        real = torch.ones(sees.shape[0], sees.shape[2], dtype=torch.bool)
    assert torch.equal(sees, real.unsqueeze(1).expand_as(sees)), call.name
    torch.testing.assert_close(
        found.entropy[sees].double(), entropy_of(attention)[sees], atol=1e-5, rtol=0
    )
