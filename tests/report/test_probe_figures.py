"""The pictures of a model and of a series: what is drawn of which numbers."""

from typing import Any

import numpy as np
import pytest

from joma.report.probe import attentions, draw_probe, entropies
from joma.report.series import Panel, draw_series
from joma.runs import Run


def record(metric: str, module: str, layer, head, value: float, bound=None) -> dict:
    names = ("metric", "module", "layer", "head", "value", "bound")
    return dict(zip(names, (metric, module, layer, head, value, bound), strict=True))


def xs(line: Any) -> list[float]:
    return list(line.get_xdata())


class TestProbe:
    RECORDS = (
        record("attention_entropy", "a0", 0, None, 1.5),
        record("attention_entropy", "a0", 0, 0, 1.0),
        record("attention_entropy", "a0", 0, 1, 2.0),
        record("attention_entropy", "a2", 2, 1, 0.5),
        record("stable_rank", "q0", 0, None, 7.0, 0.01),
        record("stable_rank", "q1", 1, None, 8.0, 0.01),
        record("stable_rank", "e", None, None, 2.0, 0.01),
    )
    ROLES = {"q0": "query", "q1": "query", "e": "embedding"}  # noqa: RUF012

    def test_entropies_by_layer_and_head(self):
        found = entropies(self.RECORDS)
        nan = np.nan
        np.testing.assert_array_equal(found, [[1.0, 2.0], [nan, nan], [nan, 0.5]])

    def test_panels(self):
        figure = draw_probe(self.RECORDS, self.ROLES)
        assert figure is not None
        titles = [ax.get_title() for ax in figure.axes if ax.get_title()]
        assert titles == ["Attention entropy, mean over queries", "Stable rank of the weights"]
        lines = next(ax for ax in figure.axes if "Stable" in ax.get_title())
        (queries,) = lines.containers
        assert queries.lines[0].get_ydata().tolist() == [7.0, 8.0]  # type: ignore[attr-defined]

    def test_only_what_was_measured(self):
        assert draw_probe([], {}) is None
        figure = draw_probe(self.RECORDS[4:], self.ROLES)
        assert figure is not None
        assert len(figure.axes) == 1


STEPS = (0, 1, 2, 4, 100, 1000)


def panel(layers: int = 3) -> Panel:
    return Panel("Entropy", "nats", np.arange(len(STEPS) * layers, dtype=float).reshape(-1, layers))


class TestSeries:
    def test_bad_steps_are_marked_and_not_joined(self):
        figure = draw_series(STEPS, [panel()], {2: "repeated", 64: "missing"})
        (ax,) = figure.axes
        by_label = {line.get_label(): line for line in ax.lines}
        assert xs(by_label["layer 0"]) == [0, 1, 4, 100, 1000]
        assert xs(by_label["repeated"]) == [2]
        assert xs(by_label["missing"]) == [64]
        crosses = [line for line in ax.lines if line.get_marker() == "x"]
        assert [xs(line) for line in crosses] == [[2]] * 3
        dotted = [xs(line)[0] for line in ax.lines if line.get_linestyle() == ":"]
        assert sorted(dotted) == [2, 64]

    def test_the_axis_shows_step_0(self):
        (ax,) = draw_series(STEPS, [panel()]).axes
        assert ax.get_xscale() == "symlog"
        assert ax.get_xlim()[0] < 0
        assert list(ax.get_xticks()) == [0, 1, 10, 100, 1000]
        places = ax.transData.transform([(step, 0) for step in STEPS])[:, 0]
        assert (np.diff(places) > 5).all()

    def test_even_steps_stand_evenly(self):
        values = panel()
        (ax,) = draw_series([0, 10, 20, 30, 40, 50], [values]).axes
        assert ax.get_xscale() == "linear"

    def test_many_layers_have_a_scale(self):
        figure = draw_series(STEPS, [panel(30), panel(30)])
        assert [ax.get_ylabel() for ax in figure.axes][-1] == "layer"
        assert figure.axes[0].get_legend() is None

    def test_numbers_that_are_not_there_are_left_out(self):
        values = panel().values_SL
        values[3, 1] = np.nan
        (ax,) = draw_series(STEPS, [Panel("Entropy", "nats", values)]).axes
        line = next(line for line in ax.lines if line.get_label() == "layer 1")
        assert 4 not in xs(line)

    @pytest.mark.parametrize(("ratios", "most", "scale"), [
        (True, 100.0, "log"), (True, 3.0, "linear"), (False, 100.0, "linear"),
    ])  # fmt: skip
    def test_values_that_span_much_stand_on_a_logarithmic_axis(self, ratios, most, scale):
        values = np.linspace(1.0, most, len(STEPS)).reshape(-1, 1)
        (ax,) = draw_series(STEPS, [Panel("Rank", "", values, ratios=ratios)]).axes
        assert ax.get_yscale() == scale

    @pytest.mark.parametrize("steps", [(0,), (7,), (0, 5)])
    def test_few_steps_can_be_saved(self, tmp_path, steps):
        from joma.report import figures

        values = np.ones((len(steps), 2))
        figure = draw_series(steps, [Panel("Entropy", "nats", values)])
        run = Run.create("probe-series", {}, out=tmp_path / "run")
        paths = figures.save(run, "series", figure, title="t", caption="c")
        assert all(path.stat().st_size > 1000 for path in paths)


def test_attentions_that_share_a_layer_keep_a_row_each():
    records = [
        {
            "metric": "attention_entropy",
            "module": module,
            "kind": kind,
            "layer": layer,
            "head": head,
            "value": 10.0 * number + (head or 0),
            "bound": None,
        }
        for number, (module, kind, layer) in enumerate(
            [("encoder.0", "encoder self", 0), ("decoder.0", "decoder self", 0), ("x#1", "self", 0)]
        )
        for head in (None, *range(2 - number % 2))
    ]
    assert list(attentions(records).values()) == [
        "0 encoder self",
        "0 decoder self",
        "0 self #1",
    ]
    found = entropies(records)
    assert found is not None
    np.testing.assert_array_equal(found, [[0, 1], [10, np.nan], [20, 21]])
    figure = draw_probe(records, {})
    assert figure is not None
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels == ["0 encoder self", "0 decoder self", "0 self #1"]
    assert attentions(records[:3]) == {}


def test_towers_and_experts_are_lines_of_their_own():
    modules = [f"{tower}.{layer}.q" for layer in range(3) for tower in ("encoder", "decoder")]
    found = [record("stable_rank", name, i // 2, None, i, 0.1) for i, name in enumerate(modules)]
    figure = draw_probe(found, dict.fromkeys(modules, "query"))
    assert figure is not None
    lines: Any = figure.axes[0].containers
    assert [xs(line.lines[0]) for line in lines] == [[0, 1, 2], [0, 1, 2]]
    assert [list(line.lines[0].get_ydata()) for line in lines] == [[0, 2, 4], [1, 3, 5]]
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["queries"]
