"""Two processes on one run folder: the first keeps it, the second gets an error."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from joma.experiments import Outcome, Request, Verdict
from joma.runs import Run
from tests.cli._command import joma, sentence
from tests.cli.conftest import make_experiment, make_trained

pytestmark = [
    pytest.mark.usefixtures("few_claims", "trained", "gpus"),
    pytest.mark.skipif(os.name == "nt", reason="no locks"),
]


class TestTwoProcesses:
    ASKING = """
import sys
from joma.runs import Run
try:
    with Run.open(sys.argv[1]).locked():
        print("free")
except ValueError as error:
    print(error)
"""
    HOLDING = """
import sys
from joma.runs import Run
with Run.open(sys.argv[1]).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""

    @pytest.fixture
    def locked_by_another(self) -> Iterator[Callable[[Path], None]]:
        with contextlib.ExitStack() as processes:

            def hold(folder: Path) -> None:
                process = processes.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-c", self.HOLDING, str(folder)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
                processes.callback(process.kill)  # before it is waited for
                assert process.stdout is not None
                assert process.stdout.readline() == "locked\n"

            yield hold

    def ask(self, folder: Path) -> str:
        return subprocess.run(
            [sys.executable, "-c", self.ASKING, str(folder)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    @pytest.mark.parametrize(
        "line", ["reproduce table1 --out here", "reproduce fig2 --out here", "demo --out here"]
    )
    def test_the_second_gets_one_sentence_and_changes_nothing(self, locked_by_another, line: str):
        name = line.split()[1] if "reproduce" in line else "demo"
        arguments = [*line.split(), *(["--jobs", "1"] if name == "demo" else [])]
        assert joma(*arguments).exit_code in (0, 1)
        Run.open("here").write_json("outcome", {"status": "running"})
        before = {path: path.read_bytes() for path in Path("here").rglob("*") if path.is_file()}
        locked_by_another(Path("here"))
        message = sentence(joma(*arguments))
        assert message.startswith("joma: run folder here is in use by another process")
        assert before == {
            path: path.read_bytes() for path in Path("here").rglob("*") if path.is_file()
        }

    @pytest.mark.parametrize("resumable", [True, False])
    def test_a_run_is_locked_while_it_works(self, few_experiments, resumable: bool):
        answers: list[str] = []

        def work(run: Run, _: Request) -> Outcome:
            answers.append(self.ask(run.path))
            return Outcome(Verdict.AGREES, "f.")

        make = make_trained if resumable else make_experiment
        few_experiments["table1"] = make("table1", reproduce=work)
        assert joma("reproduce", "table1", "--out", "here").exit_code == 0
        assert "in use by another process" in answers[0]
        assert self.ask(Path("here")) == "free\n"

    def test_so_is_a_tour(self, few_experiments):
        answers: list[str] = []

        def work(run: Run, _: Request) -> Outcome:
            answers.extend((self.ask(run.path.parent), self.ask(run.path)))
            return Outcome(Verdict.AGREES, "f.")

        few_experiments["fig2"] = make_experiment("fig2", reproduce=work)
        joma("demo", "--jobs", "1", "--out", "tour")
        assert len(answers) == 2
        assert all("in use by another process" in answer for answer in answers)
