"""The picture of a run: whatever was recorded, it can be drawn, and nothing global is changed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from joma.errors import JomaError
from joma.report import figures, training
from joma.runs import Run

FINDINGS = [
    {"kind": kind, "severity": severity, "step": step, "layer": layer}
    for kind, severity, step, layer in [
        ("attention_collapse", "critical", 40, 1),
        ("attention_collapse", "critical", 20, 0),
        ("loss_spike", "warning", 21, None),
        ("rank_collapse", None, 10**9, 3),
    ]
]


def recorded(folder: Path, layers: int = 2, steps: int = 5, **options: Any) -> Run:
    run = Run.create("monitor", {"model": "$x^2$ & <b>"}, out=folder)
    at = np.arange(1, steps + 1)
    members = options.get("members", 1)
    values = np.linspace(5.0, 0.1, steps)[:, None].repeat(members, 1)
    run.metrics.append_many(at, "loss", values * options.get("times", 1.0))
    for layer in range(layers):
        for kind in options.get("kinds", ("self",)):
            where = {"module": f"layers.{layer}.{kind}", "kind": kind, "layer": layer}
            run.metrics.append_many(at, "attention_entropy", values + layer, **where)
        run.metrics.append_many(at, "gradient_energy_32", values, module="b", layer=layer)
        for rank in (8, 128):
            run.metrics.append_many(at, f"gradient_energy_{rank}", values, module="b", layer=layer)
    run.metrics.flush()
    run.write_json("findings", {"findings": options.get("findings", FINDINGS)})
    return run


def titles(figure: Any) -> list[str]:
    return [ax.get_title(loc="left") for ax in figure.axes]


@pytest.mark.parametrize(
    ("layers", "steps", "options"),
    [
        (1, 1, {}),
        (96, 3, {"findings": []}),
        (2, 5, {"kinds": ("self", "decoder cross")}),
        (2, 5, {"members": 3}),
        (2, 5, {"times": float("nan")}),
        (2, 5, {"times": float("inf")}),
        (2, 5, {"times": -1.0}),
        (2, 5, {"times": 0.0}),
        (2, 5, {"times": 1e300}),
        (1, 9000, {"findings": []}),
    ],
)
def test_any_run_can_be_drawn(tmp_path: Path, layers: int, steps: int, options: Any):
    figure = training.draw(recorded(tmp_path / "run", layers, steps, **options))
    assert figures.rendered(figure, "png", dpi=30).startswith(b"\x89PNG")
    found = titles(figure)
    assert found[:2] == ["Loss", "Attention entropy"]
    assert "Gradient energy in the top 8 directions" in found


def test_nothing_recorded_and_old_findings(tmp_path: Path):
    run = Run.create("monitor", {}, out=tmp_path / "run")
    run.write_json("findings", [{"kind": "dead_layer", "sentence": "It died."}, {"step": "x"}])
    assert figures.rendered(training.draw(run), "svg")
    run.metrics.append(1, "ncorr", [0.5, float("nan")])
    run.metrics.flush()
    assert titles(training.draw(run))[0] == "Loss"
    assert "Ncorr" in titles(training.draw(run, metrics=["ncorr"]))
    with pytest.raises(JomaError, match="got 'loss'; there is ncorr"):
        training.draw(run, metrics=["loss"])


def test_lines_and_maps_are_the_numbers(tmp_path: Path):
    run = recorded(tmp_path / "run", layers=3)
    figure: Any = training.draw(run, metrics=["attention_entropy"])
    _, lines, heat = figure.axes[:3]
    curves = [line for line in lines.lines if len(line.get_xdata()) == 5]
    assert [line.get_ydata()[0] for line in curves] == [5.0, 6.0, 7.0]
    (mesh,) = heat.collections
    assert np.ma.filled(mesh.get_array(), np.nan).reshape(3, 5)[:, 0].tolist() == [5.0, 6.0, 7.0]
    marks = [line.get_xdata()[0] for line in lines.lines if len(line.get_xdata()) == 2]
    assert marks == [20, 21, 10**9]


def test_findings_of_a_kind_share_a_mark(tmp_path: Path):
    more = [dict(FINDINGS[0], layer=layer) for layer in (2, 5)]
    figure: Any = training.draw(recorded(tmp_path / "run", findings=[*FINDINGS, *more]))
    listed = next(ax for ax in figure.axes if ax.get_title(loc="left") == "Findings")
    assert [text.get_text() for text in listed.texts] == [
        "1", "critical: attention collapse, layers 0–2, 5, from step 20",
        "2", "warning: loss spike, from step 21",
        "3", "note: rank collapse, layer 3, from step 1,000,000,000",
    ]  # fmt: skip


def test_a_loss_over_a_decade_gets_a_logarithmic_axis(tmp_path: Path):
    assert training.draw(recorded(tmp_path / "a")).axes[0].get_yscale() == "log"
    run = Run.create("monitor", {}, out=tmp_path / "b")
    run.metrics.append_many([1, 2], "loss", [[2.0], [1.0]])
    run.metrics.append(2, "validation_loss", 1.5)
    run.metrics.flush()
    loss: Any = training.draw(run).axes[0]
    assert loss.get_yscale() == "linear"
    legend = loss.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["training", "validation"]


def test_nothing_global_is_changed(tmp_path: Path):
    before = dict(matplotlib.rcParams)
    figures.rendered(training.draw(recorded(tmp_path / "run")), "png", dpi=30)
    assert dict(matplotlib.rcParams) == before
    code = (
        "import sys; from joma.runs import Run; from joma.report import figures, training; "
        f"figures.rendered(training.draw(Run.open({str(tmp_path / 'run')!r})), 'png'); "
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
