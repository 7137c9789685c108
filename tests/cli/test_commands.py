"""What all commands have in common: help, wrong command lines, errors, streams, names, locks."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from joma import experiments
from joma.errors import JomaError
from joma.experiments import EXPERIMENTS, ChoiceOption
from joma.runs import Run
from tests.cli._command import joma, sentence, unwrapped
from tests.models.tiny import tiny

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


def test_a_worker_that_was_killed_gets_a_sentence(tmp_path):
    """Experiments are made in processes of their own, one of which ends at once."""
    code = "import os\nfrom joma.experiments import Experiment\n"
    code += "Experiment.reproduce = lambda *_: os._exit(9)\n"
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


ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e"


def test_a_tensors_name_does_not_reach_the_terminal(tmp_path):
    folder = tmp_path / "model"
    tiny("llama").save_pretrained(folder)
    path = folder / "model.safetensors"
    state = load_file(path)
    state[f"model.layers.0.{ESCAPES}.weight"] = state["model.norm.weight"].clone()
    save_file(state, path, metadata={"format": "pt"})
    ended = joma("probe", str(folder), "--tokenizer", "bytes")
    assert ended.exit_code == 2
    assert "does not mention" in ended.stderr
    assert not {"\x1b", "\x07", "\x9b"} & set(ended.output)


@pytest.mark.parametrize(
    "words",
    [
        ["probe", "\udcff\x1b[2J"],
        ["probe", "\udcff", "--dry-run"],
        ["series", "verify", "\udcff"],
        ["runs", "show", "\udcff"],
        ["probe", "model", "--text", "\udcff"],
    ],
)
def test_names_that_are_no_text_are_named(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _check_named(joma(*words))


def _check_named(ended):
    assert ended.exit_code == 2
    assert "surrogates" not in ended.stderr
    assert "\x1b" not in ended.stderr
    assert "udcff" in ended.stderr


@pytest.mark.parametrize("name", ["nope", "no/such-model", "./nope"])
def test_a_model_that_is_not_there_is_refused_by_a_dry_run(name, tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    dry, wet = (joma("probe", name, *more) for more in (["--dry-run"], []))
    assert (dry.exit_code, wet.exit_code) == (2, 2)
    assert dry.stderr == wet.stderr
    assert "nope" in dry.stderr or "no/such-model" in dry.stderr


def test_a_dry_run_refuses_what_the_run_refuses(tmp_path):
    folder = tmp_path / "model"
    tiny("llama").save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"intermediate_size": 41}, "should have"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers above"),
        ({"model_type": "nobody"}, "transformers knows"),
        ({}, "has no tokenizer"),
    ):
        path.write_text(json.dumps(config | change))
        for more in (["--dry-run"], []):
            ended = joma("probe", str(folder), *more)
            assert ended.exit_code == 2
            assert message in ended.stderr


@pytest.mark.usefixtures("few_claims", "trained", "gpus")
@pytest.mark.skipif(os.name == "nt", reason="no locks")
class TestTwoProcesses:
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
