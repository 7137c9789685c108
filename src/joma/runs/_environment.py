"""What a run ran on: versions, machine, commit and command line."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "scipy", "torch", "matplotlib")


def environment(device: str) -> dict[str, Any]:
    """The record behind `environment.json`; imports none of the packages it names."""
    return {
        "joma": _version("joma") or "0+source",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "device": device,
        "cores": os.cpu_count(),
        "commit": _commit(),
        "command": [Path(sys.argv[0]).name if sys.argv else "", *sys.argv[1:]],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the repository around the working folder, "-dirty" if files were changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
