"""Configurations of language-model trainings: what is refused, and what schedules give."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.models.series import PYTHIA
from joma.train.language import (
    PRESETS,
    CheckpointsSection,
    Config,
    DataSection,
    ModelSection,
    MonitorSection,
    OptimizerSection,
    TrainingSection,
    read_config,
)

FILE = """
[model]
type = "gpt_neox"
hidden_size = 32

[data]
corpus = "wikitext-2"
window = 64

[optimizer]
betas = [0.9, 0.99]

[checkpoints]
schedule = [0, 10]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(FILE)
    return path


def test_a_file_is_read(file: Path):
    config = read_config(file)
    assert config.model == ModelSection("gpt_neox", {"hidden_size": 32})
    assert config.data == DataSection(corpus="wikitext-2", window=64)
    assert config.optimizer.betas == (0.9, 0.99)
    assert config.checkpoints.schedule == (0, 10)
    assert config.training == TrainingSection()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_configurations_and_survive_json(name: str):
    config = read_config(name)
    again = Config.of(json.loads(json.dumps(config.sections())))
    assert again == config


def test_changes(file: Path):
    changes = ["training.steps=7", "data.corpus = embedded", "monitor.metrics=['a', 'b']"]
    changed = read_config(file, changes)
    assert changed.training.steps == 7
    assert changed.data == DataSection(window=64)
    assert changed.monitor.metrics == ("a", "b")
    assert read_config("tiny").training.steps == 300  # a preset is not changed for the next


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["training.step=7"], "no entry of [training] 'step'; available: steps"),
        (["trainin.steps=7"], "no section 'trainin'; available: training"),
        (["steps=7"], "section.entry=value"),
        (["training.steps"], "section.entry=value"),
        (["training.steps=0"], "training.steps must be a whole number from 1 on, got 0"),
        (["training.steps=ten"], "training.steps must be a whole number from 1 on, got 'ten'"),
        (["training.steps=true"], "training.steps must be"),
        (["training.compile=1"], "training.compile must be auto, true or false, got 1"),
        (["training.precision=half"], "training.precision must be one of float32, bfloat16"),
        (["training.accumulate=3"], "training.accumulate must divide data.batch, which is 16"),
        (["optimizer.learning_rate=0"], "optimizer.learning_rate must be above 0, got 0"),
        (["optimizer.learning_rate=nan"], "optimizer.learning_rate must be a number"),
        (["optimizer.betas=[0.9]"], "optimizer.betas must be two numbers below 1"),
        (["optimizer.betas=[0.9, 1.0]"], "optimizer.betas must be a number from 0 on up to 1"),
        (["optimizer.warmup=2000"], "optimizer.warmup must be at most training.steps"),
        (["optimizer.name=sgd"], "optimizer sgd has no setting 'betas'; it has momentum"),
        (["model.type=bert"], "model.type must be one of gpt_neox, gpt2, llama, opt, got 'bert'"),
        (["data.tokenizer=bpe"], "data.vocabulary goes with the tokenizer bpe"),
        (["data.vocabulary=300"], "data.vocabulary goes with the tokenizer bpe"),
        (["data.corpus=3"], "data.corpus must be a word, got 3"),
        (["checkpoints.every=5"], "exclude each other"),
        (["checkpoints.schedule=often"], "pythia or a list of steps, got 'often'"),
        (["checkpoints.schedule=[1, -1]"], "checkpoints.schedule must be a whole number"),
        (["monitor.metrics=loss"], "monitor.metrics must be a list of names, got 'loss'"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(file: Path, changes: list[str], words: str):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the words are checked below)
        read_config(file, changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path):
    with pytest.raises(ValueError, match="TOML file or one of tiny, small"):
        read_config(tmp_path / "missing.toml")
    for content in (b"[model", b"\xff", b"model = 3", b"[data]\n"):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(ValueError, match=r"TOML|\[model\]"):
            read_config(tmp_path / "bad.toml")


@settings(deadline=None, max_examples=50)
@given(
    steps=st.integers(1, 500),
    warmup=st.integers(0, 500),
    schedule=st.sampled_from(["constant", "cosine", "linear"]),
    final=st.floats(0, 1),
)
def test_learning_rates_rise_to_the_highest_and_never_after(
    steps: int, warmup: int, schedule: Any, final: float
):
    optimizer = OptimizerSection(learning_rate=0.5, warmup=warmup, schedule=schedule, final=final)
    rates = [optimizer.learning_rate_at(step, steps) for step in range(steps)]
    rising, rest = rates[:warmup], rates[warmup:]
    assert all(0 < rate <= 0.5 for rate in rising)
    assert rising == sorted(rising)
    assert all(0.5 * final - 1e-12 <= rate <= 0.5 for rate in rest)
    assert rest == sorted(rest, reverse=True)
    assert not rest or rest[0] == 0.5


def test_the_middle_of_a_cosine_and_a_line():
    for schedule in ("cosine", "linear"):
        optimizer = OptimizerSection(learning_rate=1.0, schedule=schedule, final=0.2)
        assert math.isclose(optimizer.learning_rate_at(50, 100), 0.6)


@settings(deadline=None, max_examples=50)
@given(
    last=st.integers(1, 5000),
    kind=st.one_of(
        st.just({"schedule": "pythia"}),
        st.builds(lambda n: {"every": n}, st.integers(1, 3000)),
        st.builds(lambda steps: {"schedule": tuple(steps)}, st.lists(st.integers(0, 6000))),
    ),
)
def test_kept_steps_are_in_order_end_with_the_last_and_none_is_later(last: int, kind: Any):
    steps = CheckpointsSection(**kind).steps(last)
    assert list(steps) == sorted(set(steps))
    assert steps[-1] == last
    assert steps[0] >= 0


def test_pythias_steps():
    assert CheckpointsSection(schedule="pythia").steps(143_000) == PYTHIA
    assert CheckpointsSection().steps(3000)[-4:] == (512, 1000, 2000, 3000)
    assert CheckpointsSection(every=10).steps(25) == (0, 10, 20, 25)
    assert CheckpointsSection(schedule=(5, 3, 99)).steps(25) == (3, 5, 25)


def test_a_monitor_may_be_off():
    assert MonitorSection(off=True).off
    with pytest.raises(ValueError, match=r"monitor\.every must be a whole number from 1 on, got 0"):
        MonitorSection(every=0)


def test_the_example_of_the_page_is_a_configuration(tmp_path: Path):
    page = (Path(__file__).parents[2] / "docs" / "train.md").read_text(encoding="utf-8")
    path = tmp_path / "example.toml"
    path.write_text(page.split("```toml\n")[1].split("```")[0], encoding="utf-8")
    config = read_config(path)
    assert config.training.sharding == "fsdp2"
    assert config.data.vocabulary == 8000
