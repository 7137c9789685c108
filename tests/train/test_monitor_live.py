"""Findings while a training runs: reported once, kept on disk, and able to end it."""

import json
import logging
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import joma
from joma.runs import Run
from joma.train import findings
from joma.train.findings import (
    KINDS,
    Finding,
    Judgement,
    NotJudged,
    RecordedSeries,
    judge,
)
from tests.train._watched import batches, encoder

Judge = Callable[[Sequence[RecordedSeries]], Judgement]
OPTIONS: dict[str, Any] = {"every": 1, "budget": None, "metrics": ["stable_rank"]}


def finding(
    kind: str = "dead_layer", severity: Any = "warning", step: int = 2, **where: Any
) -> Finding:
    return Finding(kind, severity, step, f"It is {kind}.", "Try less.", {"end": 0.5}, **where)


def watching(**options: Any) -> joma.Monitor:
    """A monitor of a model that lives as long as it."""
    model = encoder()
    given: dict[str, Any] = {"inputs": next(batches())} | options
    monitor = joma.Monitor(model, **given)
    monitor.model = model  # type: ignore[attr-defined]  # which is kept weakly
    return monitor


def planted(
    monkeypatch: pytest.MonkeyPatch, *found: Sequence[Finding]
) -> list[Sequence[RecordedSeries]]:
    """What each judgement finds, the last one from then on; returns what was judged."""
    judged: list[Sequence[RecordedSeries]] = []

    def fake(series: Sequence[RecordedSeries], *, ended: bool) -> Judgement:
        judged.append(series)
        now = found[min(len(judged), len(found)) - 1]
        return Judgement(tuple(now), (NotJudged("rank_collapse", "4 measurements"),))

    monkeypatch.setattr(findings, "judge", fake)
    return judged


def written(folder: Path) -> list[tuple[str, str]]:
    stored = Run.open(folder).read_json("findings")
    return [(one["kind"], one["severity"]) for one in stored["findings"]]


def test_a_finding_is_reported_once_and_again_where_it_gets_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    note, warning = finding(severity="note"), finding(severity="warning")
    other = finding(layer=1, module="layers.1")
    planted(monkeypatch, [], [note], [note], [warning], [warning, other], [note])
    heard: list[Finding] = []
    with (
        caplog.at_level(logging.INFO, "joma.monitor"),
        watching(run=tmp_path / "run", on_finding=heard.append, **OPTIONS) as monitor,
    ):
        for _ in range(7):
            monitor.step(1.0)
    assert heard == [note, warning, other]
    said = [(one.levelname, one.getMessage()) for one in caplog.records if "dead" in one.message]
    assert said == [
        ("INFO", "note, step 2: It is dead_layer. Try less."),
        ("WARNING", "warning, step 2: It is dead_layer. Try less."),
        ("WARNING", "warning, step 2: It is dead_layer. Try less."),
    ]
    assert monitor.findings == [note]  # what holds now


def test_findings_json_is_what_holds_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    critical = finding("diverged_loss", "critical", 3)
    planted(monkeypatch, [], [finding()], [critical, finding()], [], [finding("frozen", "note")])
    monitor = watching(run=tmp_path / "run", **OPTIONS)
    seen = []
    for _ in range(5):
        monitor.step(1.0)
        seen.append(written(tmp_path / "run"))  # at once, and not at the end alone
    diverged = ("diverged_loss", "critical")
    assert seen == [
        [],
        [("dead_layer", "warning")],
        [diverged, ("dead_layer", "warning")],
        [],  # a loss that came back has not diverged
        [("frozen", "note")],
    ]
    stored = json.loads((tmp_path / "run" / "findings.json").read_text())
    assert stored["findings"][0] == finding("frozen", "note").as_json()
    assert list(stored["findings"][0]) == [
        *("kind", "severity", "step", "sentence", "advice", "evidence", "module", "layer", "head")
    ]
    assert stored["not_judged"] == [{"kind": "rank_collapse", "needs": "4 measurements"}]
    assert monitor.judgement.as_json() == stored
    monitor.close()


