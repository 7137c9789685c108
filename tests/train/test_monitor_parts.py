"""The monitor's parts: when to measure, Theorem 1 on a layer, ranks of Q·K, kept inputs."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from joma.models import AttentionPart
from joma.models.model_weights import Place, Weight
from joma.probes import AttentionCall, stable_rank
from joma.probes.metrics import Effort
from joma.probes.metrics.stable_rank import StableRanks
from joma.theory.block import Block
from joma.theory.invariants import softmax_logits
from joma.train.monitor.cadence import EARLY, Budget
from joma.train.monitor.forward import (
    Theorem1,
    predicted_growth,
    residual,
    same_rows,
    seen_keys,
)
from joma.train.monitor.inputs import MeasurementInputs, _attention_without_plans
from joma.train.monitor.parts import MonitoredMatrix, Parts, parts_of
from joma.train.monitor.ranks import batches, scores_spectra, update_rows
from joma.train.monitor.undisturbed import undisturbed, unwrap
from tests.train._watched import encoder


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Simulated:
    """A budget, and the clock of a training whose measurements take given times."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, every: int, share: float | None, step: int = 0
    ) -> None:
        self.now = 1000.0
        self.steps: list[int] = []
        self.expensive: list[int] = []
        self.trained = 0.0
        monkeypatch.setattr("joma.train.monitor.cadence.perf_counter", lambda: self.now)
        self.budget = Budget(every, 10 * every, share, step)
        self._step = step

    def train(
        self, until: float, a_step: float, first: float, usual: float, expensive: float,
        standing: float = 0.0,
    ) -> None:  # fmt: skip
        """Train for some seconds, measurements left out."""
        while self.trained < until:
            self._step += 1
            self.now += a_step
            self.trained += a_step
            before = self.now
            self.now += standing
            self.budget.aside(before)
            due = [self._step >= step for step in self.budget.due]
            if not any(due):
                continue
            began = self.now
            self.budget.begin(began)
            self.now += usual if self.steps else first
            middle = self.now if due[1] else None
            self.now += expensive if due[1] else 0.0
            self.budget.pay(self._step, began, middle, self.now)
            self.steps.append(self._step)
            self.expensive += [self._step] if due[1] else []


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    every=st.sampled_from([10, 100, 300]),
    share=st.floats(0.003, 0.05),
    first=st.floats(0, 0.6),
    usual=st.floats(1e-3, 0.02),
    expensive=st.floats(1e-3, 0.3),
    a_step=st.floats(0.005, 1),
)
def test_measurements_take_their_share_from_two_minutes_on(
    monkeypatch: pytest.MonkeyPatch, every: int, share: float, first: float, usual: float,
    expensive: float, a_step: float,
) -> None:  # fmt: skip
    """The allowance of two minutes at 1% is 1.2 s; what is given as a share of it scales."""
    scale = share / 0.01
    taken = first * scale, usual * scale, expensive * scale
    one = Simulated(monkeypatch, every, share)
    one.train(120.0, a_step, *taken)
    assert one.budget.seconds <= share * 120 + sum(taken[1:])
    assert len(one.steps) >= min(EARLY, (120 / a_step) ** 0.5 / 2)
    for until in (130.0, 200.0, 400.0):
        one.train(until, a_step, *taken)
        # A measurement may end just beyond what was earned when it was planned.
        assert one.budget.seconds <= share * until + 0.5 * sum(taken[1:])
    assert all(step < every or step % every == 0 for step in one.steps)
    assert all(step == 1 or step % (10 * every) == 0 for step in one.expensive)


def test_cheap_measurements_come_at_powers_of_two_and_then_on_the_cadence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Simulated(monkeypatch, 100, 0.01)
    one.train(5.0, 0.01, 0.01, 0.001, 0.002)
    assert one.steps == [1, 2, 4, 8, 16, 32, 64, 100, 200, 300, 400, 500]


