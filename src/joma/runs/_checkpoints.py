"""Checkpoints of a run: arrays and what was saved with them, in one safetensors file each.

A file is written whole, and its checksum covers every byte but the checksum's own, so that what is
loaded is what was saved or nothing. Nothing is ever unpickled.

safetensors writes several entries of metadata in no fixed order. So there is one, whose value is
the checksum followed by everything else as JSON. Older files have "step" and "about" as entries of
their own; their checksum stands in the same place.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma.common.checks import check_at_least, whole_number
from joma.common.files import replacing, sync_folder
from joma.common.json_files import plain
from joma.errors import JomaError

# As `_file_name` writes it, and in no other way, so that a step has one file.
_FILE = re.compile(r"step-([0-9]{9}|[1-9][0-9]{9,})\.safetensors")

_LENGTH_BYTES = 8  # of the header, before it
_KEY = "sha256"
_BEGIN = b'{"__metadata__":{"sha256":"'
_CHECKSUM_AT = _LENGTH_BYTES + len(_BEGIN)
_CHECKSUM_BYTES = 64
_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint that was read and is undamaged.

    Attributes:
        step: The step after which it was saved.
        path: The file.
        arrays: Its arrays by name.
        about: What was saved with them.
    """

    step: int
    path: Path
    arrays: dict[str, NDArray[Any]]
    about: dict[str, Any]


@dataclass(frozen=True, eq=False)
class LatestCheckpoint:
    """The result of a search for the latest checkpoint.

    Attributes:
        checkpoint: The newest that is undamaged, if there is one.
        refused: For each newer one, a sentence that says why it is not used.
    """

    checkpoint: Checkpoint | None
    refused: tuple[str, ...]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, `checkpoints/step-*.safetensors`; got by `run.checkpoints`.

    Attributes:
        folder: Their folder, which need not exist yet.
    """

    folder: Path

    def save(
        self,
        step: int,
        arrays: Mapping[str, NDArray[Any]],
        about: Mapping[str, Any],
        *,
        keep: int = 2,
    ) -> Path:
        """Save a checkpoint, whole or not at all, and then remove old ones.

        Those of later steps are removed too: a run that saves an earlier step has gone back.

        Args:
            step: The step after which it is saved.
            arrays: Arrays of floats, integers or truth values, by name.
            about: Anything JSON can hold; numbers that are not finite stay what they are.
            keep: How many checkpoints stay, this one included.
        """
        step = whole_number("step", step, 0)
        check_at_least(1, keep=keep)
        data = memoryview(_encoded(step, arrays, about))
        before, after = data[:_CHECKSUM_AT], data[_CHECKSUM_AT + _CHECKSUM_BYTES :]
        checksum = hashlib.sha256(before)
        checksum.update(after)
        path = self.folder / _file_name(step)
        if not self.folder.parent.is_dir():
            raise JomaError(
                f"run folder {self.folder.parent} was removed or replaced while the run was "
                "writing to it; what was not written yet is lost"
            )
        with replacing(path) as file:
            for part in (before, checksum.hexdigest().encode(), after):
                file.write(part)
        self._remove_all_but(step, keep)
        return path

    def latest(self) -> LatestCheckpoint:
        """Return the newest undamaged checkpoint, and why any newer ones are not used."""
        refused: list[tuple[Path, str]] = []
        checkpoint = None
        for step, path in self._steps().items():
            try:
                checkpoint = _load(path, step)
                break
            except _RefusedError as error:
                refused.append((path, str(error)))
            except FileNotFoundError:  # removed by the run just now, which has a newer one
                continue
            except OSError as error:
                refused.append((path, f"cannot be read ({error.strerror or error})"))
        then = f"going back to step {checkpoint.step}" if checkpoint else "there is no earlier one"
        sentences = (f"checkpoint {path} {why} and is not used; {then}" for path, why in refused)
        return LatestCheckpoint(checkpoint, tuple(sentences))

    @property
    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, the newest first; none of them is verified."""
        return list(self._steps())

    def clear(self) -> None:
        """Remove all checkpoints, of a run that will not be resumed."""
        self._remove(self._steps().values())

    def _steps(self) -> dict[int, Path]:
        """Return the files there are, by the step in their names, the newest first."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        steps = {int(match[1]): name for name in names if (match := _FILE.fullmatch(name))}
        return {step: self.folder / steps[step] for step in sorted(steps, reverse=True)}

    def _remove_all_but(self, step: int, keep: int) -> None:
        there = self._steps()
        stay = [old for old, path in there.items() if old <= step and not path.is_dir()][:keep]
        self._remove([path for old, path in there.items() if old not in stay])

    def _remove(self, paths: Collection[Path]) -> None:
        for path in paths:
            if not path.is_dir():  # a folder of such a name is not of a run and stays
                path.unlink(missing_ok=True)
        if paths:
            sync_folder(self.folder)


class _RefusedError(JomaError):
    """Why a file is not used, as the end of a sentence."""


def _file_name(step: int) -> str:
    return f"step-{step:09d}.safetensors"


def _encoded(step: int, arrays: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file with zeros in place of its checksum."""
    from safetensors import SafetensorError
    from safetensors.numpy import save

    for name, array in arrays.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise JomaError(f"arrays must have words as names, but not __metadata__, got {name!r}")
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
            given = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise JomaError(
                f"arrays[{name!r}] must be a NumPy array of floats, integers or truth values, "
                f"got {given}"
            )
    laid = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    record = json.dumps({"step": step, "about": plain(about, finite=False)})
    try:
        data = save(laid, {_KEY: "0" * _CHECKSUM_BYTES + record})
    except SafetensorError as error:  # a type or a size the format does not have
        raise JomaError(f"arrays and about cannot be saved ({error})") from error
    assert data[_LENGTH_BYTES:_CHECKSUM_AT] == _BEGIN
    return data


def _load(path: Path, step: int) -> Checkpoint:
    """Return the checkpoint in a file, which must be as it was saved, under its own name."""
    from safetensors import SafetensorError, safe_open

    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for a writer
        raise _RefusedError("is not a regular file")
    with open(path, "rb") as file:
        _check(file)
    try:
        with safe_open(path, framework="np") as content:
            record: dict[str, Any] = content.metadata()
            if rest := record[_KEY][_CHECKSUM_BYTES:]:
                record = json.loads(rest)
            else:  # of an older version
                record["about"] = json.loads(record["about"])
            inside, about = int(record["step"]), dict(record["about"])
            arrays = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _RefusedError(f"is not a checkpoint ({error})") from error
    if inside != step:
        raise _RefusedError(f"was saved after step {inside}, under another name,")
    return Checkpoint(step, path, arrays, about)


def _check(file: BufferedReader) -> None:
    """Raise _RefusedError for a file that is not what was saved, reading it block by block."""
    before = file.read(_CHECKSUM_AT)
    expected = file.read(_CHECKSUM_BYTES)
    if before[_LENGTH_BYTES:] != _BEGIN or len(expected) < _CHECKSUM_BYTES:
        raise _RefusedError("is damaged or not a checkpoint (it does not begin like one)")
    checksum = hashlib.sha256(before)
    block = memoryview(bytearray(_BLOCK))
    while size := file.readinto(block):
        checksum.update(block[:size])
    if checksum.hexdigest().encode() != expected:
        raise _RefusedError("is damaged (its contents do not match its checksum)")
