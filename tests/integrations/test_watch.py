"""A monitor whose life follows a training."""

import subprocess
import sys
from pathlib import Path

import pytest

from joma.integrations._watch import Watch
from joma.runs import Run
from tests.train._watched import encoder, of_run

INTERRUPTED = """
import sys
from pathlib import Path
from joma.integrations._watch import Watch
from tests.train._watched import encoder
watch = Watch({"run": sys.argv[1]})
model = encoder()
monitor = watch.begin(model, step=0, folder=None)
monitor.step(float("nan"))
raise KeyboardInterrupt
"""


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


def test_what_was_logged_after_the_checkpoint_comes_again(tmp_path: Path) -> None:
    watch = Watch({"metrics": ["stable_rank"]})
    for step, losses in ((0, [5.0, 4.0, 3.0]), (2, [2.0])):
        monitor = watch.begin(encoder(), step=step, folder=tmp_path / "run")
        for loss in losses:
            monitor.step(loss)
    watch.end()
    assert of_run(Run.open(tmp_path / "run"), "loss") == ([1, 2, 3], [5.0, 4.0, 2.0])
    assert "3 steps watched" in watch.monitor.summary()
    watch.begin(encoder(), step=0, folder=tmp_path / "run")  # a new training
    watch.end()
    assert of_run(Run.open(tmp_path / "run"), "loss")[0] == [1, 2, 3]
    assert of_run(Run.open(tmp_path / "run-2"), "loss") == ([], [])
    assert f"{tmp_path / 'run'} holds an earlier run" in watch.monitor.summary()
    watch.begin(encoder(), step=1, folder=tmp_path / "run").step(9.0)  # of the newer one
    watch.end()
    assert of_run(Run.open(tmp_path / "run-2"), "loss") == ([2], [9.0])


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="has other things in it"):
        Watch({}).begin(encoder(), step=0, folder=tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
