"""GaLore: against galore-torch, AdamW and SGD; accumulation, clipping, state, errors."""

import copy
import gc
import importlib
import importlib.util
import itertools
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from joma.errors import JomaError
from joma.optim import AdamW8bit, GaLore, GaLoreAdamW


@pytest.fixture(scope="module")
def peer():
    """AdamW of galore-torch; its package imports bitsandbytes, which this class does not use."""
    found = importlib.util.find_spec("galore_torch")
    if found is None or found.origin is None:
        pytest.skip("galore-torch is not installed")
    package = types.ModuleType("galore_torch")
    package.__path__ = [str(Path(found.origin).parent)]
    before = sys.modules.get("galore_torch")
    sys.modules["galore_torch"] = package
    yield importlib.import_module("galore_torch.adamw").AdamW
    del sys.modules["galore_torch"]
    if before is not None:
        sys.modules["galore_torch"] = before


def network(seed=0, dtype=torch.float32) -> Any:
    torch.manual_seed(seed)
    layers = nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 20), nn.Tanh(), nn.Linear(20, 24)
    return nn.Sequential(*layers).to(dtype)


def batch(step, size=16, dtype=torch.float32):
    random = torch.Generator().manual_seed(step)
    return torch.randn(size, 24, generator=random).to(dtype)


def loss_of(model, inputs):
    return (model(inputs) - inputs.roll(1, 1)).square().mean()


def train(model, optimizer, steps, first=0, dtype=torch.float32):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, batch(step, dtype=dtype)).backward()
        optimizer.step()
    return model


def difference(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def make(model, **settings) -> Any:
    return GaLoreAdamW(model, 1e-2, **({"rank": 6, "verbose": False} | settings))


@pytest.mark.parametrize(
    ("shape", "theirs", "ours"),
    [
        ((24, 16), "std", "short"),
        ((16, 24), "std", "short"),
        ((24, 16), "left", "left"),
        ((16, 24), "right", "right"),
    ],
)
def test_moves_as_galore_torch(peer, shape, theirs, ours):
    torch.manual_seed(0)
    model = nn.Linear(shape[1], shape[0])
    other = copy.deepcopy(model)
    projected = {"rank": 4, "update_proj_gap": 10, "scale": 0.25, "proj_type": theirs}
    reference = peer(
        [
            {"params": [other.weight], "weight_decay": 0.1, **projected},
            {"params": [other.bias], "weight_decay": 0.0},
        ],
        lr=1e-2,
        eps=1e-12,  # which the two add at different places
        no_deprecation_warning=True,
    )
    optimizer = GaLoreAdamW(
        [
            {"params": [model.weight], "weight_decay": 0.1, "rank": 4},
            {"params": [model.bias]},
        ],
        1e-2,
        gap=10,
        scale=0.25,
        projection="svd",
        side=ours,
        eps=1e-12,
        stagger=False,
        verbose=False,
    )
    inputs, targets = torch.randn(64, shape[1]), torch.randn(64, shape[0])
    for step in range(50):
        for one, own in ((other, reference), (model, optimizer)):
            own.zero_grad()
            (one(inputs) - targets).square().mean().backward()
            own.step()
        if step % 10 == 0:
            theirs_now = reference.state[other.weight]["projector"].ortho_matrix
            theirs_now = theirs_now if theirs_now.shape[1] == 4 else theirs_now.mT
            basis = optimizer.state[model.weight]["basis"]
            assert torch.allclose(basis @ basis.mT, theirs_now @ theirs_now.mT, atol=1e-4)
    assert difference(model, other) < 1e-5


def test_parameters_that_are_not_projected_move_as_under_adamw():
    model = network()
    other: Any = copy.deepcopy(model)
    groups = [{"match": "^[02]", "rank": None}]
    settings = {"weight_decay": 0.1, "betas": (0.8, 0.95)}
    train(model, make(model, groups=groups, scale=0.0, **settings), 60)
    reference = torch.optim.AdamW(other.parameters(), 1e-2, **settings)
    last = other[4].weight
    for step in range(60):
        reference.zero_grad()
        loss_of(other, batch(step)).backward()
        last.grad = None  # with scale 0 a projected matrix only decays
        reference.step()
        with torch.no_grad():
            last.mul_(1 - 1e-2 * 0.1)
    assert difference(model, other) < 1e-6


def test_sgd_with_momentum_under_a_full_rotation_is_sgd():
    model, other = network(), network()
    optimizer = GaLore(torch.optim.SGD, model, 0.1, rank=19, momentum=0.9, verbose=False)
    for matrix in optimizer.projected:
        parameter = model.get_parameter(matrix.name)
        size = parameter.shape[matrix.side == "right"]
        basis = torch.linalg.qr(torch.randn(size, size))[0]
        optimizer.state[parameter] = {
            "basis": basis,
            "captured": torch.tensor(1.0),
            "reference": torch.tensor(1.0),
            "refreshes": torch.tensor(1),
            "age": torch.tensor(1),
            "step": torch.tensor(201),
        }
        optimizer.param_groups[0]["gap"] = 10**6
    train(model, optimizer, 40)
    train(other, torch.optim.SGD(other.parameters(), 0.1, momentum=0.9), 40)
    assert difference(model, other) < 1e-6


@pytest.mark.parametrize(
    ("inner", "settings"),
    [
        (torch.optim.Adafactor, {"lr": 0.02}),
        (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9}),
        (AdamW8bit, {"lr": 0.01}),
    ],
)
@pytest.mark.parametrize("moments", ["keep", "rotate", "align", "reset"])
def test_inner_optimizers_learn(inner, settings, moments):
    model = network()
    before = loss_of(model, batch(999, 256)).item()
    optimizer = GaLore(inner, model, rank=8, gap=20, moments=moments, verbose=False, **settings)
    train(model, optimizer, 150)
    assert loss_of(model, batch(999, 256)).item() < 0.8 * before