def test_what_a_long_first_measurement_took_is_paid_back_and_few_come_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: 0.9 s at first, then 0.07 s, and 0.1 ms of every step of 27 ms."""
    one = Simulated(monkeypatch, 100, 0.01)
    one.train(119.0, 0.027, 0.9, 0.07, 0.2, 1e-4)
    assert EARLY <= len(one.steps) <= EARLY + 2
    assert one.steps[-1] >= 500  # they are spread over the two minutes
    assert one.budget.seconds < 2.0
    one.train(300.0, 0.027, 0.9, 0.07, 0.2, 1e-4)
    assert one.budget.seconds <= 0.01 * 300 + 0.1
    one.train(3000.0, 0.027, 0.9, 0.07, 0.2, 1e-4)
    assert 0.0095 * 3000 < one.budget.seconds <= 0.01 * 3000 + 0.2
    assert 0.2 * len(one.expensive) > 0.25 * 0.07 * len(one.steps)  # of each kind a good share


def test_without_a_limit_measurements_are_always_on_the_cadence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Simulated(monkeypatch, 7, None)
    one.train(150.0, 1.0, 1e3, 1e3, 1e3)
    assert one.steps == [1, 2, 4, *range(7, 151, 7)]
    assert one.expensive == [1, 70, 140]


def test_a_training_that_is_resumed_measures_on_the_same_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Simulated(monkeypatch, 7, None, step=3)
    one.train(30.0, 1.0, 0.0, 0.0, 0.0)
    assert one.steps == [4, 7, 14, 21, 28]
    assert Budget(100, 1000, 0.01, 2500).due == [2600, 3000]


def test_measurements_that_were_asked_for_put_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Simulated(monkeypatch, 100, None)
    one.train(20.0, 0.1, 0.0, 0.0, 0.0)
    due = one.budget.due
    one.budget.pay(205, one.now, None, one.now)
    assert one.budget.due == due


def test_cudnn_makes_no_plans_for_a_measurement() -> None:
    cuda = torch.backends.cuda
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        with _attention_without_plans():
            assert not cuda.cudnn_sdp_enabled()
        assert cuda.cudnn_sdp_enabled()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), _attention_without_plans():
        assert cuda.cudnn_sdp_enabled()  # there is nothing else
    with sdpa_kernel(SDPBackend.MATH), _attention_without_plans():
        assert not cuda.cudnn_sdp_enabled()


def test_updates_that_are_not_finite_take_no_others_with_them() -> None:
    matrices = [MonitoredMatrix(number, f"w{number}", f"m{number}") for number in range(3)]
    changes = [normal(6, 9, seed=number) * 1e-30 for number in range(3)]
    ranks = [stable_rank(change.double()).value for change in changes]
    changes[1][2, 3] = math.inf
    rows = update_rows("update_stable_rank", matrices, changes, Effort(1e-3, 0))
    assert [row.module for row in rows] == ["m0", "m2"]
    assert [row.value for row in rows] == pytest.approx([ranks[0], ranks[2]], rel=1e-6)


def test_what_theorem_1_predicts_is_what_the_theory_room_does() -> None:
    scores_HTS, everything = normal(2, 9, 9, seed=2), torch.ones(2, 9, 9, dtype=torch.bool)
    v0_TK, v1_TK = (normal(9, 7, seed=seed).double() for seed in (0, 1))
    attention_HTS = scores_HTS.double().softmax(-1)
    grown_S = (v1_TK.square() - v0_TK.square()).sum(-1)
    predicted = predicted_growth(grown_S, attention_HTS, everything, same_rows(v0_TK))
    block, b = Block("softmax", eta_w=0.5), attention_HTS[1, 4].numpy()
    expected = [softmax_logits(block, v.numpy(), b) for v in (v0_TK, v1_TK)]
    np.testing.assert_allclose(predicted[1, 4], expected[1] - expected[0], rtol=1e-9)


def test_copies_of_a_token_count_once_with_the_attention_of_all() -> None:
    tokens = torch.tensor([0, 1, 1, 2, 0, 1, 3])
    alone = normal(4).double()
    seen = torch.ones(1, 1, 7, dtype=torch.bool)
    seen[..., 5:] = False  # one copy of 1, and all of 3
    attention = normal(1, 1, 7, seed=1).double().masked_fill(~seen, -torch.inf).softmax(-1)
    inputs = torch.eye(4)[tokens]
    predicted = predicted_growth(alone[tokens], attention, seen, same_rows(inputs))
    mass = torch.zeros(4).double().index_add_(0, tokens, attention[0, 0])
    expected = alone - alone[:3].sum() * mass
    assert torch.allclose(predicted[0, 0, :5], expected[tokens[:5]])


def test_the_residual_is_nought_where_growth_is_predicted_and_two_where_reversed() -> None:
    causal = torch.ones(20, 20, dtype=torch.bool).tril().expand(3, 20, 20)
    grown = normal(3, 20, 20)
    assert residual(grown, 5 * grown + 3, causal) == pytest.approx(0, abs=1e-6)
    assert residual(grown, -grown, causal) == pytest.approx(2)
    hidden = grown.masked_fill(~causal, 1e9)  # what is not seen does not count
    assert residual(grown, hidden, causal) == pytest.approx(0, abs=1e-6)
    assert residual(0 * grown, grown, causal) is None
    assert residual(grown, normal(3, 20, 20, seed=1), causal) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": False},
        {"causal": True, "window": 3},
        {"causal": False, "mask": torch.ones(6, 6, dtype=torch.bool).tril()},
        {"causal": False, "mask": torch.zeros(1, 1, 6, 6).masked_fill_(torch.eye(6) > 0, -1e30)},
        {"causal": True, "padding": torch.tensor([[1, 1, 1, 1, 0, 1]]).bool()},
    ],
)
def test_seen_keys_are_those_attention_counts(options: dict[str, Any]) -> None:
    call = AttentionCall("a", 0, torch.zeros(1, 2, 6, 4), normal(1, 2, 6, 4), **options)
    even = call.statistics().entropy[0]
    assert torch.allclose(seen_keys(call).sum(-1).clamp(min=1).log(), even.float(), atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 4]),
    groups=st.sampled_from([1, 2, 4]),
    width=st.integers(2, 20),
    seed=st.integers(0, 1000),
)
def test_ranks_of_scores_are_those_of_the_product(
    heads: int, groups: int, width: int, seed: int
) -> None:
    key_heads = max(1, heads // groups)
    query, key = normal(heads * 3, width, seed=seed), normal(key_heads * 3, width, seed=seed + 1)
    place = Place("w")
    weight = Weight("query", 0, "w", "w", place)
    of = AttentionPart("a", 0, weight, weight, heads=heads, key_heads=key_heads)
    (twice, found) = scores_spectra([(of, 2 * query, key), (of, query, key)])
    torch.testing.assert_close(twice, 2 * found)
    for head in range(heads):
        other = head * key_heads // heads
        product = query[3 * head : 3 * head + 3].T @ key[3 * other : 3 * other + 3]
        values = torch.linalg.svdvals(product.double())[:3]
        expected = torch.zeros(3, dtype=torch.float64)
        expected[: len(values)] = values
        torch.testing.assert_close(found[head], expected, rtol=1e-4, atol=1e-3)


def test_warm_stable_ranks_are_within_tolerance_of_cold_ones() -> None:
    ranks, matrix = StableRanks(Effort(1e-2, 0)), normal(250, 400)
    for step in range(4):
        found = ranks.of("w", matrix)
        true = stable_rank(matrix, method="exact").value
        assert abs(found.value - true) <= found.bound <= 1e-2 * found.value
        matrix = matrix + 10.0 ** (step - 4) * normal(250, 400, seed=step + 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_stable_ranks_of_all_weights(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    shapes = [(250, 400), (250, 400), (20, 30)]
    matrices = [normal(*shape, seed=number).to(device) for number, shape in enumerate(shapes)]
    ranks = StableRanks(Effort(1e-2, 0))
    for _ in range(2):
        for matrix, found in zip(matrices, ranks.of_all("abc", matrices), strict=True):
            true = stable_rank(matrix, method="exact").value
            assert abs(found.value - true) <= found.bound <= 1e-2 * true


def test_large_weights_are_gathered_one_by_one() -> None:
    def sized(name: str) -> Any:  # what is asked of a weight on a GPU
        numbers = int(name)
        return SimpleNamespace(is_cuda=numbers > 0, numel=lambda: abs(numbers))

    def batched(*sizes: int) -> list[list[int]]:
        weights = [MonitoredMatrix(0, str(size), "") for size in sizes]
        return [[int(one.name) for one in batch] for batch in batches(weights, sized)]

    small, large = 2**21, 2**23
    assert batched(large, large) == [[large], [large]]
    assert batched(-9, -9) == [[-9], [-9]]
    assert batched(small, small, large, small) == [[small, small], [large], [small]]
    assert [len(of) for of in batched(*[small] * 70)] == [32, 32, 6]


def test_parts_of_torchs_own_layers() -> None:
    parts = parts_of(encoder(), None)
    assert [weight.module for weight in parts.ranked] == [
        f"encoder.layers.{layer}.{name}"
        for layer in (0, 1)
        for name in ("self_attn.in_proj_weight[value]", "self_attn.out_proj", "linear1", "linear2")
    ]
    assert parts.downs == {"encoder.layers.0.linear2": 0, "encoder.layers.1.linear2": 1}
    assert [(one.layer, one.heads) for one in parts.heads] == [(0, 2), (1, 2)]
    assert len(parts.matrices) == 8
    assert parts.embedding is not None
    assert not parts.missing


class Restless(nn.Module):
    """Moves everything a forward pass can."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("other", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.other = torch.ones(2)
        return nn.functional.dropout(x * self.weight, 0.5, training=True) * np.random.rand()  # noqa: NPY002


