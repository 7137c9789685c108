"""`joma train`: what it says, writes, refuses, and how it goes on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from joma.runs import Run
from joma.train import loop
from joma.train.findings import Finding, Judgement, RecordedSeries
from joma.train.language import PRESETS, LanguageTraining, Trained
from tests.cli._command import joma, sentence
from tests.runs import _failing
from tests.train._language import write_text

CONFIG = """
[model]
type = "gpt_neox"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2

[data]
corpus = "text"
tokenizer = "basic_english"
window = 16
batch = 4

[training]
steps = 8

[checkpoints]
schedule = "pythia"
seconds = 0

[validation]
every = 4
windows = 4

[monitor]
off = true
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))
    write_text(tmp_path / "text")
    Path("config.toml").write_text(CONFIG)


def losses(folder: str) -> list[float]:
    return Run.open(folder).metrics.read("loss")["value"].tolist()


def test_a_training_and_what_reads_it():
    result = joma("train", "config.toml", "--out", "run", "--device", "cpu")
    assert result.exit_code == 0
    first, *rest = result.stdout.splitlines()
    assert first.startswith("Step 8, loss ")
    assert "tokens/s" in first
    assert rest == ["  run", "Probe the series with: joma probe --series run/series"]
    assert Run.open("run").read_json("outcome")["status"] == "done"
    assert len(losses("run")) == 8
    checked = joma("series", "verify", "run/series")
    assert checked.exit_code == 0, checked.output
    options = ("--text", "text", "--windows", "2", "--metrics", "attention_entropy,stable_rank")
    probed = joma("probe", "--series", "run/series", *options, "--out", "probed")
    assert probed.exit_code == 0, probed.output
    assert "5 measured" in probed.stdout  # 0, 1, 2, 4, 8


def test_json_and_a_second_time():
    command = ("train", "config.toml", "--json", "--out", "run", "--set", "monitor.off=false")
    record = json.loads(joma(*command).stdout)
    assert record["step"] == 8
    assert record["begun_at"] == 0
    assert record["series"][-1] == "run/series/step-000008"
    assert record["validation_loss"] > 0
    again = json.loads(joma(*command).stdout)
    assert again["begun_at"] == 8
    assert again["loss"] == record["loss"]
    other = joma(*command, "--set", "training.seed=1")
    assert "training.seed 0, not 1" in sentence(other)


def test_a_training_that_has_ended_is_made_longer():
    joma("train", "config.toml", "--out", "straight", "--set", "training.steps=12")
    joma("train", "config.toml", "--out", "run")
    more = joma("train", "config.toml", "--out", "run", "--set", "training.steps=12")
    assert more.exit_code == 0, more.output
    assert "Step 12, loss" in more.stdout
    assert "resumed from step 8." in more.stdout
    assert losses("run") == losses("straight")
    weights = [
        Path(folder, "series/step-000012/model.safetensors").read_bytes()
        for folder in ("run", "straight")
    ]
    assert weights[0] == weights[1]
    refused = sentence(joma("train", "config.toml", "--out", "run"))
    assert "training.steps must be at least 12, which the run has made, got 8" in refused
    assert Run.open("run").config["training"]["steps"] == 12


def test_a_training_that_is_refused_keeps_its_settings():
    command = ("train", "config.toml", "--out", "run")
    joma(*command)
    text = Path("text/train.txt")
    before = text.read_text()
    text.write_text(f"{before}the cat.\n")
    refused = joma(*command, "--set", "training.steps=12")
    assert "was trained on; put it back" in sentence(refused)
    text.write_text(before)
    again = joma(*command)
    assert again.exit_code == 0, again.output
    assert "nothing is left to train" in again.stdout


def test_a_training_with_an_end_in_its_schedule_is_not():
    options = ("--out", "run", "--set", "optimizer.schedule=cosine")
    joma("train", "config.toml", *options)
    before = Run.open("run").config
    said = sentence(joma("train", "config.toml", *options, "--set", "training.steps=12"))
    assert "training.steps must stay 8 with the schedule cosine" in said
    assert Run.open("run").config == before


def test_a_dry_run_writes_nothing():
    result = joma("train", "config.toml", "--dry-run", "--out", "run")
    assert result.exit_code == 0
    assert "parameters" in result.stdout
    assert "  exports: 5\n" in result.stdout
    assert not Path("run").exists()
    record = json.loads(joma("train", "config.toml", "--dry-run", "--json").stdout)
    assert record["exports"] == 5
    assert record["tokens"] == 8 * 4 * 16
    assert record["config"]["training"]["steps"] == 8


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "Interrupted"), (signal.SIGTERM, 143, "Terminated")],
)
def test_a_signal_saves_and_says_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int, word: str
):
    joma("train", "config.toml", "--out", "straight")
    advance = LanguageTraining.advance

    def interrupted(session: Any, steps: int) -> None:
        advance(session, steps)
        if session.step >= 3:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageTraining, "advance", interrupted)
        result = joma("train", "config.toml", "--out", "run", "--set", "training.steps=8")
    assert result.exit_code == code
    assert f"{word}. Incomplete: run" in result.stderr
    line = result.stderr.splitlines()[-1]
    assert line == "Continue with: joma train config.toml --set training.steps=8 --out run"
    assert Run.open("run").read_json("outcome")["status"] == "interrupted"
    resumed = joma(*line.removeprefix("Continue with: joma ").split())
    assert "resumed from step" in resumed.stdout
    assert losses("run") == losses("straight")


