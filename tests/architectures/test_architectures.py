"""Ninety-six architectures against eager attention and numpy, through probes and the monitor.

The fast half runs always, the other is `slow`. What a model computes must not change by being
watched; every number must agree with the reference in `_reference` and `_layouts`, which use
nothing of joma.
"""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import joma
from joma.errors import JomaError
from joma.probes import probe, watch_attention
from joma.runs import Run
from tests.architectures._catalogue import Architecture
from tests.architectures._comparison import (
    largest_difference,
    product_errors,
    rank_errors,
    tensors,
    watched,
)
from tests.architectures._models import (
    ARCHITECTURES,
    MEASURED,
    REFUSED,
    build,
    inputs_of,
    real_queries,
)
from tests.architectures._reference import attentions, mean_entropies, returned

TOLERANCE = 1e-5
STEPS = 2

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers and torch


def _each(architectures: Iterable[Architecture]) -> pytest.MarkDecorator:
    cases = [
        pytest.param(it, id=it.model_type, marks=() if it.fast else pytest.mark.slow)
        for it in architectures
    ]
    return pytest.mark.parametrize("architecture", cases)


def _paddings(architecture: Architecture) -> list[str]:
    return ["", "right", "left"] if architecture.pads else [""]


def test_the_list_is_what_was_promised():
    assert len({it.model_type for it in ARCHITECTURES}) == 96
    assert len(MEASURED) >= 80


@_each(MEASURED)
def test_the_reference_is_what_the_model_returns(architecture: Architecture):
    model = build(architecture, attention="eager")
    inputs = inputs_of(architecture)
    recorded = [
        it.probabilities[..., :-1] if it.sinks else it.probabilities
        for it in attentions(model, inputs)
    ]
    for attention in returned(model, inputs):
        assert any(torch.equal(attention, it) for it in recorded)
    spread = [float(it.entropy().std()) for it in attentions(model, inputs)]
    assert min(spread) > 0.01, "uniform attention would hide errors"


@_each(MEASURED)
def test_watching_agrees_with_eager_attention(architecture: Architecture):
    model, eager = build(architecture), build(architecture, attention="eager")
    for padding in _paddings(architecture):
        inputs = inputs_of(architecture, padding)
        with torch.no_grad():
            plain = tensors(model(**inputs))
        found, outputs = watched(model, inputs)
        assert all(map(torch.equal, outputs, plain)), padding
        expected = mean_entropies(attentions(eager, inputs), real_queries(inputs))
        assert found.means().keys() == expected.keys()
        assert largest_difference(found.means(), expected) < TOLERANCE, padding


@_each(MEASURED)
def test_probe_agrees_with_eager_attention_and_numpy(architecture: Architecture):
    model = build(architecture)
    inputs = inputs_of(architecture)
    found = probe(
        model,
        inputs["input_ids"] if architecture.inputs == "text" else inputs,
        metrics=["attention_entropy", "stable_rank"],
    )
    expected = mean_entropies(attentions(build(architecture, attention="eager"), inputs))
    heads = _by_key(
        (it.module, it.head, it.value) for it in found if it.metric == "attention_entropy"
    )
    assert largest_difference(heads, expected) < TOLERANCE
    ranks = [(it.module, it.value, it.bound) for it in found if it.metric == "stable_rank"]
    assert max(rank_errors(ranks, model).values()) <= 0


@_each(MEASURED)
def test_the_monitor_agrees_and_changes_no_loss(architecture: Architecture, tmp_path: Path):
    inputs = inputs_of(architecture, "right" if architecture.pads else "")
    alone, _ = _trained(build(architecture), inputs)
    model = build(architecture)
    with joma.Monitor(
        model,
        every=1,
        run=tmp_path / "run",
        budget=None,
        metrics=["attention_entropy", "stable_rank"],
    ) as monitor:
        losses, states = _trained(model, inputs, monitor)
    assert losses == alone
    rows = _logged(tmp_path / "run")
    eager = build(architecture, attention="eager")
    for step, state in enumerate(states, 1):
        eager.load_state_dict(state)
        expected = mean_entropies(attentions(eager, inputs), real_queries(inputs))
        now = [row for row in rows if row["step"] == step]
        heads = _by_key(
            (row["module"], None if row["head"] < 0 else row["head"], row["value"])
            for row in now
            if row["name"] == "attention_entropy"
        )
        assert largest_difference(heads, expected) < TOLERANCE
        ranks = [row for row in now if row["name"] == "stable_rank"]
        matrices = [
            (row["module"], row["value"], row["bound"]) for row in ranks if "·" not in row["module"]
        ]
        errors = rank_errors(matrices, eager, without=("query", "key"))
        assert max(errors.values()) <= 0
        products = [(row["module"], row["head"], row["value"]) for row in ranks]
        assert max(product_errors(products, eager).values(), default=0) < 1e-4


@_each(REFUSED)
def test_others_are_refused_by_name(architecture: Architecture):
    model = build(architecture)
    inputs = inputs_of(architecture)
    with (
        pytest.raises(JomaError, match=f"(?i){architecture.refused}"),
        torch.no_grad(),
        watch_attention(model, lambda call: None),
    ):
        model(**inputs)
    with pytest.raises(JomaError, match=f"(?i){architecture.refused}"):
        probe(model, inputs["input_ids"], metrics=["attention_entropy"])


@_each(REFUSED)
def test_the_monitor_continues_without_attention(architecture: Architecture, tmp_path: Path):
    inputs = inputs_of(architecture)
    alone, _ = _trained(build(architecture), inputs)
    model = build(architecture)
    with joma.Monitor(model, every=1, run=tmp_path / "run", budget=None) as monitor:
        losses, _ = _trained(model, inputs, monitor)
    assert losses == alone
    rows = _logged(tmp_path / "run")
    assert not any(row["name"] == "attention_entropy" for row in rows)
    assert architecture.refused in monitor.summary().lower()


def _logged(run: Path) -> list[dict[str, Any]]:
    """Rows of the metrics log."""
    columns = {name: column.tolist() for name, column in Run.open(run).metrics.read().items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _by_key(rows: Iterable[tuple[str, int | None, float]]) -> dict[str, Tensor]:
    """Values of heads, (H,), by key; a row of a whole layer must be the mean of its heads."""
    heads: dict[str, dict[int, float]] = {}
    layers: dict[str, float] = {}
    for key, head, value in rows:
        if head is None:
            assert key not in layers, f"two rows are of {key}"
            layers[key] = value
        else:
            assert head not in heads.setdefault(key, {}), f"two rows are of {key}, head {head}"
            heads[key][head] = value
    means = {key: torch.tensor([own[head] for head in sorted(own)]) for key, own in heads.items()}
    assert {key: pytest.approx(float(own.mean()), abs=1e-5) for key, own in means.items()} == layers
    return means


def _trained(
    model: nn.Module, inputs: dict[str, Tensor], monitor: joma.Monitor | None = None
) -> tuple[list[float], list[dict[str, Any]]]:
    """Losses and states after each step of a short training with dropout."""
    model.train()
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses, states = [], []
    for _ in range(STEPS):
        loss = tensors(model(**inputs))[0].float().square().mean()
        loss.backward()
        optimizer.step()
        states.append(copy.deepcopy(model.state_dict()))
        if monitor is not None:
            monitor.step(loss)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, states
