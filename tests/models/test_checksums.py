"""Exported models carry checksums, and any flipped bit in any of their files is found."""

import random
import subprocess
from pathlib import Path

import pytest

from joma.analysis.probing import Probing, measure
from joma.errors import JomaError
from joma.models.checksums import SUMS, check_checksums, checksums_of
from joma.models.series import Series, verify
from tests.models.tiny import tiny


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A series of two steps."""
    folder = tmp_path_factory.mktemp("run") / "series"
    for step in (0, 4):
        own = folder / f"step-{step:06d}"
        tiny("llama", seed=step).save_pretrained(own)
        (own / SUMS).write_bytes(checksums_of(own))
    return folder


def _flipped(path: Path, bit: int) -> bytes:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def test_a_flipped_bit_is_found(exported):
    folder = exported / "step-000004"
    files = sorted(folder.iterdir())
    assert {"config.json", "model.safetensors", SUMS} <= {path.name for path in files}
    integrity = verify(Series.of(exported))
    assert integrity.clean
    assert (integrity.verified, integrity.unverified) == ((0, 4), ())
    draw = random.Random(0)
    for number in range(20):
        path = files[number % len(files)]
        whole = path.read_bytes()
        path.write_bytes(_flipped(path, draw.randrange(8 * len(whole))))
        try:
            integrity = verify(Series.of(exported))
            assert integrity.bad_steps == (4,), (path.name, number)
        finally:
            path.write_bytes(whole)
    assert verify(Series.of(exported)).clean


def test_other_tools_read_the_checksums(exported):
    folder = exported / "step-000000"
    ended = subprocess.run(
        ["sha256sum", "-c", "--strict", SUMS], cwd=folder, capture_output=True, text=True
    )
    assert ended.returncode == 0
    assert "model.safetensors: OK" in ended.stdout


@pytest.mark.parametrize("low_memory", [False, True])
def test_a_damaged_model_is_not_measured(exported, tmp_path, low_memory):
    folder = tmp_path / "step-000000"
    folder.mkdir()
    for path in (exported / "step-000000").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    probing = Probing(metrics=("stable_rank",), low_memory=low_memory)
    measure(str(folder), "", probing)
    path = folder / "model.safetensors"
    path.write_bytes(_flipped(path, 8 * path.stat().st_size - 5))
    with pytest.raises(JomaError, match=r"model\.safetensors is damaged: its sha256"):
        measure(str(folder), "", probing)
    (folder / SUMS).unlink()
    measure(str(folder), "", probing)


def test_a_listed_file_that_is_missing_is_found_and_other_forms_are_left_alone(tmp_path):
    (tmp_path / SUMS).write_text(f"{'0' * 64}  config.json\n")
    with pytest.raises(JomaError, match=r"config\.json is missing"):
        check_checksums(tmp_path)
    (tmp_path / SUMS).write_text("".join(f"{'0' * 64} *{name}\n" for name in ("a", "b/c")))
    assert check_checksums(tmp_path) is False


@pytest.mark.parametrize("content", ["", "x\n", f"{'0' * 64} a\n", f"{'0' * 64}  a", "é\n"])
def test_checksums_that_are_none(tmp_path, content):
    (tmp_path / SUMS).write_text(content)
    with pytest.raises(JomaError, match="is damaged"):
        check_checksums(tmp_path)
