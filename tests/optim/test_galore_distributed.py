"""GaLore on two processes: DistributedDataParallel and FSDP2 against one process."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

from joma.optim import GaLoreAdamW
from tests.two_processes import run_in_two_processes

STEPS, LATER = 16, 4


def network():
    """Layers with 33, 17 and 40 rows: the first two cannot be divided by two."""
    torch.manual_seed(0)
    layers = nn.Linear(24, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 40)
    return nn.Sequential(*layers)


def train(model, optimizer, rows, steps, first=0, passes=1):
    for step in range(first, first + steps):
        random = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 24, generator=random)[rows]
        targets = torch.randn(16, 40, generator=random)[rows]
        optimizer.zero_grad()
        for number in range(passes):
            part = slice(number, None, passes)
            with optimizer.accumulate(last=number == passes - 1):
                loss = (model(inputs[part]) - targets[part]).square().mean()
                (loss / passes).backward()
        optimizer.step()


def make(model, case):
    kind, side, per_layer, clip, bits, _ = case
    del kind
    return GaLoreAdamW(
        model,
        1e-2,
        rank=6,
        gap=7,
        weight_decay=0.01,
        side=side,
        per_layer=per_layer,
        clip_norm=clip,
        projector_bits=bits,
        verbose=False,
    )


def sharded():
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


CASES = [
    # kind, side, per layer, clip norm, bits of the projector, backward passes
    ("ddp", "short", False, None, None, 1),
    ("ddp", "left", True, 0.05, None, 1),
    ("ddp", "right", True, None, None, 2),
    ("fsdp", "short", False, None, None, 1),
    ("fsdp", "left", True, 0.05, None, 1),
    ("fsdp", "right", True, None, 8, 2),
]


def work(rank, folder):
    """Train every case on one of two processes; the first saves weights and the state."""
    for number, case in enumerate(CASES):
        own = slice(8 * rank, 8 * rank + 8)
        if case[0] == "ddp":
            model = nn.parallel.DistributedDataParallel(network())
            train(model, make(model, case), own, STEPS, passes=case[5])
            weights = model.module.state_dict()
        else:
            model = sharded()
            optimizer = make(model, case)
            train(model, optimizer, own, STEPS, passes=case[5])
            saved = {
                "model": get_model_state_dict(model),
                "optimizer": get_optimizer_state_dict(model, optimizer),
            }
            save(saved, checkpoint_id=f"{folder}/{number}")
            weights = {name: one.full_tensor() for name, one in model.state_dict().items()}
        if rank == 0:
            torch.save(weights, f"{folder}/{number}.pt")
    unused_layers(rank, folder)


def unused_layers(rank, folder):
    """Train layers of which each process uses another one, at times none or with zeros."""
    sums = []
    for refresh in ("gap", "energy"):
        torch.manual_seed(0)
        layers = nn.ModuleDict({name: nn.Linear(16, 16) for name in "abc"})
        model = nn.parallel.DistributedDataParallel(layers, find_unused_parameters=True)
        optimizer = GaLoreAdamW(model, 1e-2, rank=4, gap=3, refresh=refresh, verbose=False)
        for step in range(8):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            hidden = layers["a"](torch.randn(8, 16))
            loss = layers["bc"[rank]](hidden).square().mean()
            if not (step == 4 and rank == 1):
                (0 * loss if step == 0 and rank == 0 else loss).backward()
            optimizer.step()
        sums += [float(one.detach().sum()) for one in layers.parameters()]
    Path(folder, f"unused-{rank}").write_text(repr(sums))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_in_two_processes(work, folder)
    return folder


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=["-".join(map(str, one)) for one in CASES]
)
def test_two_processes_move_as_one(trained, number):
    case = CASES[number]
    model = network()
    # Of several backward passes the first chooses the basis where parameters move per layer.
    rows = slice(0, 16)
    one = list(case)
    train(model, make(model, one), rows, STEPS, passes=case[5])
    found = torch.load(trained / f"{number}.pt", weights_only=True)
    for name, weights in model.state_dict().items():
        assert torch.allclose(found[name], weights, atol=1e-5), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("number", [at for at, case in enumerate(CASES) if case[0] == "fsdp"])
def test_saved_on_two_processes_and_loaded_on_one(trained, number):
    case = CASES[number]
    whole = network()
    optimizer = make(whole, case)
    train(whole, optimizer, slice(0, 16), STEPS + LATER, passes=case[5])
    model = network()
    fresh = make(model, case)
    target = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, fresh)}
    load(target, checkpoint_id=trained / str(number), no_dist=True)
    model.load_state_dict(target["model"])
    set_optimizer_state_dict(model, fresh, target["optimizer"])
    train(model, fresh, slice(0, 16), LATER, first=STEPS, passes=case[5])
    for name, weights in whole.state_dict().items():
        assert torch.allclose(model.state_dict()[name], weights, atol=1e-5), name


def test_processes_stay_equal_where_each_uses_another_layer(trained):
    assert (trained / "unused-0").read_text() == (trained / "unused-1").read_text()
