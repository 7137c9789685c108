"""`joma reproduce` and `joma demo` for what trains networks: scales, devices, going on."""

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest

from joma.experiments import Outcome, Request, Verdict
from joma.runs import Run
from tests.cli._command import joma, sentence
from tests.cli.conftest import make_experiment, make_trained
from tests.runs._failing import contents

pytestmark = pytest.mark.usefixtures("trained", "gpus")


def interrupt(run: Run, _: Request) -> Outcome:
    run.write_table("begun", {"value": [1.0]})
    raise KeyboardInterrupt


class TestRequests:
    def test_defaults(self):
        result = joma("reproduce", "table1", "--out", "here", "--json")
        assert result.exit_code == 0
        (record,) = json.loads(result.stdout)
        assert record["finding"] == "trained small cpu."
        assert record["scale"] == "small"
        assert record["options"] == {"learning-rate": 1e-5, "hidden": 4096}
        assert record["device"] == "cpu"
        assert Run.open("here").config == {
            "name": "table1",
            "seed": 0,
            "scale": "small",
            "options": {"learning-rate": 1e-5, "hidden": 4096},
        }

    def test_what_was_asked_for(self, gpus):
        gpus.append("H200")
        flags = "--scale tiny --device cpu --learning-rate 3e-4 --hidden 17 --group C50 --group C20"
        result = joma("reproduce", "table1", *flags.split(), "--seed", "2", "--out", "x", "--json")
        (record,) = json.loads(result.stdout)
        assert record["finding"] == "trained tiny cpu C20 C50."
        assert record["groups"] == ["C20", "C50"]
        assert record["options"] == {"learning-rate": 3e-4, "hidden": 17}
        assert Run.open("x").config["seed"] == 2

    @pytest.mark.parametrize("device", ["auto", "cuda"])
    def test_a_gpu_is_used_by_what_trains(self, gpus, device: str):
        gpus.append("H200")
        joma("reproduce", "table1", "--device", device, "--out", "here")
        assert Run.open("here").environment["device"] == "cuda"
        joma("reproduce", "fig2", "table1", "--out", "both")
        assert Run.open("both/fig2").environment["device"] == "cpu"
        assert Run.open("both/table1").environment["device"] == "cuda"

    def test_torch_is_not_asked_without_need(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
        assert joma("reproduce", "fig2", "--out", "a").exit_code == 0
        assert joma("reproduce", "table1", "--device", "cpu", "--out", "b").exit_code == 0

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("fig2 --scale tiny", "--scale must not be given for fig2, which has no scales"),
            ("table1 fig2 --scale tiny", "--scale must not be given for fig2"),
            ("fig2 --learning-rate .1", "--learning-rate must not be given for fig2"),
            ("fig2 --hidden 4", "--hidden must not be given for fig2, which has no options, got 4"),
            ("fig2 --group C20", "--group must not be given for fig2, which has no groups"),
            ("table1 --scale big", "--scale must be one of tiny, small, full for table1, got 'big"),
            ("table1 --group C7", "--group must be one of C20, C30, C50 for table1, got 'C7'"),
            ("table1 --device cuda", "--device must be cpu or auto where torch sees no GPU"),
            ("fig2 --device cuda", "--device must be cpu for fig2"),
            ("table1 --device gpu", "it must be auto, cpu, cuda, not 'gpu'"),
            ("table1 --learning-rate 0", "it must be a positive number, not '0'"),
            ("table1 --learning-rate nan", "it must be a positive number, not 'nan'"),
            ("table1 --learning-rate fast", "it must be a positive number, not 'fast'"),
            ("table1 --hidden 0", "it must be a whole number from 1 on"),
            ("table1 --hidden 2.5", "it must be a whole number from 1 on"),
        ],
    )
    def test_bad_combinations_get_one_sentence_before_anything_runs(self, line, expected: str):
        assert expected in sentence(joma("reproduce", *line.split(), "--out", "here"))
        assert not Path("here").exists()

    def test_another_option_names_those_there_are(self, few_experiments, trained):
        few_experiments["table1"] = make_trained("table1", options=trained.options[:1])
        line = sentence(joma("reproduce", "table1", "--hidden", "4"))
        assert "--hidden must not be given for table1, which has learning-rate, got 4" in line


