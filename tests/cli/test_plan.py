"""`joma reproduce --dry-run`: what is said of the time it takes, before it starts."""

import json
from pathlib import Path

import pytest

from tests.cli._command import joma, unwrapped

pytestmark = pytest.mark.usefixtures("trained", "gpus")


def plan(*arguments: str) -> dict:
    (found,) = json.loads(joma("reproduce", "table1", *arguments, "--dry-run", "--json").stdout)
    return found


def test_every_scale_the_device_and_the_groups():
    result = joma("reproduce", "table1", "--group", "C30", "--out", "here", "--dry-run")
    for line in (
        "table1 → here",
        "  scale: small",
        "  scales: tiny about 3 s, on 2 CPU cores, memory 1 GB",
        "  scales: full about 50 min, on an H200, memory 20 GB",
        "  device: cpu",
        "  options: learning-rate 1e-05",
        "  groups: C30",
    ):
        assert line in result.stdout.splitlines()
    assert not Path("here").exists()


def test_json_and_resuming():
    joma("reproduce", "table1", "--out", "here")
    found = plan("--out", "here")
    assert found["continues"] is True
    assert (found["scale"], found["about_seconds"], found["memory"]) == ("small", 240, "2 GB")
    assert found["scales"]["full"] == {"about_seconds": 9000, "on": "an H200", "memory": "20 GB"}
    assert found["groups"] == ["C20", "C30", "C50"]


def test_a_part_of_the_work_takes_a_part_of_the_time():
    found = plan("--group", "C20", "--group", "C50")
    assert found["about_seconds"] == 240 * 2 / 3
    assert found["scales"]["full"]["about_seconds"] == 9000 * 2 / 3


@pytest.mark.parametrize(("device", "scale"), [("cpu", "full"), ("cuda", "small")])
def test_nothing_is_known_of_the_other_kind_of_device(gpus, device: str, scale: str):
    if device == "cuda":
        gpus.append("H200")
    assert plan("--scale", scale)["about_seconds"] is None


@pytest.mark.parametrize(
    ("scale", "found", "warned"),
    [("full", [], True), ("small", [], False), ("full", ["H200"], False)],
)
def test_work_for_a_gpu_is_warned_of_on_a_cpu_and_goes_on(gpus, scale, found, warned: bool):
    gpus.extend(found)
    result = joma("reproduce", "table1", "--scale", scale)
    assert result.exit_code == 0
    assert ("may take days: --dry-run says" in unwrapped(result.stderr)) == warned
