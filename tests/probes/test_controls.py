import numpy as np
import pytest
import torch
from torch import Tensor

from joma.probes import controls, held_out, ncorr, planted, shuffled


def noise(seed: int, *lead: int, samples: int, latents: int, nodes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    on = torch.rand(*lead, samples, latents, generator=generator) < 0.4
    return on, torch.randn(*lead, samples, nodes, generator=generator)


def test_held_out_undoes_the_selection_of_the_best_of_many():
    latents, activations = noise(0, 4, samples=60, latents=10, nodes=500)
    chosen = ncorr(latents, activations).mean
    # The median of the largest of 500 standard normals is 2.99.
    assert chosen.mean().item() == pytest.approx(2.99 / 60**0.5, rel=0.1)
    assert held_out(latents, activations).mean.abs().max() < 0.05


def test_held_out_keeps_what_is_real():
    latents, activations = noise(1, samples=60, latents=4, nodes=100)
    activations[:, 10:14] = latents + 0.1 * activations[:, 10:14]
    result = held_out(latents, activations)
    assert result.mean > 0.95
    assert (result.counted == 4).all()


def test_samples_of_few_inputs_hold_nothing_out_but_classes_do():
    latents, activations = noise(2, samples=20, latents=10, nodes=2000)
    classes = torch.arange(1000) % 20
    repeated = latents[classes], activations[classes]
    best = ncorr(*repeated).mean
    assert best > 0.6
    assert held_out(*repeated).mean == pytest.approx(best.item(), abs=0.03)
    over_classes = held_out(*repeated, groups=classes)
    assert over_classes.mean.abs() < 0.15
    # The same for shuffling: over samples it destroys what classes alone would give by chance.
    assert shuffled(*repeated).mean < 0.15
    assert shuffled(*repeated, groups=classes).mean == pytest.approx(best.item(), abs=0.05)


@pytest.mark.parametrize("control", [held_out, shuffled])
def test_weighted_classes_are_the_samples_they_stand_for(control):
    latents, activations = noise(3, 2, samples=12, latents=5, nodes=30)
    drawn = torch.randint(12, (2, 64), generator=torch.Generator().manual_seed(5))
    drawn[drawn == 7] = 3  # a class that never occurs is no group
    weights = torch.nn.functional.one_hot(drawn, 12).sum(-2)
    expand = drawn.unsqueeze(-1)
    samples = (
        part.gather(-2, expand.expand(2, 64, part.shape[-1])) for part in (latents, activations)
    )
    by_class = control(latents, activations, groups=torch.arange(12), weights=weights, seed=4)
    by_sample = control(*samples, groups=drawn, seed=4)
    torch.testing.assert_close(by_class.mean, by_sample.mean, atol=1e-12, rtol=0)


def test_held_out_against_a_plain_loop():
    latents, activations = noise(4, samples=11, latents=3, nodes=4)
    result = held_out(latents, activations, repeats=1000)
    rng = np.random.default_rng(0)
    both = np.concatenate([latents.double().numpy(), activations.double().numpy()], axis=-1)
    means, counts = [], []
    for _ in range(2000):
        order = rng.permutation(11)
        halves = both[order[:5]], both[order[5:]]
        kept = [i for i in range(3) if all(len(set(half[:, i])) == 2 for half in halves)]
        counts.append(len(kept))
        if kept:
            here, there = (np.corrcoef(half[:, [*kept, 3, 4, 5, 6]].T) for half in halves)
            here, there = here[: len(kept), len(kept) :], there[: len(kept), len(kept) :]
            each = range(len(kept))
            forth, back = there[each, here.argmax(-1)], here[each, there.argmax(-1)]
            means.append((forth.mean() + back.mean()) / 2)
    error = 4 * np.std(means) * (1 / 1000 + 1 / 2000) ** 0.5
    assert error < 0.05
    assert result.mean.item() == pytest.approx(np.mean(means), abs=error)
    assert result.counted.double().mean().item() == pytest.approx(np.mean(counts), abs=0.12)


def test_held_out_chooses_on_one_half_and_measures_on_the_other():
    """Node 0 is right on classes 0-3, node 1 on classes 4-7, and each is wrong elsewhere."""
    latent = torch.tensor([0.0, 1.0] * 4).unsqueeze(-1)
    sign = torch.where(torch.arange(8) < 4, 1.0, -1.0).unsqueeze(-1)
    activations = torch.cat([latent * sign, -latent * sign], -1)
    result = held_out(latent, activations, repeats=200)
    lowest = result.splits.nan_to_num(1.0).min().item()
    assert lowest == pytest.approx(-1)


def test_latents_that_never_vary_in_both_halves_count_nowhere():
    latents, activations = noise(5, samples=8, latents=1, nodes=4)
    latents[:] = False
    latents[3] = True
    result = held_out(latents, activations, repeats=3)
    assert (result.counted == 0).all()
    assert result.mean.isnan()


def test_shuffled_moves_whole_vectors_over_all_permutations():
    """Three classes, one node that is latent 0: every permutation's value is known."""
    latents = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    activations = latents[:, :1]
    values = {
        round(v, 6) for v in shuffled(latents, activations, repeats=100).permutations.tolist()
    }
    # A latent's correlation is 1 where its one comes to class 2, −1/2 where it does not.
    assert values == {0.25, -0.5}
    twice = shuffled(latents, activations, repeats=2000).mean.item()
    assert twice == pytest.approx((4 * 0.25 + 2 * -0.5) / 6, abs=0.03)


def test_rows_of_a_group_move_together():
    latents, activations = noise(6, samples=6, latents=4, nodes=9)
    groups = torch.tensor([30, -2, 7, 30, 7, -2, 30, 5, 6, 9, -2])
    first = {30: 0, -2: 1, 7: 2, 5: 3, 6: 4, 9: 5}
    place = torch.tensor([first[int(group)] for group in groups])
    expanded = shuffled(latents[place], activations[place], groups=groups)
    ids = torch.tensor(list(first))
    weighted = shuffled(latents, activations, groups=ids, weights=place.bincount())
    torch.testing.assert_close(expanded.permutations, weighted.permutations, atol=1e-12, rtol=0)


@pytest.mark.parametrize("control", [held_out, shuffled])
def test_same_seed_same_numbers_and_members_apart(control):
    latents, activations = noise(7, 3, samples=16, latents=4, nodes=20)
    other_latents, other_activations = noise(8, 3, samples=16, latents=4, nodes=20)
    groups = torch.stack([torch.arange(16), torch.arange(16) // 2, torch.arange(16) // 4])
    latents = latents.gather(1, groups.unsqueeze(-1).expand(3, 16, 4))
    other_latents[1], other_activations[1] = latents[1], activations[1]
    other_groups = torch.stack([torch.arange(16), groups[1], torch.arange(16)])
    first = control(latents, activations, groups=groups).mean
    assert torch.equal(first, control(latents, activations, groups=groups).mean)
    assert not torch.equal(first, control(latents, activations, groups=groups, seed=1).mean)
    second = control(other_latents, other_activations, groups=other_groups).mean
    assert first[1] == second[1]
    assert first[0] != second[0]
    alone = control(latents[1], activations[1], groups=groups[1]).mean
    torch.testing.assert_close(first[1], alone, atol=1e-12, rtol=0)


@pytest.mark.parametrize("control", [held_out, shuffled])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": torch.zeros(6)}, "groups must be integers, got torch.float32"),
        ({"groups": torch.arange(5)}, "groups must be 6, one per row"),
        ({"groups": torch.zeros(3, 6, dtype=torch.int64)}, r"shape \(6,\) or \(2, 6\)"),
        ({"repeats": 0}, "repeats must be a whole number from 1"),
        ({"repeats": 1.5}, "repeats must be a whole number"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"weights": torch.full((6,), -1.0)}, "weights must be ≥ 0"),
    ],
)
def test_bad_input(control, changes: dict, message: str):
    latents, activations = noise(9, 2, samples=6, latents=2, nodes=3)
    with pytest.raises(ValueError, match=message):
        control(latents, activations, **changes)