def test_a_full_disk_is_reported_in_one_sentence(monkeypatch: pytest.MonkeyPatch):
    advance = LanguageTraining.advance

    def full(session: Any, steps: int) -> None:
        advance(session, steps)
        if session.step >= 3:
            _failing.fill_disk(patch, "write")

    with monkeypatch.context() as patch:
        patch.setattr(LanguageTraining, "advance", full)
        said = sentence(joma("train", "config.toml", "--out", "run"))
    assert "No space left on device" in said
    saved = Run.open("run").checkpoints.steps[0]
    assert "resume with `joma train config.toml --out run`" in said
    result = joma("train", "config.toml", "--out", "run")
    assert f"resumed from step {saved}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "say what to train: a TOML file, or one of tiny"),
        (("nothing",), "there is no configuration 'nothing'"),
        (("config.toml", "--set", "training.steps=0"), "training.steps must be"),
        (("config.toml", "--set", "model.hiden_size=1"), "model.hiden_size is no setting"),
        (("config.toml", "--set", "data.corpus=missing"), "missing"),
        (("config.toml", "--out", "config.toml"), "--out config.toml is a file"),
    ],
)
def test_bad_input_is_answered_in_a_sentence(arguments: tuple[str, ...], words: str):
    assert words in sentence(joma("train", *arguments))


def test_the_presets_of_the_help_are_those_there_are():
    result = joma("train", "--help")
    assert all(name in result.stdout for name in PRESETS)
    assert "Example: joma train tiny" in result.stdout


def test_findings_and_warnings_are_printed(monkeypatch: pytest.MonkeyPatch):
    stopped: str | None

    def train(config: Any, run: Run, **options: Any) -> Trained:
        loop._logger.warning("a checkpoint was damaged")
        found = Finding("attention_collapse", "warning", 4, "Attention collapses.", "Try less.")
        return Trained(
            *(2, 5, 1.5, float("nan"), 10.0, 1.0, 0.1, 1000),
            judgement=Judgement((found,)),
            lines=("- warning, step 4: Attention collapses.", "    Try less."),
            stopped=stopped,
            refused=(),
        )

    monkeypatch.setattr("joma.train.language.train", train)
    stopped = None
    result = joma("train", "config.toml", "--out", "run")
    assert result.stdout.splitlines()[:3] == [
        "Step 5, loss 1.500, resumed from step 2. 0.001M parameters, 10 tokens/s, 1.0 s, "
        "of them 0.1 for the monitor.",
        "  - warning, step 4: Attention collapses.",
        "      Try less.",
    ]
    assert "a checkpoint was damaged" in result.stderr
    assert "stopped" not in result.stdout
    outcome = Run.open("run").read_json("outcome")
    assert outcome["findings"] == ["warning, step 4: Attention collapses."]
    assert outcome["status"] == "done"

    stopped = "Attention collapses."
    record = json.loads(joma("train", "config.toml", "--out", "run", "--json").stdout)
    assert record["stopped"] == stopped
    assert record["findings"][0]["advice"] == "Try less."
    assert record["not_judged"] == []
    assert Run.open("run").read_json("outcome")["status"] == "stopped"


def test_a_finding_ends_the_training_with_a_checkpoint(monkeypatch: pytest.MonkeyPatch):
    def judge(series: list[RecordedSeries], *, ended: bool) -> Judgement:
        steps = max(one.steps[-1] for one in series if one.name == "stable_rank")
        names = {one.name for one in series}
        if steps < 4 or not {"loss", "validation_loss", "learning_rate"} <= names:
            return Judgement()
        found = Finding("diverged_loss", "critical", 3, "The loss diverged.", "Take a lower one.")
        return Judgement((found,))

    monkeypatch.setattr("joma.train.findings.judge", judge)
    watched = CONFIG.replace("off = true", 'every = 1\nbudget = 0\nstop_on = ["diverged"]')
    Path("config.toml").write_text(watched)
    result = joma("train", "config.toml", "--out", "run")
    assert result.exit_code == 0, result.stderr
    assert "critical, step 3: The loss diverged. Take a lower one." in result.stderr  # at once
    assert "  - critical, step 3: The loss diverged.\n      Take a lower one." in result.stdout
    last = len(losses("run"))
    assert 4 <= last < 8
    assert f"Training stopped at step {last} of 8, as monitor.stop_on asks: The loss" in (
        result.stdout
    )
    assert "Continue with: joma train config.toml --out run" in result.stdout
    assert Run.open("run").checkpoints.steps[0] == last
    shown = joma("runs", "show", "run").stdout
    assert "critical step 3 The loss diverged. Take a lower one." in " ".join(shown.split())

    result = joma("train", "config.toml", "--out", "run")  # which goes on, as was asked
    assert "stopped" not in result.stdout
    assert len(losses("run")) == 8
    assert Run.open("run").read_json("findings")["findings"][0]["kind"] == "diverged_loss"


@pytest.mark.slow
def test_torchrun_and_bad_input_of_two_processes():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    command = [*torchrun, "joma", "train", "config.toml", "--out", "run"]
    around = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=around, check=True)
    assert done.stdout.count("Step 8") == 1
    assert len(losses("run")) == 8
    bad = subprocess.run(
        [*command, "--set", "data.window=0"],
        capture_output=True,
        text=True,
        env=around,
        check=False,
    )
    assert bad.stderr.count("joma: data.window must be") == 1
