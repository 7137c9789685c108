"""The attention kernels without a GPU: in Triton's interpreter, and compiled ahead of time."""

import pytest

from tests.without_gpu import needs_triton, printed

pytestmark = needs_triton


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ((), 59),
        pytest.param(("--all",), 303, marks=pytest.mark.slow),
        pytest.param(("--smaller",), 59, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_agree_with_float64_softmax(arguments: tuple[str, ...], count: int):
    """Masks of every kind, padding, windows, softcaps, queries that are not real, NaN and ∞."""
    found = printed("tests.probes.interpreted_attention", *arguments)
    assert len(found) == count
    assert [case for case in found if not case["error"] <= 1e-5] == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "89", "90", "100", "120"])
@pytest.mark.parametrize("of", [("128", "bfloat16"), ("256", "float32")], ids=" ".join)
def test_every_kernel_fits(of: tuple[str, str], capability: str):
    """Rows, few rows, keys, tiles of masks, sums that are joined, and padding, of one type."""
    found = printed("tests.probes.compiled_attention", *of, capability, interpret=False)
    assert len(found) == 26 + 48 + 22 + 8 + 9 + 1
    assert {case.get("way", 0) for case in found} <= {0, 1}
    if capability == "90" or (capability == "80" and of[1] == "bfloat16"):
        assert {case.get("way", 0) for case in found} == {0}
