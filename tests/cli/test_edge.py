"""How a command ends that did not work: the sentence, the exit code, the traceback if asked for."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest

from joma.cli import _verify, _workers
from joma.errors import JomaError
from tests.cli._command import joma, sentence


@pytest.fixture
def failing(monkeypatch):
    """Make `joma verify` fail with an error that the test chooses."""

    def fail_with(error: BaseException) -> None:
        def chosen(_) -> list[str]:
            raise error

        monkeypatch.setattr(_verify, "chosen", chosen)
        monkeypatch.setattr("sys.argv", ["joma", "verify", "--claim", "a b"])

    return fail_with


class TestWhoseMistake:
    def test_a_joma_error_is_the_users(self, failing):
        failing(JomaError("--seed must be even, got 3"))
        assert sentence(joma("verify")) == "joma: --seed must be even, got 3"

    @pytest.mark.parametrize(
        "error",
        [
            ValueError("operands could not be broadcast together"),
            np.linalg.LinAlgError("SVD did not converge"),  # a ValueError of a library
            UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"),
            KeyError("fig10"),
            TypeError("NoneType"),
            AssertionError(),
            RuntimeError("shape mismatch"),
            ZeroDivisionError("division by zero"),
        ],
    )
    def test_any_other_error_is_a_defect_of_joma(self, failing, error: Exception):
        failing(error)
        result = joma("verify")
        assert result.exit_code == 70
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith("joma: this is a defect of joma")
        assert type(error).__name__ in line
        assert "joma/cli/_verify.py:" in line
        assert "`JOMA_DEBUG=1 joma verify --claim 'a b'`" in line
        assert "joma 0." in line

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (PermissionError(13, "Permission denied", "a.json"), "a.json: Permission denied"),
            (OSError("server gone"), "output: server gone"),
            (MemoryError(), "there is too little memory for this command (MemoryError)"),
            (
                RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1e15 bytes"),
                "there is too little memory for this command (DefaultCPUAllocator: can't allocate "
                "memory: you tried 1e15 bytes)",
            ),
        ],
    )
    def test_what_the_machine_refuses_is_the_users_to_fix(self, failing, error, said: str):
        failing(error)
        assert sentence(joma("verify")) == f"joma: {said}"

    @pytest.mark.parametrize(
        ("error", "code"), [(JomaError("no such claim"), 2), (KeyError("fig10"), 70)]
    )
    def test_debugging_shows_the_traceback_of_both(self, failing, monkeypatch, error, code: int):
        failing(error)
        monkeypatch.setenv("JOMA_DEBUG", "1")
        result = joma("verify")
        assert result.exit_code == code
        *traced, last = result.stderr.splitlines()
        assert traced[0] == "Traceback (most recent call last):"
        assert any("in chosen" in line for line in traced)
        assert last.startswith("joma: ")
        monkeypatch.setenv("JOMA_DEBUG", "0")
        assert "Traceback" not in joma("verify").stderr

    def test_the_traceback_of_a_worker_is_shown_too(self, monkeypatch):
        monkeypatch.setenv("JOMA_DEBUG", "1")
        code = "from joma.cli._app import app; import joma.cli._demo\n"
        code += "joma.cli._demo.check_claim = int\n"
        code += "if __name__ == '__main__': app(['demo', '--out', 'd'])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 70
        assert "_RemoteTraceback" in done.stderr


def test_a_message_cannot_act_on_the_terminal(failing):
    failing(JomaError("tensor \x1b[2J\x07" + "x" * 5000))
    line = sentence(joma("verify"))
    assert line.isprintable()
    assert r"\x1b[2J" in line
    assert len(line) < 1000


def _end() -> dict[str, Any]:
    os._exit(9)


def test_a_worker_that_was_killed_gets_a_sentence():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        future = pool.submit(_end)
        with pytest.raises(JomaError, match="a worker process was killed"):
            _workers.gather([future], lambda: None)


CLOSED = {"stdin": "<&-", "stdout": ">&-", "stderr": "2>&-", "all": "<&- >&- 2>&-"}


@pytest.mark.skipif(os.name == "nt", reason="redirections of a shell")
class TestClosedStreams:
    @staticmethod
    def run(closed: str, words: str) -> subprocess.CompletedProcess[str]:
        line = f'exec "$0" -m joma {words} {CLOSED[closed]}'
        return subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, text=True)

    @pytest.mark.parametrize("closed", CLOSED)
    def test_a_command_ends_as_it_would(self, closed: str):
        done = self.run(closed, "runs list --json")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == ("[]\n" if closed in ("stdin", "stderr") else "")

    @pytest.mark.parametrize("closed", ["stdout", "stderr"])
    def test_so_does_one_that_is_refused(self, closed: str):
        done = self.run(closed, "verify --seed x")
        assert done.returncode == 2
        assert done.stdout == ""
        assert ("whole number" in done.stderr) == (closed == "stdout")

    def test_nothing_is_printed_into_a_file(self, tmp_path):
        """A file that is opened may otherwise take the number of a closed stream."""
        done = self.run("all", f"verify --claim lemma8 --out {tmp_path}/kept")
        assert done.returncode == 0
        files = list((tmp_path / "kept").rglob("*.json"))
        assert files
        assert not any("claim   source" in path.read_text() for path in files)

    def test_there_is_nothing_to_read(self):
        code = "import sys; from joma import cli; cli.reopen_closed_streams(); "
        code += "print(repr(sys.stdin.buffer.read()))"
        line = ["sh", "-c", 'exec "$0" -c "$1" <&-', sys.executable, code]
        assert subprocess.run(line, capture_output=True, text=True).stdout == "b''\n"

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
    @pytest.mark.parametrize(("stream", "code"), [(">", 2), ("2>", 2)])
    def test_a_full_disk(self, stream: str, code: int):
        words = "--help" if stream == ">" else "verify --seed x"
        line = f'exec "$0" -m joma {words} {stream}/dev/full'
        done = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, text=True)
        assert done.returncode == code
        assert "Traceback" not in done.stderr


def test_arguments_are_named_as_the_user_writes_them():
    shown = joma("series", "verify", "--help").stdout
    assert shown.splitlines()[0] == "Usage: joma series verify [OPTIONS] SERIES..."


def test_what_has_no_effect_on_a_list_is_said(tmp_path, few_claims):
    result = joma("verify", "--list", "--out", "kept", "--seed", "3")
    assert result.exit_code == 0
    assert result.stderr == "joma: --seed and --out have no effect with --list\n"
    assert not os.path.exists("kept")


def test_signals_have_their_defaults_here():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("given", ["9" * 19, "9" * 30, "9" * 5000])
@pytest.mark.parametrize("line", ["verify --seed", "reproduce fig4 --seed", "demo --jobs"])
def test_numbers_that_64_bits_cannot_hold_are_refused(line: str, given: str):
    assert "it must be a whole number" in sentence(joma(*line.split(), given))


def test_a_name_of_thousands_of_digits_is_no_step():
    assert "9" * 50 in sentence(joma("series", "verify", "9" * 5000))


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["--no-such-option"], 2)])
def test_a_process_of_torchrun_ends_with_the_same_code_and_words(arguments: list[str], code: int):
    """It ends itself, before threads of other libraries can abort the interpreter."""
    command = [sys.executable, "-m", "joma", *arguments]
    alone, one_of_two = (
        subprocess.run(
            command, env=os.environ | {"WORLD_SIZE": size}, capture_output=True, text=True
        )
        for size in ("1", "2")
    )
    assert alone.returncode == one_of_two.returncode == code
    assert (alone.stdout, alone.stderr) == (one_of_two.stdout, one_of_two.stderr)
    assert alone.stdout + alone.stderr
