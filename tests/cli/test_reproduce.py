"""`joma reproduce` and `joma demo`: what they print, what they write and how they exit."""

import json
from pathlib import Path

import pytest

from joma.experiments import Outcome, Request, Scale, Verdict
from joma.runs import Run, RunSummary
from tests.cli._command import joma, sentence
from tests.cli.conftest import make_experiment
from tests.cli.test_trained import interrupt
from tests.runs._failing import contents


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

    @pytest.mark.parametrize("verdict", [Verdict.NOT_COMPARABLE, Verdict.INCOMPLETE])
    def test_what_decides_nothing_exits_with_0(self, few_experiments, verdict: Verdict):
        few_experiments["fig9"] = make_experiment("fig9", verdict)
        result = joma("reproduce", "fig9", "--out", "here")
        assert result.exit_code == 0
        assert f"seen with seed 0.  {verdict}" in result.stdout
        listed = joma("runs", "list", ".")
        assert verdict.value.split()[0] in listed.stdout

    def test_out_is_the_folder_of_a_single_one(self):
        assert joma("reproduce", "fig2", "--out", "here").exit_code == 0
        assert Run.open("here").tables == ["curve"]

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

    def test_an_earlier_run_is_kept(self, few_experiments):
        joma("reproduce", "fig2", "--out", "here")
        before = contents(Path("here"))
        message = sentence(joma("reproduce", "fig2", "--out", "here"))
        assert message == (
            "joma: --out here holds an earlier fig2 run, which is kept; give another folder, such "
            "as here-2"
        )
        assert contents(Path("here")) == before

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
