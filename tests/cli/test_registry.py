"""What the package knows of experiments and claims without importing what makes them."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from joma.experiments import list_claims
from joma.experiments.claims import CLAIMS

HEAVY = ("torch", "scipy", "matplotlib")

THROW_AWAY = """
from joma.experiments import ChoiceOption, Experiment, Option, Outcome, Scale, Verdict

EXPERIMENT = Experiment(
    name="throw-away",
    title="A picture of nothing",
    published="there is nothing.",
    run="joma.experiments.throw_away:reproduce",
    scales={"tiny": Scale(3, "2 CPU cores", "1 GB"), "small": Scale(6, "2 CPU cores", "1 GB")},
    default_scale="small",
    options=(
        Option("breadth", 7, "how broad it is", int),
        ChoiceOption("color", {"tiny": "red", "small": "blue"}, "red or blue", ("red", "blue")),
    ),
    groups=("left", "right"),
)


def reproduce(run, request):
    import numpy

    run.write_table("nothing", {"value": numpy.zeros(request.options["breadth"])})
    return Outcome(Verdict.AGREES, f"{request.options} {request.groups}.")
"""


@pytest.fixture
def joma_with_another(tmp_path: Path):
    """Runs a command line of a package with one experiment more."""
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "throw_away.py").write_text(textwrap.dedent(THROW_AWAY))
    code = (
        "import sys, joma.experiments\n"
        f"joma.experiments.__path__.append({str(folder)!r})\n"
        "from joma.cli import main\n"
        "main()\n"
    )

    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_an_experiment_is_one_file(joma_with_another):
    joma = joma_with_another
    assert "throw-away" in joma("reproduce", "--list")
    text = " ".join(joma("reproduce", "--help").split())
    assert "throw-away" in text
    assert "--breadth N Of throw-away: how broad it is." in text
    assert "--color NAME Of throw-away: red or blue." in text
    plan = joma("reproduce", "throw-away", "--breadth", "4", "--device", "cpu", "--dry-run")
    assert "throw-away → " in plan
    assert "  scales: small about 6 s, on 2 CPU cores, memory 1 GB\n" in plan
    assert "  options: breadth 4\n" in plan
    assert "  groups: left, right\n" in plan
    flags = ("--breadth", "4", "--scale", "tiny", "--group", "right", "--device", "cpu")
    shown = joma("reproduce", "throw-away", *flags, "--out", "run")
    assert "Here: {'breadth': 4, 'color': 'red'} ('right',).  ✓ agrees" in shown
    assert Path("run/tables/nothing.parquet").is_file()


@pytest.mark.parametrize(
    "words", [["reproduce", "--list"], ["verify", "--list"], ["reproduce", "--help"]]
)
def test_lists_import_nothing_heavy(words: list[str]):
    code = (
        f"import sys; sys.argv[1:] = {words!r}\n"
        "from joma.cli import main\n"
        "try:\n    main()\n"
        f"finally:\n    assert not {{*{HEAVY!r}}} & {{*sys.modules}}, sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_list_of_claims_is_that_of_the_claims():
    assert [tuple(one) for one in list_claims()] == [
        (claim.id, claim.title, claim.source) for claim in CLAIMS
    ]
