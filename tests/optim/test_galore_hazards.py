"""GaLore where it is easily used wrongly: copies, loaded settings, odd gradients."""

import copy
import pickle

import pytest
import torch
from torch import nn

from joma.errors import JomaError
from joma.optim import GaLoreAdamW
from tests.optim.test_galore import difference, make, network, train


def test_a_copy_is_refused():
    optimizer = make(network())
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(JomaError, match="cannot be copied or pickled; build one"):
            copied(optimizer)


def test_a_loaded_state_brings_its_settings():
    def build(bits):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 200), nn.Tanh(), nn.Linear(200, 24))
        return model, make(model, bits=bits, projector_bits=bits, gap=3)

    model, optimizer = build(8)
    train(model, optimizer, 4)
    other, fresh = build(None)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 4, first=4)
    train(other, fresh, 4, first=4)
    assert difference(model, other) == 0


def test_a_group_that_is_refused_is_not_added():
    model = network()
    optimizer = make(model)
    with pytest.raises(JomaError, match="gap must be a whole number"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(9, 9))], "gap": 0})
    train(model, optimizer, 2)
    assert len(optimizer.projected) == 3


def test_a_sparse_gradient_stops_the_step_before_anything_moves():
    torch.manual_seed(0)
    words, layer = nn.Embedding(10, 24, sparse=True), nn.Linear(24, 24)
    optimizer = GaLoreAdamW([*layer.parameters(), words.weight], rank=4, verbose=False)
    before = layer.weight.detach().clone()
    layer(words(torch.arange(4))).square().mean().backward()
    with pytest.raises(JomaError, match="dense gradients"):
        optimizer.step()
    assert torch.equal(layer.weight, before)
    assert not any(optimizer.state.values())


def test_a_gradient_too_large_for_products_leaves_the_subspace():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(24, 16))
    optimizer = GaLoreAdamW([weight], rank=4, gap=1, verbose=False)
    refreshes = []
    for size in (1.0, 1e37, 1.0):
        weight.grad = size * torch.randn(24, 16)
        optimizer.step()
        refreshes.append(optimizer.projected[0].refreshes)
    assert refreshes == [1, 1, 2]


def test_a_gradient_of_zero_is_no_reference_for_captured_energy():
    """The gradient after the first is zero, and turns away from the subspace at step 30."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(32, 24))
    optimizer = GaLoreAdamW([weight], rank=3, gap=20, refresh="energy", verbose=False)
    early, late = torch.linalg.qr(torch.randn(24, 6))[0].mT.split(3)
    for step in range(40):
        rows = early if step < 30 else late
        weight.grad = (step != 1) * torch.randn(32, 3) @ rows
        optimizer.step()
    assert optimizer.projected[0].refreshes == 2


def test_directions_without_gradient_are_counted():
    weight = nn.Parameter(torch.zeros(32, 24, dtype=torch.bfloat16))
    optimizer = GaLoreAdamW([weight], rank=16, gap=2, stagger=False, verbose=False)
    counts = []
    for rank in (5, 5, 24):
        gradient = torch.zeros(32, 24)
        gradient[:rank, :rank] = torch.randn(rank, rank)
        weight.grad = gradient.bfloat16()
        optimizer.step()
        counts.append(int(optimizer.state[weight]["null_directions"]))
    assert counts == [11, 11, 0]
