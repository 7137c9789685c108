"""The search for learning rates, the medium scale, the theory's controls, and the peer package."""

import importlib.util
import math

import numpy as np
import pytest
from benchmarks import galore_peer

from joma.experiments import EXPERIMENTS
from joma.experiments.galore import (
    SIZES,
    TUNING_MEMBER,
    GaLoreNetwork,
    LearningRate,
    networks_of,
    results,
    training,
    tuning,
)
from joma.experiments.galore.figure import paired_differences
from joma.experiments.galore.results import GaloreResults
from joma.runs import Run

TINY, MEDIUM = SIZES["tiny"], SIZES["medium"]
LOW = LearningRate(2e-2, 0.25)
BEST = {"full": LearningRate(1e-2, 0.125), "galore": LOW, "svd": LOW}


def bowl(network: GaLoreNetwork) -> float:
    """A loss that is least at 0.005 for embeddings and 0.01 for matrices."""
    rate, share = network.rate
    return 2 + math.log2(rate / 5e-3) ** 2 + math.log2(rate * share / 1e-2) ** 2


class TestSearch:
    def test_it_ends_where_all_neighbours_are_worse(self):
        losses: dict[GaLoreNetwork, float] = {}
        rounds = 0
        while new := [one for one in tuning(MEDIUM, losses) if one not in losses]:
            losses |= {one: bowl(one) for one in new}
            rounds += 1
        assert rounds > 2
        for method in ("full", "galore", "svd"):
            found = {one.rate: loss for one, loss in losses.items() if one.method == method}
            best = min(found, key=lambda rate: found[rate])
            assert best == pytest.approx((5e-3, 2.0))
            assert all(found[one] > found[best] for one in best.neighbours)
        assert {one.member for one in losses} == {TUNING_MEMBER}

    def test_it_goes_on_from_what_is_done(self, tmp_path):
        run = Run.create("galore", {}, out=tmp_path)
        assert results.best_rates(run, MEDIUM) == {}
        trained = 0
        while not (best := results.best_rates(run, MEDIUM)):
            for one in tuning(MEDIUM, results.tuning_losses(run, MEDIUM)):
                if not (run.path / "groups" / one.name).exists():
                    own = Run.create("galore-network", {}, out=run.path / "groups" / one.name)
                    own.write_json("outcome", {"status": "done", "validation_loss": bowl(one)})
                    trained += 1
        assert best["galore"] == best["svd"] == pytest.approx((5e-3, 2.0))
        assert trained == len(results.collect(run, MEDIUM).outcomes)
        words = results.judge(results.collect(run, MEDIUM), published_size=False).paragraphs[0]
        assert "on a seed that is not judged" in words
        assert "0.005 × 2 of" in words
        assert "(its neighbours +50.0% to +50.0%)" in words


def made(losses: dict[GaLoreNetwork, float]) -> GaloreResults:
    outcomes = {one: {"validation_loss": loss, "state_bytes": 8} for one, loss in losses.items()}
    return GaloreResults(MEDIUM, BEST, outcomes, {}, ())


class TestMediumScale:
    def test_methods_and_variants_are_paired_by_seed(self):
        losses = {}
        change = {"full": 0.0, "svd": -0.01, "galore": -0.02}
        moments = {"keep": 0.0, "project": -0.01, "rotate": 0.02, "reset": 0.1, "": 0.0}
        for group in ("seeds", "ranks", "moments"):
            for one in networks_of(group, MEDIUM, BEST):
                by_rank = 0.0 if one.method == "full" else 0.6 / one.rank
                worse = change[one.method] + moments[one.moments] + by_rank
                losses[one] = 2 + 0.1 * one.member + worse
        found = made(losses)
        variants = {one.label: one.difference.mean for one in results.variants(found, "moments")}
        assert variants["project"] == pytest.approx(-0.01)
        assert variants["reset"] == pytest.approx(0.1)
        outcome = results.judge(found, published_size=False)
        assert outcome.verdict == "not comparable"
        text = " ".join(outcome.paragraphs)
        assert "each at its own learning rate: -0.0100 ± 0.0000 (SE, 6 seeds)" in text
        assert "project is lowest, clear of keep" in text
        shares = {name: one.mean for name, one, _ in paired_differences(found)}
        level = np.mean([2 + 0.1 * member for member in range(MEDIUM.seeds)])
        expected = (0.6 / 32 - 0.02) / level
        assert shares["GaLore,\nfrom full rank"] == pytest.approx(expected)


@pytest.mark.skipif(
    importlib.util.find_spec("galore_torch") is None, reason="galore-torch is not installed"
)
def test_the_peer_package_moves_as_our_svd(tmp_path):
    network = TINY.network("svd", LearningRate(1e-2, 0.25))
    losses = []
    for name, make in (("ours", training.make_optimizer), ("peer", galore_peer.peer_optimizer)):
        request = EXPERIMENTS["galore"].request(scale="tiny")
        training.train_network(tmp_path / name, network, TINY, request, make=make)
        losses.append(Run.open(tmp_path / name).metrics.read("loss")["value"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
