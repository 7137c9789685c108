"""The search for learning rates, the medium scale, the theory's controls, and the peer package."""

import dataclasses
import importlib.util
import math

import numpy as np
import pytest
import torch
from benchmarks import galore_peer

from joma.experiments.galore import figure, findings, groups, networks, results, study, training
from joma.experiments.galore.results import GaloreResults
from joma.experiments.galore.setting import (
    CONTROLS,
    DESCENT_RATE,
    SIZES,
    TUNING_MEMBER,
    GaLoreNetwork,
    LearningRate,
)
from joma.runs import Run

TINY, MEDIUM = SIZES["tiny"], SIZES["medium"]
LOW = LearningRate(2e-2, 0.25)
BEST = {"full": LearningRate(1e-2, 0.125), "galore": LOW, "svd": LOW, "power": LOW, "residual": LOW}


def bowl(network: GaLoreNetwork) -> float:
    """A loss that is least at 0.005 for embeddings and 0.01 for matrices."""
    rate, share = network.rate
    return 2 + math.log2(rate / 5e-3) ** 2 + math.log2(rate * share / 1e-2) ** 2


class TestSearch:
    def test_it_ends_where_all_neighbours_are_worse(self):
        losses: dict[GaLoreNetwork, float] = {}
        rounds = 0
        while new := [one for one in groups.tuning(MEDIUM, losses) if one not in losses]:
            losses |= {one: bowl(one) for one in new}
            rounds += 1
        assert rounds > 2
        for method in ("full", "galore", "svd"):
            found = {one.rate: loss for one, loss in losses.items() if one.method == method}
            best = min(found, key=lambda rate: found[rate])
            assert best == pytest.approx((5e-3, 2.0))
            assert all(found[one] > found[best] for one in groups.neighbours(best))
        assert {one.member for one in losses} == {TUNING_MEMBER}

    def test_the_judged_seeds_are_others(self):
        for group in ("seeds", "ranks", "moments", "recipe", "theory"):
            for one in groups.networks_of(group, MEDIUM, BEST):
                assert one.member < TUNING_MEMBER

    def test_neighbours_change_one_of_the_two_rates(self):
        for one in groups.neighbours(LOW):
            embeddings, inside = one.rate / LOW.rate, one.rate * one.share / (LOW.rate * LOW.share)
            assert sorted((embeddings, inside)) in ([1, 2], [0.5, 1])

    def test_it_goes_on_from_what_is_done(self, tmp_path):
        run = Run.create("galore", {}, out=tmp_path)
        assert results.best_rates(run, MEDIUM) == {}
        trained = 0
        while not (best := results.best_rates(run, MEDIUM)):
            for one in groups.tuning(MEDIUM, results.tuning_losses(run, MEDIUM)):
                if not (run.path / "groups" / one.name).exists():
                    own = Run.create("galore-network", {}, out=run.path / "groups" / one.name)
                    own.write_json("outcome", {"status": "done", "validation_loss": bowl(one)})
                    trained += 1
        assert best["galore"] == best["svd"] == pytest.approx((5e-3, 2.0))
        assert trained == len(results.collect(run, MEDIUM).outcomes)
        words = findings._tuned(results.collect(run, MEDIUM))[0]
        assert "on a seed that is not judged" in words
        assert "0.005 × 2 of" in words
        assert "(its neighbours +50.0% to +50.0%)" in words


def made(losses: dict[GaLoreNetwork, float]) -> GaloreResults:
    outcomes = {one: {"validation_loss": loss, "state_bytes": 8} for one, loss in losses.items()}
    return GaloreResults(MEDIUM, BEST, outcomes, {}, ())


