"""What all commands have in common: help, wrong command lines, errors, output of any width."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from joma import experiments
from joma.errors import JomaError
from joma.experiments import EXPERIMENTS, ChoiceOption
from tests.cli._command import joma, sentence, unwrapped

COMMANDS = (
    *("train", "probe", "superposition", "generate", "memory", "report", "serve", "laboratory"),
    *("verify", "reproduce", "demo", "runs list", "runs show", "runs compare", "runs plot"),
    *("series verify", "sparsify fit", "sparsify show"),
)
WITHOUT_JSON = ("serve", "laboratory")
PLANNED = ("train", "probe", "superposition", "generate", "reproduce", "sparsify fit")


@pytest.mark.parametrize("command", ["", "runs", "series", "sparsify", *COMMANDS])
@pytest.mark.parametrize("columns", ["80", "120"])
def test_help(command: str, columns: str, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    result = joma(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"Example: joma {command}".strip() in result.stdout
    for leak in ("<", "[[", "[default: (", "{", "..."):
        assert leak not in result.stdout.replace("]...", "").replace("SERIES...", "").replace(
            "RUN...", ""
        )
    assert max(map(len, result.stdout.splitlines())) <= 80
    if command in COMMANDS:
        assert ("--json" in result.stdout) == (command not in WITHOUT_JSON)
        assert ("--dry-run" in result.stdout) == (command in PLANNED)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_a_wrong_option_gets_one_sentence(command: str):
    assert "--bogus" in sentence(joma(*command.split(), "--bogus"))


@pytest.mark.parametrize("command", ["", "runs", "series", "sparsify"])
def test_a_group_alone_prints_its_help_and_knows_its_commands(command: str):
    result = joma(*command.split())
    assert result.exit_code == 0
    assert "Usage: joma" in result.stdout
    assert "bogus" in sentence(joma(*command.split(), "bogus"))


def test_version():
    import joma as package

    assert joma("--version").stdout == f"joma {package.__version__}\n"


@pytest.mark.parametrize("line", ["verify --seed", "reproduce fig4 --seed", "demo --jobs"])
@pytest.mark.parametrize("given", ["-1", "one", "9" * 19, "9" * 5000])
def test_numbers_must_be_whole_and_fit_64_bits(line: str, given: str):
    assert "it must be a whole number" in sentence(joma(*line.split(), given))


def test_reproduce_help_names_what_the_experiments_declare():
    text = unwrapped(joma("reproduce", "--help").stdout)
    for name, experiment in EXPERIMENTS.items():
        assert name in text
        assert all(scale in text for scale in experiment.scales)
        for option in experiment.options:
            assert f"--{option.name}" in text
            assert option.help in text
            if isinstance(option, ChoiceOption):
                assert all(word in text for word in option.choices)


def test_reproduce_lists_the_experiments():
    lines = joma("reproduce", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(EXPERIMENTS)
    (record,) = json.loads(joma("reproduce", "fig6", "--list", "--json").stdout)
    assert (record["name"], record["title"]) == ("fig6", EXPERIMENTS["fig6"].title)


def test_what_has_no_effect_on_a_list_is_said(few_claims):
    result = joma("verify", "--list", "--out", "kept", "--seed", "3")
    assert result.exit_code == 0
    assert result.stderr == "joma: --seed and --out have no effect with --list\n"
    assert not os.path.exists("kept")


class TestWhoseMistake:
    @pytest.fixture
    def fail(self, monkeypatch):
        """Run `joma verify` while listing the claims fails with an error."""

        def fail_with(error: BaseException):
            def listed():
                raise error

            monkeypatch.setattr(experiments, "list_claims", listed)
            return joma("verify", "--claim", "a b")

        return fail_with

    @pytest.mark.parametrize(
        "error",
        [
            ValueError("operands could not be broadcast together"),
            np.linalg.LinAlgError("SVD did not converge"),  # a ValueError of a library
            UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"),
            KeyError("fig10"),
            AssertionError(),
            RuntimeError("shape mismatch"),
        ],
    )
    def test_any_other_error_is_a_defect_of_joma(self, fail, error: Exception):
        result = fail(error)
        assert (result.exit_code, result.stdout) == (70, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith("joma: this is a defect of joma")
        assert type(error).__name__ in line
        assert "joma/cli/_verify.py:" in line
        assert "`JOMA_DEBUG=1 joma verify --claim 'a b'`" in line
        assert "joma 0." in line

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (JomaError("--seed must be even, got 3"), "--seed must be even, got 3"),
            (PermissionError(13, "Permission denied", "a.json"), "a.json: Permission denied"),
            (OSError("server gone"), "output: server gone"),
            (MemoryError(), "there is too little memory for this command (MemoryError)"),
            (
                RuntimeError("DefaultCPUAllocator: can't allocate memory"),
                "there is too little memory for this command (DefaultCPUAllocator: can't allocate "
                "memory)",
            ),
        ],
    )
    def test_what_the_user_or_the_machine_can_fix(self, fail, error: Exception, said: str):
        assert sentence(fail(error)) == f"joma: {said}"

    @pytest.mark.parametrize(
        ("error", "code"), [(JomaError("no such claim"), 2), (KeyError("fig10"), 70)]
    )
    def test_debugging_shows_the_traceback_of_both(self, fail, monkeypatch, error, code: int):
        monkeypatch.setenv("JOMA_DEBUG", "1")
        result = fail(error)
        assert result.exit_code == code
        *traced, last = result.stderr.splitlines()
        assert traced[0] == "Traceback (most recent call last):"
        assert last.startswith("joma: ")
        monkeypatch.setenv("JOMA_DEBUG", "0")
        assert "Traceback" not in fail(error).stderr

    def test_a_message_cannot_act_on_the_terminal(self, fail):
        line = sentence(fail(JomaError("tensor \x1b[2J\x07" + "x" * 5000)))
        assert line.isprintable()
        assert r"\x1b[2J" in line
        assert len(line) < 1000


def test_a_worker_that_was_killed_gets_a_sentence(tmp_path):
    """Experiments are made in processes of their own, one of which ends at once."""
    code = "import os, joma.experiments.claims as claims\n"
    code += "claims.check = lambda *_: os._exit(9)\n"
    code += "import sys; sys.argv = ['joma', 'demo', '--out', 'd']\n"
    code += "if __name__ == '__main__':\n    from joma.cli import main\n    main()\n"
    script = tmp_path / "killed.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "a worker process was killed" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="redirections of a shell")
class TestStreams:
    @staticmethod
    def run(words: str, redirection: str) -> subprocess.CompletedProcess[str]:
        line = f'exec "$0" -m joma {words} {redirection}'
        return subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, text=True)

    @pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
    def test_a_closed_stream_changes_nothing_else(self, closed: str, tmp_path):
        done = self.run("runs list --json", closed)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == ("" if " >&-" in f" {closed}" else "[]\n")
        done = self.run("verify --seed x", closed)
        assert done.returncode == 2
        assert ("whole number" in done.stderr) == ("2>&-" not in closed)

    def test_nothing_is_printed_into_a_file(self, tmp_path):
        """A file that is opened may otherwise take the number of a closed stream."""
        done = self.run(f"verify --claim lemma8 --out {tmp_path}/kept", "<&- >&- 2>&-")
        assert done.returncode == 0
        files = list((tmp_path / "kept").rglob("*.json"))
        assert files
        assert not any("derived ≤ tolerance" in path.read_text() for path in files)

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
    @pytest.mark.parametrize(
        ("words", "stream"), [("--help", "> /dev/full"), ("verify --seed x", "2> /dev/full")]
    )
    def test_a_full_disk(self, words: str, stream: str):
        done = self.run(words, stream)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


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


def test_demo_leaves_out_what_needs_a_package_that_is_missing(monkeypatch, few_claims):
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"fig4": experiments.EXPERIMENTS["fig4"]})
    result = joma("demo", "--jobs", "1", "--out", "tour")
    assert result.exit_code == 0
    assert "Left out: the training needs transformers" in unwrapped(result.stdout)
    assert not os.path.exists("tour/training")


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="trains one of its models")
def test_demo_shows_what_the_monitor_found_in_sixty_lines(monkeypatch, tmp_path):
    few = {"fig4": experiments.EXPERIMENTS["fig4"]}
    listed = [one for one in experiments.list_claims() if one.id in ("thm2", "lemma1")]
    monkeypatch.setattr(experiments, "EXPERIMENTS", few)
    monkeypatch.setattr(experiments, "list_claims", lambda: listed)
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "tour"
    result = joma("demo", "--jobs", "1", "--out", str(folder))
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) + 2 * 5 <= 60  # the whole tour has five more figures, of two lines at most
    assert "The learning rate 0.03 is too high" in unwrapped(result.stdout)
    assert lines[-1] == f"The runs in the browser: joma serve {folder}"
    assert lines[-2] == f"Report of the training: {folder / 'report.html'}"
    assert "<!doctype html>" in (folder / "report.html").read_text(encoding="utf-8").lower()