class TestGoingOn:
    def test_the_same_command_finds_what_it_left(self, few_experiments):
        seen: list[list[str]] = []

        def train(run: Run, request: Request) -> Outcome:
            seen.append(run.tables)
            run.write_table("-".join(request.groups), {"value": [1.0]})
            return Outcome(Verdict.AGREES, "f.")

        few_experiments["table1"] = make_trained("table1", train)
        for group in ("C20", "C30"):
            joma("reproduce", "table1", "--group", group, "--device", "cpu", "--out", "here")
        assert seen == [[], ["C20"]]
        assert Run.open("here").read_json("outcome")["status"] == "done"

    @pytest.mark.parametrize(
        ("flags", "expected"),
        [
            (["--seed", "1"], "(seed 0, not 1)"),
            (["--scale", "tiny"], "(scale small, not tiny)"),
            (["--hidden", "400"], "(options.hidden 4096, not 400)"),
        ],
    )
    @pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
    def test_other_settings_are_refused_before_anything_runs(self, flags, expected, dry_run):
        joma("reproduce", "table1", "--out", "all/table1")
        before = Path("all/table1/config.json").read_bytes()
        line = sentence(
            joma("reproduce", "table1", *flags, *dry_run, "--out", str(Path("all/table1")))
        )
        assert f"--out {Path('all/table1')} holds a table1 run with other settings" in line
        assert expected in line
        assert Path("all/table1/config.json").read_bytes() == before

    def test_ctrl_c_says_how_to_go_on_in_the_default_folder(self, few_experiments):
        few_experiments["table1"] = make_trained("table1", interrupt)
        flags = "--scale tiny --device cpu --learning-rate 0.0001 --hidden 400 --group C30 --seed 3"
        result = joma("reproduce", "table1", *flags.split(), "--json")
        assert result.exit_code == 130
        (folder,) = Path("runs").iterdir()
        command = f"joma reproduce table1 {flags} --json --out {folder}"
        assert result.stderr.splitlines()[-1] == f"Continue with: {command}"
        assert Run.open(folder).read_json("outcome") == {"status": "interrupted"}
        few_experiments["table1"] = make_trained("table1")
        assert joma(*command.split()[1:]).exit_code == 0
        assert Run.open(folder).tables == ["begun", "curve"]

    def test_ctrl_c_among_several(self, few_experiments):
        few_experiments["table1"] = make_trained("table1", interrupt)
        result = joma("reproduce", "fig2", "table1", "fig4", "fig9")
        folder = next(Path("runs").glob("table1*"))
        assert result.stderr.splitlines()[-3:] == [
            f"Continue with: joma reproduce table1 --out {folder}",
            "Then: joma reproduce fig4",
            "Then: joma reproduce fig9",
        ]
        result = joma("reproduce", "fig2", "table1", "fig4", "--out", "my runs")
        assert result.stderr.splitlines()[-2:] == [
            "Continue with: joma reproduce table1 --out 'my runs/table1'",
            "Then: joma reproduce fig4 --out 'my runs/fig4'",
        ]

    def test_sigterm_is_answered_as_ctrl_c_is(self, few_experiments):
        def terminated(run: Run, _: Request) -> Outcome:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)  # does not disturb what is being saved
                run.write_table("begun", {"value": [1.0]})
            raise AssertionError("unreachable")

        before = signal.getsignal(signal.SIGTERM)
        whole = few_experiments["table1"]
        few_experiments["table1"] = make_trained("table1", terminated)
        result = joma("reproduce", "table1", "--out", "here")
        assert signal.getsignal(signal.SIGTERM) is before
        assert result.exit_code == 143
        assert "Terminated. Incomplete: here." in result.stderr
        line = result.stderr.splitlines()[-1]
        assert line == "Continue with: joma reproduce table1 --out here"
        assert Run.open("here").read_json("outcome") == {"status": "interrupted"}
        assert Run.open("here").tables == ["begun"]
        few_experiments["table1"] = whole
        assert joma(*line.removeprefix("Continue with: joma ").split()).exit_code == 0

    @pytest.mark.parametrize("make", [make_trained, make_experiment])
    def test_a_removed_folder_is_an_error(self, few_experiments, make):
        def removing(run: Run, _: Request) -> Outcome:
            shutil.rmtree(run.path)
            run.write_table("late", {"a": [1]})
            return Outcome(Verdict.AGREES, "f.")

        few_experiments["table1"] = make("table1", reproduce=removing)
        result = joma("reproduce", "table1", "--out", "here")
        assert "run folder here was removed or replaced while" in sentence(result)
        assert not Path("here").exists()