@pytest.mark.parametrize(
    "settings", [{}, {"clip_norm": 0.05}, {"clip_norm": 0.05, "clip": "matrix"}]
)
def test_per_layer_moves_as_without(settings):
    model, other = network(), network()
    train(model, make(model, per_layer=True, gap=7, **settings), 30)
    train(other, make(other, gap=7, **settings), 30)
    assert difference(model, other) < 1e-6
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("clip", [None, "global", "matrix"])
def test_accumulation_of_four_is_one_large_batch(per_layer, clip):
    model, other = network(), network()
    clipped = {} if clip is None else {"clip_norm": 0.05, "clip": clip}
    one = make(model, per_layer=per_layer, **clipped)
    two = make(other, **clipped)
    train(model, one, 1)  # chooses the same basis from the same gradient
    train(other, two, 1)
    for step in range(1, 20):
        inputs = batch(step, 64)
        one.zero_grad()
        for number, part in enumerate(inputs.split(16)):
            with one.accumulate(last=number == 3):
                (loss_of(model, part) / 4).backward()
        one.step()
        two.zero_grad()
        loss_of(other, inputs).backward()
        two.step()
    assert difference(model, other) < 1e-6
    assert {int(state["step"]) for state in one.state.values()} == {20}


def test_a_second_backward_pass_before_step_is_refused():
    model = network()
    optimizer = make(model, per_layer=True)
    loss_of(model, batch(0)).backward()
    with pytest.raises(JomaError, match="accumulate"):
        loss_of(model, batch(1)).backward()
    optimizer.step()


