"""The iteration of large matrices on a GPU: its kernels in Triton's interpreter, and its checks."""

import itertools
import math
from collections import deque
from typing import Any

import pytest
import torch
from benchmarks.spectrum_steps import COLUMNS, FAILURE, Emulated
from benchmarks.stable_rank import Dice

from joma.probes.spectrum._krylov import chi_square_floor
from joma.probes.spectrum._pace import STOPS, Pace
from tests.probes._matrices import noisy, true_stable_rank
from tests.without_gpu import needs_triton, printed


@needs_triton
def test_the_iteration_bounds_matrices_whose_blocks_lose_rank_and_orthogonality() -> None:
    found = printed("tests.probes.interpreted_spectrum")
    assert len(found) == 4
    for case in found:
        assert case["holds"], case
        assert case["share"] <= 1e-3, case
        assert case["error"] < 1e-5, case
        assert case["residual"] < 1e-6, case
        assert case["steps"] <= 5, case


@needs_triton
def test_no_two_plans_have_the_same_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a plan that is gone are used again, for torch has 32 and hands them out in turn."""
    from joma.probes.spectrum import _graph_plan

    class Owner:
        pass

    made = itertools.count()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(made))
    monkeypatch.setattr(_graph_plan, "_free_streams", {})
    gpu, owners = torch.device("cuda", 0), deque[tuple[Owner, tuple[int, ...]]](maxlen=4)
    for _ in range(40):
        owner = Owner()
        streams: Any = _graph_plan._own_streams(owner, gpu)
        assert not any(set(streams) & set(others) for _, others in owners)
        owners.append((owner, streams))
    assert next(made) <= 15


@pytest.mark.parametrize(
    ("rank", "noise", "most"), [(8, 0.9, 8), (8, 0.5, 6), (8, 0.1, 4), (8, 1e-2, 4), (1, 0.0, 4)]
)
def test_bounds_of_rank_plus_noise_close_early_and_stay(rank: int, noise: float, most: int) -> None:
    """The arithmetic of the kernels, emulated: going on beyond what was needed harms nothing."""
    matrix = noisy(640, 900, rank, noise)
    run, true = Emulated(matrix), true_stable_rank(matrix)
    for count in range(1, 13):
        run.step()
        if count >= most:
            share, _ = run.bound(1e-3)
            assert share <= 1e-3, count
            assert run.floor <= (1 + 1e-6) / true
            assert 1 / true <= run.floor * (1 + share)


@pytest.mark.parametrize("gap", [6e-4, 2e-3, 1e-2])
@pytest.mark.parametrize("rest", [0.5, 0.1, 1e-2, 0.0])
def test_the_emulated_bound_holds_for_every_start_the_probability_allows(
    rest: float, gap: float
) -> None:
    """‖g‖² = r, and the start sees the second vector as it sees the top one, which hides behind."""
    values = torch.full((300,), rest, dtype=torch.float64)
    values[:9] = 1.0
    values[0] = 1 + gap
    matrix = Dice(1, "cpu").with_values(400, values)
    squares, vectors = torch.linalg.eigh(matrix.double() @ matrix.double().mT)
    true = float(squares[-1] / matrix.double().square().sum())
    start = Dice(2, "cpu").gaussian(300, COLUMNS).double()
    seen, now = vectors[:, -2] @ start, vectors[:, -1] @ start
    least = math.sqrt(chi_square_floor(COLUMNS, 0.9 * FAILURE))
    start -= torch.outer(vectors[:, -1], now - seen / seen.norm() * least)
    run = Emulated(matrix, start=start)
    for count in range(1, 9):
        run.step()
        if count >= 3:
            share, _ = run.bound(1e-3)
            assert true <= run.floor * (1 + share), count


def steps(pace: Pace, needed: int, *, least: bool = True) -> list[int]:
    """Return the stops at which a matrix is checked that is done after so many steps."""
    stops, stop = [], pace.begin()
    while stop is not None and STOPS[stop] < needed:
        stops.append(STOPS[stop])
        stop = pace.next(10.0 ** (needed - STOPS[stop] - 3), 1e-3)
    assert stop is not None
    pace.done(over=least)
    return [*stops, STOPS[stop]]


def test_the_next_matrix_is_checked_where_the_last_was_done() -> None:
    pace = Pace()
    first = steps(pace, 18)
    assert first[0] == STOPS[0]
    assert first[-1] in (18, 22)
    assert steps(pace, 18, least=False) == [first[-1]]


def test_fewer_steps_are_tried_where_they_may_be_enough() -> None:
    pace = Pace()
    steps(pace, 18)
    taken = [steps(pace, 3) for _ in range(40)]
    assert all(len(stops) == 1 for stops in taken)
    assert taken[-1] == [3]


def test_after_a_matrix_that_needed_many_steps_few_are_enough_soon() -> None:
    pace = Pace()
    for needed in (3, 18, 18):
        steps(pace, needed, least=needed == 3)
    assert [steps(pace, 3)[-1] for _ in range(5)] == [22, 8, 5, 4, 3]


def test_trying_fewer_steps_is_rare_where_they_are_not_enough() -> None:
    pace = Pace()
    steps(pace, 5)
    checks = [len(steps(pace, 5)) for _ in range(90)]
    assert sum(count > 1 for count in checks) <= 11
    assert max(checks) == 2


def test_there_is_an_end_and_one_new_beginning() -> None:
    pace = Pace()
    assert pace.begin() == 0
    assert pace.restart() is None
    stop: int | None = 0
    for _ in range(20):
        stop = pace.next(math.inf, 1e-3) if stop is not None else None
    assert stop is None
    steps(pace, 18)
    pace.begin()
    assert pace.restart() == 0
    assert pace.restart() is None
