"""Stacked optimizers against torch's own, member by member."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from joma.errors import JomaError
from joma.optim import StackedAdam, StackedSGD

RATES, DECAYS, STEPS = (1e-3, 1e-2, 0.3), (0.0, 1e-4, 0.5), 30


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (3, 4, 5), "vector": (3, 37), "unused": (3, 2)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
        for name, shape in shapes.items()
    }


def gradients(like: torch.Tensor, step: int) -> torch.Tensor:
    """Of very different sizes, zero among them."""
    generator = torch.Generator().manual_seed(step)
    grad = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    return (grad * 10.0 ** torch.randint(-6, 4, (), generator=generator) * (grad > -1)).to(like)


def _adam(ours: dict[str, nn.Parameter], clip: float | None) -> StackedAdam:
    return StackedAdam(ours.items(), RATES, DECAYS, betas=(0.8, 0.95), epsilon=1e-6, clip=clip)


def _torch_adam(given: Any, rate: float, decay: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(given, rate, (0.8, 0.95), 1e-6, weight_decay=decay)


@pytest.mark.parametrize("restart", [None, 12])
@pytest.mark.parametrize(
    ("make", "by_torch", "clip"),
    [
        (lambda ours: _adam(ours, None), _torch_adam, None),
        (lambda ours: _adam(ours, 0.5), _torch_adam, 0.5),
        (
            lambda ours: StackedSGD(ours.items(), RATES),
            lambda given, rate, decay: torch.optim.SGD(given, rate),
            None,
        ),
    ],
    ids=["Adam", "Adam, clipped", "SGD"],
)
def test_each_member_moves_as_under_torchs(
    make: Callable[..., Any], by_torch: Callable[..., Any], clip: float | None, restart: int | None
):
    ours = parameters()
    optimizer = make(ours)
    for step in range(STEPS):
        if step == restart:
            optimizer.restart()
        optimizer.zero_grad()
        for name in ("matrix", "vector"):
            ours[name].grad = gradients(ours[name], step)
        optimizer.step()
    for member, (rate, decay) in enumerate(zip(RATES, DECAYS, strict=True)):
        theirs = {n: nn.Parameter(p[member].detach().clone()) for n, p in parameters().items()}
        plain = by_torch(theirs.values(), rate, decay)
        for step in range(STEPS):
            if step == restart:
                plain = by_torch(theirs.values(), rate, decay)
            for name in ("matrix", "vector"):
                theirs[name].grad = gradients(ours[name], step)[member]
            if clip is not None:
                nn.utils.clip_grad_norm_(theirs.values(), clip)
            plain.step()
        for name, parameter in theirs.items():
            torch.testing.assert_close(ours[name][member], parameter, rtol=1e-11, atol=1e-12)
    assert torch.equal(ours["unused"], parameters()["unused"])


def test_what_is_rounded_moves_in_float32():
    """Under the same, rounded, gradients the master weights move as if nothing were rounded."""
    whole, rounded = parameters(torch.float32), parameters(torch.float32)
    for ours, names in ((whole, ()), (rounded, ("matrix",))):
        optimizer = StackedAdam(ours.items(), RATES, DECAYS)
        optimizer.to_bfloat16_with_master_weights(names)
        for step in range(STEPS):
            for name in ("matrix", "vector"):
                gradient = gradients(whole[name], step).bfloat16()
                ours[name].grad = gradient.to(ours[name].dtype)
            optimizer.step()
    masters = optimizer.master_weights()
    assert all(torch.equal(masters[name], parameter) for name, parameter in whole.items())
    assert torch.equal(rounded["matrix"].data, whole["matrix"].data.bfloat16())
    with optimizer.using_master_weights():
        assert torch.equal(rounded["matrix"], whole["matrix"])
    assert rounded["matrix"].dtype == torch.bfloat16


ODD = {**parameters(), "odd": nn.Parameter(torch.zeros(2, 3))}


@pytest.mark.parametrize(
    ("sentence", "make"),
    [
        ("at least one", lambda: StackedAdam([], 1e-3)),
        ("must all be contiguous and have 3 members", lambda: StackedAdam(ODD.items(), 1e-3)),
        ("learning_rates must be one number or 3", lambda: _given(learning_rates=(1e-3, 1e-3))),
        ("learning_rates must be finite", lambda: _given(learning_rates=float("nan"))),
        ("weight_decays must be finite and not negative", lambda: _given(weight_decays=-1.0)),
        (r"the second of betas must lie in \[0, 1\), got 1.0", lambda: _given(betas=(0.9, 1.0))),
        ("epsilon must be positive", lambda: _given(epsilon=0.0)),
        ("at least one", lambda: StackedSGD([], 0.1)),
        ("one number or 3", lambda: StackedSGD(parameters().items(), [0.1, 0.2])),
        (
            "bfloat16",
            lambda: StackedSGD(parameters().items(), 0.1).to_bfloat16_with_master_weights(["odd"]),
        ),
    ],
)
def test_bad_settings(sentence: str, make: Callable[[], Any]):
    with pytest.raises(JomaError, match=sentence):
        make()


def _given(**options: Any) -> StackedAdam:
    return StackedAdam(parameters().items(), **{"learning_rates": 1e-3, **options})
