"""Importing a room imports no package that it rarely needs."""

import pytest

from tests.own_process import said

FOREIGN = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "sympy", "scipy")
FOREIGN += ("matplotlib", "transformers", "pyarrow", "starlette")
ROOMS = ("integrations", "models", "optim", "probes", "probes.attention", "probes.spectrum")
ROOMS += ("random", "runs", "train", "train.monitor")


@pytest.mark.parametrize(
    ("rooms", "foreign"),
    [(ROOMS, FOREIGN), (("analysis", "data", "inference", "report", "server"), FOREIGN[:4])],
)
def test_rooms_import_none_of_these(rooms, foreign):
    code = (
        "import importlib, sys\n"
        f"for room in {rooms}: importlib.import_module('joma.' + room)\n"
        f"print(sorted(set({foreign}) & set(sys.modules)))"
    )
    assert said(code) == ["[]"]
