"""What GaLore records of its subspaces: energies and principal angles."""

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles

from joma.optim import GaLoreAdamW
from tests.optim.test_galore import batch, loss_of, network, train


def bases(optimizer):
    return [optimizer.state[one]["basis"].double() for one, _ in optimizer.subspaces()]


@pytest.mark.parametrize("side", ["left", "right"])
def test_energy_is_that_of_the_gradient_of_the_step(side):
    model = network()
    optimizer = GaLoreAdamW(model, rank=4, gap=100, side=side, verbose=False)
    train(model, optimizer, 3)
    assert {one.energy for one in optimizer.projected} == {None}
    optimizer.record_energy = True
    train(model, optimizer, 1, first=3)
    for (parameter, matrix), basis in zip(optimizer.subspaces(), bases(optimizer), strict=True):
        assert parameter.grad is not None
        gradient = parameter.grad.double()
        inside = basis.mT @ gradient if side == "left" else gradient @ basis
        share = float(inside.square().sum() / gradient.square().sum())
        assert matrix.energy == pytest.approx(share, rel=1e-5)
        assert matrix.captured != pytest.approx(share, rel=1e-3)  # of another gradient
    optimizer.record_energy = False
    train(model, optimizer, 1, first=4)
    assert {one.energy for one in optimizer.projected} == {None}


def test_energies_of_several_passes_are_added():
    model = network()
    optimizer = GaLoreAdamW(model, rank=4, gap=100, per_layer=True, verbose=False)
    train(model, optimizer, 2)
    basis = bases(optimizer)
    inside, everything = torch.zeros(len(basis)), torch.zeros(len(basis))
    parameters = [one for one, _ in optimizer.subspaces()]
    for number in (2, 3):
        gradients = torch.autograd.grad(loss_of(model, batch(number)), parameters)
        for at, (gradient, one) in enumerate(zip(gradients, basis, strict=True)):
            left = one.shape[0] == gradient.shape[0] < gradient.shape[1]
            part = one.float().mT @ gradient if left else gradient @ one.float()
            inside[at] += part.square().sum()
            everything[at] += gradient.square().sum()
    optimizer.record_energy = True
    for number in (2, 3):
        with optimizer.accumulate(last=number == 3):
            loss_of(model, batch(number)).backward()
    optimizer.step()
    found = [one.energy for one in optimizer.projected]
    assert found == pytest.approx((inside / everything).tolist(), rel=1e-5)


def test_angles_are_those_between_the_last_two_subspaces():
    model = network()
    optimizer = GaLoreAdamW(model, rank=4, gap=3, stagger=False, verbose=False)
    optimizer.record_angles = True
    train(model, optimizer, 3)
    assert {one.angles for one in optimizer.projected} == {None}
    before = bases(optimizer)
    train(model, optimizer, 1, first=3)
    for matrix, old, new in zip(optimizer.projected, before, bases(optimizer), strict=True):
        assert matrix.refreshes == 2
        expected = np.rad2deg(subspace_angles(old.numpy(), new.numpy()))
        assert matrix.angles == pytest.approx((expected.max(), expected.mean()), abs=0.05)
        assert expected.max() > 1
    fresh = GaLoreAdamW(model, rank=4, gap=3, stagger=False, verbose=False)
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.projected == optimizer.projected
