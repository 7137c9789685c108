"""What all commands have in common: help, wrong command lines, summaries."""

import importlib.util
import json

import pytest

from joma import experiments
from joma.cli import _demo
from joma.cli._verdicts import summary
from joma.common.checks import check_known
from joma.errors import JomaError
from joma.experiments import EXPERIMENTS, ChoiceOption
from tests.cli._command import joma, sentence, unwrapped

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
                continue
            for value in option.published:
                written = f"{value:.0e}".replace("e-0", "e-") if value < 1 else f"{value:g}"
                assert written in text, (name, option.name)


def test_reproduce_lists_the_experiments():
    lines = joma("reproduce", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(EXPERIMENTS)
    records = json.loads(joma("reproduce", "fig6", "--list", "--json").stdout)
    assert [record["name"] for record in records] == ["fig6"]
    assert records[0]["title"] == EXPERIMENTS["fig6"].title


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


def refusal(*given) -> str:
    with pytest.raises(JomaError) as refused:
        check_known(*given)
    return str(refused.value)


def test_unknown_lists_the_closest_first():
    message = refusal("claim", ["lema8"], ["theorem2", "lemma8", "eqn6"])
    assert message.startswith("there is no claim 'lema8'; available: lemma8, ")
    names = [f"eqn{k}" for k in range(20)]
    message = refusal("claim", ["eqn 17"], names, "joma verify --list")
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
    assert summary(records) == expected


def test_demo_leaves_out_what_needs_a_package_that_is_missing(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    missing = {"transformers"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in missing else found(name)
    )
    few = {"fig4": experiments.EXPERIMENTS["fig4"]}
    monkeypatch.setattr(experiments, "EXPERIMENTS", few)
    monkeypatch.setattr(_demo, "chosen", lambda names: ["thm2"])
    result = joma("demo", "--jobs", "1", "--out", str(tmp_path / "tour"))
    assert result.exit_code == 0
    assert "Left out: the training needs transformers" in unwrapped(result.stdout)
    assert not (tmp_path / "tour" / "training").exists()


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_demo_shows_what_the_monitor_found_in_sixty_lines(monkeypatch, tmp_path):
    pytest.importorskip("transformers", reason="the tour trains one of its models")
    fewer = [line for line in _demo._CHANGES if "steps" not in line]
    monkeypatch.setattr(_demo, "_CHANGES", (*fewer, "training.steps=60"))
    few = {"fig4": experiments.EXPERIMENTS["fig4"]}
    monkeypatch.setattr(experiments, "EXPERIMENTS", few)
    monkeypatch.setattr(_demo, "chosen", lambda names: ["thm2", "lemma1"])
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
