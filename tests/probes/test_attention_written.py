"""All scores at once, without a decision that depends on the numbers, as on a GPU."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from joma.probes import _attention_written, attention_statistics
from joma.probes.attention import AttentionStatistics
from tests.probes.test_attention import MASKS, SIGHTS, close, draw, materialised, seen_keys

WAITS = ("_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero")


class Unlooked(TorchDispatchMode):
    """Refuses operations whose result the host would have to wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in WAITS, func
        return func(*args, **kwargs or {})


def careful(q: torch.Tensor, k: torch.Tensor, **given: Any) -> AttentionStatistics:
    names = {"padding": "padding_BS", "mask": "mask_BHTS", "rows": "rows_BT"}
    options = {"causal": True, "scale": q.shape[-1] ** -0.5, "first": 3, "last": 4}
    options |= {names.get(name, name): it for name, it in given.items()}
    with Unlooked():
        found = _attention_written.statistics(q, k, **options, received=True)
    assert found is not None
    logsumexp, entropy, *masses = found
    assert logsumexp is not None
    assert entropy is not None
    return AttentionStatistics(logsumexp, entropy, *masses)


@pytest.mark.parametrize("shape", [(23, 23), (9, 31), (31, 9), (1, 17)], ids=str)
@pytest.mark.parametrize("sight", SIGHTS.values(), ids=SIGHTS.keys())
@pytest.mark.parametrize("kind", ["none", "bool", "numbers", "padding"])
def test_against_the_attention_matrix(sight: dict[str, Any], kind: str, shape: tuple[int, int]):
    T, S = shape
    q, k = draw(0, 2, 6, T, 8, size=2), draw(1, 2, 3, S, 8, size=2)
    hidden = draw(2, 2, 1, T, S) < -0.5
    given: dict[str, Any] = {
        "none": {},
        "bool": {"mask": ~hidden},
        "numbers": {"mask": draw(3, 2, 1, T, S).masked_fill(hidden, -math.inf), "softcap": 3.0},
        "padding": {"padding": draw(4, 2, S) > -0.5},
    }[kind]
    close(careful(q, k, **sight, **given), materialised(q, k, **sight, **given), 1e-5)


@pytest.mark.parametrize("sight", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e35])
def test_a_bad_key_reaches_only_rows_that_see_it(sight: dict[str, Any], bad: float):
    q, k = draw(38, 1, 2, 21, 8), draw(39, 1, 2, 21, 8)
    given = {
        name: (it[None, None, None] if name == "mask" else it[None]) if torch.is_tensor(it) else it
        for name, it in sight.items()
    }
    truth = materialised(q, k, **sight)
    k[..., 13, :] = bad
    found = careful(q, k, **given)
    hidden = torch.ones(21, dtype=torch.bool)
    if "window" in sight or not sight:
        hidden = ~seen_keys(21, 21, **sight)[:, 13]
    for name in ("logsumexp", "entropy", "first", "last"):
        got, want = getattr(found, name)[..., hidden], getattr(truth, name)[..., hidden]
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-7)


def test_the_threads_kept_memory_is_nobodys_result():
    q, k = draw(5, 2, 3, 40, 8), draw(6, 2, 3, 40, 8)
    with torch.inference_mode():
        first = attention_statistics(q, k, first=2, last=3, received=True)
    kept = [it.clone() for it in vars(first).values()]
    again = attention_statistics(q * 2, k, first=2, last=3, received=True)
    for before, now, other in zip(kept, vars(first).values(), vars(again).values(), strict=True):
        assert torch.equal(before, now)
        assert not torch.equal(now, other)


FOREIGN = """
import torch
torch.set_default_dtype(torch.float64)
with torch.device("meta"):
    from joma.probes import attention_statistics
q, k = (torch.randn(1, 2, 64, 8, dtype=torch.float32, device="cpu") for _ in range(2))
attention_statistics(q, k)
torch.set_default_dtype(torch.float32)
print(attention_statistics(q, k).entropy.isfinite().all().item())
"""


def test_default_types_and_devices_of_others_do_not_matter():
    """Models are loaded under other defaults, and the import may come from there."""
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("size", [12, 300])  # written out, and in blocks
def test_queries_that_are_not_real_reach_nothing(bad: float, size: int):
    q, k = draw(60, 1, 2, size, 8), draw(61, 1, 2, size, 8)
    rows = torch.ones(1, size, dtype=torch.bool)
    rows[:, size // 3] = False
    expected = attention_statistics(q, k, rows=rows, first=3, last=4, received=True)
    q[:, :, size // 3] = bad
    found = attention_statistics(q, k, rows=rows, first=3, last=4, received=True)
    for name in ("logsumexp", "entropy", "first", "last", "received"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
