"""`joma reproduce`: what it says of the time it takes, before it starts."""

import json
from pathlib import Path

import pytest

from tests.cli._command import joma
from tests.cli.conftest import make_trained

pytestmark = pytest.mark.usefixtures("trained", "gpus")


class TestDryRun:
    def test_every_scale_the_device_and_the_groups(self):
        result = joma("reproduce", "table1", "fig2", "--group", "C30", "--out", "all", "--dry-run")
        assert result.exit_code == 2  # fig2 has no groups
        result = joma("reproduce", "table1", "--group", "C30", "--out", "here", "--dry-run")
        assert result.stdout.splitlines() == [
            "table1: Picture table1 → here",
            "  tiny: about 3 s on 2 CPU cores, memory 1 GB",
            "  small: about 80 s on 2 CPU cores, memory 2 GB (this one)",
            "  full: about 50 min on an H200, memory 20 GB",
            "  device: cpu",
            "  learning-rate: 1e-05",
            "  hidden: 4096",
            "  groups: C30 of C20, C30, C50",
        ]
        assert not Path("here").exists()
        result = joma("reproduce", "table1", "fig2", "--dry-run")
        assert "  groups: C20, C30, C50\n" in result.stdout
        assert result.stdout.endswith("Together about 4 min.\n")

    def test_json_and_going_on(self):
        joma("reproduce", "table1", "--out", "here")
        (plan,) = json.loads(
            joma("reproduce", "table1", "--out", "here", "--dry-run", "--json").stdout
        )
        assert plan["continues"] is True
        assert (plan["scale"], plan["about_seconds"], plan["memory"]) == ("small", 240, "2 GB")
        assert plan["scales"]["full"] == {
            "about_seconds": 9000,
            "on": "an H200",
            "memory": "20 GB",
        }
        assert plan["groups"] == ["C20", "C30", "C50"]

    def test_a_part_of_the_work_takes_a_part_of_the_time(self):
        flags = ["--group", "C20", "--group", "C50", "--dry-run", "--json"]
        (plan,) = json.loads(joma("reproduce", "table1", *flags).stdout)
        assert plan["about_seconds"] == 240 * 2 / 3
        assert plan["scales"]["full"]["about_seconds"] == 9000 * 2 / 3

    @pytest.mark.parametrize(
        ("device", "scale", "line"),
        [
            ("cpu", "full", "2.5 h on an H200, memory 20 GB (this one; on cpu far longer: not"),
            ("cuda", "small", "4 min on 2 CPU cores, memory 2 GB (this one; not measured on cuda)"),
        ],
    )
    def test_nothing_is_known_of_the_other_kind_of_device(self, gpus, device, scale, line):
        if device == "cuda":
            gpus.append("H200")
        asked = ("reproduce", "table1", "--scale", scale)
        (plan,) = json.loads(joma(*asked, "--dry-run", "--json").stdout)
        assert plan["about_seconds"] is None
        result = joma(*asked, "--dry-run")
        assert f"  {scale}: about {line}" in result.stdout
        assert "Together" not in result.stdout
        assert result.stderr == ""

    def test_the_sum_says_what_it_leaves_out(self, few_experiments, monkeypatch):
        few_experiments["table1"] = make_trained("table1", default_scale="full")
        result = joma("reproduce", "fig2", "table1", "--dry-run")
        assert result.stdout.endswith(
            f"Together about {few_experiments['fig2'].seconds:g} s, without table1.\n"
        )


class TestMadeForGpu:
    def test_one_line_warns_and_the_work_goes_on(self):
        result = joma("reproduce", "table1", "--scale", "full", "--group", "C20", "--json")
        assert result.exit_code == 0
        first = result.stderr.splitlines()[0]
        assert first == (
            "table1 at scale full was made for a GPU; on this CPU what is not done may take days; "
            "--scale small takes about 80 s"
        )
        assert json.loads(result.stdout)[0]["finding"] == "trained full cpu C20."

    @pytest.mark.parametrize(("scale", "found"), [("small", []), ("full", ["H200"])])
    def test_what_fits_gets_none(self, gpus, scale: str, found: list[str]):
        gpus.extend(found)
        result = joma("reproduce", "table1", "--scale", scale)
        assert result.exit_code == 0
        assert "GPU" not in result.stderr
