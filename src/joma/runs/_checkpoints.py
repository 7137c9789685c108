"""Checkpoints of a run: arrays and what they are about, in one safetensors file each.

A file is written whole, and its checksum covers every byte but the checksum's own, so that what is
loaded is what was saved or nothing. Nothing is ever unpickled.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma.common.files import replacing, sync_folder
from joma.common.json_files import plain
from joma.errors import JomaError

# As `_file_name` writes it, and in no other way, so that a step has one file.
_FILE = re.compile(r"step-([0-9]{9}|[1-9][0-9]{9,})\.safetensors")

# A safetensors file is the header's length, the header (JSON) and the arrays. Ours always begins
# its header like this, so that the checksum stands in one known place.
_LENGTH_BYTES = 8
_BEGIN = b'{"__metadata__":{"sha256":"'
_CHECKSUM_AT = _LENGTH_BYTES + len(_BEGIN)
_CHECKSUM_BYTES = 64
_ALIGNMENT = 8  # of the arrays, so that a reader can map them
_LARGEST_HEADER = 100_000_000  # what readers of the format accept

_BLOCK = 1 << 20

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint that was read and is undamaged.

    Attributes:
        step: after which it was saved.
        path: of the file.
        arrays: by name.
        about: what was saved with them.
    """

    step: int
    path: Path
    arrays: dict[str, NDArray[Any]]
    about: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Found:
    """What a look for the latest checkpoint found.

    Attributes:
        checkpoint: the newest that is undamaged, if there is one.
        refused: for each newer one, a sentence that says why it is not used.
    """

    checkpoint: Checkpoint | None
    refused: tuple[str, ...]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, `checkpoints/step-*.safetensors`; got by `run.checkpoints`.

    Attributes:
        folder: they are in; need not be there yet.
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
        """Saves a checkpoint, whole or not at all, and then removes old ones.

        Those of later steps are removed too: a run that saves an earlier step has gone back.

        Args:
            step: after which it is saved.
            arrays: by name; of floats, integers or truth values.
            about: anything JSON can hold; numbers that are not finite stay what they are.
            keep: how many checkpoints stay, this one included.
        """
        if not isinstance(step, int | np.integer) or step < 0:
            raise JomaError(f"step must be a whole number ≥ 0, got {step!r}")
        if keep < 1:
            raise JomaError(f"keep must be at least 1, got {keep}")
        ordered = _ordered(arrays)
        before, after = _header(int(step), ordered, about)
        checksum = hashlib.sha256(before)
        for block in (after, *map(_bytes, ordered.values())):
            checksum.update(block)
        path = self.folder / _file_name(int(step))
        if not self.folder.parent.is_dir():
            raise JomaError(
                f"run folder {self.folder.parent} was removed or replaced while the run was "
                "writing to it; what was not written yet is lost"
            )
        with replacing(path) as file:
            file.write(before + checksum.hexdigest().encode() + after)
            for array in ordered.values():
                file.write(_bytes(array))
        self._remove_all_but(int(step), keep)
        return path

    def latest(self) -> Found:
        """The newest undamaged checkpoint, and why any newer ones are not used."""
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
        return Found(checkpoint, tuple(sentences))

    @property
    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, the newest first; none of them is verified."""
        return list(self._steps())

    def clear(self) -> None:
        """Removes all, of a run that has nothing left to go on with."""
        there = self._steps()
        for path in there.values():
            _remove(path)
        if there:
            sync_folder(self.folder)

    def _steps(self) -> dict[int, Path]:
        """The files there are, by the step in their names, the newest first."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        steps = {int(match[1]): name for name in names if (match := _FILE.fullmatch(name))}
        return {step: self.folder / steps[step] for step in sorted(steps, reverse=True)}

    def _remove_all_but(self, step: int, keep: int) -> None:
        there = self._steps()
        stay = [old for old, path in there.items() if old <= step and not path.is_dir()][:keep]
        for old, path in there.items():
            if old not in stay:
                _remove(path)
        if len(stay) < len(there):
            sync_folder(self.folder)


class _RefusedError(JomaError):
    """Why a file is not used, as the end of a sentence."""


def _file_name(step: int) -> str:
    return f"step-{step:09d}.safetensors"


def _remove(path: Path) -> None:
    """Removes a file; a folder of such a name is not of a run and stays."""
    if not path.is_dir():
        path.unlink(missing_ok=True)


def _ordered(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The arrays as they lie in the file: row by row, little-endian, each at a fit address."""
    for name, array in arrays.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise JomaError(f"arrays must have words as names, but not __metadata__, got {name!r}")
        if not isinstance(array, np.ndarray) or array.dtype.name not in _DTYPES:
            given = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise JomaError(
                f"arrays[{name!r}] must be a NumPy array of {', '.join(_DTYPES)}, got {given}"
            )
    laid = {
        name: np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
        for name, array in arrays.items()
    }
    return dict(sorted(laid.items(), key=lambda item: (-item[1].itemsize, item[0])))


def _bytes(array: NDArray[Any]) -> Any:
    """The bytes of an array, not copied."""
    return array.reshape(-1).view(np.uint8)


def _header(
    step: int, arrays: Mapping[str, NDArray[Any]], about: Mapping[str, Any]
) -> tuple[bytes, bytes]:
    """The header with its length, up to the checksum and after it."""
    metadata = {
        "sha256": "0" * _CHECKSUM_BYTES,
        "step": str(step),
        "about": json.dumps(plain(about, finite=False)),
    }
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        dtype = _DTYPES[array.dtype.name]
        entries[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    assert text.startswith(_BEGIN)
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _LARGEST_HEADER:
        raise JomaError(
            f"about and the names of arrays must fit in {_LARGEST_HEADER} bytes, "
            f"but take {len(text)}"
        )
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return header[:_CHECKSUM_AT], header[_CHECKSUM_AT + _CHECKSUM_BYTES :]


def _load(path: Path, step: int) -> Checkpoint:
    """The checkpoint in a file, which must be as it was saved, under its own name."""
    from safetensors import SafetensorError, safe_open

    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for a writer
        raise _RefusedError("is not a regular file")
    with open(path, "rb") as file:
        _check(file)
    try:
        with safe_open(path, framework="np") as content:
            metadata = content.metadata()
            inside, about = int(metadata["step"]), dict(json.loads(metadata["about"]))
            arrays = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _RefusedError(f"is not a checkpoint ({error})") from error
    if inside != step:
        raise _RefusedError(f"was saved after step {inside}, under another name,")
    return Checkpoint(step, path, arrays, about)


def _check(file: BufferedReader) -> None:
    """Refuses a file that is not what was saved; keeps no more than a block of it in memory."""
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