def test_a_measurement_leaves_nothing_behind() -> None:
    model, x = Restless(), torch.ones(4, 3)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    expected, number = torch.rand(2), np.random.rand()  # noqa: NPY002
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    other = model.other
    with undisturbed(model):
        assert not model.training
        MeasurementInputs.of([x, (x,)]).run(model)
        assert float(model.calls) == 2
    assert model.training
    assert float(model.calls) == 0
    assert model.other is other
    assert model.weight.grad is None
    assert torch.equal(torch.rand(2), expected)
    assert np.random.rand() == number  # noqa: NPY002
    assert torch.is_grad_enabled()


def seen_twice(autocast: bool) -> tuple[list[Tensor], float]:
    """The scores and the residual of two measurements of a layer, in a model in autocast."""
    model = nn.Sequential(nn.Identity())
    parts = Parts(None, (), (), (), {0: "0"}, frozenset(), {})
    theorem, scores, values = Theorem1(0), [], []
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        for turn in range(2):
            query, key = (normal(1, 2, 12, 16, seed=2 * turn + k) for k in range(2))
            with theorem.watching(model, parts):
                model(normal(1, 12, 8))
                theorem.see(AttentionCall("0", 0, query, key))
            assert theorem._scores_HTS is not None
            expected = (query[0].double() @ key[0].double().mT / 4).float()
            torch.testing.assert_close(theorem._scores_HTS, expected, rtol=1e-5, atol=1e-6)
            scores.append(theorem._scores_HTS)
            values += [row.value for row in theorem.rows(normal(5, 8, seed=9 + turn))]
        (value,) = values
    return scores, value


