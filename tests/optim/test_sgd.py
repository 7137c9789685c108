"""Stacked gradient descent against torch's own, member by member."""

import pytest
import torch
from torch import nn

from joma.errors import JomaError
from joma.optim import StackedSGD

RATES = (1e-3, 1e-2, 0.3)


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (3, 4, 5), "vector": (3, 37), "unused": (3, 2)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for name, shape in shapes.items()
    }


def test_each_member_moves_as_under_torchs_sgd():
    ours = parameters()
    optimizer = StackedSGD(ours.items(), RATES)
    theirs = [
        {name: nn.Parameter(p[member].detach().clone()) for name, p in ours.items()}
        for member in range(3)
    ]
    plain = [torch.optim.SGD(own.values(), rate) for own, rate in zip(theirs, RATES, strict=True)]
    for step in range(20):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        for name in ("matrix", "vector"):
            shape = ours[name].shape
            gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
            ours[name].grad = gradient
            for member, own in enumerate(theirs):
                own[name].grad = gradient[member].clone()
        optimizer.step()
        for one in plain:
            one.step()
    for member, own in enumerate(theirs):
        for name, parameter in own.items():
            torch.testing.assert_close(ours[name][member], parameter, rtol=1e-12, atol=1e-13)
    assert int(optimizer.steps) == 20
    assert optimizer.settings() == {"optimizer": "sgd", "learning_rates": list(RATES)}


def test_what_does_not_fit_is_refused():
    with pytest.raises(JomaError, match="at least one"):
        StackedSGD([], 0.1)
    with pytest.raises(JomaError, match="members"):
        StackedSGD([("a", nn.Parameter(torch.zeros(3))), ("b", nn.Parameter(torch.zeros(2)))], 0.1)
    with pytest.raises(JomaError, match="one number or 3"):
        StackedSGD(parameters().items(), [0.1, 0.2])
    with pytest.raises(JomaError, match="bfloat16"):
        StackedSGD(parameters().items(), 0.1).to_bfloat16_with_master_weights(["matrix"])