def test_controls_name_groups_they_cannot_use():
    latents, activations = noise(10, samples=6, latents=2, nodes=3)
    one = torch.zeros(6, dtype=torch.int64)
    with pytest.raises(ValueError, match="at least 2 groups"):
        held_out(latents, activations, groups=one)
    with pytest.raises(ValueError, match="equal in all rows of a group"):
        shuffled(latents, activations, groups=one)


class TestPlanted:
    """Nodes of a known correlation, and how much of it the control still reads."""

    @pytest.mark.parametrize("correlation", [0.0, 0.3, 0.9, 1.0])
    def test_the_correlation_is_exact(self, correlation: float):
        generator = torch.Generator().manual_seed(3)
        latents = (torch.rand(2, 30, 5, generator=generator) < 0.4).double()
        latents[0, :, 0] = 1.0  # constant
        weights = torch.rand(2, 30, generator=generator).double()
        nodes = torch.randn(2, 30, 7, generator=generator).double()
        more = planted(latents, nodes, correlation, weights=weights)
        assert more.shape == (2, 30, 12)
        torch.testing.assert_close(more[..., :7], nodes)
        for member in range(2):
            for latent in range(5):
                y, f, w = latents[member, :, latent], more[member, :, 7 + latent], weights[member]
                y, f = y - (w * y).sum() / w.sum(), f - (w * f).sum() / w.sum()
                if (member, latent) == (0, 0):
                    assert (f == 0).all()
                    continue
                found = (w * y * f).sum() / ((w * y * y).sum() * (w * f * f).sum()).sqrt()
                assert float(found) == pytest.approx(correlation, abs=1e-12)

    def test_few_classes_hide_what_many_show(self):
        """The control over 20 classes misses most of a correlation that it reads over 200."""
        generator = torch.Generator().manual_seed(0)
        read = {}
        for classes in (20, 200):
            latents = (torch.rand(classes, 20, generator=generator) < 0.15).double()
            nodes = torch.randn(classes, 4096, generator=generator).relu().double()
            read[classes] = float(held_out(latents, planted(latents, nodes, 0.8)).mean)
        assert read[20] < 0.4
        assert read[200] > 0.75

    def test_refuses_what_is_no_correlation(self):
        for wrong in (-0.1, 1.1, float("nan")):
            with pytest.raises(ValueError, match="correlation must lie in"):
                planted(torch.ones(4, 1), torch.ones(4, 2), wrong)


@pytest.mark.parametrize("control", [held_out, shuffled])
def test_repeats_computed_together_are_those_computed_alone(control, monkeypatch):
    """As on a GPU; some latents do not vary, and members have rows that do not count."""
    generator = torch.Generator().manual_seed(5)
    latents = torch.rand(3, 24, 6, generator=generator) < 0.2
    nodes = torch.randn(3, 24, 40, generator=generator)
    weights = torch.rand(3, 24, generator=generator) * (torch.arange(24) % 7 > 0)
    options = {"weights": weights, "groups": torch.arange(24), "repeats": 11, "seed": 3}
    alone = control(latents, nodes, **options)
    for at_once in (1, 4, 100):
        monkeypatch.setitem(controls._AT_ONCE, "cpu", at_once * nodes.numel())
        together = control(latents, nodes, **options)
        for name, expected in vars(alone).items():
            found = getattr(together, name)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13, equal_nan=True)
