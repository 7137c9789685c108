"""The manifest of a run folder: which files the run owns, with their sizes and checksums.

`manifest.json` lists JSON files, tables and figures, and says how many parts the metrics log has.
Parts and checkpoints carry their own checksums, and are not listed one by one.

A file's new checksum is listed before the file is written, next to the one it has. So a kill at any
moment leaves a file that matches. Somebody who edited a file on purpose deletes the manifest; what
is in the folder is then read without being verified.
"""

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
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
class Contents:
    """What a manifest says.

    Attributes:
        files: For each file, by its path in the folder, size and checksum of the contents it may
            have: the ones it was given last, and those before in case the last write was cut short.
        parts: How many parts the metrics log has; files may hold several.
    """

    files: dict[str, list[dict[str, Any]]]
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
            value = json.loads(data)
            contents = Contents(dict(value["files"]), int(value["metrics"]["parts"]))
            if _encoded(contents) == data:
                return contents
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise JomaError(f"{path} is damaged; restore it, or delete it to open the run unverified")

    def begin(self, files: Mapping[str, bytes]) -> None:
        """Write the manifest of a new run and then its first files, in their order."""
        self._list(Contents({name: [_digest(data)] for name, data in files.items()}))
        for name, data in files.items():
            write_bytes(self.folder / name, data)

    def write_file(self, name: str, data: bytes) -> Path:
        """Write a file of the run, after listing what it will hold next to what it holds."""
        self.check_folder()
        path = self.folder / name
        with _guard:
            contents = self.read()
            if contents is not None:
                listed, new = contents.files.get(name, []), _digest(data)
                try:
                    there = _digest(read_file(path)) if listed else None
                except (OSError, JomaError):
                    there = None
                kept = [there] if there is not None and there in listed and there != new else []
                if [*kept, new] != listed:
                    self._list(Contents({**contents.files, name: [*kept, new]}, contents.parts))
        write_bytes(path, data)
        return path

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
            listed = [] if contents is None else contents.files.get(name, [])
            try:
                data = read_file(self.folder / name)
            except FileNotFoundError:
                if not listed:
                    raise
                data = None
            if data is not None and (not listed or _digest(data) in listed):
                return data
            if (listed, data) == before:
                path = self.folder / name
                raise JomaError(
                    f"{path} {'is missing' if data is None else 'is damaged'}: it does not match "
                    f"{MANIFEST}; restore it, or delete {MANIFEST} to open the run unverified"
                )
            before = listed, data  # the run may have written it just now: read both again

    def check_folder(self) -> None:
        """Raise JomaError if the run folder was removed or replaced."""
        if not (self.folder / "environment.json").is_file():
            raise JomaError(
                f"run folder {self.folder} was removed or replaced while the run was writing to "
                "it; what was not written yet is lost"
            )

    def _list(self, contents: Contents) -> None:
        write_bytes(self.folder / MANIFEST, _encoded(contents))


def _digest(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _encoded(contents: Contents) -> bytes:
    body = {
        "version": _VERSION,
        "metrics": {"parts": contents.parts},
        "files": dict(sorted(contents.files.items())),
    }
    checksum = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return (json.dumps({**body, "sha256": checksum}, indent=1) + "\n").encode()
