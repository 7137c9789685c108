"""Sharded tensors and modules are recognised, without importing what makes them."""

import pytest

from tests.own_process import said

ALONE = """
import sys, torch
from joma.common.sharded import is_dtensor, is_fsdp1, is_fully_sharded
assert not any(is_it(torch.ones(2)) for is_it in (is_dtensor, is_fsdp1, is_fully_sharded))
print(sorted({"torch.distributed.tensor", "torch.distributed.fsdp"} & set(sys.modules)))
"""

SHARDED = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from joma.common.sharded import is_dtensor, is_fsdp1, is_fully_sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
assert [is_dtensor(one.weight) for one in model] == [True, False]
assert [is_fully_sharded(one) for one in model] == [True, False]
wrapped = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
assert [is_fsdp1(one) for one in (wrapped, *model)] == [True, False, False]
assert not is_fully_sharded(wrapped)
print("recognised")
import os, sys; sys.stdout.flush(); os._exit(0)  # gloo's threads may abort the interpreter's end
"""


def test_nothing_is_recognised_before_it_is_imported():
    assert said(ALONE) == ["[]"]


@pytest.mark.skipif("not __import__('torch').distributed.is_available()", reason="needs gloo")
def test_both_kinds_are_recognised():
    assert said(SHARDED) == ["recognised"]
