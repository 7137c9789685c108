"""Where a run goes: default names, and which existing folders may be written to."""

import contextlib
import itertools
import json
import re
from datetime import datetime
from pathlib import Path

from joma.errors import JomaError
from joma.runs._lock import locked
from joma.runs._write import is_temporary, remove_temporaries, sync_folder

ENVIRONMENT = "environment.json"
CONFIG = "config.json"
OUTCOME_FILE = "outcome.json"
"""In which whoever ran a run says how it ended."""

OWN_FOLDERS = ("checkpoints", "metrics", "tables", "figures")

DEFAULT_ROOT = Path("runs")

_NAME = re.compile(r"\w[\w.+-]*")


def is_run(path: Path) -> bool:
    """Whether `path` is a run folder, possibly one that was killed while it began.

    `environment.json` is written first and tells; `config.json` alone is too common a name.
    """
    try:
        environment = json.loads((path / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(environment, dict) and "joma" in environment


def check_out(out: Path, name: str) -> Path:
    """`out` if run `name` may be written there: it is new, empty, or an earlier run of that name.

    A folder that was killed before it knew its name may be used by any run.
    """
    if out.exists() and not out.is_dir():
        raise JomaError(f"out {out} is a file, but must be a folder")
    if not out.is_dir() or all(is_temporary(path) for path in out.iterdir()):
        return out
    if not is_run(out):
        raise JomaError(
            f"out {out} has other things in it, but must be a new folder, an empty one or "
            f"that of an earlier {name} run"
        )
    there = _name_of(out)
    if there not in (None, name):
        raise JomaError(
            f"out {out} holds a {there} run, but must be a new folder, an empty one or "
            f"that of an earlier {name} run"
        )
    return out


def remove_old(folder: Path) -> None:
    """Removes what an earlier run left in `folder` and a new one might not write over.

    That is its outcome, configuration, checkpoints, metrics, tables and figures, and those of the
    runs that are its parts, in `groups/`; what a run does not write stays. `folder` must be locked;
    if another process is in one of the parts, nothing is removed.
    """
    parts = [part for part in folder.glob("groups/*") if is_run(part)]
    with contextlib.ExitStack() as locks:
        for part in parts:
            locks.enter_context(locked(part))
        _remove_own(folder)
        for part in parts:
            remove_old(part)


def _remove_own(folder: Path) -> None:
    # What speaks of the rest goes first: a folder in which this was cut short has no outcome it
    # did not reach, and without a configuration no run can go on from what is left in it.
    for pattern in (
        OUTCOME_FILE,
        CONFIG,
        "checkpoints/step-*.safetensors",
        "metrics/part-*.parquet",
        "tables/*.parquet",
        "figures/*.png",
        "figures/*.svg",
    ):
        for path in folder.glob(pattern):
            if path.is_file():
                path.unlink()
    remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Removes the temporary files of writes that were killed; `folder` must be locked."""
    for place in (folder, *(folder / name for name in OWN_FOLDERS)):
        remove_temporaries(place)


def _name_of(folder: Path) -> str | None:
    try:
        name = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def check_name(what: str, name: str) -> str:
    """`name` if it is good as a file name."""
    if not _NAME.fullmatch(name):
        raise JomaError(
            f"{what} must be letters, digits and . + - _ beginning with a letter or digit, "
            f"got {name!r}"
        )
    return name


def default_folder(name: str) -> Path:
    """`./runs/NAME-date-time` in local time, as a new run would be called now."""
    return DEFAULT_ROOT / f"{check_name('name', name)}-{datetime.now():%Y%m%d-%H%M%S}"


def make_folder(name: str, out: Path | None) -> Path:
    """Makes the folder of a run, in which an earlier one may have left something.

    The default one is new even within one second.
    """
    if out is not None:
        check_name("name", name)
        check_out(out, name).mkdir(parents=True, exist_ok=True)
        sync_folder(out.parent)
        return out
    first = default_folder(name)
    first.parent.mkdir(parents=True, exist_ok=True)
    for n in itertools.count(1):
        folder = first if n == 1 else first.with_name(f"{first.name}-{n}")
        try:
            folder.mkdir()  # fails if another process was faster, so that a name is given once
        except FileExistsError:
            continue
        sync_folder(folder.parent)
        return folder
    raise AssertionError("unreachable")
