"""A write that fails leaves the old file and nothing else."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from joma.common import files


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_writes_and_replaces(tmp_path: Path):
    path = tmp_path / "deep" / "file"
    files.write_bytes(path, b"old")
    files.write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch, step: str):
    path = tmp_path / "file"
    files.write_bytes(path, b"old")
    monkeypatch.setattr(files.os, step, full_disk)
    with pytest.raises(OSError, match="No space left"):
        files.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_writer_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "file"
    files.write_bytes(path, b"old")

    def interrupted() -> None:
        with files.replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_data_and_folder_are_forced_to_disk_around_the_rename(tmp_path: Path, monkeypatch):
    order: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda fd: (order.append("fsync"), fsync(fd)))
    monkeypatch.setattr(files.os, "replace", lambda a, b: (order.append("replace"), replace(a, b)))
    files.write_bytes(tmp_path / "file", b"data")
    assert order == ["fsync", "replace", "fsync"]
    files.write_bytes(tmp_path / "new" / "file", b"data")  # whose folder must survive as well
    assert order[3:] == ["fsync", "fsync", "replace", "fsync"]


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "file"
    files.write_bytes(path, b"old")
    script = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from joma.common.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode < 0
    assert path.read_bytes() == b"old"
    (tmp_path / ".mine.tmp").write_bytes(b"not of a write")
    assert len(list(tmp_path.iterdir())) == 3
    files.remove_temporaries(tmp_path)
    assert {left.name for left in tmp_path.iterdir()} == {"file", ".mine.tmp"}
