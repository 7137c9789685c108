"""Table 1 on HBLT(ρ): what can be known, a tiny run end to end, and a verdict that can turn."""

import dataclasses

import numpy as np
import pytest
import torch

from joma.data import HBLT
from joma.experiments import EXPERIMENTS, Request, Verdict
from joma.experiments.table1 import results as nodes
from joma.experiments.table1 import trees
from joma.experiments.table1.results import CellResults
from joma.experiments.table1.trees import TreeNetworks
from joma.runs import Run
from joma.theory.hblt import posteriors

SIZE = trees.TreeSize(2, 8, 16, learning_rate=1e-2, steps=3, batch=8, samples=64, repeats=2)


def test_posteriors_are_the_latents_where_nothing_is_uncertain():
    source = HBLT.regular(4, 3, 1.0, classes=8, off=0.0)
    batch = source.sample(40, 0)
    for known, latents in zip(
        posteriors(source.trees[0], trees.leaves_on(batch)[0]), batch.latents, strict=True
    ):
        np.testing.assert_array_equal(known, latents[0].numpy())


def test_nobody_follows_a_latent_better_than_the_perfect_observer():
    source = HBLT.regular(3, 3, 0.8, classes=20, seeds=(1, 2))
    batch = source.sample(10_000, 0)
    leaves = trees.leaves_on(batch)
    known = trees.observer(source, leaves)
    for latents, own in zip(batch.latents[:-1], known[:-1], strict=True):
        below = torch.from_numpy(leaves).double().unflatten(-1, (latents.shape[-1], -1))
        best = trees.following(latents, own)
        assert (best < 1).all()
        assert (trees.following(latents, below.mean(-1)) < best).all()
    for latents, own in zip(batch.latents, known, strict=True):
        # What is said to be likely happens as often as is said, also among what is said often.
        missed = latents.double() - own
        assert float(missed.mean().abs()) < 0.005
        assert float((missed * own).mean().abs()) < 0.005


def made_up(before: float, after: float, step: float = 0.1, noise: float = 0.0) -> CellResults:
    """Held-out correlations that go from `before` to `after`, lower by `step` for each level up."""
    cells, steps, seeds = trees.CELLS, (0, 1, 10), 3
    shape = (len(cells), trees.LEVELS, len(steps), seeds)
    rise = np.linspace(before, after, len(steps))[:, None] + noise * np.array([-1.0, 0.0, 1.0]) * (
        np.arange(len(steps))[:, None] > 0
    )
    values = rise - step * np.arange(trees.LEVELS)[:, None, None]
    by_level = {name: np.broadcast_to(values, shape).copy() for name in trees.BY_LEVEL}
    by_level["observer"][:] = 0.95
    whole = {name: np.full((len(cells), len(steps), seeds), 0.3) for name in trees.WHOLE}
    return CellResults(cells, steps, by_level, whole)


def judge(results: CellResults, gains: float = 0.0):
    """Judge results whose upper levels gain more in every layer, by `gains` for each level."""
    levels = results.by_level["held_out_samples"][:, :, None]
    every = np.repeat(levels, trees.LEVELS, axis=2)
    every[:, :, :, -1] += gains * np.arange(trees.LEVELS)[:, None, None]
    return trees.judge(results, dict.fromkeys(trees.EVERY, every), 100)


class TestVerdict:
    def test_nothing_was_published_to_compare(self):
        outcome = judge(made_up(0.5, 0.7))
        assert outcome.verdict is Verdict.NOT_COMPARABLE
        assert "rises by more than twice the seed std in 36 of 36 rows" in outcome.finding
        assert "from 0.39 to 0.59 in training, where a perfect observer" in outcome.finding
        assert "the lower one reads higher in 24 of 24 pairs" in outcome.finding

    @pytest.mark.parametrize(
        ("results", "rows"),
        [
            (made_up(0.6, 0.6), 0),
            (made_up(0.6, 0.5), 0),
            (made_up(0.5, 0.6, noise=0.06), 0),
            (made_up(0.5, 0.6, noise=0.04), 36),
        ],
        ids=["nothing added", "unlearned", "seeds differ", "clear"],
    )
    def test_a_clear_gain_is_one_beyond_the_seeds(self, results: CellResults, rows: int):
        assert f"the seed std in {rows} of 36 rows" in judge(results).finding

    def test_where_and_when_training_adds_follows_the_numbers(self):
        top_down, bottom_up = made_up(0.5, 0.7), made_up(0.5, 0.7)
        for name in ("ncorr", "held_out_samples"):
            late, early = top_down.by_level[name], bottom_up.by_level[name]
            late[:, 0, 1] = late[:, 0, 0]  # the lowest level comes after the others, and gains less
            late[:, 0, 2] = late[:, 0, 0] + 0.1
            early[:, 0, 1:] = early[:, 0, :1] + 0.3  # comes before them, and gains more
            early[:, 1:, 1] = early[:, 1:, 0]
        late, early = judge(top_down), judge(bottom_up)
        assert "and gains more in 0." in late.finding
        assert (
            "earlier measurement in 0, at the same in 12 and at a later one in 12; no order"
            in (late.paragraphs[0])
        )
        assert "and gains more in 12." in early.finding
        assert (
            "earlier measurement in 12, at the same in 12 and at a later one in 0; no order"
            in (early.paragraphs[0])
        )
        assert "no order can be seen" in judge(made_up(0.5, 0.7)).paragraphs[0]
        assert "in no pair training clearly adds to both" in judge(made_up(0.6, 0.6)).paragraphs[0]

    def test_one_depth_alone(self):
        whole = made_up(0.5, 0.7)
        cells = whole.cells[:4]
        part = dataclasses.replace(
            whole,
            cells=cells,
            by_level={name: values[:4] for name, values in whole.by_level.items()},
            whole={name: values[:4] for name, values in whole.whole.items()},
        )
        outcome = judge(part)
        assert outcome.verdict is Verdict.INCOMPLETE
        assert "in 4 of 4 pairs" in outcome.finding


def test_samples_measured_in_parts_are_the_same():
    work = TreeNetworks(None, trees.GROUPS["L3"], SIZE, Request())  # pyright: ignore[reportArgumentType]
    at_once = nodes.pooled_nodes(work.ensemble, work.batch)
    in_parts = nodes.pooled_nodes(work.ensemble, work.batch, 24)
    assert len(at_once[0]) == 3
    for one, other in zip([*at_once[0], at_once[1]], [*in_parts[0], in_parts[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_small_networks_learn_the_latents_that_decide_the_class(tmp_path):
    experiment = EXPERIMENTS["table1-hblt"]
    request = experiment.request(scale="small", groups=["L3"])
    run = Run.create("table1-hblt", request.config, out=tmp_path / "run")
    experiment.reproduce(run, request)
    size, levels = trees.SIZES["small"], trees.LEVELS
    results = nodes.collect(run, trees.GROUPS, size, levels, trees.BY_LEVEL, trees.WHOLE)
    learned = trees.Learned.of(results)
    top = np.array([s == 1 and results.cells[i].rho >= 0.7 for i, s in learned.rows])
    assert learned.raised[top].all()
    assert (learned.after < learned.possible).all()
    assert (
        results.whole["accuracy"][:, -1].mean() > 0.8 * results.whole["best_accuracy"][:, 0].mean()
    )
