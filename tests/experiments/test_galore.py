"""GaLore's experiment at its smallest, its own methods, and what its numbers are made to say."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from joma.errors import JomaError
from joma.experiments import EXPERIMENTS, Verdict
from joma.experiments.galore import (
    SIZES,
    GaLoreNetwork,
    LearningRate,
    results,
    training,
)
from joma.experiments.galore.results import GaloreResults
from joma.experiments.galore.training import LoRALinear, add_lora
from joma.runs import Run

EXPERIMENT = EXPERIMENTS["galore"]
TINY, FULL = SIZES["tiny"], SIZES["full"]
LOW = LearningRate(1e-2, 0.25)
RATES = {
    "full": LearningRate(1e-3),
    "galore": LOW,
    "svd": LOW,
    "lora": LearningRate(2e-3),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """All of it, once, at the smallest scale."""
    request = EXPERIMENT.request(scale="tiny")
    run = Run.resume("galore", request.config, out=tmp_path_factory.mktemp("galore"))
    EXPERIMENT.reproduce(run, request)
    return run


def test_everything_is_measured_and_drawn(run: Run):
    assert run.tables == ["curves", "networks", "subspaces"]
    assert [path.name for path in run.figures] == ["galore.png", "galore.svg"]
    found = results.collect(run, TINY)
    assert found.missing == ()
    assert found.methods == ["full", "galore", "svd", "lora"]
    for group in ("ranks", "gaps", "moments", "warm-lora"):
        for one in results.variants(found, group):
            assert np.isfinite(one.losses).all()
    steps, losses, _ = found.metric("validation_loss", "galore", 1)
    assert list(steps) == [0, 3, 6]
    assert losses[-1] < losses[0]
    measures = set(run.read_table("subspaces")["measure"])
    assert {
        "gradient_stable_rank",
        "captured_after_2",
        "weight_overlap",
    } <= measures
    summary = run.read_json("summary")
    assert set(summary["best"]) == set(TINY.rates)
    progress: list[object] = []
    again = EXPERIMENT.request(scale="tiny", progress=lambda *given: progress.append(given))
    assert list(EXPERIMENT.reproduce(run, again).paragraphs) == summary["paragraphs"]
    assert not progress  # what is done is not done again


def test_a_network_that_was_stopped_starts_over(run: Run, tmp_path):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    other = Run.create("galore", run.config, out=tmp_path / "galore")
    stopped = EXPERIMENT.request(scale="tiny", groups=["tune"], progress=stop)
    with pytest.raises(KeyboardInterrupt):
        EXPERIMENT.reproduce(other, stopped)
    EXPERIMENT.reproduce(other, EXPERIMENT.request(scale="tiny", groups=["tune"]))
    one, two = (results.tuning_losses(own, TINY) for own in (other, run))
    assert one == two


def test_the_state_is_counted_as_it_is(run: Run):
    found = results.collect(run, TINY)
    model = training.make_model(TINY, 0, "cpu")
    everything = sum(one.numel() for one in model.parameters())
    assert found.outcome("full")["state_bytes"] == 2 * 4 * everything
    inside = training.matrices(model)
    rest = everything - sum(one.numel() for one in inside.values())
    rank = TINY.rank
    low = sum(rank * (min(one.shape) + 2 * max(one.shape)) for one in inside.values())
    assert found.outcome("galore")["state_bytes"] == 4 * (low + 2 * rest)
    adapters = sum(rank * sum(one.shape) for one in inside.values())
    assert found.outcome("lora")["state_bytes"] == 2 * 4 * (adapters + rest)


class TestLoRA:
    def test_it_starts_from_a_checkpoint_and_freezes_it(self):
        text = training.load_text(TINY, "cpu")
        batch = text.batch(0, 0, 4)
        model: Any = training.make_model(TINY, 3, "cpu")
        optimizer = training.make_optimizer(model, GaLoreNetwork("full", LearningRate(1e-2)), "cpu")
        for step in range(3):
            training.loss_of(model, text.batch(0, step, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            checkpoint = training.loss_of(model, batch)
        inside = {name: one.detach().clone() for name, one in training.matrices(model).items()}
        add_lora(model, 4, seed=0)
        with torch.no_grad():
            assert torch.equal(training.loss_of(model, batch), checkpoint)
        optimizer = training.make_optimizer(model, TINY.network("lora", LOW), "cpu")
        for _ in range(3):
            training.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, one in inside.items():
            layer = model.model.layers.get_submodule(name.removesuffix(".weight"))
            assert isinstance(layer, LoRALinear)
            assert torch.equal(layer.base.weight, one)  # as in the checkpoint
            change = layer.up @ layer.down
            assert torch.linalg.matrix_rank(change.detach()) <= 4
            assert change.abs().max() > 0
        assert training.loss_of(model, batch) < checkpoint

    def test_a_switched_network_begins_as_full_rank(self, run: Run):
        found = results.collect(run, TINY)
        (switch,) = TINY.switches
        ours, full = (
            found.runs[one].metrics.read("loss")["value"]
            for one in (
                TINY.network(
                    "lora", found.best["lora"], switch=switch, full_rate=found.best["full"]
                ),
                TINY.network("full", found.best["full"]),
            )
        )
        # The loss at the switch is still that of the weights before.
        np.testing.assert_array_equal(ours[: switch + 1], full[: switch + 1])
        assert ours[-1] != full[-1]


class TestStudy:
    @pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
    def test_directions_against_the_svd(self, shape):
        torch.manual_seed(0)
        matrix = torch.randn(shape)
        basis, squares = training.leading_directions(matrix, 2)
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        expected = left[:, :2] if shape[0] < shape[1] else right[:2].mT
        torch.testing.assert_close(basis @ basis.mT, expected @ expected.mT)
        torch.testing.assert_close(squares.sqrt().float(), values)
        share = values[:2].square().sum() / values.square().sum()
        torch.testing.assert_close(training.captured_share(matrix, basis), share)

    def test_numbers_of_planted_gradients(self, tmp_path):
        run = Run.create("planted", {}, out=tmp_path)
        size = dataclasses.replace(TINY, rank=1, lags=(1,), studied=(0,), steps=2)
        weight = nn.Parameter(torch.zeros(3, 4))
        measured = training.SubspaceStudy(run, size, {"0.weight": weight})
        for step, row in enumerate((0, 1)):
            weight.grad = torch.zeros(3, 4)
            weight.grad[row, row] = 2.0
            weight.grad[2, 2] = 1.0
            measured.before_step(step)
            with torch.no_grad():
                weight += weight.grad
        measured.at_end(2)
        run.metrics.flush()

        def read(name: str) -> dict[int, float]:
            log = run.metrics.read(name)
            return dict(zip(log["step"].tolist(), log["value"].tolist(), strict=True))

        assert read("gradient_stable_rank") == pytest.approx({0: 1.25, 1: 1.25})
        assert read("gradient_captured") == pytest.approx({0: 0.8, 1: 0.8})
        assert read("captured_after_1") == pytest.approx({0: 0.0}, abs=1e-6)
        # W_1 has one leading direction; W_2 = diag(2, 2, 2) has none that stands out.
        assert read("weight_stable_rank") == pytest.approx({1: 1.25, 2: 3.0})


def made(losses: dict[GaLoreNetwork, float], **fields) -> GaloreResults:
    outcomes = {
        network: {"validation_loss": loss, "state_bytes": 8, "seconds": 0.1}
        for network, loss in losses.items()
    }
    chosen = {"size": FULL, "best": RATES, "outcomes": outcomes, "runs": {}, "missing": ()}
    return GaloreResults(**{**chosen, **fields})


def planted(lost: float, by_gap: float, spread: float = 0.0) -> GaloreResults:
    """Full-scale networks with losses that were chosen, three seeds."""
    losses = {}
    for member, noise in enumerate((-spread, 0.0, spread)):
        base = 1.0 + 0.1 * member
        losses[FULL.network("full", RATES["full"], member)] = base
        losses[FULL.network("galore", LOW, member)] = base + lost + noise
        losses[FULL.network("svd", LOW, member)] = base + lost
        shortest = min(FULL.gaps)
        losses[FULL.network("galore", LOW, member, gap=shortest)] = base + lost + noise - by_gap
    return made(losses)


class TestVerdict:
    @pytest.mark.parametrize(
        ("lost", "by_gap", "spread", "verdict"),
        [
            (0.004, 0.001, 0.0, Verdict.AGREES),
            (-0.004, -0.01, 0.0, Verdict.AGREES),
            (-0.02, -0.01, 0.0, Verdict.INCOMPLETE),  # lower than print ever is
            (0.02, 0.001, 0.0, Verdict.DIFFERS),
            (0.004, 0.02, 0.0, Verdict.DIFFERS),
            (0.010, 0.001, 0.01, Verdict.INCOMPLETE),
        ],
    )
    def test_it_follows_from_the_losses(self, lost, by_gap, spread, verdict):
        outcome = results.judge(planted(lost, by_gap, spread), published_size=True)
        assert outcome.verdict is verdict
        assert f"{lost:+.4f}" in outcome.finding
        assert ("too far below full rank" in outcome.finding) == (lost == -0.02)

    def test_it_is_incomplete_without_the_groups_it_needs(self):
        full = planted(0.004, 0.001)
        lacking = dataclasses.replace(full, missing=("gaps",))
        outcome = results.judge(lacking, published_size=True)
        assert outcome.verdict is Verdict.INCOMPLETE
        assert "gaps" in outcome.finding
        assert results.judge(made({}, best={}), True).verdict is Verdict.INCOMPLETE
        assert results.judge(full, False).verdict is Verdict.NOT_COMPARABLE

    def test_the_comparison_with_galore_torch_says_its_error(self):
        words, *_, chance = results.judge(planted(0.004, 0.001, 0.01), True).paragraphs
        assert "not more than two standard errors" in words
        # A spread of 0.01 over three seeds is 0.01 / √3 of 1.104.
        assert "the standard error is 0.52% of the loss, above the 0.5% wanted" in words
        # Student's t with two degrees of freedom exceeds 2 with probability 0.184 (two-sided).
        assert "by chance in 18% of comparisons of 3 seeds" in chance


def test_a_reversible_gradient_loses_its_rank():
    ranks = results.theory_stable_rank()
    assert ranks[0] > 4
    assert ranks[-1] < 1.1
    bent = results.theory_stable_rank(realizable=True)
    assert bent[0] < 1.5
    assert bent.max() > 3 * bent[0]  # rises on the way, in the same theory
    assert bent[-1] < 1.1


def test_a_missing_text_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JOMA_SHARED", raising=False)
    monkeypatch.setenv("JOMA_CACHE", "nowhere")
    monkeypatch.chdir("/")
    with pytest.raises(JomaError, match="wikitext-2"):
        EXPERIMENT.check_needs(EXPERIMENT.request(scale="full"))
