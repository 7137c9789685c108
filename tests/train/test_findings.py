"""Findings against series made for each rule, and against the recorded runs of Fig. 6 and 8."""

import csv
import math
import os
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.runs import Run
from joma.train.findings import (
    Series,
    attention_bounce,
    attention_collapse,
    dead_layers,
    diverged_loss,
    judge,
    learning_rate_too_high,
    low_rank_gradients,
    rank_collapse,
    series_of,
)

SHARED = Path(os.environ.get("JOMA_SHARED", Path(__file__).parents[3] / "shared"))
RECORDED = SHARED / "reference" / "wikitext2_entropy.csv"
UNIFORM = math.lgamma(36) / 35

Key = tuple[int, float, int]


@pytest.fixture(scope="module")
def recorded() -> dict[Key, dict[int, tuple[list[int], list[float]]]]:
    """Steps and entropies by (layers, learning rate, seed) and layer."""
    if not RECORDED.is_file():
        pytest.skip(f"needs the recorded curves in {RECORDED.name}; set JOMA_SHARED to find them")
    rows: dict[Key, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    with RECORDED.open() as file:
        for row in csv.DictReader(file):
            key = int(row["layers"]), float(row["lr"]), int(row["seed"])
            rows[key][int(row["layer"])][int(row["step"])] = float(row["attention_entropy"])
    return {
        key: {
            layer: (sorted(points), [points[step] for step in sorted(points)])
            for layer, points in layers.items()
        }
        for key, layers in rows.items()
    }


def test_collapse_is_found_in_exactly_the_recorded_runs_that_collapsed(recorded) -> None:
    assert len(recorded) == 141
    for (depth, rate, seed), layers in recorded.items():
        collapsed = [
            layer
            for layer, (steps, entropy) in layers.items()
            if attention_collapse(steps, entropy, UNIFORM, layer=layer)
        ]
        expected = rate >= 1e-2 or (rate >= 1e-3 and depth >= 2)
        assert bool(collapsed) == expected, (depth, rate, seed, collapsed)


def bounced(recorded, least: float) -> dict[tuple[int, float], tuple[int, int]]:
    """Of how many seeds layer 0 bounced back, and how many there are."""
    found, runs = Counter(), Counter()
    for (depth, rate, _), layers in recorded.items():
        runs[depth, rate] += 1
        found[depth, rate] += attention_bounce(*layers[0], least=least) is not None
    return {key: (found[key], runs[key]) for key in runs}


def test_bounce_back_is_found_where_the_recorded_runs_have_it(recorded) -> None:
    found = bounced(recorded, 0.2)
    every_seed = {key for key, (seeds, runs) in found.items() if key[0] <= 2 and seeds == runs}
    assert every_seed == {(1, 5e-5), (1, 1e-4), (1, 1e-3), (2, 5e-5), (2, 1e-4)}
    assert not any(seeds for key, (seeds, _) in found.items() if key[0] in (5, 10))
    assert bounced(recorded, 0.1)[5, 1e-4] == (3, 3)


def test_a_dip_that_recovers_is_no_collapse_and_a_lost_rise_no_bounce() -> None:
    steps = range(6)
    assert attention_collapse(steps, [2, 1, 0.3, 0.6, 1, 1], 2.6) is None
    found = attention_collapse(steps, [2, 1, 0.3, 0.3, 0.2, 0.1], 2.6, layer=3)
    assert found is not None
    assert (found.kind, found.layer, found.step) == ("attention_collapse", 3, 1)
    assert "layer 3" in found.sentence
    assert found.evidence["end"] == pytest.approx(0.2)
    assert attention_bounce(steps, [2, 1, 1.5, 1.1, 1.0, 1.0]) is None
    back = attention_bounce(steps, [2, 1, 1.5, 1.5, 1.5, 1.5], layer=0, head=2)
    assert back is not None
    assert (back.step, back.head) == (1, 2)
    assert back.evidence["fall"] == pytest.approx(1)
    assert back.evidence["rise"] == pytest.approx(0.5)


def test_two_looks_decide_nothing() -> None:
    assert attention_collapse([0, 1], [0.1, 0.1], 2.6) is None
    assert attention_bounce([0, 1], [1, 2]) is None
    assert rank_collapse([0, 1], [10, 1]) is None
    assert learning_rate_too_high([0, 1], [1, 1], layer=0) is None


@settings(max_examples=30, deadline=None)
@given(
    sixteenths=st.lists(st.integers(0, 48), min_size=3, max_size=12),
    shift=st.integers(0, 5),
)
def test_bounce_depends_on_neither_level_nor_cadence(sixteenths: list[int], shift: int) -> None:
    values = np.array(sixteenths) / 16  # no difference of theirs is near the threshold
    one = attention_bounce(range(len(values)), values)
    other = attention_bounce(range(0, 10 * len(values), 10), values + shift)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert other.step == 10 * one.step
        assert other.evidence["fall"] == pytest.approx(one.evidence["fall"])


def test_rank_collapse_needs_a_rank_to_lose() -> None:
    found = rank_collapse(range(5), [50, 20, 1.9, 1.5, 1.2], what="fc1", layer=1)
    assert found is not None
    assert found.step == 2
    assert "fc1" in found.sentence
    assert rank_collapse(range(5), [3, 2, 1.9, 1.5, 1.2]) is None
    assert rank_collapse(range(5), [50, 20, 1.9, 5, 6]) is None


def test_a_layer_without_gradient_is_dead_and_a_small_one_is_not() -> None:
    alive, small, dead = [1.0] * 4, [1e-3] * 4, [1.0, 1e-6, 0.0, 0.0]
    found = dead_layers(range(4), {0: alive, 1: small, 2: dead, 3: alive})
    assert [one.layer for one in found] == [2]
    assert dead_layers(range(4), {0: dead}) == []
    assert dead_layers(range(4), {0: [0.0] * 4, 1: [0.0] * 4}) == []


def test_loss() -> None:
    falling = np.linspace(10, 3, 100)
    assert diverged_loss(range(100), falling) is None
    spike = falling.copy()
    spike[70] = 40
    assert diverged_loss(range(100), spike) is None
    broken = falling.copy()
    broken[60:] = np.nan
    found = diverged_loss(range(100), broken)
    assert found is not None
    assert found.step == 60
    assert "NaN" in found.sentence
    risen = np.concatenate([falling, np.full(30, 12.0)])
    found = diverged_loss(range(130), risen)
    assert found is not None
    assert "12.000" in found.sentence


def test_a_loss_that_keeps_most_of_what_it_has_gained_has_not_diverged() -> None:
    back = np.concatenate([np.linspace(10, 3, 100), np.linspace(3, 6, 30), np.full(20, 6.0)])
    assert diverged_loss(range(150), back) is None
    found = diverged_loss(range(150), np.where(np.arange(150) > 120, 11.0, back))
    assert found is not None


def test_low_rank_gradients_are_decided_by_the_worst_weight() -> None:
    good, bad = [0.1, 0.95, 0.96, 0.97], [0.9, 0.95, 0.89, 0.99]
    found = low_rank_gradients(range(4), {"a": good}, 8)
    assert found is not None
    assert found.evidence["least"] == pytest.approx(0.95)
    assert low_rank_gradients(range(4), {"a": good, "b": bad}, 8) is None
    assert low_rank_gradients([], {}, 8) is None


def test_steps_of_more_than_a_hundredth_are_too_large() -> None:
    found = learning_rate_too_high(range(3), [0.02] * 3, layer=4, learning_rate=0.1)
    assert found is not None
    assert "learning rate 0.1 is too high for layer 4" in found.sentence
    assert learning_rate_too_high(range(3), [0.002] * 3, layer=4) is None


def test_find_reads_a_run(tmp_path: Path) -> None:
    run = Run.create("small", {}, out=tmp_path / "run")
    for step in range(4):
        run.metrics.append(step, "loss", 3.0 - step)
        for layer, entropy in enumerate((0.1, 2.0)):
            run.metrics.append(step, "attention_uniform", 2.0, layer=layer)
            run.metrics.append(step, "attention_entropy", entropy, layer=layer)
            for head in (0, 1):
                low = layer == 1 and head == 1
                value = 0.2 if low or layer == 0 else 1.9
                run.metrics.append(step, "attention_entropy", value, layer=layer, head=head)
            run.metrics.append(step, "gradient_energy_8", 0.95, module=f"w{layer}", layer=layer)
            run.metrics.append(step, "gradient_stable_rank", 3.0, module=f"w{layer}", layer=layer)
            run.metrics.append(step, "update_relative", 0.05 * layer, layer=layer)
    run.metrics.flush()
    found = judge(series_of(run.metrics.read())).findings
    assert [(one.kind, one.layer, one.head) for one in found] == [
        ("attention_collapse", 0, None),
        ("low_rank_gradients", None, None),
        ("learning_rate_too_high", 1, None),
    ]
    run.write_json("findings", [one.as_json() for one in found])


@pytest.mark.parametrize(
    ("steps", "values", "says"),
    [([0, 1], [1.0], "one for each step"), ([1, 1, 2], [1.0, 1, 1], "increase")],
)
def test_series_that_are_none_are_refused(steps, values, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        attention_bounce(steps, values)
    with pytest.raises(ValueError, match=says):
        Series("loss", np.array(steps), np.array(values))
    with pytest.raises(ValueError, match="uniform must be an entropy"):
        attention_collapse([0], [1.0], -1.0)
