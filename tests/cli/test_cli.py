"""Commands: what they print, what they write and how they exit."""

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from joma.cli import _show
from joma.cli._app import app
from joma.cli._edge import unknown
from joma.cli._reproduce import SECONDS
from joma.experiments import EXPERIMENTS, claims
from joma.experiments._experiment import Outcome
from joma.experiments.claims import Measurement
from joma.runs import Run
from tests.cli.conftest import make_experiment


def joma(*arguments: str):
    return CliRunner().invoke(app, list(arguments), prog_name="joma", catch_exceptions=False)


def sentence(result) -> str:
    """What bad input gets: exit code 2 and one line on standard error."""
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("joma: ")
    return line


COMMANDS = ["verify", "reproduce", "demo", "runs list", "runs show", "runs compare"]


@pytest.mark.parametrize("command", ["", "runs", *COMMANDS])
def test_every_help_has_an_example(command: str):
    result = joma(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"Example: joma {command}".strip() in result.stdout


@pytest.mark.parametrize("command", ["", "runs", *COMMANDS])
def test_help_speaks_the_users_words(command: str):
    text = joma(*command.split(), "--help").stdout
    for leak in ("<", "[[", "[default: (", "{", "..."):
        assert leak not in text.replace("[ARGS]...", "").replace("[NAME]...", "")


def test_reproduce_help_names_every_experiment():
    assert list(SECONDS) == list(EXPERIMENTS)
    text = joma("reproduce", "--help").stdout
    assert all(name in text for name in EXPERIMENTS)


@pytest.mark.parametrize("command", ["", "runs"])
def test_without_a_command_help_is_printed(command: str):
    result = joma(*command.split())
    assert result.exit_code == 0
    assert "Usage: joma" in result.stdout


def test_version():
    import joma as package

    assert joma("--version").stdout == f"joma {package.__version__}\n"


@pytest.mark.parametrize("arguments", [["bogus"], ["verify", "--bogus"], ["runs", "bogus"]])
def test_a_wrong_command_line_gets_one_sentence(arguments: list[str]):
    assert "bogus" in sentence(joma(*arguments))


@pytest.mark.parametrize("command", ["verify", "reproduce", "demo"])
@pytest.mark.parametrize("seed", ["-1", "one"])
def test_a_bad_seed_gets_one_sentence(command: str, seed: str):
    line = sentence(joma(command, "--seed", seed))
    assert "--seed" in line
    assert repr(seed) in line


def test_no_processes_are_too_few():
    assert "not '0'" in sentence(joma("demo", "--jobs", "0"))


def test_unknown_lists_the_closest_first():
    message = str(unknown("claim", "lema8", ["theorem2", "lemma8", "eqn6"]))
    assert message.startswith("there is no claim 'lema8'; available: lemma8, ")
    names = [f"eqn{k}" for k in range(20)]
    message = str(unknown("claim", "eqn17", names, all_of_them="joma verify --list"))
    assert "closest are eqn17" in message
    assert sum(f"{name}," in message or f"{name};" in message for name in names) == 5
    assert message.endswith("`joma verify --list` lists all")


def verdict(derived: bool, printed: bool | None, **extra):
    form = None if printed is None else {"holds": printed, "error": 1.0}
    return {"derived": {"holds": derived, "error": 1.0, "tolerance": 2.0, **extra}, "printed": form}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([verdict(True, False)], "The claim holds as derived; its printed form does not hold."),
        ([verdict(True, True)], "The claim holds as derived; its printed form holds."),
        ([verdict(False, None)], "The claim does not hold as derived."),
        ([verdict(True, None)] * 2, "2 of 2 claims hold as derived."),
        (
            [verdict(True, True), verdict(False, False)],
            "1 of 2 claims holds as derived; 1 of 2 printed forms does not hold.",
        ),
        (
            [verdict(True, False)] * 32 + [verdict(True, True)] * 42,
            "74 of 74 claims hold as derived; 32 of 74 printed forms do not hold.",
        ),
    ],
)
def test_summary(records, expected: str):
    assert _show.summary(records) == expected