def test_numbers_alone_are_rewritten_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [[Finding("dead_layer", "note", 2, f"At {at}.", "")] for at in range(9)]
    planted(monkeypatch, *found)
    writes: list[Any] = []
    write = Run.write_json

    def counted(self: Run, name: str, value: Any) -> Path:
        writes.append((name, value["findings"][0]["sentence"]))
        return write(self, name, value)

    monkeypatch.setattr(Run, "write_json", counted)
    with watching(run=tmp_path / "run", **OPTIONS) as monitor:
        for _ in range(4):
            monitor.step(1.0)
        assert writes == [("findings", "At 0.")]
        now = time.perf_counter
        monkeypatch.setattr(time, "perf_counter", lambda: now() + 11)
        monitor.step(1.0)
        assert writes[1:] == [("findings", "At 5.")]
        monitor.step(1.0)
    assert writes[2:] == [("findings", "At 7.")]  # at its end, judged as ended


def test_a_callback_that_raises_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, [finding()], [finding(), finding(layer=1)])
    heard: list[Finding] = []

    def fail(found: Finding) -> None:
        heard.append(found)
        raise OSError("no mail")

    with watching(run=tmp_path / "run", on_finding=fail, **OPTIONS) as monitor:
        for _ in range(3):
            assert monitor.step(1.0) is False
    assert heard == [finding()]
    assert "- on_finding dropped: no mail" in monitor.summary()
    assert len(monitor.findings) == 2


def test_rules_that_fail_are_named_and_nothing_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(series: Sequence[RecordedSeries], *, ended: bool) -> Judgement:
        raise KeyError("loss")

    monkeypatch.setattr(findings, "judge", fail)
    with watching(run=tmp_path / "run", **OPTIONS) as monitor:
        monitor.step(1.0)
    assert "- findings not made: KeyError" in monitor.summary()
    assert "nothing" not in monitor.summary()
    assert not (tmp_path / "run" / "findings.json").exists()


KILLED = """
import os, signal, sys
import joma
from joma.train.findings import Finding, Judgement
from joma.train import findings
from tests.train._watched import batches, encoder

def judge(series, *, ended):
    found = Finding("diverged_loss", "critical", 2, "It diverged.", "Try less.")
    return Judgement((found,) if max(one.steps[-1] for one in series) >= 3 else ())

findings.judge = judge
model = encoder()
monitor = joma.Monitor(model, every=1, run=sys.argv[1], inputs=next(batches()), budget=None)
for step in range(1, 9):
    monitor.step(1.0)
    if step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_its_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)], cwd=Path(__file__).parents[2], timeout=600
    )
    assert done.returncode == -signal.SIGKILL
    assert written(folder) == [("diverged_loss", "critical")]

    # Resumed, it is neither reported again nor a reason to stop.
    planted(monkeypatch, [Finding("diverged_loss", "critical", 2, "It diverged.", "Try less.")])
    heard: list[Finding] = []
    resumed: dict[str, Any] = {"step": 3, "stop_on": {"critical"}, "on_finding": heard.append}
    with watching(run=folder, **OPTIONS, **resumed) as monitor:
        assert not monitor.step(1.0)
    assert heard == []
    assert written(folder) == [("diverged_loss", "critical")]
    assert "critical, step 2: It diverged." in monitor.summary()
    planted(monkeypatch, [])
    with watching(run=folder, inputs=next(batches()), step=1, **OPTIONS):  # from before
        pass
    assert written(folder) == []


def test_two_findings_of_one_place_are_both_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = finding("not_finite", "critical", 2)
    weights = Finding("not_finite", "critical", 3, "8 weights are not finite.", "")
    planted(monkeypatch, [loss], [loss, weights])
    with watching(run=tmp_path / "run", **OPTIONS) as monitor:
        monitor.step(1.0)
        monitor.step(1.0)
    assert monitor.findings == [loss, weights]
    assert len(written(tmp_path / "run")) == 2


def test_a_note_never_stops_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharp attention that a tuned model came with is one."""
    planted(monkeypatch, [finding("attention_collapse", "note")])
    with watching(run=tmp_path / "run", stop_on={"collapse"}, **OPTIONS) as monitor:
        assert not any(monitor.step(1.0) for _ in range(3))


