import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from joma.probes.activations import (
    ActivationStatistics,
    ActivationStatisticsAccumulator,
    activation_statistics,
)

NEAR = 0.2


def hidden(seed: int, batch: int = 3, length: int = 7, nodes: int = 21) -> Tensor:
    """What a ReLU lets through, here and there with a sign, one node dead, one token silent."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(batch, length, nodes, generator=generator, dtype=torch.float64)
    values = torch.where(values < -1, values, values.clamp(min=0)) ** 3
    values[..., 4] = 0
    values[0, 2] = 0
    return values


def plain(rows: np.ndarray, near: float, share: float) -> dict[str, Any]:
    """Everything by loops over tokens and nodes; moments by SciPy."""
    active = np.zeros(rows.shape[1])
    energies, silent = [], 0
    for token in rows:
        rms = math.sqrt(sum(a * a for a in token) / len(token))
        for node, a in enumerate(token):
            active[node] += abs(a) > near * rms
        squares = sorted((a * a for a in token), reverse=True)
        if sum(squares) == 0:
            silent += 1
            continue
        energies.append(sum(squares[: math.ceil(share * len(token))]) / sum(squares))
    flat = rows.ravel()
    return {
        "tokens": len(rows),
        "zero": np.mean(flat == 0),
        "near_zero": 1 - active.sum() / flat.size,
        "negative": np.mean(flat < 0),
        "mean": flat.mean(),
        "std": flat.std(),
        "kurtosis": scipy.stats.kurtosis(flat, fisher=False),
        "silent": silent,
        "activity": active / len(rows),
        "top": np.mean(energies),
    }


def assert_equal(result: ActivationStatistics, expected: dict[str, Any]) -> None:
    for name in ("tokens", "zero", "near_zero", "negative", "mean", "std", "kurtosis", "silent"):
        assert getattr(result, name) == pytest.approx(expected[name]), name
    np.testing.assert_allclose(result.activity, expected["activity"])
    assert result.dead == (expected["activity"] == 0).sum()


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0])
def test_against_loops(share: float):
    values = hidden(0)
    result = activation_statistics(values, near=NEAR, top=(1.0, share, 0.3))
    expected = plain(values.reshape(-1, 21).numpy(), NEAR, share)
    assert_equal(result, expected)
    assert result.top_energy[share] == pytest.approx(expected["top"])
    assert result.top_energy[1.0] == pytest.approx(1)
    assert result.dead == 1
    assert result.silent == 1
    assert next(iter(result.top_energy)) == 1.0  # in the order asked for


def test_tokens_that_do_not_count_may_hold_anything():
    values = hidden(1)
    counted = torch.rand(3, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    spoiled = torch.where(counted.unsqueeze(-1), values, torch.nan)
    result = activation_statistics(spoiled, counted=counted, near=NEAR, top=(0.1,))
    assert_equal(result, plain(values[counted].numpy(), NEAR, 0.1))


def test_normal_numbers_have_kurtosis_three_whatever_their_mean():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(2000, 100, generator=generator) + 100.0
    result = activation_statistics(values)
    assert result.kurtosis == pytest.approx(3, abs=0.05)
    assert result.std == pytest.approx(1, abs=0.01)
    assert result.zero == result.near_zero == result.negative == result.dead == 0


def test_one_node_alone_holds_all_energy():
    result = activation_statistics(torch.eye(200))
    assert result.top_energy == {0.01: pytest.approx(1), 0.1: pytest.approx(1)}
    assert result.near_zero == result.zero == pytest.approx(1 - 1 / 200)
    even = activation_statistics(-torch.ones(5, 200))
    assert even.top_energy == {0.01: pytest.approx(0.01), 0.1: pytest.approx(0.1)}
    assert even.negative == 1
    assert math.isnan(even.kurtosis)


def test_a_silent_layer():
    result = activation_statistics(torch.zeros(4, 10))
    assert (result.dead, result.silent, result.zero, result.near_zero) == (10, 4, 1, 1)
    assert math.isnan(result.top_energy[0.1])


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_numbers_out_of_the_range_of_squares(scale: float):
    values = hidden(2).float()
    result = activation_statistics(values * scale, near=NEAR)
    expected = activation_statistics(values, near=NEAR)
    assert result.near_zero == expected.near_zero
    assert result.kurtosis == pytest.approx(expected.kurtosis, rel=1e-5)
    assert result.top_energy[0.1] == pytest.approx(expected.top_energy[0.1], rel=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 21), offset=st.integers(-100, 100))
def test_batches_accumulate_to_the_whole(seed: int, cut: int, offset: int):
    values = hidden(seed).reshape(21, 21) + offset
    parts = ActivationStatisticsAccumulator(near=NEAR, top=(0.1,))
    parts.update(values[:cut])
    parts.update(values[cut:])
    whole = activation_statistics(values, near=NEAR, top=(0.1,))
    assert_equal(parts.compute(), plain(values.numpy(), NEAR, 0.1))
    assert parts.compute().top_energy[0.1] == pytest.approx(whole.top_energy[0.1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activations": [1.0]}, "activations must be a torch.Tensor"),
        ({"activations": torch.ones(3, 2, dtype=torch.int64)}, "floating-point"),
        ({"activations": torch.ones(3, 0)}, "must have nodes"),
        ({"activations": torch.full((3, 2), torch.inf)}, "finite"),
        ({"activations": torch.full((3, 2), torch.nan)}, "finite"),
        ({"activations": torch.ones(0, 2)}, "tokens that count"),
        ({"counted": torch.zeros(3, 7, dtype=torch.bool)}, "tokens that count"),
        ({"counted": torch.ones(3, 7)}, "counted must be bool"),
        ({"counted": torch.ones(7, dtype=torch.bool)}, r"of shape \(3, 7\)"),
        ({"near": -1.0}, "near must be"),
        ({"near": math.nan}, "near must be"),
        ({"top": (0.0,)}, "top must be shares"),
        ({"top": (1.5,)}, "top must be shares"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str):
    arguments: dict[str, Any] = {"activations": hidden(3)} | changes
    with pytest.raises(ValueError, match=message):
        activation_statistics(**arguments)


def test_accumulators_say_what_does_not_fit():
    accumulator = ActivationStatisticsAccumulator()
    with pytest.raises(ValueError, match="call update first"):
        accumulator.compute()
    accumulator.update(hidden(4))
    with pytest.raises(ValueError, match="as before"):
        accumulator.update(hidden(4, nodes=20))


def test_a_refused_update_leaves_no_trace(monkeypatch):
    monkeypatch.setitem(vars(activations_module())["_AT_ONCE"], "cpu", 21)
    accumulator = ActivationStatisticsAccumulator()
    values = hidden(5)
    accumulator.update(values)
    before = accumulator.compute()
    values[-1, -1, -1] = torch.nan
    with pytest.raises(ValueError, match="finite"):
        accumulator.update(values)
    assert accumulator.compute().tokens == before.tokens
    assert accumulator.compute().mean == before.mean


def activations_module() -> Any:
    import joma.probes.activations

    return joma.probes.activations


SCALES = [1e-60, 1e60]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("parts", [1, 3])
def test_statistics_of_very_small_and_large_activations(scale: float, parts: int) -> None:
    x = torch.randn(60, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain, accumulator = activation_statistics(x), ActivationStatisticsAccumulator()
    for part in (x * scale).chunk(parts):
        accumulator.update(part)
    scaled = accumulator.compute()
    assert scaled.kurtosis == pytest.approx(plain.kurtosis, rel=1e-12)
    assert scaled.std == pytest.approx(plain.std * scale, rel=1e-12)
    assert scaled.mean == pytest.approx(plain.mean * scale, rel=1e-9)
    assert scaled.near_zero == plain.near_zero
    assert scaled.top_energy == pytest.approx(plain.top_energy)


def test_batches_of_different_scales_are_added_up() -> None:
    accumulator = ActivationStatisticsAccumulator()
    for scale in (0.0, 1e-200, 1.0, 0.0):
        accumulator.update(torch.tensor([[1.0, -1.0]], dtype=torch.float64) * scale)
    found = accumulator.compute()
    assert found.std == pytest.approx(0.5)  # two of eight are ±1, the others next to nothing
    assert found.kurtosis == pytest.approx(4)
