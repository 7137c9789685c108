"""GaLore's experiment at its smallest, its own methods, and what its numbers are made to say."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from joma.errors import JomaError
from joma.experiments import EXPERIMENTS, Verdict
from joma.experiments.galore import findings, networks, results, study, training
from joma.experiments.galore.groups import networks_of, tuning
from joma.experiments.galore.lora import LoRALinear, add_lora
from joma.experiments.galore.residual import GROWTH, ResidualGaLoreAdamW, limited
from joma.experiments.galore.results import GaloreResults, Variant, paired
from joma.experiments.galore.setting import (
    GROUPS,
    READINGS,
    SIZES,
    GaLoreNetwork,
    LearningRate,
)
from joma.optim import GaLoreAdamW
from joma.runs import Run

EXPERIMENT = EXPERIMENTS["galore"]
TINY, FULL = SIZES["tiny"], SIZES["full"]
LOW = LearningRate(1e-2, 0.25)
RATES = {
    "full": LearningRate(1e-3),
    "galore": LOW,
    "svd": LOW,
    "power": LOW,
    "residual": LOW,
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
    assert found.methods == ["full", "galore", "svd", "power", "residual", "lora"]
    for group in ("ranks", "gaps", "moments", "warm-lora", "recipe"):
        for one in results.variants(found, group):
            assert np.isfinite(one.losses).all()
    steps, losses = found.curve("galore", 1)
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
    assert any("each parameter as its gradient arrives" in one for one in summary["paragraphs"])


def test_networks_of_one_seed_start_alike_and_read_the_same_text(run: Run):
    found = results.collect(run, TINY)
    starts = {
        method: [found.curve(method, member)[1][0] for member in range(2)]
        for method in found.methods
    }
    assert len({tuple(one) for one in starts.values()}) == 1
    assert starts["full"][0] != starts["full"][1]
    first = found.runs[TINY.network("full", found.best["full"])].metrics.read("loss")["value"]
    assert len(first) == TINY.steps


def test_the_state_is_counted_as_it_is(run: Run):
    found = results.collect(run, TINY)
    model = networks.make_model(TINY, 0, "cpu")
    everything = sum(one.numel() for one in model.parameters())
    assert found.outcome("full")["state_bytes"] == 2 * 4 * everything
    inside = networks.matrices(model)
    rest = everything - sum(one.numel() for one in inside.values())
    rank = TINY.rank
    low = sum(rank * (min(one.shape) + 2 * max(one.shape)) for one in inside.values())
    assert found.outcome("galore")["state_bytes"] == 4 * (low + 2 * rest)
    adapters = sum(rank * sum(one.shape) for one in inside.values())
    assert found.outcome("lora")["state_bytes"] == 2 * 4 * (adapters + rest)


def test_the_readings_of_the_recipe_differ_in_updates_and_clipping(run: Run):
    found = results.collect(run, TINY)
    clipped, plain, at_once = (found.outcome("galore", reading=one) for one in READINGS)
    assert clipped["updates"] == plain["updates"] == TINY.recipe_steps
    assert at_once["updates"] == TINY.recipe_steps * TINY.micro_batches
    assert max(at_once["norms"]) == 0  # nothing is left to clip
    assert min(clipped["norms"]) > 0
    assert clipped["clipped"] == np.mean(np.array(clipped["norms"]) > 1)


def test_what_is_done_is_not_done_again(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "make_model", lambda *_: pytest.fail("trained again"))
    best = results.best_rates(run, TINY)
    wanted = tuning(TINY, results.tuning_losses(run, TINY))
    training.train_networks(run, wanted, TINY, EXPERIMENT.request(scale="tiny"), "tune")
    for group in GROUPS[1:]:
        wanted = networks_of(group, TINY, best)
        training.train_networks(run, wanted, TINY, EXPERIMENT.request(scale="tiny"), group)
    other = [TINY.network("galore", LearningRate(0.5))]
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        training.train_networks(run, other, TINY, EXPERIMENT.request(scale="tiny"), "other")


def test_every_group_has_its_networks_and_names_differ():
    wanted = {group: networks_of(group, FULL, RATES) for group in GROUPS[1:]}
    wanted["tune"] = tuning(FULL, {})
    assert {group: len(own) for group, own in wanted.items()} == {
        "tune": 5,  # from which the search starts
        "seeds": 18,
        "equal-rates": 6,
        "moments": 15,  # with those that keep them, which are also among the seeds
        "ranks": 12,
        "gaps": 15,
        "warm-lora": 9,
        "recipe": 9,
        "theory": 12,
        "time": 6,
    }
    every = {one for own in wanted.values() for one in own}
    assert len({one.name for one in every}) == len(every)
    small = SIZES["small"]
    rates = {method: one[0] for method, one in small.rates.items()}
    trained = {one for group in GROUPS[1:] for one in networks_of(group, small, rates)}
    trained |= set(tuning(small, {}))
    assert {one.method for one in trained} == {"full", "galore", "lora"}
    assert len(trained) == 3
    svd = networks.make_optimizer(
        networks.make_model(TINY, 0, "cpu"), TINY.network("svd", LOW), "cpu"
    )
    group = svd.param_groups[0]
    assert (group["projection"], group["stagger"], group["moments"]) == ("svd", False, "keep")


class TestResidualScaling:
    @pytest.mark.parametrize("shape", [(5, 9), (9, 5)])
    def test_steps_against_a_direct_computation(self, shape: tuple[int, int]):
        """Adam, column scales and the limit, with loops in float64 and the optimizer's bases."""
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(shape))
        expected = weight.detach().double().numpy().copy()
        lr, scale = 0.1, 0.25
        optimizer = ResidualGaLoreAdamW(
            [weight], lr, rank=2, gap=3, scale=scale, projection="svd", verbose=False
        )
        first = second = None
        before, limits = 0.0, 0
        for step in range(1, 8):
            gradient = torch.randn(shape) * step**2  # grows, so that the limit acts
            weight.grad = gradient
            optimizer.step()
            basis = optimizer.state[weight]["basis"].double().numpy()
            # As if projected on the left: the transposed problem where it is on the right.
            left = shape[0] < shape[1]
            g = gradient.double().numpy() if left else gradient.double().numpy().T
            r = basis.T @ g
            first = 0.1 * r if first is None else 0.9 * first + 0.1 * r
            second = 0.001 * r**2 if second is None else 0.999 * second + 0.001 * r**2
            adam = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
            rest = g - basis @ r
            for column in range(g.shape[1]):
                rest[:, column] *= np.linalg.norm(adam[:, column]) / np.linalg.norm(r[:, column])
            length = lr * np.linalg.norm(rest)
            if before and length > GROWTH * before:
                rest *= GROWTH * before / length
                length, limits = GROWTH * before, limits + 1
            before = length
            move = lr * scale * (basis @ adam + rest)
            expected -= move if left else move.T
            np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=0, atol=2e-5)
        assert limits > 0

    def test_the_limit(self):
        move = torch.tensor([3.0, 4.0])
        same, length = limited(move, None)
        assert torch.equal(same, move)
        assert length == 5
        shorter, length = limited(move, torch.tensor(2.0))
        torch.testing.assert_close(length, torch.tensor(2 * GROWTH))
        torch.testing.assert_close(shorter, move / 5 * 2 * GROWTH)
        assert torch.equal(limited(move, torch.tensor(0.0))[0], move)  # nothing to compare with

    def test_it_is_galore_where_the_gradient_lies_in_the_subspace(self):
        torch.manual_seed(1)
        gradient = torch.randn(6, 2) @ torch.randn(2, 8)
        moved = []
        for kind in (GaLoreAdamW, ResidualGaLoreAdamW):
            weight = nn.Parameter(torch.zeros(6, 8))
            optimizer = kind([weight], 0.1, rank=2, projection="svd", verbose=False)
            weight.grad = gradient.clone()
            optimizer.step()
            moved.append(weight.detach())
        torch.testing.assert_close(*moved, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("setting", [{"per_layer": True}, {"clip_norm": 1.0}])
    def test_it_needs_whole_gradients(self, setting):
        with pytest.raises(JomaError, match="must not be given with residual scaling"):
            ResidualGaLoreAdamW([nn.Parameter(torch.zeros(4, 4))], rank=2, **setting)


class TestLoRA:
    def test_it_starts_from_a_checkpoint_and_freezes_it(self):
        text = networks.load_text(TINY, "cpu")
        batch = text.batch(0, 0, 4)
        model: Any = networks.make_model(TINY, 3, "cpu")
        optimizer = networks.make_optimizer(model, GaLoreNetwork("full", LearningRate(1e-2)), "cpu")
        for step in range(3):
            networks.loss_of(model, text.batch(0, step, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            checkpoint = networks.loss_of(model, batch)
        inside = {name: one.detach().clone() for name, one in networks.matrices(model).items()}
        assert add_lora(model.model.layers, 4, seed=0) == 7 * TINY.layers
        with torch.no_grad():
            assert torch.equal(networks.loss_of(model, batch), checkpoint)
        optimizer = networks.make_optimizer(model, TINY.network("lora", LOW), "cpu")
        for _ in range(3):
            networks.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, one in inside.items():
            layer = model.model.layers.get_submodule(name.removesuffix(".weight"))
            assert isinstance(layer, LoRALinear)
            assert torch.equal(layer.base.weight, one)  # as in the checkpoint
            change = layer.up @ layer.down
            assert torch.linalg.matrix_rank(change.detach()) <= 4
            assert change.abs().max() > 0
        assert networks.loss_of(model, batch) < checkpoint

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
        basis, squares = study.leading_directions(matrix, 2)
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        expected = left[:, :2] if shape[0] < shape[1] else right[:2].mT
        torch.testing.assert_close(basis @ basis.mT, expected @ expected.mT)
        torch.testing.assert_close(squares.sqrt().float(), values)
        share = values[:2].square().sum() / values.square().sum()
        torch.testing.assert_close(study.captured_share(matrix, basis), share)

    def test_numbers_of_planted_gradients(self, tmp_path):
        run = Run.create("planted", {}, out=tmp_path)
        size = dataclasses.replace(TINY, rank=1, lags=(1,), studied=(0,), steps=2)
        weight = nn.Parameter(torch.zeros(3, 4))
        measured = study.SubspaceStudy(run, size, {"0.weight": weight})
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
        outcome = findings.judge(planted(lost, by_gap, spread), published_size=True)
        assert outcome.verdict is verdict
        assert f"{lost:+.4f}" in outcome.finding
        assert ("too far below full rank" in outcome.finding) == (lost == -0.02)

    def test_one_seed_does_not_decide(self):
        single = dataclasses.replace(planted(0.004, 0.001), size=dataclasses.replace(FULL, seeds=1))
        assert findings.judge(single, published_size=True).verdict is Verdict.INCOMPLETE

    def test_it_is_incomplete_without_the_groups_it_needs(self):
        full = planted(0.004, 0.001)
        lacking = dataclasses.replace(full, missing=("gaps",))
        outcome = findings.judge(lacking, published_size=True)
        assert outcome.verdict is Verdict.INCOMPLETE
        assert "gaps" in outcome.finding
        assert findings.judge(made({}, best={}), True).verdict is Verdict.INCOMPLETE
        assert findings.judge(full, False).verdict is Verdict.NOT_COMPARABLE

    def test_the_comparison_with_galore_torch_says_its_error(self):
        words, *_, chance = findings.judge(planted(0.004, 0.001, 0.01), True).paragraphs
        assert "not more than two standard errors" in words
        # A spread of 0.01 over three seeds is 0.01 / √3 of 1.104.
        assert "the standard error is 0.52% of the loss, above the 0.5% wanted" in words
        # Student's t with two degrees of freedom exceeds 2 with probability 0.184 (two-sided).
        assert "by chance in 18% of comparisons of 3 seeds" in chance

    def test_published_shares(self):
        # Perplexity 34.88 against 34.06 is 3.5519 against 3.5281 nats.
        assert findings.published_losses()["60M"] == pytest.approx(0.00674, abs=1e-5)

    def test_the_lowest_is_named_and_whether_it_is_clear(self):
        one, two = np.array([1.0, 1.2, 1.4]), np.array([1.1, 1.3, 1.5])
        found = [
            Variant("moments", "keep", 0, two, paired(two, two)),
            Variant("moments", "align", 0, one, paired(one, two)),
        ]
        assert "align is lowest, clear of keep (-0.1000" in findings._best(found)
        found[1] = dataclasses.replace(found[1], losses=two + np.array([0.1, -0.15, 0.02]))
        assert "within two standard errors" in findings._best(found)


def test_paired_differences():
    one = paired([1.0, 2.0, 4.0], [0.0, 1.0, 2.0])
    assert one.mean == pytest.approx(4 / 3)
    assert one.error == pytest.approx(1 / 3)
    assert one.is_clear
    assert not paired([1.0, -1.0], [0.0, 0.0]).is_clear
    assert paired([1.0, np.nan], [0.0, 0.0]).count == 1


def test_the_schedule_rises_and_falls():
    rates = [networks.schedule(step / 100) for step in range(101)]
    assert rates[5] == pytest.approx(0.5)
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1)


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


@pytest.mark.slow
def test_networks_in_several_processes_are_the_same(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """As a GPU trains them, but on the CPU."""
    losses = []
    wanted = [TINY.network("galore", LOW, member) for member in range(2)]
    for processes in (1, 2):
        run = Run.create("galore", {}, out=tmp_path / str(processes))
        request = EXPERIMENT.request(scale="tiny")
        monkeypatch.setattr(training, "several_at_once", lambda *_, count=processes: count)
        training.train_networks(run, wanted, TINY, request, "test")
        outcomes = [run.path / "groups" / one.name / "outcome.json" for one in wanted]
        losses.append([json.loads(path.read_text())["validation_loss"] for path in outcomes])
    assert losses[0] == losses[1]
