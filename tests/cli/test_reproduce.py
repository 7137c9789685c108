"""`joma reproduce` and `joma demo`: what they print, what they write and how they exit."""

import json
import signal
from pathlib import Path

import pytest

from joma.experiments import Outcome, Request, Scale, Verdict
from joma.runs import Run, RunSummary
from tests.cli._command import joma, sentence, unwrapped
from tests.cli.conftest import make_experiment, make_trained

pytestmark = pytest.mark.usefixtures("trained", "gpus")


@pytest.mark.usefixtures("few_experiments")
class TestReproduce:
    def test_one_folder_each(self):
        result = joma("reproduce", "fig2", "fig4", "fig2", "--seed", "7")
        assert result.exit_code == 0
        assert result.stdout.count("seen with seed 7.") == 2
        assert "✓ agrees" in result.stdout
        folders = sorted(Path("runs").iterdir())
        assert [Run.open(folder).name for folder in folders] == ["fig2", "fig4"]
        assert f"{folders[0] / 'figures' / 'picture.png'}" in result.stdout
        assert Run.open(folders[0]).config["seed"] == 7

    def test_disagreement_exits_with_1(self):
        result = joma("reproduce", "fig9", "fig2", "--out", "all", "--json")
        assert result.exit_code == 1
        records = json.loads(result.stdout)
        assert [(record["name"], record["verdict"]) for record in records] == [
            ("fig9", "differs"),
            ("fig2", "agrees"),
        ]
        assert [record["run"] for record in records] == [
            str(Path("all/fig9")),
            str(Path("all/fig2")),
        ]
        assert Run.open("all/fig9").read_json("outcome")["verdict"] == "differs"

    def test_dry_run_makes_nothing(self):
        result = joma("reproduce", "fig2", "fig4", "--out", "all", "--dry-run")
        assert result.exit_code == 0
        assert f"fig2 → {Path('all/fig2')}\n" in result.stdout
        (record,) = json.loads(joma("reproduce", "fig2", "--dry-run", "--json").stdout)
        assert record["about_seconds"] == 5
        assert not list(Path().iterdir())

    @pytest.mark.parametrize("arguments", [["fig3"], []])
    def test_unknown_and_missing_names_list_what_there_is(self, arguments: list[str]):
        line = sentence(joma("reproduce", *arguments))
        assert all(name in line for name in ("fig2", "fig4", "fig9"))

    def test_ctrl_c_keeps_what_was_finished(self, few_experiments):
        def interrupted(run: Run, request: Request):
            raise KeyboardInterrupt

        few_experiments["fig4"] = make_experiment("fig4", reproduce=interrupted)
        result = joma("reproduce", "fig2", "fig4", "--out", "all")
        assert result.exit_code == 130
        assert f"Interrupted. Saved: {Path('all/fig2')}. " in result.stderr
        assert f"Incomplete: {Path('all/fig4')}." in result.stderr
        assert f"Continue with: joma reproduce fig4 --out {Path('all/fig4')}\n" in result.stderr
        assert Run.open("all/fig4").read_json("outcome") == {"status": "interrupted"}

    def test_one_that_was_stopped_is_started_over(self, few_experiments):
        whole = few_experiments["fig2"]
        few_experiments["fig2"] = make_experiment("fig2", reproduce=interrupt)
        assert joma("reproduce", "fig2", "--out", "here").exit_code == 130
        few_experiments["fig2"] = whole
        assert "seed 0, not 1" in sentence(
            joma("reproduce", "fig2", "--out", "here", "--seed", "1")
        )
        assert joma("reproduce", "fig2", "--out", "here").exit_code == 0
        assert RunSummary.of(Run.open("here")).outcome["status"] == "done"