@pytest.mark.usefixtures("few_claims")
class TestVerify:
    def test_table_errata_and_summary(self):
        result = joma("verify")
        assert result.exit_code == 0
        for text in ("right", "JoMA Eqn 1", "✓ 0", "✗ 1.0e+00", "≤ 1.0e-06", "by hand"):
            assert text in result.stdout
        assert "misprinted: print says three." in result.stdout
        last = result.stdout.splitlines()[-1]
        assert last.startswith("3 of 3 claims hold as derived; 1 of 2 printed forms does not hold.")
        assert not Path("runs").exists()

    def test_a_narrow_terminal_loses_nothing(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        result = joma("verify")
        for text in ("misprinted", "JoMA Eqn 2", "✗ 1.0e+00", "≤ 1.0e-06", "by hand"):
            assert text in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 80

    def test_forty_columns_keep_the_claim(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "40")
        lines = joma("verify").stdout.splitlines()
        assert max(map(len, lines)) <= 40
        row = next(k for k, line in enumerate(lines) if line.startswith("misprinted"))
        assert lines[row].endswith("✓ 0 ≤ 1.0e-06")
        assert lines[row + 1].endswith("✗ 1.0e+00 printed")

    @pytest.mark.parametrize("columns", ["40", "80", "140"])
    def test_a_pipe_gets_no_padding(self, monkeypatch, columns: str):
        monkeypatch.setenv("COLUMNS", columns)
        lines = joma("verify").stdout.splitlines()
        assert lines[0].startswith("claim")
        assert all(line == line.rstrip() for line in lines)

    @pytest.mark.parametrize("columns", ["40", "80", "140"])
    def test_a_sampled_verdict_quotes_its_standard_error(
        self, monkeypatch, few_claims, columns: str
    ):
        monkeypatch.setenv("COLUMNS", columns)
        sampled = dataclasses.replace(
            few_claims[0], measure=lambda *_: Measurement(4.8e-3, 8.4e-3, 2.1e-3)
        )
        monkeypatch.setattr(claims, "CLAIMS", (sampled, *few_claims[1:]))
        text = joma("verify").stdout
        assert text.count("(SE 2.1e-03)") == 1
        assert "✓ 4.8e-03 ≤ 8.4e-03" in text
        if columns != "40":
            assert "≤ 8.4e-03 (SE 2.1e-03)" in text

    def test_list(self):
        lines = joma("verify", "--list").stdout.splitlines()
        assert [line.split() for line in lines[2:]] == [
            ["right", "two"],
            ["misprinted", "two"],
            ["ours", "two"],
        ]
        records = json.loads(joma("verify", "--list", "--json", "--claim", "ours").stdout)
        assert records == [{"claim": "ours", "title": "two"}]

    def test_json_is_all_there_is(self):
        result = joma("verify", "--json", "--claim", "ours", "--claim", "misprinted")
        records = json.loads(result.stdout)
        assert [record["claim"] for record in records] == ["misprinted", "ours"]
        assert records[0]["printed"] == {"holds": False, "error": 1.0}
        assert records[1]["printed"] is None

    def test_a_failing_claim_exits_with_1(self, monkeypatch, few_claims):
        wrong = dataclasses.replace(few_claims[0], derived=lambda: 2.5)
        monkeypatch.setattr(claims, "CLAIMS", (wrong, *few_claims[1:]))
        result = joma("verify")
        assert result.exit_code == 1
        assert "2 of 3 claims hold" in result.stdout
        assert joma("verify", "--claim", "ours").exit_code == 0

    def test_an_unknown_claim_gets_one_sentence(self):
        line = sentence(joma("verify", "--claim", "rigt"))
        assert line.startswith("joma: there is no claim 'rigt'; the closest are right, ")
        assert line.endswith("`joma verify --list` lists all")

    def test_plot_makes_a_run_folder(self):
        result = joma("verify", "--plot", "--out", "here", "--seed", "5")
        assert result.exit_code == 0
        run = Run.open("here")
        assert run.config == {
            "name": "verify",
            "seed": 5,
            "claims": ["right", "misprinted", "ours"],
        }
        assert [path.name for path in run.figures] == ["verify.png", "verify.svg"]
        assert len(run.read_json("verdicts")) == 3
        assert run.read_json("outcome")["status"] == "done"
        assert f"Picture: {Path('here/figures/verify.png')}" in result.stdout

    def test_plot_with_json_keeps_standard_output_clean(self):
        result = joma("verify", "--plot", "--json")
        assert len(json.loads(result.stdout)) == 3
        assert "Picture: runs" in result.stderr

    def test_a_folder_with_other_things_is_refused(self):
        Path("here").mkdir()
        Path("here/file").touch()
        assert "--out here has other things" in sentence(joma("verify", "--plot", "--out", "here"))

    def test_the_folder_of_another_run_is_refused(self):
        run = Run.create("fig4", {}, out="f4")
        run.write_table("curve", {"a": [1]})
        assert "--out f4 holds a fig4 run" in sentence(joma("verify", "--out", "f4"))
        assert Run.open("f4").tables == ["curve"]

    def test_a_folder_that_cannot_be_made_gets_one_sentence(self):
        Path("file").touch()
        assert "--out file is a file" in sentence(joma("verify", "--out", "file"))
        below = Path("file", "below")
        line = sentence(joma("verify", "--out", str(below)))
        assert line.startswith(f"joma: cannot write to --out {below}: ")

    def test_our_own_mistakes_are_not_called_bad_input(self, monkeypatch, few_claims):
        def broken():
            raise ValueError("shapes do not match")

        monkeypatch.setattr(claims, "CLAIMS", (dataclasses.replace(few_claims[0], derived=broken),))
        with pytest.raises(RuntimeError, match="check of claim right failed"):
            joma("verify")

    def test_ctrl_c_says_what_was_saved(self, monkeypatch, few_claims):
        def interrupted():
            raise KeyboardInterrupt

        last = dataclasses.replace(few_claims[2], derived=interrupted)
        monkeypatch.setattr(claims, "CLAIMS", (*few_claims[:2], last))
        monkeypatch.setattr("sys.argv", ["joma", "verify", "--out", "my runs"])
        result = joma("verify", "--out", "my runs")
        assert result.exit_code == 130
        assert "Measured 2 of 3 claims." in result.stderr
        assert "Interrupted. Incomplete: my runs (config.json, " in result.stderr
        assert "joma verify --out 'my runs'" in result.stderr
        assert "✗ 1.0e+00" in result.stdout
        assert "2 of 2 claims hold" in result.stdout
        run = Run.open("my runs")
        assert run.read_json("outcome") == {"status": "interrupted"}
        assert len(run.read_json("verdicts")) == 2
        assert "Nothing was saved" in joma("verify").stderr
        assert len(json.loads(joma("verify", "--json").stdout)) == 2


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
        assert [(record["name"], record["agrees"]) for record in records] == [
            ("fig9", False),
            ("fig2", True),
        ]
        assert [record["run"] for record in records] == [
            str(Path("all/fig9")),
            str(Path("all/fig2")),
        ]
        assert Run.open("all/fig9").read_json("outcome")["agrees"] is False

    def test_out_is_the_folder_of_a_single_one(self):
        assert joma("reproduce", "fig2", "--out", "here").exit_code == 0
        assert Run.open("here").tables == ["curve"]

    def test_every_folder_is_checked_before_anything_runs(self):
        Path("all/fig4").mkdir(parents=True)
        Path("all/fig4/file").touch()
        sentence(joma("reproduce", "fig2", "fig4", "--out", "all"))
        assert not Path("all/fig2").exists()

    def test_dry_run_makes_nothing(self):
        result = joma("reproduce", "fig2", "fig4", "--out", "all", "--dry-run")
        assert result.exit_code == 0
        assert result.stdout.splitlines() == [
            f"fig2: Picture fig2 → {Path('all/fig2')}",
            f"  about {SECONDS['fig2']} s, memory under 1 GB",
            f"fig4: Picture fig4 → {Path('all/fig4')}",
            f"  about {SECONDS['fig4']} s, memory under 1 GB",
            f"Together about {SECONDS['fig2'] + SECONDS['fig4']} s.",
        ]
        (record,) = json.loads(joma("reproduce", "fig2", "--dry-run", "--json").stdout)
        assert record["about_seconds"] == SECONDS["fig2"]
        assert not list(Path().iterdir())

    @pytest.mark.parametrize("arguments", [["fig3"], []])
    def test_unknown_and_missing_names_list_what_there_is(self, arguments: list[str]):
        line = sentence(joma("reproduce", *arguments))
        assert all(name in line for name in ("fig2", "fig4", "fig9"))

    def test_ctrl_c_keeps_what_was_finished(self, few_experiments, monkeypatch):
        def interrupted(run: Run, seed: int):
            raise KeyboardInterrupt

        few_experiments["fig4"] = make_experiment("fig4", reproduce=interrupted)
        monkeypatch.setattr("sys.argv", ["joma", "reproduce", "fig2", "fig4", "--out", "all"])
        result = joma("reproduce", "fig2", "fig4", "--out", "all")
        assert result.exit_code == 130
        assert f"Interrupted. Saved: {Path('all/fig2')}. " in result.stderr
        assert f"Incomplete: {Path('all/fig4')} (config.json, environment.json, outcome.json)." in (
            result.stderr
        )
        assert "Run it again with: joma reproduce fig2 fig4 --out all" in result.stderr
        assert Run.open("all/fig4").read_json("outcome") == {"status": "interrupted"}

    def test_a_folder_that_cannot_be_written_gets_one_sentence(self, monkeypatch):
        def denied(*_: object, **__: object):
            raise PermissionError(13, "Permission denied", "all")

        monkeypatch.setattr(Run, "create", denied)
        line = sentence(joma("reproduce", "fig2", "--out", "all"))
        assert line == "joma: cannot write to --out all: Permission denied"

    def test_long_findings_keep_their_indent(self, few_experiments, monkeypatch):
        monkeypatch.setenv("COLUMNS", "40")

        def talkative(run: Run, seed: int) -> Outcome:
            return Outcome(True, "many words are seen here, " * 5)

        few_experiments["fig4"] = make_experiment("fig4", reproduce=talkative)
        lines = joma("reproduce", "fig4", "--out", "x").stdout.splitlines()
        assert len(lines) > 5
        assert all(line.startswith("  ") for line in lines[1:] if line)
        assert all(line == line.rstrip() for line in lines)

    def test_the_same_folder_again_has_no_old_files(self, few_experiments):
        joma("reproduce", "fig2", "--out", "here")
        Path("here/figures/note.txt").touch()
        few_experiments["fig2"] = make_experiment("fig2", reproduce=lambda *_: Outcome(True, "f."))
        assert joma("reproduce", "fig2", "--out", "here").exit_code == 0
        assert Run.open("here").tables == []
        assert [path.name for path in Run.open("here").figures] == ["note.txt"]


@pytest.mark.usefixtures("few_claims", "few_experiments")
class TestDemo:
    def test_tour(self, few_experiments):
        del few_experiments["fig9"]
        result = joma("demo", "--jobs", "1", "--out", "tour")
        assert result.exit_code == 0
        for name in ("tour/figures/verify.png", "tour/fig2/figures/picture.png"):
            assert Path(name).is_file()
            assert str(Path(name)) in result.stdout
        assert "2 of 2 figures and tables show what was published." in result.stdout
        assert Run.open("tour").read_json("outcome")["agrees"] is True
        Run.create("fig4", {}, out="other/fig2")
        line = sentence(joma("demo", "--out", "other"))
        assert f"--out {Path('other/fig2')} holds a fig4 run" in line

    def test_json_and_disagreement(self):
        result = joma("demo", "--jobs", "1", "--json")
        assert result.exit_code == 1
        record = json.loads(result.stdout)
        assert len(record["verdicts"]) == 3
        assert [one["agrees"] for one in record["experiments"]] == [True, True, False]


class TestRuns:
    @pytest.fixture(autouse=True)
    def two_runs(self):
        for name, value in (("one", 1.0), ("two", 1.5)):
            run = Run.create("fig2", {"seed": value}, out=Path("runs", name))
            run.write_table("curve", {"value": [value]})
            run.write_json("outcome", {"status": "done", "agrees": name == "one", "finding": "f."})

    def test_list(self):
        result = joma("runs", "list")
        assert "runs/one" in result.stdout
        assert "agrees" in result.stdout
        assert "differs" in result.stdout
        records = json.loads(joma("runs", "list", "runs", "--json").stdout)
        assert [record["name"] for record in records] == ["fig2", "fig2"]

    def test_list_of_nothing(self):
        Path("empty").mkdir()
        assert joma("runs", "list", "empty").stdout == "No runs in empty.\n"
        assert sentence(joma("runs", "list", "nowhere")) == "joma: DIR nowhere does not exist"
        assert "is not a folder" in sentence(joma("runs", "list", "runs/one/config.json"))

    def test_list_before_the_first_run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path / "runs")
        result = joma("runs", "list")
        assert result.exit_code == 0
        assert result.stdout == "No runs in ./runs yet.\n"
        assert json.loads(joma("runs", "list", "--json").stdout) == []

    def test_show(self):
        result = joma("runs", "show", "runs/one")
        assert "1 rows: value" in result.stdout
        assert json.loads(joma("runs", "show", "runs/one", "--json").stdout)["config"] == {
            "name": "fig2",
            "seed": 1.0,
        }
        assert "is not a run folder" in sentence(joma("runs", "show", "runs"))

    def test_compare(self):
        result = joma("runs", "compare", "runs/one", "runs/two")
        assert result.exit_code == 0
        assert "config seed" in result.stdout
        assert "table curve: largest differences: value 5.00e-01" in result.stdout
        record = json.loads(joma("runs", "compare", "runs/one", "runs/two", "--json").stdout)
        assert record["config"] == {"seed": [1.0, 1.5]}
        assert record["tables"]["curve"] == {"equal": False, "largest": {"value": 0.5}}
        same = joma("runs", "compare", "runs/one", "runs/one").stdout
        assert same.splitlines() == [
            "Settings, environment and outcome are the same.",
            "table curve: equal",
        ]
