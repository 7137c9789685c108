"""What is installed from a wheel is all that the package reads."""

import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_a_wheel_has_every_file_of_the_package(tmp_path):
    builders = pytest.importorskip("hatchling.builders.wheel", reason="it builds the wheel")
    (wheel,) = builders.WheelBuilder(str(ROOT)).build(directory=str(tmp_path))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    source = ROOT / "src"
    files = [path for path in (source / "joma").rglob("*") if path.is_file()]
    kept = [path for path in files if "__pycache__" not in path.parts]
    assert {path.suffix for path in kept} >= {".py", ".toml", ".bib", ".html", ".js", ".css"}
    missing = [path for path in kept if path.relative_to(source).as_posix() not in names]
    assert missing == []
    scripts = next(name for name in names if name.endswith("entry_points.txt"))
    assert scripts.startswith("joma-")
