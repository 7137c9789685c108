"""Stacked Adam against torch's own, member by member."""

import pytest
import torch
from torch import nn

from joma.optim import StackedAdam

RATES, DECAYS = (1e-3, 1e-2, 0.3), (0.0, 1e-4, 0.5)


def parameters(device: str = "cpu", dtype=torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (3, 4, 5), "vector": (3, 37), "unused": (3, 2)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype).to(device))
        for name, shape in shapes.items()
    }


def gradients(like: torch.Tensor, step: int) -> torch.Tensor:
    """Of very different sizes, zero among them."""
    generator = torch.Generator().manual_seed(step)
    grad = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    return (grad * 10.0 ** torch.randint(-6, 4, (), generator=generator) * (grad > -1)).to(like)


def trained(ours: dict[str, nn.Parameter], steps: int = 30, rounded=()) -> StackedAdam:
    optimizer = StackedAdam(ours.items(), RATES, DECAYS, betas=(0.8, 0.95), epsilon=1e-6)
    optimizer.to_bfloat16_with_master_weights(rounded)
    for step in range(steps):
        optimizer.zero_grad()
        for name in ("matrix", "vector"):
            ours[name].grad = gradients(ours[name], step)
        optimizer.step()
    return optimizer


def test_each_member_moves_as_under_torchs_adam():
    ours = parameters()
    trained(ours)
    for member, (rate, decay) in enumerate(zip(RATES, DECAYS, strict=True)):
        theirs = {
            name: nn.Parameter(p[member].detach().clone()) for name, p in parameters().items()
        }
        adam = torch.optim.Adam(theirs.values(), rate, (0.8, 0.95), 1e-6, weight_decay=decay)
        for step in range(30):
            for name in ("matrix", "vector"):
                theirs[name].grad = gradients(ours[name], step)[member]
            adam.step()
        for name, parameter in theirs.items():
            torch.testing.assert_close(ours[name][member], parameter, rtol=1e-12, atol=1e-13)


def test_long_gradients_are_clipped_member_by_member_and_moments_forgotten():
    ours = parameters()
    optimizer = StackedAdam(ours.items(), RATES, DECAYS, clip=0.5)
    for step in range(30):
        if step == 12:
            optimizer.restart()
        for name in ("matrix", "vector"):
            ours[name].grad = gradients(ours[name], step)
        optimizer.step()
    for member, (rate, decay) in enumerate(zip(RATES, DECAYS, strict=True)):
        theirs = {
            name: nn.Parameter(p[member].detach().clone()) for name, p in parameters().items()
        }
        adam = torch.optim.Adam(theirs.values(), rate, weight_decay=decay)
        for step in range(30):
            if step == 12:
                adam = torch.optim.Adam(theirs.values(), rate, weight_decay=decay)
            for name in ("matrix", "vector"):
                theirs[name].grad = gradients(ours[name], step)[member]
            nn.utils.clip_grad_norm_(theirs.values(), 0.5)
            adam.step()
        for name, parameter in theirs.items():
            torch.testing.assert_close(ours[name][member], parameter, rtol=1e-11, atol=1e-12)


def test_what_has_no_gradient_stays():
    ours = parameters()
    trained(ours)
    assert torch.equal(ours["unused"], parameters()["unused"])


def test_what_is_rounded_moves_in_float32():
    """Under the same, rounded, gradients the master weights move as if nothing were rounded."""
    whole, rounded = parameters(dtype=torch.float32), parameters(dtype=torch.float32)
    optimizers = []
    for ours, names in ((whole, ()), (rounded, ("matrix",))):
        optimizer = StackedAdam(ours.items(), RATES, DECAYS)
        optimizer.to_bfloat16_with_master_weights(names)
        for step in range(30):
            for name in ("matrix", "vector"):
                gradient = gradients(whole[name], step).bfloat16()
                ours[name].grad = gradient.to(ours[name].dtype)
            optimizer.step()
        optimizers.append(optimizer)
    assert rounded["matrix"].dtype == torch.bfloat16
    masters = optimizers[1].master_weights()
    for name, parameter in whole.items():
        assert torch.equal(masters[name], parameter)
    assert torch.equal(rounded["matrix"].data, whole["matrix"].data.bfloat16())
    with optimizers[1].using_master_weights():
        assert torch.equal(rounded["matrix"], whole["matrix"])
    assert rounded["matrix"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("rates", "decays", "options", "sentence"),
    [
        ((1e-3, 1e-3), 0.0, {}, "learning_rates must be one number or 3"),
        (float("nan"), 0.0, {}, "learning_rates must be finite"),
        (1e-3, -1.0, {}, "weight_decays must be finite and not negative"),
        (1e-3, 0.0, {"betas": (0.9, 1.0)}, r"the second of betas must lie in \[0, 1\), got 1.0"),
        (1e-3, 0.0, {"epsilon": 0.0}, "epsilon must be positive"),
    ],
)
def test_bad_settings(rates, decays, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        StackedAdam(parameters().items(), rates, decays, **options)


def test_parameters_must_be_stacked():
    with pytest.raises(ValueError, match="at least one"):
        StackedAdam([], 1e-3)
    odd = {**parameters(), "odd": nn.Parameter(torch.zeros(2, 3))}
    with pytest.raises(ValueError, match="must all be contiguous and have 3 members"):
        StackedAdam(odd.items(), 1e-3)
