"""Table 1 on HBLT(ρ): what can be known, a tiny run end to end, and a verdict that can turn."""

import dataclasses

import numpy as np
import pytest
import torch

from joma.data import HBLT
from joma.experiments import Outcome, Request, Verdict, _ncorr, _trained
from joma.experiments import table1_hblt as experiment
from joma.experiments.table1_hblt import figure, networks
from joma.experiments.table1_hblt import results as summary
from joma.experiments.table1_hblt.networks import TreeNetworks
from joma.experiments.table1_hblt.results import TreeResults, judge
from joma.runs import Run
from joma.theory.hblt import posteriors

L2 = {"L2": networks.GROUPS["L2"]}
SIZE = networks.TreeSize(2, 8, 16, learning_rate=1e-2, steps=3, batch=8, samples=64, repeats=2)


def test_posteriors_are_the_latents_where_nothing_is_uncertain():
    source = HBLT.regular(4, 3, 1.0, classes=8, off=0.0)
    batch = source.sample(40, 0)
    for known, latents in zip(
        posteriors(source.trees[0], networks.leaves_on(batch)[0]), batch.latents, strict=True
    ):
        np.testing.assert_array_equal(known, latents[0].numpy())


def test_nobody_follows_a_latent_better_than_the_perfect_observer():
    source = HBLT.regular(3, 3, 0.8, classes=20, seeds=(1, 2))
    batch = source.sample(10_000, 0)
    leaves = networks.leaves_on(batch)
    known = networks.observer(source, leaves)
    for latents, own in zip(batch.latents[:-1], known[:-1], strict=True):
        below = torch.from_numpy(leaves).double().unflatten(-1, (latents.shape[-1], -1))
        best = networks._following(latents, own)
        assert (best < 1).all()
        assert (networks._following(latents, below.mean(-1)) < best).all()
    for latents, own in zip(batch.latents, known, strict=True):
        # What is said to be likely happens as often as is said, also among what is said often.
        missed = latents.double() - own
        assert float(missed.mean().abs()) < 0.005
        assert float((missed * own).mean().abs()) < 0.005


