import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from joma.probes import NCorr, ncorr

INF = float("inf")


def rows(seed: int, *lead: int, samples: int = 40, latents: int = 5, nodes: int = 7):
    generator = torch.Generator().manual_seed(seed)
    on = torch.rand(*lead, samples, latents, generator=generator) < 0.4
    return on, torch.randn(*lead, samples, nodes, generator=generator).relu()


def oracle(latents: Tensor, activations: Tensor) -> np.ndarray:
    """Correlations (N, H) by numpy.corrcoef, for columns that vary."""
    both = np.concatenate([latents.double().numpy(), activations.double().numpy()], axis=-1)
    return np.corrcoef(both.T)[: latents.shape[-1], latents.shape[-1] :]


def same(a: NCorr, b: NCorr, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a.values, b.values, atol=atol, rtol=0)
    assert torch.equal(a.nodes, b.nodes)
    assert torch.equal(a.varying, b.varying)


def test_against_corrcoef_for_every_member():
    latents, activations = rows(0, 2, 3)
    result = ncorr(latents, activations)
    assert result.values.dtype == torch.float64
    for member in np.ndindex(2, 3):
        expected = oracle(latents[member], activations[member])
        np.testing.assert_allclose(result.values[member], expected.max(-1), atol=1e-13)
        np.testing.assert_array_equal(result.nodes[member], expected.argmax(-1))
    np.testing.assert_allclose(result.mean, result.values.numpy().mean(-1))
    assert result.varying.all()


def test_a_planted_node_is_found_and_its_negative_is_not():
    latents, activations = rows(1)
    activations[:, 3] = 0.1 + 2.0 * latents[:, 0]
    activations[:, 4] = 5.0 - 2.0 * latents[:, 1].float()
    result = ncorr(latents, activations)
    assert result.nodes[0] == 3
    assert result.values[0] == pytest.approx(1)
    assert result.nodes[1] != 4
    assert result.values[1] < 0.6


def test_the_maximum_is_signed():
    latents = torch.tensor([[0.0], [0.0], [1.0]])
    activations = torch.stack([-latents[:, 0], -latents[:, 0] + torch.tensor([0.0, 1.0, 0.0])], -1)
    result = ncorr(latents, activations)
    np.testing.assert_allclose(result.values, oracle(latents, activations).max(-1))
    assert result.values.item() < 0


def test_latents_that_do_not_vary_count_as_zero():
    latents, activations = rows(2)
    latents[:, 2] = True
    result = ncorr(latents, activations)
    assert result.varying.tolist() == [True, True, False, True, True]
    assert result.values[2] == 0
    assert result.nodes[2] == -1
    assert result.mean == pytest.approx(result.values.sum().item() / 5)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 + 0.1])
def test_constant_nodes_correlate_with_nothing(value: float):
    latents, activations = rows(3, samples=37)
    result = ncorr(latents, torch.full_like(activations, value))
    assert torch.equal(result.values, torch.zeros(5, dtype=torch.float64))
    assert result.varying.all()


def test_a_column_that_varies_only_where_nothing_counts_is_constant():
    latents, activations = rows(4, samples=6)
    latents[:, 0] = torch.arange(6) == 2
    weights = torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0, 3.0])
    assert not ncorr(latents, activations, weights).varying[0]


def test_weights_are_repeated_rows():
    latents, activations = rows(5, samples=12)
    counts = torch.tensor([3, 1, 0, 2, 5, 1, 1, 4, 0, 2, 1, 7])
    repeated = (part.repeat_interleave(counts, 0) for part in (latents, activations))
    same(ncorr(latents, activations, counts), ncorr(*repeated))
    same(ncorr(latents, activations, counts), ncorr(latents, activations, counts.double() * 1e-3))


def test_leading_axes_broadcast():
    latents, activations = rows(6, 3)
    weights = torch.rand(3, 1, 40, generator=torch.Generator().manual_seed(0))
    result = ncorr(latents[0], activations, weights)
    assert result.values.shape == result.varying.shape == (3, 3, 5)
    same(
        NCorr(result.values[2, 1], result.nodes[2, 1], result.varying[2, 1]),
        ncorr(latents[0], activations[1], weights[2, 0]),
    )


