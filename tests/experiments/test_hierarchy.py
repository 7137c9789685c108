"""Attention by height: sequences, what "first" means, a verdict that can turn, and a tiny run."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.data import HBLT
from joma.experiments import Verdict
from joma.experiments import hierarchy as experiment
from joma.experiments.hierarchy import networks
from joma.experiments.hierarchy import results as findings
from joma.experiments.hierarchy.networks import DEPTH, GROUPS, HEIGHTS, RHO, HierarchySize
from joma.experiments.hierarchy.results import GroupResults, LayerCurves, history, judge
from joma.probes import AttentionByHeight, attention_by_height
from joma.runs import Run
from joma.theory import hblt

SIZE = HierarchySize(seeds=2, width=8, hidden=8, learning_rate=1e-2, steps=3, batch=4, samples=16)
STEPS = (0, 1, 3, 10, 30, 100)


class TestSequences:
    @staticmethod
    def made(kind: str) -> tuple[networks.Sequences, HBLT]:
        group = GROUPS[f"{kind}-1"]
        seeds = group.seeds(0, 2)
        return networks.Sequences(group, seeds, "cpu"), HBLT(group.tree, seeds)

    def test_are_those_of_the_tree_in_another_order(self):
        data, source = self.made("class")
        found, drawn = data.sample(200, 5), source.sample(200, 5)
        short = (drawn.tokens > 0).sum(-1) <= networks.LENGTH
        assert short.float().mean() > 0.99
        whole = drawn.tokens[..., -networks.LENGTH :]
        assert torch.equal(found.tokens.sort(-1).values[short], whole[short])
        assert not torch.equal(found.tokens[short], whole[short])
        assert torch.equal(found.labels, drawn.labels)

    def test_any_token_is_as_often_the_last(self):
        tokens = self.made("class")[0].sample(20_000, 0).tokens
        counts = torch.bincount(tokens[..., -1].flatten(), minlength=25)[1:].double()
        expected = counts.mean()
        assert (counts - expected).abs().max() < 5 * expected.sqrt()

    def test_the_label_may_be_one_more_token(self):
        data, source = self.made("token")
        found, drawn = data.sample(200, 5), source.sample(200, 5)
        assert data.outputs == source.vocabulary
        both = torch.cat([found.tokens, found.labels.unsqueeze(-1)], -1).sort(-1).values
        short = (drawn.tokens > 0).sum(-1) <= networks.LENGTH + 1
        assert torch.equal(both[short], drawn.tokens[..., -networks.LENGTH - 1 :][short])
        assert not (found.tokens == found.labels.unsqueeze(-1))[found.labels > 0].any()

    def test_who_knows_the_tree_is_right_as_often_as_said(self):
        data, source = self.made("class")
        best = data.best_accuracy(4000, 7)
        assert best is not None
        # Another way: a leaf that is on votes for the class of its top latent.
        batch = source.sample(4000, 7)
        votes = torch.stack([((batch.tokens - 1) // 4 == k).sum(-1) for k in range(6)], -1)
        voted = (votes.argmax(-1) == batch.labels).double().mean(-1)
        # 4,000 draws put voting at most .02 above what no one can be better than on average.
        assert (voted.numpy() - 0.02 < best).all()
        assert (best < voted.numpy() + 0.04).all()
        assert self.made("token")[0].best_accuracy(10, 7) is None


class TestTrees:
    def test_cooccurrence_is_that_of_theorem_5(self):
        group = GROUPS["class-3"]
        rho0 = hblt.root_uncertainty(group.tree.class_probs, group.tree.child_off_probs[0])
        expected = hblt.cooccurrence(HEIGHTS[:-1], DEPTH, RHO, rho0)
        found = findings.cooccurrence(group)
        np.testing.assert_allclose(found[:-1], expected)
        assert found[-1] < found[-2]

    def test_a_flat_tree_has_no_lowest_latents_and_tells_as_much_of_the_class(self):
        tree, flat = GROUPS["class-1"].tree, GROUPS["flat-1"].tree
        np.testing.assert_allclose(tree.off_probs(DEPTH - 1), flat.off_probs(DEPTH - 1))
        low, middle, high = findings.cooccurrence(GROUPS["flat-1"])
        assert low == pytest.approx(middle)
        assert (middle, high) == pytest.approx(findings.cooccurrence(GROUPS["class-1"])[1:])


class TestMeasures:
    heights = HBLT(GROUPS["class-1"].tree).heights

    def test_what_goes_to_padding_and_to_the_query_itself_is_left_out(self):
        uniform = torch.tensor([0.1, 0.1, 0.2, 0.1])  # and half of it to padding

        def ratio(*mass: float) -> list[float]:
            kept = torch.tensor(mass)
            found = AttentionByHeight(kept, uniform, 1 - kept.sum(), torch.tensor(7))
            return networks.among_others(found).tolist()

        assert ratio(0.4, 0.1, 0.2, 0.1) == pytest.approx([1, 1, 1])
        assert ratio(0.0, 0.25, 0.5, 0.25) == pytest.approx([1, 1, 1])
        assert ratio(0.4, 0.2, 0.2, 0.0) == pytest.approx([2, 1, 0])

    def test_attention_to_siblings_is_seen_and_lost_under_wrong_leaves(self):
        group = GROUPS["class-1"]
        data = networks.Sequences(group, group.seeds(0, 20), "cpu")
        tokens = data.sample(200, 0).tokens
        between = self.heights[tokens.unsqueeze(-1), tokens.unsqueeze(-2)]
        weights = torch.where(between == 1, 3.0, 1.0).tril()
        weights /= weights.sum(-1, keepdim=True)
        renamed = data.shuffled_EV.gather(1, tokens.flatten(1)).view_as(tokens)
        right, wrong = (
            networks.among_others(attention_by_height(weights, leaves, self.heights)).mean(0)
            for leaves in (tokens, renamed)
        )
        assert right[0] > 1.8
        assert right[1:].max() < 1
        assert (wrong - 1).abs().max() < 0.2

    def test_entropy_of_even_rows(self):
        tokens = torch.tensor([[[0, 0, 3, 4]]])
        even = torch.ones(1, 1, 4, 4).tril() / torch.arange(1, 5).view(4, 1)
        found = networks.entropy(even, tokens)
        assert found.tolist() == pytest.approx([(math.log(3) + math.log(4)) / 2])


def curves(
    *changes: list[float], seeds: int = 10, noise: float = 0.005, entropy=None
) -> LayerCurves:
    """Curves with these mean changes of ln ratio by height at `STEPS`, from seeds that differ."""
    rng = np.random.default_rng(0)
    start = rng.normal(0, 0.05, (len(HEIGHTS), 1, seeds))
    drawn = rng.normal(0, noise, (len(HEIGHTS), len(STEPS), seeds))
    drawn -= drawn.mean(-1, keepdims=True)  # the means are those that are given
    drawn[:, 0] = 0
    level = np.array(entropy or [2.5, 2.4, 1.5, 1.4, 1.8, 2.0])
    return LayerCurves(
        STEPS,
        np.exp(start + drawn + np.array(changes)[..., None]),
        np.exp(start + 0.1 * drawn),
        level[:, None] + rng.normal(0, 0.01, (len(STEPS), seeds)),
    )


AS_PUBLISHED = curves(
    [0, 0.02, 0.15, 0.30, 0.20, 0.10],
    [0, 0.00, 0.02, 0.05, 0.20, 0.30],
    [0, -0.01, -0.05, -0.10, -0.06, -0.02],
)
TOGETHER = curves(
    [0, 0.02, 0.15, 0.20, 0.00, -0.2],
    [0, 0.02, 0.15, 0.25, 0.35, 0.40],
    [0, -0.01, -0.05, -0.1, -0.12, -0.15],
)
HIGH_FIRST = curves(
    [0, -0.02, -0.1, -0.3, -0.2, -0.1],
    [0, 0.00, -0.02, -0.1, 0.12, 0.15],
    [0, 0.01, 0.12, 0.15, 0.05, 0.00],
)
STILL = curves([0] * 6, [0] * 6, [0] * 6, entropy=[2.5] * 6)


class TestHistory:
    def test_as_published(self):
        found = history(AS_PUBLISHED)
        assert found.low_first
        assert (found.first, found.begun, found.taken_up) == ((1,), 3, (3, 30, None))
        assert (found.peak, found.falls_back, found.followers) == (10, True, (2, 3))

    def test_together(self):
        found = history(TOGETHER)
        assert not found.low_first
        assert (found.first, found.begun) == ((1, 2), 3)
        assert (found.peak, found.falls_back, found.followers) == (10, True, (2,))

    def test_high_first(self):
        found = history(HIGH_FIRST)
        assert not found.low_first
        assert (found.first, found.taken_up) == ((3,), (None, 30, 3))
        assert (found.falls_back, found.followers) == (True, ())

    def test_what_the_seeds_do_not_agree_on_does_not_count(self):
        up = [0, 0, 0.15, 0.3, 0.3, 0.3]
        assert history(curves(up, [0] * 6, [0] * 6)).low_first
        assert history(curves(up, [0] * 6, [0] * 6, noise=1.0)).first == ()

    @settings(max_examples=25, deadline=None)
    @given(
        scale=st.floats(0.2, 5),
        seed=st.integers(0, 2**32 - 1),
        spread=st.floats(0.01, 0.5),
    )
    def test_favourites_of_untrained_networks_do_not_matter(self, scale, seed, spread):
        rng = np.random.default_rng(seed)
        factor = scale * np.exp(rng.normal(0, spread, (len(HEIGHTS), 1, 10)))
        for given_curves in (AS_PUBLISHED, TOGETHER, HIGH_FIRST):
            moved = dataclasses.replace(given_curves, ratio=given_curves.ratio * factor)
            assert history(moved) == history(given_curves)


def results(lowest: LayerCurves, upper: LayerCurves = STILL) -> dict[str, GroupResults]:
    seeds = lowest.entropy.shape[1]
    accuracy = np.full((len(STEPS), seeds), 0.5)
    return {
        name: GroupResults(
            group,
            (lowest, *[upper] * (group.layers - 1))
            if group.kind == "class"
            else (upper,) * group.layers,
            accuracy,
            np.nan if group.kind == "token" else 0.8,
        )
        for name, group in GROUPS.items()
    }


class TestVerdict:
    def test_agrees_where_low_comes_first(self):
        found = judge(results(AS_PUBLISHED), comparable=True)
        assert found.agrees
        assert "low-level association comes first: H = 1 (step 3: H = 1 +16%" in found.finding
        assert "H = 1 (×1.35 → ×1.11) falls back, H = 2 (×1.05 → ×1.35) rises" in found.finding

    @pytest.mark.parametrize(
        ("lowest", "words"),
        [
            (TOGETHER, "H = 1 and 2 come together, less than 2 standard errors apart (step 3"),
            (TOGETHER, "H = 2 (×1.28 → ×1.49) rises, H = 3 (×0.90 → ×0.86) does not rise."),
            (HIGH_FIRST, "does not come first: H = 3 before H = 1 (step 3"),
            (STILL, "no height is taken up in 100 steps"),
        ],
    )
    def test_does_not_agree_otherwise(self, lowest: LayerCurves, words: str):
        found = judge(results(lowest), comparable=True)
        expected = Verdict.DIFFERS if lowest is HIGH_FIRST else Verdict.INCOMPLETE
        assert found.verdict is expected
        assert words in found.finding
        small = judge(results(lowest), comparable=False)
        assert small.verdict is Verdict.NOT_COMPARABLE
        assert judge({}, comparable=True).verdict is Verdict.INCOMPLETE

    def test_the_flat_control_is_compared_with_the_tree(self):
        text = "\n".join(judge(results(TOGETHER), comparable=True).paragraphs)
        assert "H = 1 gets 0.55 (" in text
        assert "and 1.00 (0) times on the flat one" in text


def test_gradient_descent_in_place_of_adam(tmp_path, monkeypatch):
    monkeypatch.setitem(networks.SIZES, "tiny", SIZE)
    run = Run.create("hierarchy", {}, out=tmp_path / "run")
    asked = {"scale": "tiny", "groups": ["class-1"], "options": {"optimizer": "sgd"}}
    request = experiment.EXPERIMENT.request(**asked)
    size = SIZE.with_options(request.options)
    assert (size.learning_rate, size.steps) == (
        networks.SGD_RATE,
        experiment.SGD_STEPS * SIZE.steps,
    )
    assert SIZE.with_options({"optimizer": "adam", "learning-rate": None}) == SIZE
    experiment.EXPERIMENT.reproduce(run, request)
    group = Run.open(run.path / "groups" / "class-1")
    assert group.config["optimizer"] == "sgd"
    loss = group.metrics.read("loss")["value"]
    assert np.isfinite(loss).all()
    takes = experiment.EXPERIMENT.takes(request)["small"]
    assert takes.seconds == experiment.SGD_STEPS * experiment.SCALES["small"].seconds
    with pytest.raises(ValueError, match="optimizer must be one of adam, sgd"):
        experiment.EXPERIMENT.request(scale="tiny", options={"optimizer": "lion"})
