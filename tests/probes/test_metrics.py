"""The registry of metrics."""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from joma.errors import JomaError
from joma.probes.metrics import METRICS, MONITORED, PROBED, Effort, checked, collected
from joma.probes.session import DEFAULT_METRICS, WEIGHT_METRICS
from joma.train import monitor

ROOT = Path(__file__).parent.parent.parent


def test_reading_the_registry_loads_nothing_heavy():
    script = (
        "import sys; from joma.probes.metrics import METRICS; assert METRICS\n"
        "print([it for it in ('torch', 'numpy', 'scipy', 'matplotlib') if it in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_a_metric_says_all_that_its_readers_need(metric):
    assert metric.sentence
    assert metric.column
    assert metric.per
    assert metric.probed or metric.monitored
    if metric.probed:
        assert metric.measure is not None
    if metric.monitored and metric.needs == "activations":
        assert metric.streamed is not None
    if metric.monitored and metric.needs == "weights":
        assert metric.of_spectrum is not None


def test_columns_are_different():
    assert len({metric.column for metric in METRICS.values()}) == len(METRICS)


def test_those_who_read_the_registry_agree():
    assert tuple(monitor.METRICS) == tuple(MONITORED)
    assert set(DEFAULT_METRICS) | set(WEIGHT_METRICS) <= set(PROBED)


def test_names_are_checked():
    assert [it.name for it in checked(["mlp_zero", "mlp_zero"])] == ["mlp_zero"]
    for wrong in ([], "mlp_zero", ["stable_rnk"], ["gradient_norm"]):
        with pytest.raises(JomaError, match="metrics must be"):
            checked(wrong)


def test_what_is_collected_is_joined():
    assert collected(METRICS.values()) == {
        "first": 1,
        "last": 16,
        "top": (0.01, 0.1),
        "ranks": True,
    }


def test_ranks_of_a_spectrum_are_those_of_a_matrix():
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    values = torch.linalg.svdvals(matrices)
    for metric in METRICS.values():
        if metric.of_spectrum is not None:
            assert metric.measure is not None
            expected = [metric.measure(matrix, Effort(1e-6, 0)).value for matrix in matrices]
            found = metric.of_spectrum(values)
            torch.testing.assert_close(
                found, torch.tensor(expected), rtol=1e-5, atol=0, check_dtype=False
            )


@pytest.mark.parametrize("name", ["probes.md", "monitor.md"])
def test_tables_of_the_docs_are_what_the_tool_writes(name: str):
    spec = importlib.util.spec_from_file_location("table", ROOT / "tools" / "metrics_table.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == tool.page(name)
    assert "<!-- metrics: " in tool.page(name)


def test_a_metric_collects_only_what_there_is() -> None:
    with pytest.raises(ValueError, match="collected of attention is first, last"):
        dataclasses.replace(METRICS["attention_first"], collects={"distance": True})