def test_a_large_offset_costs_no_digits():
    latents, activations = rows(7)
    shifted = activations.double() + 1e6  # rounds: the oracle must see what was rounded
    same(ncorr(latents, shifted), ncorr(latents, shifted - 1e6))


def test_a_member_does_not_see_its_neighbours():
    latents, activations = rows(8, 3)
    other_latents, other_activations = rows(9, 3)
    other_latents[1], other_activations[1] = latents[1], activations[1]
    first, second = ncorr(latents, activations), ncorr(other_latents, 1e3 * other_activations)
    assert not torch.equal(first.values[0], second.values[0])
    other_activations[1] = activations[1]
    second = ncorr(other_latents, other_activations)
    assert torch.equal(first.values[1], second.values[1])
    assert torch.equal(first.nodes[1], second.nodes[1])


def test_noise_gives_the_maximum_of_gaussians_over_the_root_of_samples():
    latents, activations = rows(10, 8, samples=400, latents=10, nodes=1000)
    # Median of the largest of 1000 standard normals is 3.20; its spread is about .35.
    expected = 3.20 / 400**0.5
    assert ncorr(latents, activations).mean.mean().item() == pytest.approx(expected, rel=0.05)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    scale=st.floats(1e-3, 1e3),
    offset=st.floats(-1e3, 1e3),
)
def test_a_positive_affine_map_of_nodes_and_their_order_change_nothing(
    seed: int, scale: float, offset: float
):
    latents, activations = rows(seed)
    activations = activations.double()
    result = ncorr(latents, activations)
    same(result, ncorr(latents, scale * activations + offset), atol=1e-9)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    moved = ncorr(latents, activations[:, order])
    torch.testing.assert_close(moved.values, result.values, atol=1e-13, rtol=0)
    assert torch.equal(order[moved.nodes], result.nodes)
    flipped = ncorr(latents, -activations)
    np.testing.assert_allclose(flipped.values, -oracle(latents, activations).min(-1), atol=1e-12)


def test_gradients_are_not_kept():
    latents, activations = rows(13)
    assert not ncorr(latents, activations.requires_grad_()).values.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": [[1.0]]}, "latents must be a torch.Tensor, got a list"),
        ({"latents": torch.zeros(4)}, "latents must have at least 2 axes"),
        ({"latents": torch.zeros(3, 2)}, "activations must have the 3 rows of latents"),
        ({"latents": torch.zeros(5, 4, 2)}, "broadcast"),
        ({"latents": torch.zeros(4, 0)}, "at least one row, one latent and one node"),
        ({"latents": torch.zeros(0, 2), "activations": torch.zeros(0, 3)}, "at least one row"),
        ({"activations": torch.zeros(2, 4, 3, dtype=torch.complex64)}, "activations must be real"),
        ({"activations": torch.full((2, 4, 3), INF)}, "activations must be finite"),
        ({"latents": torch.full((4, 2), float("nan"))}, "latents must be finite"),
        (
            {
                "activations": torch.tensor([1.7e308, -1.7e308] * 2, dtype=torch.float64)[
                    :, None
                ].expand(2, 4, 3)
            },
            "differ by less than float64 holds",
        ),
        ({"weights": torch.ones(3)}, "weights must be 4, one per row"),
        ({"weights": torch.tensor([1.0, -1.0, 1.0, 1.0])}, "weights must be ≥ 0, got -1"),
        ({"weights": torch.tensor([[1.0] * 4, [0.0] * 4])}, "at least one row"),
        ({"weights": torch.ones(3, 4)}, "broadcast"),
        ({"weights": torch.ones(4, device="meta")}, "weights must hold data"),
    ],
)
def test_bad_input(changes: dict, message: str):
    latents, activations = rows(0, 2, samples=4, latents=2, nodes=3)
    arguments = {"latents": latents, "activations": activations, "weights": None} | changes
    with pytest.raises(ValueError, match=message):
        ncorr(**arguments)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160])
def test_correlations_have_no_scale(scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    nodes = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    found = ncorr(latents * scale, nodes * scale).values
    torch.testing.assert_close(found, ncorr(latents, nodes).values, rtol=1e-12, atol=0)
