"""The real program: how fast it answers, what it imports, how it takes signals."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

HEAVY = ("torch", "numpy", "scipy", "matplotlib", "pyarrow", "rich")


def joma(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "joma", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def imported(code: str, *names: str) -> list[str]:
    """Which of `names` are imported once `code` has run."""
    code += f"\nimport sys, json; print(json.dumps([m for m in {names!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def running(*arguments: str) -> str:
    """Code that runs a command line in its process."""
    return f"""
import sys
from joma.cli import main
sys.argv = ["joma", *{list(arguments)!r}]
try:
    main()
except SystemExit as leave:
    assert not leave.code
"""


@pytest.mark.parametrize("command", ["", "reproduce", "demo"])
def test_help_imports_nothing_heavy(command: str):
    assert imported(running(*command.split(), "--help"), *HEAVY) == []


def test_what_trains_nothing_does_not_import_torch():
    assert imported(running("reproduce", "fig2", "--dry-run"), "numpy", "torch") == ["numpy"]


def test_the_package_imports_nothing_heavy_and_theory_no_torch():
    assert imported("import joma; joma.citation(); dir(joma)", *HEAVY) == []
    assert imported("import joma; joma.theory.linear.weights", "numpy", "torch") == ["numpy"]
    assert imported("import joma.experiments.claims, joma.report", "torch") == []


def test_a_terminal_without_unicode_gets_words():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "100"}
    done = joma("verify", "--claim", "lemma8", env=environment)
    assert done.returncode == 0, done.stderr
    assert "derived <= tolerance" in done.stdout
    assert "ok " in done.stdout
    assert done.stdout.isascii()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["verify", "--list"], ["runs", "list", "--json"]]
)
def test_a_reader_that_left_is_no_failed_claim(arguments: list[str]):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "joma", *arguments],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.parametrize("module", ["joma.cli._app", "joma.experiments.claims", "numpy"])
def test_ctrl_c_during_imports_gets_a_sentence(module: str):
    code = f"""
import sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.argv = ["joma", "verify"]
from joma.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stdout == ""
    assert done.stderr == "\nInterrupted.\n"


def _as_on_a_terminal() -> None:
    """Answer Ctrl-C, whatever a library that ran in this process has made of it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@pytest.mark.skipif(os.name == "nt", reason="signals of a terminal")
def test_ctrl_c_leaves_at_once_with_130(tmp_path):
    command = [sys.executable, "-m", "joma", "demo", "--out", str(tmp_path / "tour")]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_as_on_a_terminal,
    ) as process:
        try:
            while not (tmp_path / "tour" / "outcome.json").exists():
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
            _, stderr = process.communicate()
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert f"Interrupted. Incomplete: {tmp_path / 'tour'}." in stderr
    assert f"Continue with: joma demo --out {tmp_path / 'tour'}\n" in stderr
    assert json.loads((tmp_path / "tour" / "outcome.json").read_text()) == {"status": "interrupted"}


@pytest.mark.skipif(os.name == "nt", reason="signals of a terminal")
def test_where_ctrl_c_is_ignored_it_stays_ignored():
    """A shell starts background work so, and a Ctrl-C that is meant for others must not end it."""
    code = """
import signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == "joma.experiments.claims":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from joma.cli import main
main()
"""
    background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run([*background, "verify", "--claim", "lemma8"], capture_output=True)
    assert done.returncode == 0, done.stderr
