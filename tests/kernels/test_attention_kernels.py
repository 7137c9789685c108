"""The attention kernels without a GPU, in Triton's interpreter."""

import pytest

from tests.without_gpu import needs_triton, printed

pytestmark = needs_triton


@pytest.mark.parametrize(
    ("arguments", "count"), [((), 41), pytest.param(("--all",), 249, marks=pytest.mark.slow)]
)
def test_the_kernels_agree_with_float64_softmax(arguments: tuple[str, ...], count: int):
    """Masks of every kind, padding, windows, softcaps, queries that are not real, NaN and ∞."""
    found = printed("tests.kernels.interpreted_attention", *arguments)
    assert len(found) == count
    assert [case for case in found if not case["error"] <= 1e-5] == []
