"""`kill -9` at random moments: what a run said was on disk is there, once, and it can go on."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from joma.runs import Run
from tests.runs._failing import visible

MEMBERS = 3

CHILD = f"""
import sys
import numpy as np
from joma.runs import Run

run = Run.resume("train", {{"seed": 0}}, out=sys.argv[1])
found = run.checkpoints.latest()
assert not found.refused, found.refused
step = found.checkpoint.step if found.checkpoint else -1
run.metrics.rewind(step)
print("began", step, flush=True)
while True:
    for _ in range(5):
        step += 1
        run.metrics.append(step, "loss", step + np.arange({MEMBERS}) / 10)
        run.metrics.append(step, "twice", step, layer=1)
    run.metrics.flush()
    print("flushed", step, flush=True)
    if step % 3 == 0:
        run.metrics.compact()
        print("compacted", step, flush=True)
    if step % 2 == 0:
        run.checkpoints.save(step, {{"weight": np.full(200_000, float(step))}}, {{"at": step}})
        print("saved", step, flush=True)
"""


def lived(folder: Path, lines: int, seconds: float) -> list[tuple[str, int]]:
    """What a run in `folder` said until it was killed, so long after it had said some lines."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    first = "".join(child.stdout.readline() for _ in range(lines))
    time.sleep(seconds)
    child.send_signal(signal.SIGKILL)
    rest, errors = child.communicate()
    assert child.returncode == -signal.SIGKILL, errors
    # The last line counts once it is whole: a kill may come while it is written.
    whole = (first + rest).splitlines(keepends=True)
    said = [line.split() for line in whole if line.endswith("\n")]
    return [(what, int(step)) for what, step in said]


def test_what_was_said_to_be_on_disk_is_there_once(tmp_path: Path):
    moments = random.Random(0)
    began: list[int] = []
    for _ in range(8):
        said = lived(tmp_path / "run", moments.randrange(1, 40), moments.uniform(0, 0.03))
        began.append(said[0][1])
        steps = dict(said)
        run = Run.open(tmp_path / "run")

        log = run.metrics.read("loss")
        pairs = list(zip(log["step"].tolist(), log["member"].tolist(), strict=True))
        last = pairs[-1][0] if pairs else -1
        assert last >= steps.get("flushed", began[-1])
        assert pairs == [(s, m) for s in range(last + 1) for m in range(MEMBERS)]
        np.testing.assert_array_equal(log["value"], log["step"] + log["member"] / 10)
        assert run.metrics.read("twice")["step"].tolist() == list(range(last + 1))

        found = run.checkpoints.latest()
        assert found.refused == ()
        step = found.checkpoint.step if found.checkpoint else -1
        assert step >= steps.get("saved", began[-1])
        if found.checkpoint:
            assert found.checkpoint.about == {"at": step}
            assert set(found.checkpoint.arrays["weight"]) == {float(step)}
            assert len(visible(tmp_path / "run" / "checkpoints")) <= 3
    assert began[0] == -1
    assert began == sorted(began)
    assert len(set(began)) > 3  # it did get on
    Run.resume("train", {"seed": 0}, out=tmp_path / "run")
    left = [name for _, _, names in os.walk(tmp_path / "run") for name in names]
    assert not [name for name in left if name.endswith(".tmp")]
