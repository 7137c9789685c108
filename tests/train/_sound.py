"""What a stopped training must have left, and how to stop one."""

from collections.abc import Callable
from pathlib import Path

from joma.runs import Run
from tests.runs._log import rows


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
    measured = {row for row in whole if row[0] == step > 0 and row[2] != "loss"}
    assert measured <= set(there)


class Stop(Exception):  # noqa: N818
    pass


def stop_after(step: int) -> Callable[[int], None]:
    """Return what stops a training in its next measurement after a step."""

    def measured(at: int) -> None:
        if at > step:
            raise Stop

    return measured
