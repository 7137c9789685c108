"""Checksums of a model's files, in a file next to them that `sha256sum -c` reads as well."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from joma.errors import JomaError

SUMS = "SHA256SUMS"
"""The name of that file."""

_LINE = re.compile(r"([0-9a-f]{64})  ([^/\0]+)")
_OTHER_LINE = re.compile(r"\\?[0-9a-f]{64} [ *]\S.*")
_LARGEST = 2**24


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, read piece by piece."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums_of(folder: Path) -> bytes:
    """Return the contents of the file of checksums for all files in a folder."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    return "".join(f"{sha256(folder / name)}  {name}\n" for name in names).encode()


def check_checksums(folder: Path, known: Mapping[str, str] | None = None) -> bool:
    """Compare the files of a folder with its checksums.

    Args:
        folder: The folder.
        known: Hashes of files that were just taken, by name.

    Returns:
        True where all files are as they were written, False where there are no checksums.

    Raises:
        JomaError: A file is damaged or missing.
    """
    if not (folder / SUMS).is_file():
        return False
    expected = _expected(folder / SUMS)
    if expected is None:
        return False
    for name, digest in expected.items():
        path = folder / name
        if not path.is_file():
            raise JomaError(f"{path} is missing: {SUMS} lists it")
        if ((known or {}).get(name) or sha256(path)) != digest:
            raise JomaError(
                f"{path} is damaged: its sha256 is not the one in {SUMS}, which was written with "
                "it; remove that file if it was changed on purpose"
            )
    return True


def _expected(path: Path) -> dict[str, str] | None:
    """Return hashes by file name; None for a list of another form, which somebody else wrote."""
    if path.stat().st_size > _LARGEST:
        raise JomaError(f"{path} is damaged: it has {path.stat().st_size} bytes")
    text = path.read_bytes().decode(errors="replace")
    given = text.removesuffix("\n").split("\n")
    lines = [_LINE.fullmatch(line) for line in given]
    if not any(lines) and all(_OTHER_LINE.fullmatch(line) for line in given):
        return None
    found = {line[2]: line[1] for line in lines if line is not None}
    if not text.endswith("\n") or len(found) != len(lines):
        raise JomaError(f"{path} is damaged: a line of it is not the checksum of one file")
    return found
