"""Maps of models with rotary position embeddings."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from joma.probes.tap import AttentionCall, AttentionMap, watch_attention
from tests.probes._watched import assert_entropies, sharpen


class Rotating(nn.Module):
    """One layer with rotary embeddings; `turn` returns rotated queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.turned_q, self.turned_k = nn.Identity(), nn.Identity()
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", 1 / 100 ** (torch.arange(4) / 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        angle = torch.arange(x.shape[1])[:, None] * self.inv_freq
        cos, sin = angle.cos(), angle.sin()

        def turn(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

        q, k = self.turned_q(turn(q)), self.turned_k(turn(k))
        self.attention = (
            (q @ k.mT / 8**0.5)
            .masked_fill(~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), -math.inf)
            .softmax(-1)
        )
        return self.attention @ v


def test_a_map_of_a_rotating_model_must_say_where_rotated_queries_are():
    model = nn.Sequential(Rotating())
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(3))
    sharpen(model)
    before = AttentionMap(query="{layer}.q", key="{layer}.k", heads=2)
    with (
        pytest.raises(ValueError, match=r"the model rotates them \(it has a buffer 0\.inv_freq\)"),
        watch_attention(model, lambda call: None, names=before),
    ):
        raise AssertionError
    after = AttentionMap(query="{layer}.turned_q", key="{layer}.turned_k", heads=2, rotated=True)
    calls: list[AttentionCall] = []
    with torch.no_grad(), watch_attention(model, calls.append, names=after):
        model(x)
    layer: Any = model[0]
    assert_entropies(calls[0], layer.attention)
    unrotated = AttentionMap(query="{layer}.q", key="{layer}.k", heads=2, rotated=False)
    with torch.no_grad(), watch_attention(model, calls.append, names=unrotated):
        model(x)
    assert calls[1].rows is None
