"""The series of each case in a file of its own, and all of them in one archive."""

import io
import json
import lzma
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.findings._case import Case

KEYS = ("name", "module", "kind", "layer", "head")
LARGEST = 16 * 2**20
"""Bytes an archive may have."""


@dataclass(frozen=True)
class Stored:
    """A case that was trained.

    Attributes:
        case: What was trained.
        facts: Final losses and the like; "error" or "skipped" where it was not trained.
        columns: The metrics log, without times and bounds; empty where it was not trained.
    """

    case: Case
    facts: dict[str, Any]
    columns: dict[str, NDArray[Any]]

    @property
    def trained(self) -> bool:
        """Whether there is something to judge."""
        return bool(self.columns)


def path_of(folder: Path, case: Case) -> Path:
    return folder / f"{case.name}.npz"


def write(
    folder: Path, case: Case, columns: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]
) -> None:
    """Write a case; the file is there only when it is whole."""
    arrays = _arrays(case, columns, facts)
    path = path_of(folder, case)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    part.replace(path)


def _arrays(
    case: Case, columns: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]
) -> dict[str, NDArray[Any]]:
    series: dict[tuple[Any, ...], list[int]] = {}
    if columns:
        keys = [columns[name].tolist() for name in KEYS]
        for row, key in enumerate(zip(*keys, strict=True)):
            series.setdefault(key, []).append(row)
    rows = np.array([row for ones in series.values() for row in ones], dtype=np.int64)
    header = {
        "case": case.facts(),
        "facts": dict(facts),
        "series": [[*key, len(ones)] for key, ones in series.items()],
    }
    text = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    if not columns:
        return {"header": text}
    with np.errstate(over="ignore"):
        values = columns["value"][rows].astype(np.float32)
    return {"header": text, "step": columns["step"][rows].astype(np.int32), "value": values}


def read(path: Path) -> Stored:
    """Return what was stored of a case."""
    with np.load(path) as file:
        header = json.loads(bytes(file["header"]))
        case = Case(**header["case"])
        if "step" not in file:
            return Stored(case, header["facts"], {})
        steps, values = file["step"], file["value"]
    counts = [one[-1] for one in header["series"]]
    columns: dict[str, NDArray[Any]] = {
        "step": steps.astype(np.int64),
        "value": values.astype(np.float64),
        "member": np.zeros(len(steps), dtype=np.int32),
    }
    for place, name in enumerate(KEYS):
        kind = np.int32 if name in ("layer", "head") else object
        each = np.array([one[place] for one in header["series"]], dtype=kind)
        columns[name] = np.repeat(each, counts)
    return Stored(case, header["facts"], columns)


def read_all(folder: Path) -> Iterator[Stored]:
    """Yield everything stored in a folder, by name."""
    for path in sorted(folder.glob("*.npz")):
        yield read(path)


def pack(folder: Path, archive: Path) -> int:
    """Write one archive of all cases; return its bytes.

    Compressed together, cases share the names of their series, which is most of what they hold.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(folder.glob("*.npz")):
            inside = io.BytesIO()
            with np.load(path) as file:
                np.savez(inside, **{name: file[name] for name in file.files})
            member = tarfile.TarInfo(path.name)
            member.size = inside.tell()
            inside.seek(0)
            tar.addfile(member, inside)
    packed = lzma.compress(buffer.getvalue(), preset=9)
    archive.write_bytes(packed)
    return len(packed)


def unpack(archive: Path, folder: Path) -> int:
    """Write the cases of an archive into a folder; return how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(archive.read_bytes()))) as tar:
        for member in tar.getmembers():
            file = tar.extractfile(member)
            name = Path(member.name).name
            if file is None or not name.endswith(".npz"):
                continue
            with np.load(io.BytesIO(file.read())) as arrays:
                np.savez_compressed(folder / name, **{one: arrays[one] for one in arrays.files})
            count += 1
    return count
