"""GaLore's kernels against the same steps in torch operations, on a GPU."""

import copy
import importlib
from unittest import mock

import pytest
import torch
from torch import nn

from joma.optim import GaLoreAdamW

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def network():
    """Matrices with even and odd sides, of both kinds of shape.

    Batches have more samples than the rank, and all layers more outputs: in directions without any
    gradient Adam's first step has the sign of a rounding error.
    """
    torch.manual_seed(0)
    shapes = (512, 512), (512, 1365), (1365, 512), (512, 300)
    layers = [nn.Linear(*shape, bias=False) for shape in shapes]
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


def run(model, optimizer, steps):
    losses = []
    for step in range(steps):
        random = torch.Generator("cuda").manual_seed(step)
        inputs = torch.randn(2048, 512, generator=random, device="cuda", dtype=torch.bfloat16)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :300]).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("rank", [64, 256])
@pytest.mark.parametrize("per_layer", [False, True])
def test_kernels_move_as_torch_operations(monkeypatch, bits, rank, per_layer):
    model, settings = network(), {"rank": rank, "gap": 10, "scale": 0.25, "verbose": False}
    settings |= {"bits": bits, "weight_decay": 0.01}
    other = copy.deepcopy(model)
    optimizer = GaLoreAdamW(model, 1e-2, per_layer=per_layer, **settings)
    kernels = importlib.import_module("joma.kernels._galore_step")
    with mock.patch.object(kernels, "step", wraps=kernels.step) as used:
        fast = run(model, optimizer, 30)
    assert used.called
    monkeypatch.setattr("joma.kernels.galore.has_kernels", lambda device: False)
    slow = run(other, GaLoreAdamW(other, 1e-2, **settings), 30)
    assert fast[-1] < 0.9 * fast[0]
    assert fast == pytest.approx(slow, rel=0.05)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert (one - two).float().norm() < 0.05 * two.float().norm()


def test_a_step_of_the_kernels_is_right_to_rounding():
    model = network()
    optimizer = GaLoreAdamW(model, 1.0, rank=256, scale=0.25, verbose=False)
    before = [one.detach().float().clone() for one in model.parameters()]
    inputs = torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16)
    model(inputs).float().square().mean().backward()
    optimizer.step()
    for one, start in zip(model.parameters(), before, strict=True):
        if one not in optimizer.state or "basis" not in optimizer.state[one]:
            continue
        basis = optimizer.state[one]["basis"].float()
        assert one.grad is not None
        gradient = one.grad.float()
        left = basis.shape[0] == one.shape[0] and one.shape[0] < one.shape[1]
        inside = basis.mT @ gradient if left else gradient @ basis
        update = -inside / (inside.abs() + 1e-8)  # Adam's first step, with its ε
        whole = basis @ update if left else update @ basis.mT
        error = (one.float() - start - 0.25 * whole).norm() / (0.25 * whole).norm()
        assert error < 0.004
