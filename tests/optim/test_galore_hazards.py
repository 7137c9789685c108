"""GaLore where it is easily used wrongly: copies, edited groups, odd gradients, odd names."""

import copy
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from joma.errors import JomaError
from joma.optim import AdamW8bit, GaLore, GaLoreAdamW
from tests.optim.test_galore import batch, difference, loss_of, make, network, train

KINDS: dict[str, Any] = {
    "adamw": make,
    "eight": lambda model, **more: make(model, bits=8, projector_bits=8, **more),
    "sgd": lambda model, **more: GaLore(
        torch.optim.SGD, model, 0.1, rank=6, momentum=0.9, verbose=False, **more
    ),
    "adafactor": lambda model, **more: GaLore(
        torch.optim.Adafactor, model, 0.02, rank=6, verbose=False, **more
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
def test_a_copy_of_model_and_optimizer_moves_as_they_do(kind, per_layer, copied):
    model = network()
    optimizer = KINDS[kind](model, gap=4, per_layer=per_layer)
    train(model, optimizer, 5)
    other, second = copied((model, optimizer))
    before = copy.deepcopy(model)
    train(other, second, 6, first=5)
    assert difference(model, before) == 0
    train(model, optimizer, 6, first=5)
    assert difference(model, other) == 0


def test_an_optimizer_of_several_processes_cannot_be_copied():
    optimizer = make(network())
    optimizer._mean_over = object()
    with pytest.raises(JomaError, match="cannot be copied or pickled; build one"):
        copy.deepcopy(optimizer)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize(
    ("setting", "value"),
    [("rank", 5), ("rank", None), ("bits", 8), ("projector_bits", 8), ("side", "left")],
)
def test_settings_that_shape_the_state_cannot_be_edited(setting, value, per_layer):
    model = network()
    optimizer = make(model, per_layer=per_layer)
    train(model, optimizer, 2)
    optimizer.param_groups[0].update(lr=1e-3, gap=3, scale=0.5, projection="svd")
    train(model, optimizer, 2)
    optimizer.param_groups[0][setting] = value
    with pytest.raises(JomaError, match=rf"^{setting} of a parameter group was .* is now {value}"):
        train(model, optimizer, 1)


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


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.AdamW, AdamW8bit])
def test_small_rates_lose_no_digits(inner):
    """Weights of size 1 in float32 cannot hold steps of 1e-12; the step itself can."""
    torch.manual_seed(0)
    start, new = torch.randn(20, 16), torch.randn(20, 16)
    changes = []
    for rate in (1.0, 1e-12):
        weight = nn.Parameter(start.clone())
        optimizer = GaLore(inner, [weight], rate, rank=8, verbose=False)
        weight.grad = new.clone()
        with mock.patch.object(optimizer, "_change", wraps=optimizer._change) as change:
            found = []
            change.side_effect = lambda *given, one=optimizer, to=found: (
                to.append(type(one)._change(one, *given)) or to[-1]
            )
            optimizer.step()
        changes.append(found[0] / rate)
    assert changes[0].abs().min() > 0
    assert torch.allclose(*changes, rtol=1e-5)


def test_shared_embeddings_are_found_whatever_their_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.vocabulary = nn.Embedding(50, 24)
            self.body, self.last = nn.Linear(24, 24), nn.Linear(24, 50, bias=False)
            self.last.weight = self.vocabulary.weight

    model = Model()
    named = list(model.named_parameters())
    assert named[0][0] == "vocabulary.weight"
    for given in (named, iter(named), [{"params": named}]):
        optimizer = GaLoreAdamW(given, rank=4, verbose=False)
        assert [one.name for one in optimizer.projected] == ["body.weight"]


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


def test_a_first_gradient_that_is_not_finite_changes_no_state():
    model = network()
    optimizer = make(model)
    loss_of(model, batch(0)).backward()
    model[4].weight.grad.fill_(float("nan"))
    with pytest.raises(JomaError, match=r"first gradient of 4\.weight is not finite"):
        optimizer.step()
    make(network()).load_state_dict(optimizer.state_dict())
    train(model, optimizer, 1)
    assert [one.refreshes for one in optimizer.projected] == [1, 1, 1]


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


@pytest.mark.parametrize("per_layer", [False, True])
def test_a_matrix_that_the_kernels_decline_chooses_its_subspace_once(per_layer):
    """They take ranks that are multiples of 16."""
    model = network(dtype=torch.bfloat16)
    optimizer = make(model, per_layer=per_layer)
    with mock.patch("joma.kernels.galore.has_kernels", return_value=True):
        train(model, optimizer, 2, dtype=torch.bfloat16)
    assert [one.refreshes for one in optimizer.projected] == [1, 1, 1]


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
