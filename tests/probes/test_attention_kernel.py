"""The attention kernels without a GPU: in Triton's interpreter, and compiled ahead of time."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, for its interpreter"
)


def lines(*command: str, **environment: str) -> list[dict[str, float]]:
    """What a module of tests/probes prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "count"),
    [((), 24), pytest.param(("--all",), 205, marks=pytest.mark.slow)],
)
def test_the_kernels_agree_with_float64_softmax(arguments: tuple[str, ...], count: int):
    """Masks of every kind, padding, windows, softcaps, queries that are not real, NaN and ∞."""
    found = lines("tests.probes.interpreted_attention", *arguments, TRITON_INTERPRET="1")
    assert len(found) == count
    assert [case for case in found if not case["error"] <= 1e-5] == []


@pytest.mark.slow
@pytest.mark.parametrize("head", ["64", "128"])
def test_every_kernel_compiles(head: str):
    """36 of rows and keys, 8 of masks, 1 of padding, for each type and head size."""
    found = lines("tests.probes.compiled_attention", head, "bfloat16")
    assert len(found) == 20 + 16 + 8 + 1