@pytest.mark.parametrize("clip", ["global", "matrix"])
def test_clipping_against_its_definition(clip):
    model = nn.Sequential(nn.Linear(24, 32, bias=False), nn.Linear(32, 24, bias=False))
    optimizer = GaLore(
        torch.optim.SGD, model, 1.0, rank=5, clip_norm=0.01, clip=clip, verbose=False
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss_of(model, batch(0)).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    optimizer.step()
    parts = []
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        basis = optimizer.state[parameter]["basis"]
        tall = parameter.shape[0] >= parameter.shape[1]
        projector = basis @ basis.mT
        parts.append(gradient @ projector if tall else projector @ gradient)
    norms = [part.norm() for part in parts]
    if clip == "global":
        norms = [torch.stack(norms).norm()] * 2
    for parameter, start, part, norm in zip(model.parameters(), before, parts, norms, strict=True):
        assert norm > 0.01
        assert torch.allclose(parameter, start - part * 0.01 / norm, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{"bits": 8, "projector_bits": 8}, {"state_dtype": torch.float32}, {}],
    ids=["uint8", "float32", "bfloat16"],
)
@pytest.mark.parametrize("way", ["save", "dcp"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_resume_is_identical_to_the_bit(settings, way, tmp_path):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 200), nn.Tanh(), nn.Linear(200, 24))
        model = model.to(torch.bfloat16)
        return model, make(model, rank=8, gap=5, **settings)

    whole, optimizer = build()
    train(whole, optimizer, 20, dtype=torch.bfloat16)
    first, optimizer = build()
    train(first, optimizer, 9, dtype=torch.bfloat16)
    second, fresh = build()
    if way == "save":
        torch.save([first.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")
        weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
        second.load_state_dict(weights)
        fresh.load_state_dict(state)
    else:
        saved = {
            "model": first.state_dict(),
            "optimizer": get_optimizer_state_dict(first, optimizer),
        }
        save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
        target = {
            "model": second.state_dict(),
            "optimizer": get_optimizer_state_dict(second, fresh),
        }
        load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
        second.load_state_dict(target["model"])
        set_optimizer_state_dict(second, fresh, target["optimizer"])
    train(second, fresh, 11, first=9, dtype=torch.bfloat16)
    assert difference(whole, second) == 0
    kinds = {state["exp_avg"].dtype for state in fresh.state.values() if "basis" in state}
    assert kinds == {settings.get("state_dtype") or (torch.uint8 if settings else torch.bfloat16)}


def test_refreshes_are_staggered_and_counted():
    sides = [6 + number % 3 for number in range(20)]
    model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sides)))
    optimizer = GaLoreAdamW(model, 1e-3, rank=2, gap=6, verbose=False)
    counts = []
    for step in range(13):
        random = torch.Generator().manual_seed(step)
        model(torch.randn(5, sides[0], generator=random)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(sum(matrix.refreshes for matrix in optimizer.projected))
    new = [after - before for before, after in itertools.pairwise(counts)]
    assert counts[0] == 19
    assert max(new) == 8  # not all matrices in one step
    assert sum(new) == 2 * 19


def test_refreshes_when_captured_energy_falls():
    """The gradient keeps its directions, then turns away from them at step 30."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(32, 24))
    optimizer = GaLoreAdamW([weight], 1e-3, rank=3, gap=20, refresh="energy", verbose=False)
    early, late = torch.linalg.qr(torch.randn(24, 6))[0].mT.split(3)
    counts = []
    for step in range(260):
        rows = early if step < 30 else late
        weight.grad = torch.randn(32, 3) @ rows + 0.01 * torch.randn(32, 24)
        optimizer.step()
        counts.append(optimizer.projected[0].refreshes)
    assert counts[29] == 1
    assert counts[32] == 2
    assert counts[225] == 2
    assert counts[259] == 3  # ten gaps later
    assert (optimizer.projected[0].captured or 0) > 0.9


@pytest.mark.parametrize("shape", [(32, 24), (24, 32)])
@pytest.mark.parametrize("projection", ["power", "svd"])
def test_rounding_does_not_move_weights_where_there_is_no_gradient(shape, projection):
    """A gradient of rank 3 in a subspace of rank 8."""
    random = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = GaLoreAdamW(
        [weight], 0.1, rank=8, gap=5, projection=projection, eps=1e-30, verbose=False
    )
    left = torch.randn(shape[0], 3, generator=random)
    right = torch.randn(3, shape[1], generator=random)
    for _ in range(12):
        weight.grad = left @ torch.randn(3, 3, generator=random) @ right
        optimizer.step()
    values = torch.linalg.svdvals(weight.detach())
    assert values[3] < 1e-5 * values[0]


@pytest.mark.parametrize("rank", [4, 0.9])
def test_a_subspace_is_chosen_at_the_first_gradient_that_is_not_zero(rank):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(24, 16))
    optimizer = GaLoreAdamW([weight], 0.1, rank=rank, gap=1000, verbose=False)
    for _ in range(3):
        weight.grad = torch.zeros(24, 16)
        optimizer.step()
    weight.grad = torch.randn(24, 4) @ torch.randn(4, 16)
    optimizer.step()
    (matrix,) = optimizer.projected
    assert matrix.refreshes == 1
    assert (matrix.captured or 0) > 0.85
    assert matrix.rank is not None
    assert matrix.rank > 1


def test_a_refresh_waits_for_a_gradient_that_is_not_zero():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(24, 16))
    optimizer = GaLoreAdamW([weight], 0.1, rank=4, gap=5, stagger=False, verbose=False)
    counts = []
    for step in range(8):
        weight.grad = torch.zeros(24, 16) if step == 5 else torch.randn(24, 16)
        optimizer.step()
        counts.append(optimizer.projected[0].refreshes)
    assert counts == [1, 1, 1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("moments", ["keep", "project", "rotate", "align", "reset"])
def test_updates_stay_bounded_when_the_basis_turns(moments):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(24, 16))
    optimizer = GaLoreAdamW(
        [weight], 1e-3, rank=8, gap=50, moments=moments, stagger=False, verbose=False
    )
    left, right = torch.randn(24, 1), torch.randn(1, 16)
    largest = 0.0
    for step in range(120):
        weight.grad = left @ right if step < 50 else torch.randn(24, 16)
        before = weight.detach().clone()
        optimizer.step()
        largest = max(largest, (weight.detach() - before).norm().item())
    assert largest < 5 * 1e-3 * (24 * 8) ** 0.5


def test_an_optimizer_that_is_gone_moves_nothing():
    model = network()
    optimizer = make(model, per_layer=True)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    del optimizer
    gc.collect()
    before = copy.deepcopy(model)
    loss_of(model, batch(1)).backward()
    assert difference(model, before) == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("size", [1e17, 1e-17])
def test_subspaces_of_large_and_small_gradients(size):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = GaLoreAdamW([weight], 0.1, rank=4, eps=1e-30, verbose=False)
    weight.grad = size * torch.randn(64, 4) @ torch.randn(4, 64)
    optimizer.step()
    (matrix,) = optimizer.projected
    assert (matrix.captured or 0) > 0.99
    assert torch.isfinite(weight).all()


def test_rank_as_captured_energy():
    model = network()
    optimizer = make(model, rank=0.9)
    assert [matrix.rank for matrix in optimizer.projected] == [None, None, None]
    loss_of(model, batch(0)).backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
    optimizer.step()
    for matrix in optimizer.projected:
        squares = torch.linalg.svdvals(gradients[matrix.name]).square()
        share = squares.cumsum(0) / squares.sum()
        assert share[matrix.rank - 1] >= 0.9
        assert matrix.rank == 1 or share[matrix.rank - 2] < 0.9
        assert matrix.captured > 0.9 - 1e-4


def test_non_finite_gradients():
    model = network()
    optimizer = make(model, gap=1)
    loss_of(model, batch(0) * float("nan")).backward()
    with pytest.raises(JomaError, match=r"first gradient of 0\.weight is not finite"):
        optimizer.step()
    train(model, optimizer, 2)
    basis = optimizer.state[model[0].weight]["basis"].clone()
    optimizer.zero_grad()
    loss_of(model, batch(0) * float("nan")).backward()
    optimizer.step()
    assert torch.equal(optimizer.state[model[0].weight]["basis"], basis)


def test_parameters_added_later():
    model, later = network(), nn.Linear(16, 16)
    optimizer = make(model)
    optimizer.add_param_group({"params": list(later.named_parameters("later")), "rank": 4})
    assert len(optimizer.projected) == 4
    optimizer.add_param_group({"params": [("last", nn.Parameter(torch.zeros(9, 9)))]})
    assert len(optimizer.projected) == 4
    later(torch.randn(8, 16)).square().mean().backward()
    before = later.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(later.weight, before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 64}, "must be below the shorter side of a matrix, which is at most 24"),
        ({"rank": None}, "no rank was given"),
        ({"rank": 1.5}, "share of energy below 1"),
        ({"rank": 0}, "rank must be a whole number from 1 on"),
        ({"gap": 0}, "gap must be a whole number from 1 on"),
        ({"side": "top"}, "side must be one of short, left, right, smallest"),
        ({"projection": "qr"}, "projection must be one of power, svd"),
        ({"refresh": "often"}, "refresh must be one of gap, energy"),
        ({"moments": "lose"}, "moments must be one of keep, rotate"),
        ({"bits": 4}, "bits must be None or 8"),
        ({"betas": (1.0, 0.9)}, r"first of betas must lie in \[0, 1\)"),
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
        ({"groups": [{"match": "decoder", "rank": 4}]}, "no parameter's name matches 'decoder'"),
        ({"groups": [{"match": "0", "moments": "rotat"}]}, "moments must be one of keep, rotate"),
        ({"groups": [{"match": "0", "betas": (2, 5)}]}, "first of betas"),
        ({"groups": [{"rank": 4}]}, "must have a regular expression as 'match'"),
        ({"groups": [{"match": "0", "ranks": 4}]}, "a group has no setting 'ranks'"),
    ],
)
def test_errors_say_what_is_wrong(settings, message):
    with pytest.raises(JomaError, match=message):
        make(network(), **settings)


def test_a_state_of_another_rank_is_refused():
    model = network()
    optimizer = make(model)
    train(model, optimizer, 1)
    with pytest.raises(JomaError, match=r"a basis of 24 × 6 for 0\.weight, .* of 24 × 5 \(right\)"):
        make(model, rank=5).load_state_dict(optimizer.state_dict())
    smaller = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 24))
    with pytest.raises(JomaError, match="the state is of 6 parameters, these are 4"):
        make(smaller).load_state_dict(optimizer.state_dict())


def test_a_state_in_the_middle_of_a_step_is_refused():
    model = network()
    optimizer = make(model, per_layer=True)
    with optimizer.accumulate(last=False):
        loss_of(model, batch(0)).backward()
    with pytest.raises(JomaError, match="after step"):
        optimizer.state_dict()
    optimizer.zero_grad()
    optimizer.state_dict()
