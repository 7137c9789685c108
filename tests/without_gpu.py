"""Triton kernels on a machine without a GPU: in its interpreter, or compiled ahead of time.

Triton decides when it is imported how kernels run, so each script that runs them is a process of
its own that prints a JSON object for each case.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[1]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, for its interpreter"
)


def printed(module: str, *arguments: str, interpret: bool = True) -> list[dict[str, Any]]:
    """Return what a module of the tests prints, an object for each line.

    Args:
        module: Its name, such as "tests.optim.interpreted".
        arguments: Its arguments.
        interpret: Whether kernels run in Triton's interpreter.
    """
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if interpret else {})
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
