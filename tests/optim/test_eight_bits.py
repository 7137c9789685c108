"""Eight-bit storage: error, mean, slow means, blocks, and AdamW with it."""

import copy

import pytest
import torch
from torch import nn

from joma.errors import JomaError
from joma.kernels.eight_bits import BLOCK, encode
from joma.optim import AdamW8bit


@pytest.fixture
def values():
    random = torch.Generator().manual_seed(0)
    return torch.randn(16, 600, generator=random) * torch.logspace(-3, 0, 600)


def test_relative_error_is_below_one_step_of_the_logarithmic_scale(values):
    found = encode(values, "signed").decode("signed")
    kept = values.abs() > values.abs().amax() * 2.0**-12
    assert ((found - values).abs() / values.abs())[kept].max() < 2 ** (13 / 126) - 1 + 1e-3


def test_rounding_has_the_right_mean(values):
    mean = torch.stack([encode(values, "signed", seed).decode("signed") for seed in range(300)])
    error = (mean.mean(0) - values) / values.abs()
    assert error.abs().mean() < 0.005


def test_second_moment_is_never_rounded_to_zero():
    values = torch.tensor([[1.0, 1e-20, 0.0, 1e-9]])
    found = encode(values, "root").decode("root")
    assert (found > 0).tolist() == [[True, True, False, True]]


def test_a_slow_mean_follows_its_target_down_and_up():
    """Rounded to the nearest code it would stay where it begins."""
    stored, low = encode(torch.full((4, BLOCK), 1e-4), "root"), 0.0
    for step in range(4000):
        target = 1e-6 if step < 2000 else 1e-5
        stored = encode(stored.decode("root") * 0.998 + 0.002 * target, "root", step)
        if step == 1999:
            low = stored.decode("root").mean().item()
    assert low == pytest.approx(1e-6 + 1e-4 * 0.998**2000, rel=0.1)
    assert stored.decode("root").mean().item() == pytest.approx(1e-5, rel=0.1)


def test_linear_error_is_half_a_step(values):
    found = encode(values, "linear").decode("linear")
    for block in range(0, 600, BLOCK):
        part, original = found[:, block : block + BLOCK], values[:, block : block + BLOCK]
        steps = original.abs().amax(1, keepdim=True) / 127
        assert ((part - original).abs() <= steps * 0.501).all()


@pytest.mark.parametrize("code", ["signed", "root", "linear"])
def test_zeros_and_empty_tensors_come_back(code):
    assert not encode(torch.zeros(3, 300), code).decode(code).any()
    assert encode(torch.zeros(0, 5), code).decode(code).shape == (0, 5)


def test_the_same_seed_gives_the_same_codes(values):
    assert torch.equal(encode(values, "signed", 5).codes, encode(values, "signed", 5).codes)
    assert not torch.equal(encode(values, "signed", 5).codes, encode(values, "signed", 6).codes)


def _fit(model, optimizer, steps):
    random, loss = torch.Generator().manual_seed(1), torch.zeros(())
    for _ in range(steps):
        inputs = torch.randn(64, 64, generator=random)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_adamw_in_eight_bits_reaches_the_loss_of_adamw():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    other = copy.deepcopy(model)
    low = AdamW8bit(model.parameters(), 1e-2, weight_decay=0.01)
    full = torch.optim.AdamW(other.parameters(), 1e-2, weight_decay=0.01)
    assert _fit(model, low, 200) == pytest.approx(_fit(other, full, 200), rel=0.1)
    state = low.state[next(model.parameters())]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.uint8


def test_sparse_gradients_are_refused():
    table = nn.Embedding(100, 64, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(JomaError, match="sparse=False"):
        AdamW8bit(table.parameters()).step()