def test_what_is_not_finite_stands_once_in_the_summary(tmp_path: Path) -> None:
    with watching(run=tmp_path / "run", **OPTIONS) as monitor:
        for _ in range(3):
            monitor.step(float("nan"))
    said = monitor.summary()
    assert said.count("NaN") == 1
    assert "go back to a checkpoint" in said


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        ({"dead_layer"}, 2),
        (["diverged"], 3),
        (("diverged_loss", "nan"), 3),
        ({"critical"}, 3),
        ({"collapse"}, 4),
        ({"nan"}, None),
        ((), None),
    ],
)
def test_a_loop_is_stopped_where_it_asked_for_it(
    names: Any, ends: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, diverged = finding(), finding("diverged_loss", "critical")
    collapsed = finding("attention_collapse", "warning")
    planted(monkeypatch, [], [dead], [dead, diverged], [dead, diverged, collapsed])
    with watching(run=tmp_path / "run", stop_on=names, **OPTIONS) as monitor:
        answers = [monitor.step(1.0) for _ in range(5)]
    # The first judgement is that before the first step.
    expected = [ends is not None and step >= ends - 1 for step in range(1, 6)]
    assert answers == expected
    assert (monitor.stop_reason is None) == (ends is None)
    if ends is not None:
        assert monitor.stop_reason in {one.sentence for one in (dead, diverged, collapsed)}


def test_a_nan_is_judged_when_it_happens(tmp_path: Path) -> None:
    heard: list[Finding] = []
    monitor = watching(
        every=1000,
        run=tmp_path / "run",
        inputs=next(batches()),
        stop_on={"not_finite"},
        on_finding=heard.append,
    )
    ended = [monitor.step(1.0 if step < 40 else torch.nan) for step in range(1, 42)]
    assert ended == [False] * 39 + [True] * 2
    assert [one.kind for one in heard] == ["not_finite"]
    assert written(tmp_path / "run")[0] == ("not_finite", "critical")
    monitor.close()


def test_the_summary_has_severity_advice_and_what_was_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = [NotJudged(kind, "an optimizer") for kind in KINDS[:2]]
    missing.append(NotJudged(KINDS[2], "at least 4 measurements; there are 2"))
    found = (finding("diverged_loss", "critical", 3), finding("attention_bounce", "note", 1))
    monkeypatch.setattr(findings, "judge", lambda series, ended: Judgement(found, tuple(missing)))
    with watching(run=tmp_path / "run", **OPTIONS) as monitor:
        monitor.step(1.0)
    assert monitor.summary().splitlines()[1:] == [
        "- critical, step 3: It is diverged_loss.",
        "    Try less.",
        "- note, step 1: It is attention_bounce.",
        "    Try less.",
        f"- not judged: {KINDS[0]}, {KINDS[1]}: needs an optimizer",
        f"- not judged: {KINDS[2]}: needs at least 4 measurements; there are 2",
    ]


@pytest.mark.parametrize(
    ("left_out", "says"),
    [
        (len(KINDS), "- nothing out of the ordinary was found"),
        (2, "- nothing was found by the 2 rules that could be judged"),
        (0, "- nothing could be judged"),
    ],
)
def test_nothing_found_claims_no_more_than_was_judged(
    left_out: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tuple(NotJudged(kind, "more") for kind in KINDS[left_out:])
    monkeypatch.setattr(findings, "judge", lambda series, ended: Judgement((), missing))
    with watching(run=tmp_path / "run", **OPTIONS) as monitor:
        monitor.step(1.0)
    assert monitor.summary().splitlines()[1] == says


def test_the_kinds_are_those_that_rules_return() -> None:
    assert {one.kind for one in judge([]).not_judged} <= set(KINDS)
    sources = Path(findings.__file__).parent.glob("*.py")
    named = [re.findall(r'found\(\s*"(\w+)"', path.read_text("utf-8")) for path in sources]
    assert {kind for kinds in named for kind in kinds} <= set(KINDS)
