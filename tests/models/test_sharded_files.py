"""Pickled checkpoints with DTensors: whole ones are read, parts are refused, hostile ones too."""

from pathlib import Path

import pytest
import torch

from tests.own_process import said

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="needs torch.distributed"
)

SAVE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
mesh, local = init_device_mesh("cpu", (1,)), torch.arange(8.0).view(2, 4)

def saved(name, placement, shape):
    given = {"run_check": False, "shape": torch.Size(shape), "stride": (4, 1)}
    tensor = DTensor.from_local(local, mesh, [placement], **given)
    if name == "odd":
        del tensor._spec
    torch.save({"w": tensor, "b": local}, f"{sys.argv[1]}/{name}.pt")

saved("whole", Shard(0), (2, 4))
saved("part", Shard(0), (4, 4))
saved("summand", Partial(), (2, 4))
saved("odd", Shard(0), (2, 4))
sys.stdout.flush(); os._exit(0)  # gloo's threads may abort the interpreter's end
"""

LOAD = """
import sys
from pathlib import Path
from joma.models.weight_files import load_pickled
assert "torch.distributed.tensor" not in sys.modules
for name in ("whole", "part", "summand", "odd"):
    try:
        found = load_pickled(Path(sys.argv[1]) / f"{name}.pt")
        print(name, *(f"{type(it).__name__} {it.tolist()}" for it in found.values()), sep=": ")
    except ValueError as error:
        print(f"{name}: {error}".replace(sys.argv[1], "FOLDER"))
"""


def test_whole_ones_are_read_and_parts_refused(tmp_path: Path):
    said(SAVE, tmp_path)
    whole, part, summand, odd = said(LOAD, tmp_path)
    assert whole == ": ".join(
        ["whole", *["Tensor [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]"] * 2]
    )
    for line in (part, summand):
        assert "holds of w the part that one process had (a DTensor); save whole tensors" in line
    assert odd.startswith("odd: FOLDER/odd.pt ")
