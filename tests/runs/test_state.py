"""What became of a run: by real processes that run, end, fail or are killed."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from joma.runs import Run, RunSummary, _state, is_locked, list_runs, read_findings, state_of

HOLD = """
import sys, time
from joma.runs import Run

run = Run.open(sys.argv[1])
with run.locked():
    run.write_json("outcome", {"status": "running"})
    print("locked", flush=True)
    time.sleep(600)
"""
DIVERGED = {"kind": "not_finite", "severity": "critical", "step": 61, "sentence": "NaN at 61."}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create("monitor", {}, out=tmp_path / "run")


@contextlib.contextmanager
def running(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "locked\n"
            yield child
        finally:
            child.kill()


def test_a_run_is_running_until_it_is_killed_and_then_died(run: Run):
    with running(run.path) as child:
        assert state_of(run) == "running"
        child.send_signal(signal.SIGKILL)
        child.wait()
        summary = RunSummary.of(run)
        assert (summary.state, summary.reason) == (
            "died",
            "Its process ended without closing the run.",
        )


def test_a_folder_locked_by_this_process_is_running(run: Run):
    run.write_json("outcome", {"status": "running"})
    with run.locked():
        assert state_of(run) == "running"
    assert state_of(run) == "died"


@pytest.mark.parametrize(
    ("outcome", "state", "reason"),
    [
        (None, "unknown", "It did not record how it ended."),
        ({"status": "done"}, "ended", ""),
        ({"status": "interrupted"}, "stopped", "It was interrupted."),
        ({"status": "stopped", "stopped": "Collapse."}, "stopped", "Collapse."),
        ({"status": "failed"}, "died", "It failed."),
        ({"status": "failed", "error": "KeyError: 'x'"}, "died", "It failed with KeyError: 'x'."),
        ({"status": "unclosed"}, "unknown", "Its process left without closing the monitor."),
        ("strange", "unknown", "It did not record how it ended."),
    ],
)
def test_states_follow_from_the_outcome(run: Run, outcome: Any, state: str, reason: str):
    if outcome is not None:
        run.write_json("outcome", outcome)
    summary = RunSummary.of(run)
    assert (summary.state, summary.reason) == (state, reason)


@pytest.mark.parametrize("status", ["done", "failed", "running", "stopped", None])
def test_a_critical_finding_of_divergence_makes_it_diverged(run: Run, status: str | None):
    run.write_json("findings", {"findings": [{**DIVERGED, "severity": "warning"}]})
    if status is not None:
        run.write_json("outcome", {"status": status})
    assert state_of(run) != "diverged"
    run.write_json("findings", {"findings": [{"severity": "note", "step": 1}, DIVERGED]})
    summary = RunSummary.of(run)
    assert (summary.state, summary.reason) == ("diverged", "NaN at 61.")
    assert summary.worst is not None
    assert summary.worst["step"] == 61
    with run.locked():
        assert state_of(run) == ("diverged" if status == "done" else "running")


def test_the_reason_of_a_divergence_is_its_own_finding(run: Run):
    earlier = {"kind": "attention_collapse", "severity": "critical", "step": 5, "sentence": "No."}
    run.write_json("findings", {"findings": [earlier, DIVERGED]})
    summary = RunSummary.of(run)
    assert (summary.state, summary.reason) == ("diverged", "NaN at 61.")
    assert summary.worst is not None
    assert summary.worst["step"] == 5


def test_asking_for_the_state_never_refuses_a_run_that_starts(run: Run):
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            is_locked(run.path)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            with run.locked():
                pass
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_without_locks_it_counts_when_files_were_written(run: Run, monkeypatch):
    run.write_json("outcome", {"status": "running"})

    def flock(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    summary = RunSummary.of(run)
    assert summary.state == "running"
    assert summary.reason.startswith("Locks cannot be tested here, and it wrote last ")
    long_ago = time.time() - 7200
    for path in run.path.iterdir():
        os.utime(path, (long_ago, long_ago))
    summary = RunSummary.of(run)
    assert summary.state == "died"
    assert summary.reason == "Locks cannot be tested here, and it wrote last 2.0 h ago."


def test_a_run_of_another_machine_is_judged_by_its_files(run: Run, monkeypatch):
    run.write_json("outcome", {"status": "running"})
    assert state_of(run) == "died"
    monkeypatch.setattr(_state.platform, "node", lambda: "elsewhere")
    summary = RunSummary.of(run)
    assert summary.state == "running"
    assert run.environment["host"] in summary.reason


def damaged(root: Path) -> dict[Path, str]:
    """Return run folders that are damaged, each with a word of the reason."""
    found: dict[Path, str] = {}
    for name, reason in {
        "config": "config.json is damaged",
        "environment": "environment.json is not valid JSON",
        "no environment": "environment.json does not exist",
        "no config": "config.json is missing",
        "outcome": "outcome.json is damaged",
        "findings": "findings.json is damaged",
        "log": "part-000000.parquet is damaged: it was cut short",
        "middle": "part-000001.parquet is damaged",
        "missing part": "part-000000.parquet is missing",
    }.items():
        run = Run.create("monitor", {}, out=root / name.replace(" ", "-"))
        for step in range(3):
            run.metrics.append(step, "loss", 1.0)
            run.metrics.flush()
        run.write_json("outcome", {"status": "done"})
        run.write_json("findings", {"findings": []})
        parts = sorted((run.path / "metrics").iterdir())
        if name == "middle":
            parts[1].write_bytes(parts[1].read_bytes()[:-10])
        elif name == "log":
            parts[0].write_bytes(parts[0].read_bytes()[:100])
        elif name == "missing part":
            parts[0].unlink()
        elif name.startswith("no "):
            (run.path / f"{name[3:]}.json").unlink()
        else:
            (run.path / f"{name}.json").write_text("{")
        found[run.path] = reason
    return found


def test_damaged_folders_are_listed_with_their_reason(tmp_path: Path):
    reasons = damaged(tmp_path)
    (tmp_path / "website").mkdir()
    (tmp_path / "website" / "manifest.json").write_text('{"name": "not a run"}')
    (tmp_path / "website" / "environment.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "environment.json").write_text("{")
    summaries = {summary.path: summary for summary in list_runs(tmp_path)}
    assert set(summaries) == set(reasons)
    for path, reason in reasons.items():
        assert summaries[path].state == "damaged"
        assert reason in summaries[path].reason, path
        json.dumps(summaries[path].as_json())


def test_the_last_loss_is_the_mean_of_members_and_may_be_nan(run: Run):
    assert (RunSummary.of(run).last_step, RunSummary.of(run).last_loss) == (None, None)
    run.metrics.append(1, "loss", [1.0, 3.0])
    run.metrics.flush()
    run.metrics.append(5, "other", 0.0)
    run.metrics.flush()
    summary = RunSummary.of(run)
    assert (summary.last_step, summary.last_loss) == (5, 2.0)
    run.metrics.append(6, "loss", [float("nan"), 3.0])
    run.metrics.flush()
    summary = RunSummary.of(run)
    assert summary.last_loss != summary.last_loss
    assert summary.as_json()["last_loss"] is None


def test_only_the_last_part_is_read_for_the_last_loss(run: Run, monkeypatch):
    for step in range(5):
        run.metrics.append(step, "loss", float(step))
        run.metrics.flush()
    read: list[str] = []
    reading = type(run.metrics)._with_parts.__globals__["LogPart"].read

    def noted(part: Any) -> Any:
        read.append(part.path.name)
        return reading(part)

    monkeypatch.setattr("joma.runs._metrics.LogPart.read", noted)
    assert RunSummary.of(run).last_loss == 4.0
    assert read == ["part-000004.parquet"]


@pytest.mark.parametrize(
    "stored", [3, "text", [], {}, {"findings": 3}, [1, None], {"findings": [{}]}]
)
def test_findings_of_any_content_are_read(run: Run, stored: Any):
    run.write_json("findings", stored)
    found = read_findings(run)
    assert all(isinstance(one, dict) for one in found.findings)
    assert RunSummary.of(run).state == "unknown"