@pytest.mark.usefixtures("few_experiments")
class TestReference:
    @pytest.fixture
    def given(self, few_experiments) -> list[Path | None]:
        """What an experiment that can be compared is given."""
        found: list[Path | None] = []

        def compare(run: Run, request: Request) -> Outcome:
            found.append(request.reference)
            raise KeyboardInterrupt

        few_experiments["fig4"] = make_experiment(
            "fig4", reproduce=compare, reference="recorded curves"
        )
        Path("recorded").mkdir()
        return found

    def test_it_reaches_the_experiment_and_the_command_that_goes_on(self, given):
        result = joma("reproduce", "fig4", "--reference", "recorded", "--out", "here")
        assert given == [Path("recorded")]
        assert "joma reproduce fig4 --reference recorded --out here\n" in result.stderr
        assert "reference" not in Run.open("here").config

    @pytest.mark.parametrize(
        ("name", "folder", "expected"),
        [
            ("fig2", "recorded", "--reference must not be given for fig2, which has no recorded"),
            ("fig4", "none", "--reference must be a folder with recorded results, got 'none'"),
        ],
    )
    def test_a_wrong_one_gets_one_sentence(self, given, name: str, folder: str, expected: str):
        line = sentence(joma("reproduce", name, "--reference", folder, "--out", "here"))
        assert expected in line
        assert not given
        assert not Path("here").exists()


@pytest.mark.usefixtures("few_claims", "few_experiments")
class TestDemo:
    def test_tour(self, few_experiments):
        del few_experiments["fig9"]
        result = joma("demo", "--jobs", "1", "--out", "tour")
        assert result.exit_code == 0
        for name in ("tour/figures/verify.png", "tour/fig2/figures/picture.png"):
            assert Path(name).is_file()
        assert result.stdout.count("✓ fig") == 2
        assert "Left out: the training needs" in result.stdout
        outcome = Run.open("tour").read_json("outcome")
        assert outcome["agrees"] is True
        assert "2 of 2 theory figures show what was published." in outcome["finding"]
        Run.create("fig4", {}, out="other/fig2")
        line = sentence(joma("demo", "--out", "other"))
        assert f"--out {Path('other/fig2')} holds a fig4 run" in line

    def test_what_is_not_judged_has_no_mark(self, few_experiments):
        del few_experiments["fig9"]
        scales = {"tiny": Scale(1, "2 CPU cores", "1 GB")}
        few_experiments["trained"] = make_experiment(
            "trained", Verdict.NOT_COMPARABLE, scales=scales, default_scale="tiny"
        )
        result = joma("demo", "--jobs", "1")
        assert result.exit_code == 0
        assert "Picture trained" not in result.stdout
        assert result.stdout.count("agrees") == 2

    def test_json_and_disagreement(self):
        result = joma("demo", "--jobs", "1", "--json")
        assert result.exit_code == 1
        record = json.loads(result.stdout)
        assert len(record["verdicts"]) == 3
        assert [one["verdict"] for one in record["experiments"]] == [
            "agrees",
            "agrees",
            "differs",
        ]


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

    @pytest.mark.parametrize("device", ["auto", "cuda"])
    def test_a_gpu_is_used_by_what_trains(self, gpus, device: str):
        gpus.append("H200")
        joma("reproduce", "table1", "--device", device, "--out", "here")
        assert Run.open("here").environment["device"] == "cuda"
        joma("reproduce", "fig2", "table1", "--out", "both")
        assert Run.open("both/fig2").environment["device"] == "cpu"
        assert Run.open("both/table1").environment["device"] == "cuda"

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


def test_a_part_of_the_work_takes_a_part_of_the_time():
    found = plan("--group", "C20", "--group", "C50")
    assert found["about_seconds"] == 240 * 2 / 3
    assert found["scales"]["full"]["about_seconds"] == 9000 * 2 / 3


@pytest.mark.parametrize(
    ("scale", "found", "warned"),
    [("full", [], True), ("small", [], False), ("full", ["H200"], False)],
)
def test_work_for_a_gpu_is_warned_of_on_a_cpu_and_goes_on(gpus, scale, found, warned: bool):
    gpus.extend(found)
    result = joma("reproduce", "table1", "--scale", scale)
    assert result.exit_code == 0
    assert ("may take days: --dry-run says" in unwrapped(result.stderr)) == warned