class TestMediumScale:
    def test_networks_of_its_groups(self):
        counts = {
            group: len(groups.networks_of(group, MEDIUM, BEST))
            for group in ("seeds", "ranks", "moments", "recipe", "theory")
        }
        assert counts == {"seeds": 24, "ranks": 12, "moments": 24, "recipe": 9, "theory": 4}
        seeds = groups.networks_of("seeds", MEDIUM, BEST)
        assert len({one.member for one in seeds if one.method == "svd"}) == MEDIUM.seeds
        assert len({one.member for one in seeds if one.method == "residual"}) == 3

    def test_moments_are_compared_at_the_same_gap(self):
        losses = {}
        for one in groups.networks_of("moments", MEDIUM, BEST):
            worse = {"keep": 0.0, "project": -0.01, "rotate": 0.02, "reset": 0.1}[one.moments]
            losses[one] = 2 + one.gap + 0.1 * one.member + worse
        found = made(losses)
        variants = {one.label: one.difference.mean for one in results.variants(found, "moments")}
        assert variants["project, gap 10"] == pytest.approx(-0.01)
        assert variants["reset, gap 50"] == pytest.approx(0.1)
        first, second = findings._moments(found)
        assert "rotate, gap 10 +0.0200" in first
        assert "project, gap 50 is lowest, clear of keep, gap 50" in second

    def test_both_ranks_are_compared_with_galore_torch_and_drawn(self):
        losses = {}
        for group in ("seeds", "ranks"):
            for one in groups.networks_of(group, MEDIUM, BEST):
                by_rank = 0.0 if one.method == "full" else 0.6 / one.rank
                power = 0.001 * (-1) ** one.member if one.method == "galore" else 0.0
                losses[one] = 2 + 0.1 * one.member + by_rank + power
        found = made(losses)
        words = findings._against_svd(found)
        assert ["rank 32" in words[0], "rank 16" in words[1]] == [True, True]
        assert all("not more than two standard errors" in one for one in words)
        shares = {name: one.mean for name, one, _ in figure._differences(found)}
        level = np.mean([2 + 0.1 * member for member in range(MEDIUM.seeds)])
        assert shares["GaLore, rank 16,\nfrom full rank"] == pytest.approx(0.6 / 16 / level)
        outcome = findings.judge(found, published_size=False)
        assert outcome.verdict == "not comparable"

    def test_the_changes_to_galore_torch_are_told_apart(self):
        losses, change = {}, {"svd": 0.0, "power": -0.01, "galore": -0.02}
        wanted = groups.networks_of("seeds", MEDIUM, BEST)
        wanted += groups.networks_of("equal-rates", MEDIUM, BEST)
        for one in wanted:
            aligned = -0.03 if one.moments == "align" else 0.0
            losses[one] = 2 + 0.1 * one.member + change.get(one.method, 0.0) + aligned
        (words,) = findings._apart(made(losses))
        assert "power iteration, all at once -0.0100 ± 0.0000 (SE, 3 seeds)" in words
        assert "power iteration, staggered -0.0200 ± 0.0000 (SE, 6 seeds)" in words
        assert "turned to the old -0.0300" in words
        assert findings._apart(made({})) == []


class TestTheory:
    def test_controls_come_closer_to_the_theory(self):
        for control in CONTROLS:
            network = TINY.network("full", LearningRate(1e-2), control=control)
            model = networks.make_model(TINY, 0, "cpu")
            optimizer = training._make_control(model, network, "cpu")
            trained = list(networks.matrices(model))
            if control in CONTROLS[:2]:
                assert isinstance(optimizer, torch.optim.AdamW)
                continue
            assert isinstance(optimizer, torch.optim.SGD)
            (group,) = optimizer.param_groups
            assert (group["lr"], group["momentum"]) == (DESCENT_RATE, 0)
            alone = control == CONTROLS[3]
            assert (trained == [f"{TINY.layers - 1}.mlp.down_proj.weight"]) == alone

    def test_a_control_reads_one_batch_at_one_rate(self, tmp_path, monkeypatch: pytest.MonkeyPatch):
        rates: list[float] = []
        step = torch.optim.SGD.step

        def spy(self, closure=None):
            rates.extend(group["lr"] for group in self.param_groups)
            return step(self, closure)

        monkeypatch.setattr(torch.optim.SGD, "step", spy)
        size = dataclasses.replace(TINY, steps=4)
        network = size.network("full", LearningRate(1e-2), control=CONTROLS[2])
        training.train_network(training.Task(tmp_path / "one", network, size, 0, "cpu"))
        losses = Run.open(tmp_path / "one").metrics.read("loss")["value"]
        assert rates == [DESCENT_RATE] * 4
        assert (np.diff(losses) < 0).all()  # of the same batch, so it can only fall

    def test_the_share_of_noise(self):
        """Against the share that was put in, over many draws."""
        random = torch.Generator().manual_seed(0)
        mean, count, found = torch.ones(20, 30), 4, []
        for _ in range(200):
            batches = mean + 2 * torch.randn(count + 1, 20, 30, generator=random)
            found.append(float(study.noise_share(batches[0], batches[1:].mean(0), count)))
        assert np.mean(found) == pytest.approx(4 / 5, rel=0.01)

    def test_a_course_says_where_it_goes_and_its_top(self):
        there = {0: np.array([1.0, 3.0]), 5: np.array([9.0]), 9: np.array([4.0])}
        assert findings._course(there) == (
            "rises from 2.00 at step 0 to 4.00 at step 9 (most at step 5, 9.00)"
        )
        assert findings._course({0: np.array([2.0]), 9: np.array([1.0])}).startswith("falls")


@pytest.mark.skipif(
    importlib.util.find_spec("galore_torch") is None, reason="galore-torch is not installed"
)
def test_the_peer_package_moves_as_our_svd(tmp_path):
    network = TINY.network("svd", LearningRate(1e-2, 0.25))
    losses = []
    for name, make in (("ours", networks.make_optimizer), ("peer", galore_peer.peer_optimizer)):
        task = training.Task(tmp_path / name, network, TINY, 0, "cpu")
        training.train_network(task, optimizer=make)
        losses.append(Run.open(tmp_path / name).metrics.read("loss")["value"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
