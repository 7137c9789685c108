"""A monitor whose life follows a training, by the events of a Trainer."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from joma.runs import Run
from tests.train._watched import encoder, of_run

pytest.importorskip("transformers")
from joma.integrations.huggingface import MonitorCallback  # needs it

INTERRUPTED = """
import sys
from types import SimpleNamespace
from joma.integrations.huggingface import MonitorCallback
from tests.train._watched import encoder
callback, model = MonitorCallback(run=sys.argv[1]), encoder()
arguments, state = SimpleNamespace(output_dir=None), SimpleNamespace(global_step=0)
callback.on_train_begin(arguments, state, None, model=model)
callback.monitor.step(float("nan"))
raise KeyboardInterrupt
"""


def begin(callback: MonitorCallback, folder: Path, step: int) -> nn.Module:
    model, state = encoder(), SimpleNamespace(global_step=step)
    callback.on_train_begin(SimpleNamespace(output_dir=str(folder)), state, None, model=model)
    return model


def test_a_training_that_is_interrupted_leaves_its_findings(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "run")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    [found] = Run.open(tmp_path / "run").read_json("findings")["findings"]
    assert found["kind"] == "not_finite"


def test_what_was_logged_after_the_checkpoint_comes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = MonitorCallback(metrics=["stable_rank"])
    nothing: Any = None
    for step, losses in ((0, [5.0, 4.0, 3.0]), (2, [2.0])):
        begin(callback, tmp_path, step)
        for loss in losses:
            callback.monitor.step(loss)
    callback.on_train_end(nothing, nothing, nothing)
    folder = tmp_path / "monitor"
    assert of_run(Run.open(folder), "loss") == ([1, 2, 3], [5.0, 4.0, 2.0])
    assert "3 steps watched" in capsys.readouterr().out
    begin(callback, tmp_path, 0)  # a new training
    callback.on_train_end(nothing, nothing, nothing)
    assert of_run(Run.open(folder), "loss")[0] == [1, 2, 3]
    newer = Run.open(tmp_path / "monitor-2")
    assert of_run(newer, "loss") == ([], [])
    assert f"{folder} holds an earlier run" in callback.monitor.summary()
    begin(callback, tmp_path, 1)  # of the newer one
    callback.monitor.step(9.0)
    callback.on_train_end(nothing, nothing, nothing)
    assert of_run(newer, "loss") == ([2], [9.0])


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "monitor").mkdir()
    thesis = tmp_path / "monitor" / "thesis.txt"
    thesis.write_text("mine")
    with pytest.raises(ValueError, match="has other things in it"):
        begin(MonitorCallback(), tmp_path, 0)
    assert thesis.read_text() == "mine"