def made_up(before: float, after: float, step: float = 0.1, noise: float = 0.0) -> TreeResults:
    """Held-out correlations that go from `before` to `after`, lower by `step` for each level up."""
    cells, steps, seeds = networks.CELLS, (0, 1, 10), 3
    shape = (len(cells), networks.LEVELS, len(steps), seeds)
    rise = np.linspace(before, after, len(steps))[:, None] + noise * np.array([-1.0, 0.0, 1.0]) * (
        np.arange(len(steps))[:, None] > 0
    )
    values = rise - step * np.arange(networks.LEVELS)[:, None, None]
    by_level = {name: np.broadcast_to(values, shape).copy() for name in summary.BY_LEVEL}
    by_level["observer"][:] = 0.95
    whole = {name: np.full((len(cells), len(steps), seeds), 0.3) for name in summary.WHOLE}
    every = {
        name: np.broadcast_to(values[:, None], (*shape[:2], networks.LEVELS, *shape[2:])).copy()
        for name in networks.EVERY
    }
    return TreeResults(cells, steps, 100, by_level, whole, every)


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
    def test_a_clear_gain_is_one_beyond_the_seeds(self, results: TreeResults, rows: int):
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
            in (late.paragraphs[1])
        )
        assert "and gains more in 12." in early.finding
        assert (
            "earlier measurement in 12, at the same in 12 and at a later one in 0; no order"
            in (early.paragraphs[1])
        )
        assert "no order can be seen" in judge(made_up(0.5, 0.7)).paragraphs[1]
        assert "in no pair training clearly adds to both" in judge(made_up(0.6, 0.6)).paragraphs[1]

    def test_every_level_is_compared_in_one_layer(self):
        results = made_up(0.5, 0.7)
        values = results.every[networks.EVERY[1]]
        values[:, :, :, -1] += (
            0.1 * np.arange(networks.LEVELS)[:, None, None]
        )  # upper ones gain more
        words = judge(results).paragraphs
        assert "depth 2: s = 0 +0.20, +0.20; class +0.30, +0.30" in words[2]
        assert "in 44 of 44 where it is of latents, 36 of 36 where it is the class" in words[3]

    def test_one_depth_alone(self):
        whole = made_up(0.5, 0.7)
        cells = whole.cells[:4]
        part = dataclasses.replace(
            whole,
            cells=cells,
            by_level={name: values[:4] for name, values in whole.by_level.items()},
            whole={name: values[:4] for name, values in whole.whole.items()},
            every={name: values[:4] for name, values in whole.every.items()},
        )
        outcome = judge(part)
        assert outcome.verdict is Verdict.INCOMPLETE
        assert "in 4 of 4 pairs" in outcome.finding


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Run, Outcome]:
    """A run smaller than tiny, of all groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(networks.SIZES, "tiny", SIZE)
        request = experiment.EXPERIMENT.request(scale="tiny")
        out = tmp_path_factory.mktemp("hblt") / "run"
        run = Run.create("table1-hblt", request.config, out=out)
        return run, experiment.EXPERIMENT.reproduce(run, request)


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """The smaller run again, without files of figures, which take most of its time."""
    monkeypatch.setitem(networks.SIZES, "tiny", SIZE)
    monkeypatch.setattr(figure.figures, "save", lambda *_, **__: None)


class TestRun:
    def test_every_level_is_scored_in_every_layer(self, tiny):
        table = tiny[0].read_table("every")
        pairs = set(zip(table["depth"], table["s"], table["layer"], strict=True))
        assert pairs == {(d, s, n) for d in (2, 3, 4) for s in range(d) for n in range(d)}
        # In the layer of its number a level reads what the main table has.
        results = summary.collect(tiny[0], SIZE)
        every = results.every[networks.EVERY[0]]
        own = np.stack([every[:, s, s] for s in range(networks.LEVELS)], 1)
        np.testing.assert_array_equal(own, results.by_level["ncorr"])

    def test_the_folder_holds_what_it_should(self, tiny):
        run, outcome = tiny
        assert run.tables == ["every", "means", "seeds"]
        assert {path.name for path in run.figures} == {
            f"{name}.{kind}"
            for name in ("table1-hblt", "table1-hblt-training")
            for kind in ("png", "svg")
        }
        assert [row["s"] for row in outcome.table[:2]] == ["0", "1, class"]
        labels = [(row["depth"], row["ρ"], row["s"]) for row in outcome.table]
        assert len(set(labels)) == len(labels) == 4 * (2 + 3 + 4)
        assert labels[1] == ("2", f"{networks.CELLS[0].rho:g}", "1, class")
        assert all("nan" not in str(value) for row in outcome.table for value in row.values())
        assert "nan" not in outcome.finding + " ".join(outcome.paragraphs)
        for group in networks.GROUPS:
            own = Run.open(run.path / "groups" / group)
            assert own.read_json("outcome")["status"] == "done"
            assert own.checkpoints.latest().checkpoint is None

    def test_tables_hold_every_number(self, tiny):
        run, outcome = tiny
        seeds, means = run.read_table("seeds"), run.read_table("means")
        chosen = (means["depth"] == 3) & (means["rho"] == 0.9) & (means["s"] == 1)
        chosen &= (means["step"] == 3) & (means["measure"] == "held_out_samples")
        (place,) = np.flatnonzero(chosen)
        (row,) = (r for r in outcome.table if (r["depth"], r["ρ"], r["s"]) == ("3", "0.9", "1"))
        assert row["new samples"] == f"{means['mean'][place]:.2f} ± {means['std'][place]:.2f}"
        same = np.logical_and.reduce(
            [seeds[name] == means[name][place] for name in ("depth", "rho", "s", "step", "measure")]
        )
        assert seeds["value"][same].mean() == pytest.approx(means["mean"][place])
        ncorr = seeds["measure"] == "ncorr"
        assert set(seeds["step"][ncorr]) == {0, 1, 3}
        assert ncorr.sum() == 3 * 2 * 4 * (2 + 3 + 4)
        for depth in networks.DEPTHS:
            own = (seeds["depth"] == depth) & (seeds["measure"] == "held_out_classes")
            assert set(seeds["s"][own]) == set(range(depth - 1))
        assert set(seeds["s"][seeds["measure"] == "best_accuracy"]) == {-1}

    def test_every_member_is_of_its_cell(self, tiny):
        results = summary.collect(tiny[0], SIZE)
        observer = results.by_level["observer"][:, 0, 0]
        for group in np.split(observer, 3):
            # Each tree with a larger ρ tells more of its lowest latents than any with a smaller.
            assert (group[:-1].max(-1) < group[1:].min(-1)).all()

    def test_what_is_done_is_not_done_again(self, tiny, undrawn, monkeypatch):
        run, outcome = tiny
        monkeypatch.setattr(figure, "TreeNetworks", None)  # making networks would fail
        request = experiment.EXPERIMENT.request(scale="tiny", groups=["L3"])
        assert experiment.EXPERIMENT.reproduce(run, request) == outcome

    def test_a_group_alone_has_the_same_numbers(self, tiny, undrawn, tmp_path):
        request = experiment.EXPERIMENT.request(scale="tiny", groups=["L2"])
        run = Run.create("table1-hblt", request.config, out=tmp_path / "run")
        outcome = experiment.EXPERIMENT.reproduce(run, request)
        assert list(outcome.table) == list(tiny[1].table[:8])
        assert not _trained.groups_done(run, ["L3"])

    def test_stopped_networks_resume(self, tiny, tmp_path, monkeypatch):
        request = experiment.EXPERIMENT.request(scale="tiny")
        run = Run.create("table1-hblt", request.config, out=tmp_path / "run")
        measure = TreeNetworks.measure

        def stop(self, step: int) -> None:
            if step == 3:
                raise KeyboardInterrupt
            measure(self, step)

        with monkeypatch.context() as patch:
            patch.setattr(TreeNetworks, "measure", stop)
            with pytest.raises(KeyboardInterrupt):
                _trained.train_cells(run, L2, TreeNetworks, SIZE, request)
        assert not _trained.groups_done(run, ["L2"])
        _trained.train_cells(run, L2, TreeNetworks, SIZE, request)
        found = summary.collect(run, SIZE)
        expected = summary.collect(tiny[0], SIZE)
        for name, values in found.by_level.items():
            np.testing.assert_array_equal(values, expected.by_level[name][:4])

    def test_another_learning_rate_is_another_result(self, tiny, tmp_path):
        request = Request(0, "tiny", options={"learning-rate": 0.3})
        size = SIZE.with_options(request.options)
        assert size.learning_rate == 0.3
        assert SIZE.with_options({"learning-rate": None}) == SIZE
        run = Run.create("table1-hblt", request.config, out=tmp_path / "run")
        _trained.train_cells(run, L2, TreeNetworks, size, request)
        found, expected = (summary.collect(r, size).by_level["ncorr"][:4] for r in (run, tiny[0]))
        np.testing.assert_array_equal(found[:, :, 0], expected[:, :, 0])
        assert not np.array_equal(found[:, :, -1], expected[:, :, -1], equal_nan=True)


def test_samples_measured_in_parts_are_the_same():
    work = TreeNetworks(None, networks.GROUPS["L3"], SIZE, Request())  # pyright: ignore[reportArgumentType]
    at_once = _ncorr.pooled_nodes(work.ensemble, work.batch)
    in_parts = _ncorr.pooled_nodes(work.ensemble, work.batch, 24)
    assert len(at_once[0]) == 3
    for one, other in zip([*at_once[0], at_once[1]], [*in_parts[0], in_parts[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_measurements_begin_untrained_and_end_trained():
    assert networks.SIZES["full"].measure_at[:4] == (0, 1, 3, 10)
    assert networks.SIZES["full"].measure_at[-2:] == (1400, 2000)
    assert networks.SIZES["full"].controlled == (0, 1, 2000)
    seeds = [seed for cell in networks.CELLS for seed in cell.seeds(0, 3)]
    assert len(set(seeds)) == 36


@pytest.mark.slow
def test_small_networks_learn_the_latents_that_decide_the_class(tmp_path):
    request = experiment.EXPERIMENT.request(scale="small", groups=["L3"])
    run = Run.create("table1-hblt", request.config, out=tmp_path / "run")
    experiment.EXPERIMENT.reproduce(run, request)
    results = summary.collect(run, networks.SIZES["small"])
    learned = summary.Learned.of(results)
    top = np.array([s == 1 and results.cells[i].rho >= 0.7 for i, s in results.rows])
    assert learned.raised[top].all()
    assert (learned.after < learned.possible).all()
    assert (
        results.whole["accuracy"][:, -1].mean() > 0.8 * results.whole["best_accuracy"][:, 0].mean()
    )
