"""What a stopped training must have left, and how to stop one."""

import importlib
from collections.abc import Callable
from pathlib import Path

from joma.runs import Run
from tests.runs._log import rows

module = importlib.import_module("joma.train.fit")  # the room's `fit` is the function


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def check_sound(folder: Path, straight: Path) -> None:
    """Nothing is in the log twice or wrong, and all that the newest checkpoint stands for is."""
    run, whole = Run.open(folder), rows(Run.open(straight).metrics)
    there = rows(run.metrics)
    assert len(set(there)) == len(there)
    assert set(there) <= set(whole)
    found = run.checkpoints.latest()
    assert found.refused == ()
    step = found.checkpoint.step if found.checkpoint else 0
    assert {row for row in whole if row[0] < step} <= set(there)
    looks = {row for row in whole if row[0] == step > 0 and row[2] != "loss"}
    assert looks <= set(there)


class Stop(Exception):  # noqa: N818
    pass


def stop_after(step: int) -> Callable[[int, int], None]:
    def progress(done: int, _: int) -> None:
        if done > step:
            raise Stop

    return progress
