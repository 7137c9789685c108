"""Disks that are full and processes that are killed, at a moment of the test's choice."""

import errno
import io
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from joma.common import files

STEPS_OF_A_WRITE = ["write", "fsync", "replace"]


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class _FullFile(io.BufferedWriter):
    """Takes some of what it is given, and then the disk is full."""

    def write(self, data: Any, /) -> int:
        super().write(memoryview(data)[: len(data) // 2])
        full_disk()
        raise AssertionError("unreachable")


def fill_disk(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """From now on, this step of every write fails."""
    if step == "write":
        full = lambda path, mode: _FullFile(io.FileIO(path, mode))  # noqa: E731
        monkeypatch.setattr(files, "open", full, raising=False)
    else:
        monkeypatch.setattr(files.os, step, full_disk)


class Killed(BaseException):
    """What stands for `kill -9`."""


def every_kill(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> Iterator[int]:
    """Does something again and again, killed before its first, second … change of the disk.

    From the moment of the kill no change succeeds, as a dead process makes none, not even to clean
    up. Ends after the first time that nothing was left to kill.
    """
    for moment in range(1000):
        left = moment

        def mortal(call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*given: Any, **named: Any) -> Any:
                nonlocal left
                if left <= 0:
                    raise Killed
                left -= 1
                return call(*given, **named)

            return called

        with monkeypatch.context() as patch:
            for name in ("replace", "unlink", "fsync"):
                patch.setattr(os, name, mortal(getattr(os, name)))
            patch.setattr(files, "open", mortal(open), raising=False)
            try:
                do()
            except Killed:
                alive = False
            else:
                alive = True
        yield moment
        if alive:
            return
    raise AssertionError("never done")


def visible(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def small_disk(place: Path) -> Iterator[Path]:
    """A real disk of one megabyte at `place`, where that may be had."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"a small disk cannot be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
