"""Language models of every type are trained, watched, and read by others."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from joma.models import Series, load, verify
from joma.runs import Run
from joma.train.language._text import first_windows, read_tokens
from tests.train._language import SIZES, Stop, begin, ended, logged, make, stop_after, write_text


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


@pytest.mark.parametrize("kind", SIZES)
def test_it_learns_and_its_models_are_read_by_others(text: Path, tmp_path: Path, kind: str):
    config = make(
        text,
        kind,
        training={"steps": 20},
        data={"tokenizer": "basic_english"},
        optimizer={"learning_rate": 0.03},
        checkpoints={"schedule": [0, 10]},
    )
    result = begin(config, tmp_path / "run")
    assert (result.begun_at, result.step, result.refused) == (0, 20, ())
    steps, losses = logged(tmp_path / "run", "loss")
    assert steps == list(range(20))
    assert np.mean(losses[-5:]) < losses[0] - 0.15
    assert logged(tmp_path / "run", "validation_loss")[0] == [0, 5, 10, 15, 20]
    series = Series.of(tmp_path / "run" / "series")
    assert series.steps == (0, 10, 20)
    assert verify(series).findings == ()
    last = load(series.checkpoints[-1].source)
    assert last.tokenizer is not None
    assert last.encode("the cat sat.") == list(
        read_tokens(config.data).tokenizer.encode("the cat sat.")
    )
    valid = read_tokens(config.data).valid
    assert valid is not None
    windows = first_windows(valid, 16, 6)
    with torch.no_grad():
        logits = last.model(input_ids=windows[:, :-1]).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert float(loss) == pytest.approx(result.validation_loss, rel=1e-5)


def test_the_seed_decides_everything_and_nothing_global_does(text: Path, tmp_path: Path):
    for name, seed, around in (("a", 3, 0), ("b", 3, 1), ("c", 4, 0)):
        torch.manual_seed(around)
        before = torch.random.get_rng_state()
        begin(make(text, "gpt2", training={"seed": seed}), tmp_path / name)  # has dropout
        assert torch.equal(torch.random.get_rng_state(), before)
    assert ended(tmp_path / "a") == ended(tmp_path / "b")
    assert logged(tmp_path / "a", "loss") != logged(tmp_path / "c", "loss")


def test_the_monitor_changes_no_loss_and_goes_on(text: Path, tmp_path: Path):
    watching = {"off": False, "every": 3, "budget": 0.0}
    config = make(text, "gpt2", monitor=watching)
    words: list[str] = []
    begin(make(text, "gpt2"), tmp_path / "off")
    result = begin(config, tmp_path / "on", progress=lambda what, *_: words.append(what))
    assert ended(tmp_path / "on")[0] == ended(tmp_path / "off")[0]
    assert ended(tmp_path / "on")[3] == ended(tmp_path / "off")[3]
    steps, entropies = logged(tmp_path / "on", "attention_entropy")
    assert {0, 3, 6, 9, 12} <= set(steps)
    assert words[-1].startswith("loss ")
    assert words[-1].split(", ")[-1] == f"entropy {np.mean(entropies[-4:]):.2f}"
    assert result.judgement.as_json() == Run.open(tmp_path / "on").read_json("findings")
    assert result.stopped is None
    with pytest.raises(Stop):
        begin(config, tmp_path / "stopped", progress=stop_after(7))
    begin(config, tmp_path / "stopped")
    assert ended(tmp_path / "stopped")[0] == ended(tmp_path / "on")[0]
    assert {0, 3, 6, 9, 12} <= set(logged(tmp_path / "stopped", "attention_entropy")[0])
