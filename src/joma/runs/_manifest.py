"""The manifest of a run folder: which files the run owns, with their sizes and checksums.

`manifest.json` lists JSON files, tables and figures, and says how many parts the metrics log has.
Parts and checkpoints carry their own checksums, and are not listed one by one.

A file's new checksum is listed before the file is written, next to the one it has. So a kill at any
moment leaves a file that matches. A folder of an older version has no manifest and gets none; what
is in it is read without being verified.
"""

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from joma.common.files import read_file, write_bytes
from joma.errors import JomaError

MANIFEST = "manifest.json"
_VERSION = 1
_LARGEST = 1 << 28

_guard = threading.RLock()  # what is collected as garbage within may write, too, in this thread
"""A training and its monitor may write to the same run from two threads."""


@dataclass(frozen=True)
class FileDigest:
    """Size and SHA-256 of a file's contents."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> "FileDigest":
        """Return the fingerprint of these contents."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Contents:
    """What a manifest says.

    Attributes:
        files: For each file, by its path in the folder, the contents it may have: the ones it was
            given last, and those before in case the last write was cut short.
        parts: How many parts the metrics log has; files may hold several.
    """

    files: dict[str, tuple[FileDigest, ...]] = field(default_factory=dict)
    parts: int = 0


@dataclass(frozen=True)
class Manifest:
    """The manifest in a run folder.

    Attributes:
        folder: The run folder.
    """

    folder: Path

    def read(self) -> Contents | None:
        """Return what the manifest says, None where there is none; raise JomaError if damaged."""
        path = self.folder / MANIFEST
        try:
            data = read_file(path, largest=_LARGEST)
        except FileNotFoundError:
            return None
        try:
            contents = _decoded(json.loads(data))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            contents = None
        if contents is None or _encoded(contents) != data:
            raise JomaError(
                f"{path} is damaged; restore it, or delete it to open the run unverified"
            )
        return contents

    def begin(self, files: Mapping[str, bytes]) -> None:
        """Write the manifest of a new run and then its first files, in their order."""
        self._list(Contents({name: (FileDigest.of(data),) for name, data in files.items()}))
        for name, data in files.items():
            self._write(name, data)

    def write_file(self, name: str, data: bytes) -> Path:
        """Write a file of the run, after listing what it will hold next to what it holds."""
        self.check_folder()
        with _guard:
            contents = self.read()
            if contents is not None:
                self._expect(contents, name, FileDigest.of(data))
        self._write(name, data)
        return self.folder / name

    def _expect(self, contents: Contents, name: str, new: FileDigest) -> None:
        old = contents.files.get(name, ())
        try:
            there = FileDigest.of(read_file(self.folder / name)) if old else None
        except (OSError, JomaError):
            there = None
        kept = (there,) if there is not None and there in old and there != new else ()
        if (*kept, new) != old:
            self._list(Contents({**contents.files, name: (*kept, new)}, contents.parts))

    def set_parts(self, parts: int) -> None:
        """Write how many parts the metrics log has: after one is added, before one is removed."""
        with _guard:
            contents = self.read()
            if contents is not None and contents.parts != parts:
                self._list(Contents(contents.files, parts))

    def read_file(self, name: str) -> bytes:
        """Return the contents of a file; raise JomaError if they are not what the manifest lists.

        A file that is not listed is read as it is. FileNotFoundError is raised where the file does
        not exist and is not listed either.
        """
        before: Any = None
        while True:
            contents = self.read()
            listed = () if contents is None else contents.files.get(name, ())
            try:
                data = read_file(self.folder / name)
            except FileNotFoundError:
                if not listed:
                    raise
                data = None
            if not listed or (data is not None and FileDigest.of(data) in listed):
                assert data is not None, "raised above"
                return data
            if (listed, data) == before:
                path = self.folder / name
                raise JomaError(
                    f"{path} {'is missing' if data is None else 'is damaged'}: it does not match "
                    f"{MANIFEST}; restore it, or delete {MANIFEST} to open the run unverified"
                )
            before = listed, data  # the run may have written it just now: read both again

    def _list(self, contents: Contents) -> None:
        self._write(MANIFEST, _encoded(contents))

    def _write(self, name: str, data: bytes) -> None:
        write_bytes(self.folder / name, data)

    def check_folder(self) -> None:
        """Raise JomaError if the run folder was removed or replaced."""
        if not (self.folder / "environment.json").is_file():
            raise JomaError(
                f"run folder {self.folder} was removed or replaced while the run was writing to "
                "it; what was not written yet is lost"
            )


def _encoded(contents: Contents) -> bytes:
    body = {
        "version": _VERSION,
        "metrics": {"parts": contents.parts},
        "files": {
            name: [{"size": it.size, "sha256": it.sha256} for it in listed]
            for name, listed in sorted(contents.files.items())
        },
    }
    checksum = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return (json.dumps({**body, "sha256": checksum}, indent=1) + "\n").encode()


def _decoded(value: Any) -> Contents:
    """Return what parsed JSON says; any error of these types means damage."""
    if value["version"] != _VERSION:
        raise ValueError
    files = {
        name: tuple(FileDigest(int(it["size"]), str(it["sha256"])) for it in listed)
        for name, listed in value["files"].items()
    }
    return Contents(files, int(value["metrics"]["parts"]))