class TestFullDisk:
    @staticmethod
    def full(run: Run, _: Request) -> Outcome:
        raise OSError(28, "No space left on device", str(run.path / "metrics" / "part-0"))

    def test_one_sentence_says_how_to_go_on(self, few_experiments):
        few_experiments["table1"] = make_trained("table1", self.full)
        line = sentence(joma("reproduce", "table1", "--scale", "tiny"))
        (folder,) = Path("runs").iterdir()
        assert line == (
            f"joma: table1 stopped, {folder / 'metrics' / 'part-0'}: No space left on device; "
            f"when that is fixed, resume with `joma reproduce table1 --scale tiny --out {folder}`"
        )
        assert Run.open(folder).read_json("outcome") == {"status": "failed"}


class TestTable:
    ROWS = (
        {"C": 20, "latents": "(10, 20)", "published s=1": ".81 ± .05", "ours s=1": 0.8341234},
        {"C": 50, "latents": "(20, 30)", "published s=1": ".61 ± .04", "ours s=1": float("nan")},
    )

    @pytest.fixture(autouse=True)
    def with_table(self, few_experiments, trained):
        import numpy as np

        rows = [{**row, "nodes": np.int64(4096)} for row in self.ROWS]
        outcome = Outcome(
            Verdict.AGREES, "f.", rows, ("Training adds ρ ≤ .1.", "And no more. " * 20)
        )
        few_experiments["table1"] = make_trained("table1", lambda *_: outcome)

    def test_json(self):
        (record,) = json.loads(joma("reproduce", "table1", "--json").stdout)
        assert record["table"][0] == {**self.ROWS[0], "nodes": 4096}
        assert record["table"][1]["ours s=1"] is None
        assert record["paragraphs"][0] == "Training adds ρ ≤ .1."

    def test_wide(self):
        lines = joma("reproduce", "table1").stdout.splitlines()
        cells = [line.split() for line in lines]
        assert ["20", "(10,", "20)", ".81", "±", ".05", "0.8341", "4096"] in cells
        assert ["50", "(20,", "30)", ".61", "±", ".04", "–", "4096"] in cells
        assert "  Training adds ρ ≤ .1." in lines
        assert all(line == line.rstrip() for line in lines)

    @pytest.mark.parametrize("columns", [12, 30, 40, 60, 100])
    def test_no_number_is_broken(self, monkeypatch, columns: int):
        monkeypatch.setenv("COLUMNS", str(columns))
        result = joma("reproduce", "table1", "--out", "x")
        shown = result.stdout.split("agrees")[1]
        assert all(text in shown for text in ("0.8341", "4096"))
        if columns >= 30:
            assert ".81 ± .05" in shown
            assert max(map(len, result.stdout.splitlines())) <= columns


@pytest.mark.usefixtures("few_claims")
class TestDemo:
    def test_experiments_that_train_networks_are_not_part_of_it(self, few_experiments):
        few_experiments["table1"] = make_trained("table1")
        del few_experiments["fig9"]
        result = joma("demo", "--jobs", "1", "--out", "tour", "--seed", "1", "--json")
        assert result.exit_code == 0, result.stderr
        records = json.loads(result.stdout)["experiments"]
        assert [record["name"] for record in records] == ["fig2", "fig4"]
        assert not Path("tour/table1").exists()
        assert Run.open("tour/fig2").config["seed"] == 1

    def test_one_that_was_stopped_is_started_over_and_one_that_ended_is_kept(self, few_experiments):
        line = ("demo", "--jobs", "1", "--out", "tour")
        del few_experiments["fig9"]
        whole = few_experiments["fig4"]
        few_experiments["fig4"] = make_experiment("fig4", reproduce=interrupt)
        assert joma(*line).exit_code == 130
        few_experiments["fig4"] = whole
        assert joma(*line).exit_code == 0
        before = contents(Path("tour"))
        assert "--out tour holds an earlier demo run" in sentence(joma(*line))
        assert contents(Path("tour")) == before