def test_theorem_1_is_measured_in_float32_whatever_the_autocast() -> None:
    plain, half = seen_twice(False), seen_twice(True)
    assert all(map(torch.equal, plain[0], half[0]))
    assert plain[1] == half[1]


def test_a_measurement_inside_autocast_leaves_weights_uncached() -> None:
    model = nn.Linear(3, 3)
    x = torch.ones(2, 3)
    with torch.autocast("cpu", torch.float16):
        with undisturbed(model):
            MeasurementInputs(MeasurementInputs.of(x).calls, (True, torch.float16)).run(model)
        model(x).float().sum().backward()
    assert model.weight.grad is not None


def test_nothing_is_cached_while_a_model_is_measured_in_autocast() -> None:
    """Older versions of torch would train with weights that were cached without their graph."""
    model = nn.Linear(3, 3)
    cached = []
    model.register_forward_pre_hook(
        lambda *_: cached.append(torch.is_autocast_cache_enabled())  # type: ignore[func-returns-value]
    )
    with torch.autocast("cpu", torch.float16), undisturbed(model):
        cached.append(torch.is_autocast_cache_enabled())
        MeasurementInputs(MeasurementInputs.of(torch.ones(2, 3)).calls, (True, torch.float16)).run(
            model
        )
    assert cached == [False, False]


def test_sequences_that_come_second_are_cut_there() -> None:
    attention = nn.MultiheadAttention(8, 2)
    x = normal(100, 50, 8)
    kept = MeasurementInputs.seen(attention, (x, x, x), {"need_weights": False}, "cpu")
    (args, kwargs) = kept[0].calls[0]
    assert args[0].shape == (100, math.floor(2048 / 100), 8)
    assert kwargs == {"need_weights": False}


def test_what_is_wrapped_is_found_inside() -> None:
    model = nn.Linear(2, 2)
    assert unwrap(model) is model
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert unwrap(compiled) is model
