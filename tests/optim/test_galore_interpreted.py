"""The kernels of GaLore against torch operations, in Triton's interpreter."""

import pytest

from tests.without_gpu import needs_triton, printed

pytestmark = needs_triton
MATRICES_OF_FOUR_STEPS = {"wide": 12, "wide_eight": 12}


def check(found):
    """Weights in bfloat16 differ where a change is rounded before it is added."""
    assert found["moved_by_kernels"] == MATRICES_OF_FOUR_STEPS.get(found["case"], 16)
    assert found["weights"] < 0.03
    assert max(found["moments"]) < 2e-3


@pytest.fixture(scope="module")
def fast():
    """What the short cases find, by name."""
    found = printed("tests.optim.interpreted", "bfloat16", "eight", "null_directions")
    return {one["case"]: one for one in found}


def test_kernels_move_as_torch_operations(fast):
    """Both shapes and sides, refreshes, decay, scale, odd rows, several launches; both moments."""
    full, eight = fast["bfloat16"], fast["eight"]
    check(full)
    check(eight)
    assert full["launches"] == 12  # three in each of four steps
    assert eight["moments"][0] < 1e-4  # rounded by the same random numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["left", "right", "left_eight", "right_eight", "wide", "wide_eight", "per_layer"]
)
def test_kernels_move_as_torch_operations_on_either_side_and_in_several_tiles(case):
    (found,) = printed("tests.optim.interpreted", case)
    check(found)
    assert found["launches"] == (16 if case == "per_layer" else 4)


def test_directions_without_gradient_are_left_to_torch_operations(fast):
    """A gradient of rank 5 in a subspace of rank 16: the kernels would move weights by rounding."""
    assert fast["null_directions"]["moved_by_kernels"] == 0
    assert fast["null_directions"]["weights"] == 0
