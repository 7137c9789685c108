"""Checkpoints of a run: arrays and what was saved with them, in one safetensors file each.

A file is written whole, and its checksum covers every byte but the checksum's own, so that what is
loaded is what was saved or nothing. Nothing is ever unpickled.

The files have the format of safetensors, which reads them, but are written here: the library would
copy all arrays while no other thread runs. It also writes several entries of metadata in no fixed
order, so there is one, whose value is the checksum followed by everything else as JSON.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

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
_LARGEST_HEADER = 100_000_000  # that safetensors reads
_BLOCK = 1 << 20
_KINDS = {
    "u8": "U64", "i8": "I64", "f8": "F64", "f4": "F32", "u4": "U32", "i4": "I32",
    "f2": "F16", "u2": "U16", "i2": "I16", "i1": "I8", "u1": "U8", "b1": "BOOL",
}  # fmt: skip
"""What safetensors calls the types of NumPy, by kind and bytes, in its order: wider ones first."""
_ORDER = list(_KINDS)


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


class GivenUpError(Exception):
    """A checkpoint that was being written is not wanted any more; nothing is left of it."""


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
        wanted: Callable[[], bool] = lambda: True,
    ) -> Path:
        """Save a checkpoint, whole or not at all, and then remove old ones.

        Those of later steps are removed too: a run that saves an earlier step has gone back.

        Args:
            step: The step after which it is saved.
            arrays: Arrays of floats, integers or truth values, by name.
            about: Anything JSON can hold; numbers that are not finite stay what they are.
            keep: How many checkpoints stay, this one included.
            wanted: Function that is asked now and then; once it says no, nothing is saved.

        Raises:
            GivenUpError: It was not wanted any more.
        """
        step = whole_number("step", step, 0)
        check_at_least(1, keep=keep)
        header, laid = _laid_out(step, arrays, about)
        path = self.folder / _file_name(step)
        if not self.folder.parent.is_dir():
            raise JomaError(
                f"run folder {self.folder.parent} was removed or replaced while the run was "
                "writing to it; what was not written yet is lost"
            )
        with replacing(path) as file:
            _write(file, header, laid, wanted)
        there = self._steps()
        stay = [old for old in there if old <= step][:keep]
        self._remove([there[old] for old in there if old not in stay])
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
        paths = [path for path in self.folder.glob("step-*") if path.is_file()]
        steps = {int(match[1]): path for path in paths if (match := _FILE.fullmatch(path.name))}
        return dict(sorted(steps.items(), reverse=True))

    def _remove(self, paths: Collection[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
        if paths:
            sync_folder(self.folder)


class _RefusedError(JomaError):
    """Why a file is not used, as the end of a sentence."""


def _file_name(step: int) -> str:
    return f"step-{step:09d}.safetensors"


def _laid_out(
    step: int, arrays: Mapping[str, NDArray[Any]], about: Mapping[str, Any]
) -> tuple[bytes, list[memoryview]]:
    """Return the header of a file, with zeros in place of its checksum, and the bytes after it.

    These are views of the arrays where their memory is in order. safetensors would make a copy of
    all of them, during which no other thread of Python runs, and no training.
    """
    laid: list[memoryview] = []
    begin = 0
    record = json.dumps({"step": step, "about": plain(about, finite=False)})
    header: dict[str, Any] = {"__metadata__": {_KEY: "0" * _CHECKSUM_BYTES + record}}
    places = {name: (_ORDER.index(_kind(name, array)), name) for name, array in arrays.items()}
    for name in sorted(arrays, key=places.__getitem__):  # as safetensors has it: all are aligned
        array = arrays[name]
        flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
        laid.append(flat.view(np.uint8).data)
        end = begin + flat.nbytes
        kind = _KINDS[_kind(name, array)]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    if len(text) > _LARGEST_HEADER:
        raise JomaError(
            "arrays and about cannot be saved: their names and what is saved with them take "
            f"{len(text)} bytes, more than the {_LARGEST_HEADER} of a safetensors file"
        )
    data = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    assert data[_LENGTH_BYTES:_CHECKSUM_AT] == _BEGIN
    return data, laid


def _write(
    file: BinaryIO, header: bytes, laid: Iterable[memoryview], wanted: Callable[[], bool]
) -> None:
    """Write a file, whose checksum is of the bytes that were written, whatever arrays are now."""
    checksum = hashlib.sha256(header[:_CHECKSUM_AT])
    checksum.update(header[_CHECKSUM_AT + _CHECKSUM_BYTES :])
    file.write(header)
    for array in laid:
        for start in range(0, len(array), _BLOCK):
            if not wanted():
                raise GivenUpError
            block = bytes(array[start : start + _BLOCK])
            checksum.update(block)
            file.write(block)
    file.seek(_CHECKSUM_AT)
    file.write(checksum.hexdigest().encode())
    if not wanted():  # forcing it to disk takes longest
        raise GivenUpError


def _kind(name: str, array: NDArray[Any]) -> str:
    """Return what an array of a file has, one of `_KINDS`."""
    if not isinstance(name, str) or name == "__metadata__":
        raise JomaError(f"arrays must have words as names, but not __metadata__, got {name!r}")
    dtype = getattr(array, "dtype", np.dtype(object))
    kind = f"{dtype.kind}{dtype.itemsize}"
    if not isinstance(array, np.ndarray) or kind not in _KINDS:
        given = dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise JomaError(
            f"arrays[{name!r}] must be a NumPy array of floats, integers or truth values, "
            f"got {given}"
        )
    return kind


def _load(path: Path, step: int) -> Checkpoint:
    """Return the checkpoint in a file, which must be as it was saved, under its own name."""
    from safetensors import SafetensorError, safe_open

    with open(path, "rb") as file:
        _check(file)
    try:
        with safe_open(path, framework="np") as content:
            record: dict[str, Any] = json.loads(content.metadata()[_KEY][_CHECKSUM_BYTES:])
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
