"""Findings against series made for each rule, and against the recorded runs of Fig. 6 and 8.

`benchmarks.findings` holds them against trainings with a known state.
"""

import csv
import math
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.runs import Run
from joma.train.findings import (
    Finding,
    Judgement,
    RecordedSeries,
    attention_bounce,
    attention_collapse,
    judge,
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


def test_the_bounce_depends_on_its_threshold_as_documented(recorded) -> None:
    """How many of the 141 runs have a layer that bounced, by the nats that are asked for."""
    runs = {
        least: sum(
            any(attention_bounce(*series, least=least) for series in layers.values())
            for layers in recorded.values()
        )
        for least in (0.1, 0.2, 0.4)
    }
    assert list(runs.values()) == sorted(runs.values(), reverse=True)
    for layers in recorded.values():
        for steps, entropy in layers.values():
            found = attention_bounce(steps, entropy)
            if found is not None:  # entropy really rises after its minimum, and stays up
                after = [
                    value for step, value in zip(steps, entropy, strict=True) if step > found.step
                ]
                assert np.mean(after[-3:]) >= min(entropy) + 0.2


def test_a_dip_that_recovers_is_no_collapse_and_a_lost_rise_no_bounce() -> None:
    steps = range(6)
    assert attention_collapse(steps, [2, 1, 0.3, 0.6, 1, 1], 2.6) is None
    found = attention_collapse(steps, [2, 1, 0.3, 0.3, 0.2, 0.1], 2.6, layer=3)
    assert found is not None
    assert (found.kind, found.layer, found.step) == ("attention_collapse", 3, 2)
    assert "layer 3" in found.sentence
    assert found.evidence["end"] == pytest.approx(0.2)
    assert attention_bounce(steps, [2, 1, 1.5, 1.1, 1.0, 1.0]) is None
    back = attention_bounce(steps, [2, 1, 1.5, 1.5, 1.5, 1.5], layer=0)
    assert back is not None
    assert (back.step, back.layer, back.severity) == (1, 0, "note")
    assert back.evidence["fall"] == pytest.approx(1)
    assert back.evidence["rise"] == pytest.approx(0.5)


def test_a_collapse_is_said_to_last_since_a_step_at_which_it_does() -> None:
    """It was said that entropy "stays below after step 500", where step 500 is above."""
    steps, entropy = [0, 250, 500, 750, 1000], [2.6, 2.0, 1.0, 0.3, 0.2]
    found = attention_collapse(steps, [*entropy[:-1], 0.1], 2.6)
    assert found is not None
    assert found.step == 750
    assert "since step 750" in found.sentence


@pytest.mark.parametrize(
    "entropy",
    [
        [3.206, 2.882, 2.723],  # of a default Trainer run
        [3.0, 2.5, 2.0, 1.5, 1.4],
        [3.0, 2.5, 1.0, 1.5],  # one measurement after the lowest
    ],
)
def test_attention_that_only_falls_has_not_bounced(entropy: list[float]) -> None:
    assert attention_bounce(range(len(entropy)), entropy) is None


def test_two_measurements_decide_nothing() -> None:
    assert attention_collapse([0, 1], [0.1, 0.1], 2.6) is None
    assert attention_bounce([0, 1], [1, 2]) is None


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


FALLING = np.linspace(10, 3, 100)


def of_loss(kind: str, steps: Any, loss: Any, vocabulary: int | None = None) -> Finding | None:
    """Return what a rule says of a loss."""
    series = recorded_of(loss=(steps, loss))
    if vocabulary is not None:
        series += recorded_of(vocabulary=([1], [vocabulary]))
    return next(iter(judge(series).of_kind(kind)), None)


def over_fitted(steps: Any, validation: Any) -> Finding | None:
    """Return whether a validation loss is over-fitting while the training loss falls."""
    falling = range(1, 1000), np.linspace(9, 1, 999)
    series = recorded_of(loss=falling, validation_loss=(steps, validation))
    return next(iter(judge(series).of_kind("overfitting")), None)


def test_a_loss_that_rises_for_good_has_diverged() -> None:
    assert of_loss("diverged_loss", range(100), FALLING) is None
    spike = FALLING.copy()
    spike[70] = 40
    assert of_loss("diverged_loss", range(100), spike) is None
    found = of_loss("diverged_loss", range(130), np.concatenate([FALLING, np.full(30, 12.0)]))
    assert found is not None
    assert found.severity == "critical"
    assert "12.000" in found.sentence
    back = np.concatenate([FALLING, np.linspace(3, 6, 30), np.full(20, 6.0)])
    assert of_loss("diverged_loss", range(150), back) is None  # most of what it had gained is kept
    some = of_loss("diverged_loss", range(150), np.where(np.arange(150) > 120, 8.0, back))
    assert some is not None
    assert some.severity == "warning"  # not as bad as it began


def test_one_spike_at_the_end_of_few_losses_is_no_divergence() -> None:
    for number in (11, 20, 41, 101):
        loss = np.append(np.linspace(5, 2, number - 1), 40.0)
        assert of_loss("diverged_loss", range(number), loss) is None, number


def test_noise_of_a_loss_that_falls_little_is_no_divergence() -> None:
    dice = np.random.default_rng(0)
    for _ in range(50):
        loss = 2.0 - 1e-4 * np.arange(400) + 0.3 * dice.standard_normal(400)
        assert of_loss("diverged_loss", range(400), loss) is None
        assert of_loss("loss_spike", range(400), loss) is None


def test_one_loss_that_is_not_finite_is_not_since_then() -> None:
    loss = FALLING.copy()
    loss[50] = np.nan
    found = of_loss("not_finite", range(100), loss)
    assert found is not None
    assert found.severity == "warning"
    assert found.sentence == "The loss was NaN at step 50 and is finite again (1 of 100 steps)."
    loss[60:] = np.inf
    found = of_loss("not_finite", range(100), loss)
    assert found is not None
    assert (found.severity, found.step) == ("critical", 50)
    assert of_loss("not_finite", range(100), FALLING) is None


def test_a_spike_that_comes_back_is_a_note_and_one_that_stays_is_none() -> None:
    loss = np.concatenate([FALLING, np.full(10, 8.0), np.full(60, 3.1)])
    found = of_loss("loss_spike", range(len(loss)), loss)
    assert found is not None
    assert found.severity == "note"
    assert 100 <= found.step <= 110
    assert of_loss("loss_spike", range(110), loss[:110]) is None
    assert of_loss("loss_spike", range(100), FALLING) is None


def test_a_first_loss_is_compared_with_that_of_knowing_nothing() -> None:
    assert of_loss("bad_initialisation", [1, 2], [math.log(1000) * 1.2, 3.0], 1000) is None
    found = of_loss("bad_initialisation", [1, 2], [20.0, 3.0], 1000)
    assert found is not None
    assert "ln 1000 = 6.91" in found.sentence
    # A sum of losses, or of squares, is nothing that can be compared with ln V.
    summed = recorded_of(loss=(range(1, 30), np.linspace(800, 500, 29)), vocabulary=([1], [1000]))
    assert needs(summed, "bad_initialisation") == (
        "a loss that is a mean of cross-entropies over 1000 tokens"
    )


def test_overfitting_is_a_validation_loss_that_rises_while_training_goes_on() -> None:
    steps = range(0, 1000, 100)
    rising = [4.0, 3.0, 2.5, 2.4, 2.5, 2.7, 2.9, 3.0, 3.1, 3.2]
    found = over_fitted(steps, rising)
    assert found is not None
    assert found.step == 300
    assert over_fitted(steps, sorted(rising, reverse=True)) is None
    assert over_fitted(steps, [*sorted(rising, reverse=True)[:-1], 2.41]) is None
    assert over_fitted([0, 100, 200], [4.0, 2.0, 3.0]) is None  # three are too few
    # After a spike of the training loss, too, the validation loss is above its lowest.
    loss = np.concatenate([np.linspace(4, 1.5, 300), np.full(50, 4.0), np.linspace(3, 1.8, 600)])
    both = recorded_of(loss=(range(1, 951), loss), validation_loss=(steps, rising))
    assert "overfitting" not in kinds(both)


def recorded_of(**series: tuple) -> list[RecordedSeries]:
    """Series of the whole model; of modules where a name has "__", as `frozen__layers_0_a`."""
    found = []
    for name, (steps, values) in series.items():
        name, _, module = name.partition("__")
        module = module.replace("_", ".")
        numbers = [int(part) for part in module.split(".") if part.isdigit()]
        layer = numbers[0] if numbers else None
        at = np.asarray(steps, dtype=np.int64)
        found.append(
            RecordedSeries(
                name, at, np.broadcast_to(np.asarray(values, float), at.shape), module, layer
            )
        )
    return found


def kinds(series: list[RecordedSeries], **options: bool) -> set[str]:
    return {one.kind for one in judge(series, **options).findings}


def needs(series: list[RecordedSeries], kind: str) -> str | None:
    return next((one.needs for one in judge(series).not_judged if one.kind == kind), None)


MEASURED = (1, 2, 4, 8, 16, 32, 64, 100)


def layers_of(**changed: tuple[float, ...] | float) -> list[RecordedSeries]:
    """Four layers of which every weight is trained and moves; `changed` by "name__layers_1_a"."""
    usual = {
        "requires_grad": 1.0,
        "optimized": 1.0,
        "gradient_norm": 0.5,
        "update_relative": 0.01,
        "frozen": 0.0,
        "stable_rank": 8.0,
        "mlp_dead": 0.1,
    }
    series: dict[str, tuple] = {}
    for layer in range(4):
        for part in ("a", "b"):
            for name, value in usual.items():
                series[f"{name}__layers_{layer}_{part}"] = (MEASURED, value)
    for name, value in changed.items():
        series[name] = (MEASURED, value)
    return recorded_of(**series)


def found_in(series: list[RecordedSeries], kind: str) -> list[tuple[str | None, int | None, str]]:
    return [(it.module, it.layer, it.severity) for it in judge(series).findings if it.kind == kind]


def test_a_model_that_is_trained_throughout_has_no_findings() -> None:
    assert judge(layers_of()).findings == ()


def test_a_layer_in_between_that_is_frozen_is_a_warning_and_the_first_ones_are_a_note() -> None:
    def frozen(*layers: int) -> list[RecordedSeries]:
        return layers_of(
            **{f"requires_grad__layers_{at}_{part}": 0.0 for at in layers for part in "ab"}
        )

    assert found_in(frozen(2), "frozen_layer") == [("layers.2", 2, "warning")]
    first = [("layers.0", 0, "note"), ("layers.1", 1, "note")]
    assert found_in(frozen(0, 1), "frozen_layer") == first
    assert found_in(frozen(0, 1, 2, 3), "frozen_layer") == []  # a tower that is only read
    # LoRA: what is there is frozen, in every layer something is trained.
    adapters = {f"requires_grad__layers_{at}_a": 0.0 for at in range(4)}
    assert found_in(layers_of(**adapters), "frozen_layer") == []


def test_a_layer_that_no_step_moves_is_not_in_the_optimizer() -> None:
    still = {f"update_relative__layers_1_{part}": 0.0 for part in "ab"}
    left_out = {f"optimized__layers_1_{part}": 0.0 for part in "ab"}
    assert found_in(layers_of(**still, **left_out), "not_optimized") == [("layers.1", 1, "warning")]
    unknown = [one for one in layers_of(**still) if one.name != "optimized"]
    assert found_in(unknown, "not_optimized") == [("layers.1", 1, "warning")]
    # Steps that were not seen move it: every fourth one, as of a generator.
    norms = {
        "weight_norm__layers_1_a": (1, 1, 1, 1, 1.1, 1.1, 1.2, 1.2),
        "weight_norm__layers_1_b": 1.0,
    }
    assert found_in(layers_of(**still, **left_out, **norms), "not_optimized") == [
        ("layers.1.b", 1, "warning")
    ]
    # A second optimizer holds it that the monitor was not given: it moves.
    assert found_in(layers_of(**left_out), "not_optimized") == []
    one = layers_of(update_relative__layers_2_b=0.0, optimized__layers_2_b=0.0)
    assert found_in(one, "not_optimized") == [("layers.2.b", 2, "warning")]
    # While the learning rate is 0 nothing moves.
    waiting = {
        f"update_relative__layers_{at}_{part}": (0.0,) * 7 + (0.01,)
        for at in range(4)
        for part in "ab"
    }
    assert found_in(layers_of(**waiting), "not_optimized") == []
    assert needs(layers_of(**waiting), "not_optimized") is not None


def test_a_layer_without_gradient_is_dead_and_a_small_one_is_not() -> None:
    def gradient(value: float) -> list[RecordedSeries]:
        return layers_of(**{f"gradient_norm__layers_3_{part}": value for part in "ab"})

    assert found_in(gradient(1e-6), "dead_layer") == [("layers.3", 3, "warning")]
    assert found_in(gradient(0.0), "dead_layer") == [("layers.3", 3, "warning")]
    assert found_in(gradient(1e-3), "dead_layer") == []
    assert found_in(gradient(0.0), "not_optimized") == []
    without = [one for one in layers_of() if one.name != "gradient_norm"]
    assert needs(without, "dead_layer") == "gradients: call step() before zero_grad()"


def test_gradients_that_are_missing_now_and_then_are_no_dead_layer() -> None:
    """Of layers that are left out of some steps, or whose gradients were infinite."""
    series = layers_of()
    for index, one in enumerate(series):
        if one.name == "gradient_norm" and one.layer == 3:
            some = np.array([1, 2, 4, 8, 16])
            series[index] = RecordedSeries(one.name, some, np.full(5, 0.5), one.module, 3)
    assert found_in(series, "dead_layer") == []
    never = [one for one in series if not (one.name == "gradient_norm" and one.layer == 3)]
    assert found_in(never, "dead_layer") == [("layers.3", 3, "warning")]


def test_layers_that_are_the_same_are_named() -> None:
    series = layers_of(tied_layer__layers_2=1.0)
    assert found_in(series, "tied_layer") == [("layers.2", 2, "warning")]


def test_an_mlp_is_dead_where_nearly_all_its_nodes_are() -> None:
    late = (0.1, 0.1, 0.2, 0.5, 0.8, 0.95, 0.97, 1.0)
    (found,) = judge(layers_of(mlp_dead__layers_1_a=late)).findings
    assert (found.kind, found.layer, found.step) == ("dead_mlp", 1, 32)
    assert judge(layers_of(mlp_dead__layers_1_a=0.85)).findings == ()


@pytest.mark.parametrize("part", ["gate", "up", "down", "v", "o"])
def test_every_matrix_of_a_layer_may_collapse(part: str) -> None:
    usual = {f"stable_rank__layers_{at}_{part}": 8.0 for at in (0, 2, 3)}
    one = {f"stable_rank__layers_1_{part}": (8, 8, 6, 4, 2, 1.2, 1.1, 1.0)}
    assert found_in(layers_of(**usual, **one), "rank_collapse") == [
        (f"layers.1.{part}", 1, "warning")
    ]
    small = {f"stable_rank__layers_{at}_{part}": 1.4 for at in range(4)}
    assert found_in(layers_of(**small), "rank_collapse") == []  # as all are, and as it began


def test_ranks_of_queries_times_keys_are_not_judged() -> None:
    """In good trainings they end low: the preset tiny ended with three such collapses."""
    series = layers_of()
    falling = np.array([9, 8, 6, 4, 2, 1.2, 1.1, 1.0])
    series.append(
        RecordedSeries("stable_rank", np.array(MEASURED), falling, "layers.1.attn[query·key]", 1)
    )
    assert judge(series).findings == ()


def moving(share: tuple[float, ...] | float, **more: tuple) -> list[RecordedSeries]:
    every = {f"update_relative__layers_{at}_{part}": share for at in range(4) for part in "ab"}
    return [*layers_of(**every), *recorded_of(**more)]


def test_the_learning_rate_is_named_as_it_was_when_steps_were_large() -> None:
    """A rate at the end of a cosine was named, "1.9e-07 is too high"."""
    large = (0.3, 0.25, 0.2, 0.2, 0.1, 0.1, 0.01, 1e-4)
    rates = (0.03, 0.03, 0.03, 0.03, 0.02, 0.01, 1e-3, 1.9e-7)
    series = moving(large, learning_rate=(MEASURED, rates))
    (found,) = judge(series).findings
    assert found.kind == "learning_rate_too_high"
    assert "The learning rate 0.03 is too high" in found.sentence
    # Zero-initialised halves, as LoRA has them, move by all of their size at first.
    half = {f"update_relative__layers_{at}_a": 0.9 for at in range(4)}
    assert "learning_rate_too_high" not in kinds(layers_of(**half))
    assert kinds(moving(0.08)) == set()


def test_where_every_weight_grows_tenfold_that_is_what_is_said() -> None:
    growing = tuple(np.geomspace(1, 20, len(MEASURED)))
    norms = {f"weight_norm__layers_{at}_{part}": growing for at in range(4) for part in "ab"}
    every = {f"update_relative__layers_{at}_{part}": 0.3 for at in range(4) for part in "ab"}
    missing = needs(layers_of(**every, **norms), "learning_rate_too_high")
    assert missing is not None
    assert "all have" in missing
    del norms["weight_norm__layers_0_a"]
    assert "learning_rate_too_high" in kinds(layers_of(**every, **norms))


def test_smaller_steps_are_too_large_where_attention_collapses_meanwhile() -> None:
    falling = (2.5, 2.4, 2.2, 2.0, 1.0, 0.3, 0.2, 0.1)
    attention = {
        "attention_entropy__layers_0_attn": (MEASURED, falling),
        "attention_uniform__layers_0_attn": (MEASURED, 2.6),
    }
    assert kinds(moving(0.03, **attention)) == {"attention_collapse", "learning_rate_too_high"}
    assert kinds(moving(0.005, **attention)) == {"attention_collapse"}
    rates = {"learning_rate": (MEASURED, (0.003,) * 7 + (1.9e-7,))}  # the end of a cosine
    found = judge(moving((0.03,) * 7 + (1e-5,), **attention, **rates)).findings
    assert [one.step for one in found if "rate 0.003 is too high" in one.sentence] == [1]
    attention["attention_entropy__layers_0_attn"] = (MEASURED, 0.1)
    assert kinds(moving(0.03, **attention)) == {"attention_collapse"}  # it began so


def fresh(end: float, first: float = 4.1) -> dict[str, tuple]:
    """The losses of a training over 64 tokens."""
    loss = np.concatenate([np.linspace(first, end, 200), np.full(200, end)])
    return {"loss": (range(1, 401), loss), "vocabulary": ([1], [64])}


def severities(series: list[RecordedSeries]) -> dict[str, str]:
    return {one.kind: one.severity for one in judge(series).findings}


def test_sharp_attention_that_solves_a_task_or_was_learned_before_is_a_note() -> None:
    falling = (2.5, 2.4, 2.2, 2.0, 1.0, 0.3, 0.2, 0.1)
    attention = {
        "attention_entropy__layers_0_attn": (MEASURED, falling),
        "attention_uniform__layers_0_attn": (MEASURED, 2.6),
    }
    assert severities(moving(0.03, **attention, **fresh(2.0))) == {
        "attention_collapse": "warning",
        "learning_rate_too_high": "warning",
    }
    assert severities(moving(0.03, **attention, **fresh(0.05))) == {"attention_collapse": "note"}
    attention["attention_entropy__layers_0_attn"] = (MEASURED, 0.4)
    came_so = moving(0.005, **attention, **fresh(1.9, first=2.1))
    assert severities(came_so) == {"attention_collapse": "note"}


def test_a_loss_in_other_units_is_not_compared_with_the_validation_loss() -> None:
    steps = range(0, 400, 40)
    summed = {
        "loss": (range(1, 401), np.linspace(17_000, 12_000, 400)),
        "validation_loss": (steps, np.linspace(4.1, 3.0, 10)),
        "vocabulary": ([1], [64]),
    }
    assert kinds(recorded_of(**summed)) == set()
    assert needs(recorded_of(**summed), "label_noise") == "a training from scratch"
    noisy = fresh(3.5) | {"validation_loss": (steps, np.linspace(4.1, 2.0, 10))}
    assert kinds(recorded_of(**noisy)) == {"label_noise"}


def test_noise_of_validation_losses_is_no_overfitting() -> None:
    dice = np.random.default_rng(0)
    found = 0
    for _ in range(200):
        values = np.linspace(2.0, 1.9, 10) + 0.02 * dice.standard_normal(10)
        found += over_fitted(range(10), values) is not None
    assert found <= 4  # 85 without regard to their noise


def test_a_loss_that_was_not_finite_once_is_judged_nevertheless() -> None:
    loss = 4 * np.exp(-np.arange(1000) / 100) + 1
    loss[4], loss[600:] = np.nan, 12.0
    assert kinds(recorded_of(loss=(range(1, 1001), loss))) == {"not_finite", "diverged_loss"}
    broken = recorded_of(loss=(range(1, 101), [*np.linspace(4, 3, 50), *[math.nan] * 50]))
    assert needs(broken, "diverged_loss") == "losses that are finite"


def test_odd_series_are_judged_without_an_error() -> None:
    for value in (math.nan, math.inf, 0.0, -1.0, 1e100):
        names = ("vocabulary", "attention_uniform__layers_0_a", "not_finite__layers_0_a")
        names += ("tied_layer__layers_0", "weight_norm__layers_0_a", "validation_loss")
        odd = dict.fromkeys(names, (MEASURED, value))
        series = recorded_of(loss=(range(1, 101), FALLING), **odd)
        series += recorded_of(attention_entropy__layers_0_a=(MEASURED, 1.0))
        judge([*layers_of(), *series])


def test_attention_that_has_collapsed_is_not_dense_again() -> None:
    """One layer was both."""
    low = (2.5, 2.4, 2.2, 0.2, 0.1, 0.4, 0.4, 0.4)
    assert attention_bounce(MEASURED, low) is not None
    attention = {
        "attention_entropy__layers_0_attn": (MEASURED, low),
        "attention_uniform__layers_0_attn": (MEASURED, 2.6),
    }
    assert kinds(moving(0.005, **attention)) == {"attention_collapse"}


def test_a_learning_rate_is_too_low_at_the_end_of_a_training_alone() -> None:
    slow = {
        "loss": (range(1, 401), np.linspace(4.1, 3.9, 400)),
        "vocabulary": ([1], [64]),
        "learning_rate": (MEASURED, 1e-5),
    }
    series = moving(1e-4, **slow)
    assert kinds(series) == {"learning_rate_too_low"}
    assert kinds(series, ended=False) == set()
    assert kinds(moving(1e-2, **slow)) == set()
    tuned = slow | {"loss": (range(1, 401), np.linspace(2.1, 2.0, 400))}
    assert kinds(moving(1e-4, **tuned)) == set()  # what was learned before needs small steps
    warming = slow | {"learning_rate": (MEASURED, np.linspace(1e-6, 1e-5, 8))}
    assert kinds(moving(1e-4, **warming)) == set()


def test_what_could_not_be_judged_is_said() -> None:
    """After 601 steps in which no rule could run, nothing was "out of the ordinary"."""
    judged = judge(recorded_of(loss=(range(1, 4), 3.0)))
    assert judged.findings == ()
    assert {one.kind for one in judged.not_judged} >= {
        "attention_collapse",
        "rank_collapse",
        "dead_layer",
        "learning_rate_too_high",
        "diverged_loss",
        "overfitting",
    }
    assert needs(recorded_of(loss=(range(1, 4), 3.0)), "diverged_loss") == (
        "at least 20 losses; there are 3"
    )
    assert judge([]).findings == ()
    assert all(one.needs for one in judge([]).not_judged)


def test_gradients_of_low_rank_are_measured_and_no_finding() -> None:
    """They were reported in 16 of 16 trainings, sick or healthy."""
    energy = {f"gradient_energy_8__layers_{at}_a": 0.99 for at in range(4)}
    assert judge(layers_of(**energy)).findings == ()


def test_a_run_folder_is_judged(tmp_path: Path) -> None:
    run = Run.create("small", {}, out=tmp_path / "run")
    for step in range(4):
        run.metrics.append(step, "loss", 3.0 - step)
        for layer, entropy in enumerate((0.1, 2.0)):
            run.metrics.append(step, "attention_uniform", 2.0, layer=layer, module=f"l.{layer}")
            run.metrics.append(step, "attention_entropy", entropy, layer=layer, module=f"l.{layer}")
            for head in (0, 1):  # which are recorded and not judged
                run.metrics.append(
                    step, "attention_entropy", 0.2, layer=layer, head=head, module=f"l.{layer}"
                )
    run.metrics.flush()
    judged = judge(series_of(run.metrics.read()))
    assert [(one.kind, one.layer, one.head) for one in judged.findings] == [
        ("attention_collapse", 0, None)
    ]
    run.write_json("findings", judged.as_json())
    assert isinstance(judged, Judgement)
    keys = {"kind", "severity", "module", "layer", "head", "step", "sentence", "advice", "evidence"}
    assert set(judged.as_json()["findings"][0]) == keys


def test_every_finding_says_what_to_try() -> None:
    falling = (2.5, 2.4, 2.2, 2.0, 1.0, 0.3, 0.2, 0.1)
    series = [
        *moving(
            0.3,
            loss=(range(1, 101), [*np.linspace(20, 3, 60), *np.full(40, 40.0)]),
            vocabulary=([1], [50]),
            attention_entropy__layers_0_attn=(MEASURED, falling),
            attention_uniform__layers_0_attn=(MEASURED, 2.6),
        ),
        *recorded_of(tied_layer__layers_2=([1], 1.0)),
    ]
    found = judge(series).findings
    assert len({one.kind for one in found}) >= 4
    assert all(one.advice.endswith(".") and one.sentence.endswith(".") for one in found)
    order = [one.severity for one in found]
    assert order == sorted(order, key=["critical", "warning", "note"].index)


@pytest.mark.parametrize(
    ("steps", "values", "says"),
    [([0, 1], [1.0], "one for each step"), ([1, 1, 2], [1.0, 1, 1], "increase")],
)
def test_series_that_are_none_are_refused(steps, values, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        attention_bounce(steps, values)
    with pytest.raises(ValueError, match=says):
        RecordedSeries("loss", np.array(steps), np.array(values))
    with pytest.raises(ValueError, match="uniform must be an entropy"):
        attention_collapse([0], [1.0], -1.0)
