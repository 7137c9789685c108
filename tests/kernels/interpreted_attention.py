"""Run the attention kernels in Triton's interpreter next to float64 softmax; prints JSON.

TRITON_INTERPRET=1 python -m tests.kernels.interpreted_attention [--all]

One line for each case: its name and the largest error. Without --all the cases are fewer.
"""

import json
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import triton.runtime.interpreter as interpreter  # pyright: ignore[reportMissingImports]
from torch import Tensor

from tests.probes.test_attention import draw, materialised

INF = math.inf
_patch = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    """NumPy 2.4 does not turn an array of one number into a whole number, as Triton 3.6 asks."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched

from joma.kernels import attention  # noqa: E402

attention.has_kernels = lambda device: device.type == "cpu"

NAMES = ("logsumexp", "entropy", "first", "last", "received")
SHAPES = ((130, 130), (33, 150), (150, 33), (1, 77), (64, 128))


def cases(T: int, S: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What can be asked for, for 2 sequences of 4 heads."""
    ragged = torch.ones(2, S, dtype=torch.bool)
    ragged[0, : S // 2] = False
    ragged[1, S - S // 3 :] = False
    holes = draw(2, 2, S) > -0.5
    nothing = ragged.clone()
    nothing[1] = False
    hidden = draw(3, 2, 4, T, S) < -0.5
    triangle = torch.ones(T, S, dtype=torch.bool).tril(S - T)[None, None]
    packed = (torch.arange(T)[:, None] + S - T) // 70 == torch.arange(S) // 70
    distance = (torch.arange(T)[:, None] + S - T - torch.arange(S)).abs().float()
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.01])[:, None, None]
    added = draw(4, 2, 1, T, S).masked_fill(hidden[:, :1], -INF)
    rows = draw(5, 2, T) > -0.3
    lifted = added + 1e6 * (torch.arange(T) % 2)[:, None]
    yield "plain", {}
    yield "ragged padding", {"padding": ragged}
    yield "bool", {"mask": ~hidden[:1, :1]}
    yield "added", {"mask": added, "padding": ragged, "rows": rows}
    yield "causal mask, softcap", {"mask": triangle, "softcap": 2.0}
    yield "ALiBi", {"mask": -(distance * slopes)[None]}
    yield "window", {"window": 20}
    yield "padding with holes", {"padding": holes, "window": 90}
    yield "a sequence of padding", {"padding": nothing}
    yield "packed sequences", {"mask": packed[None, None], "rows": rows}
    yield "bool of each head", {"mask": ~hidden, "softcap": 1.0}
    yield "bool of keys", {"mask": ~hidden[:, :1, :1]}
    yield "transposed mask", {"mask": hidden.mT.contiguous().mT}
    yield "large numbers added", {"mask": lifted}
    yield "zeros and −∞", {"mask": torch.zeros(1, 1, T, S).masked_fill(~triangle, -INF)}
    yield "softcap, negative scale", {"softcap": 3.0, "scale": -0.4}
    yield "softcap far above all scores", {"softcap": 50.0, "mask": triangle}


def run(q: Tensor, k: Tensor, rows: Tensor | None = None, **given: Any) -> list[Tensor | None]:
    """The kernel's answers."""
    names = {"padding": "padding_BS", "mask": "mask_BHTS"}
    options = {"scale": q.shape[-1] ** -0.5, "causal": True, "first": 3, "last": 4}
    options |= {names.get(name, name): it for name, it in given.items()}
    return attention.row_statistics(q, k, **options, rows_BT=rows, received=True)


def expected(q: Tensor, k: Tensor, rows: Tensor | None = None, **given: Any) -> list[Tensor]:
    """The same by float64 softmax."""
    truth = materialised(q, k, **given)
    found = [getattr(truth, name) for name in NAMES]
    if rows is None:
        return found
    nothing = ~rows[:, None]
    found = [it.masked_fill(nothing, 0 if i else -INF) for i, it in enumerate(found[:4])]
    # A query that is not real gives nothing: as if it were hidden from every key.
    seen = rows[:, None, :, None].expand(-1, q.shape[1], -1, k.shape[-2])
    mask = given.pop("mask", None)
    if mask is None or mask.dtype == torch.bool:
        mask = seen if mask is None else mask & seen
    else:
        mask = mask.masked_fill(~seen, -INF)
    given |= {"padding": given["padding"]} if "padding" in given else {}
    return [*found, _received(q, k, mask, **given)]


def _received(q: Tensor, k: Tensor, mask: Tensor, **given: Any) -> Tensor:
    received = materialised(q, k, mask=mask, **given).received
    assert received is not None
    return received


def error(found: Sequence[Tensor | None], truth: Sequence[Tensor]) -> float:
    """The largest of all; ∞ where one is not a number, or infinite, and the other is not."""
    worst = 0.0
    for got, want in zip(found, truth, strict=True):
        assert got is not None
        got, want = got.double(), want.double()
        if not (torch.equal(got.isneginf(), want.isneginf()) and not got.isnan().any()):
            return INF
        off = (got - want).nan_to_num(0, 0, 0).abs() / want.abs().nan_to_num(1, 1, 1).clamp(min=1)
        worst = max(worst, float(off.max()))
    return worst


def bad_numbers() -> Iterator[tuple[str, float]]:
    """NaN and ∞ reach the rows that see them, and only those; 0 if so."""
    q, k = draw(6, 1, 2, 70, 16), draw(7, 1, 2, 70, 16)
    truth = materialised(q, k)
    for bad in (math.nan, INF, -INF):
        spoiled = k.clone()
        spoiled[:, :, 40] = bad
        sights: list[tuple[str, dict[str, Any]]] = [("causal", {}), ("window", {"window": 8})]
        for name, given in sights:
            truth = materialised(q, k, **given)
            sees = (torch.arange(70) >= 40) & (torch.arange(70) < 40 + given.get("window", 99))
            logsumexp, entropy, *_ = run(q, spoiled, **given)
            assert logsumexp is not None
            assert entropy is not None
            off = (entropy - truth.entropy)[..., ~sees].abs().max()
            off = max(float(off), float((logsumexp - truth.logsumexp)[..., ~sees].abs().max()))
            yield f"{name}, key {bad}", off if entropy[..., sees].isnan().all() else INF
    alone = torch.full((1, 1, 1, 16), -INF)
    logsumexp, entropy, *_ = run(torch.ones(1, 1, 1, 16), alone)
    assert logsumexp is not None
    assert entropy is not None
    yield "all scores −∞", 0.0 if logsumexp.isnan().all() and entropy.isnan().all() else INF
    mask = torch.zeros(1, 1, 70, 70)
    mask[..., 3:] = torch.finfo(torch.float16).min
    found, want = run(q, k, mask=mask.half()), expected(q, k, mask=mask == 0)
    yield "lowest float16 hides", error(found, want)


def extremes() -> Iterator[tuple[str, float]]:
    """Numbers next to those that stand for hidden keys, and beyond what float32 can add up."""
    q, k, ones = draw(12, 1, 2, 17, 16), draw(13, 1, 2, 20, 16), torch.ones(1, 2, 17, 16)
    plain = expected(q, k)
    for entry in (-9e29, -5e29, 1e30, 3e38):  # shifts of all scores: all but the log-sum-exp stays
        found = run(q, k, mask=torch.full((1, 1, 17, 20), entry))
        yield f"all entries {entry:g}", error(found[1:], plain[1:])
        yield f"log-sum-exp of {entry:g}", error(found[:1], [plain[0].double() + entry])
    real = (torch.arange(20) > 3)[None]
    low = -torch.ones(1, 2, 20, 16)
    for size in (1e14, 2e14, 1e16):
        found = run(ones * size, low * size, padding=real)[:2]
        truth = expected(ones * size, low * size, padding=real)[:2]
        yield f"scores of {-4 * size**2:g}", error(found, truth)
    broken = [it for it in run(ones, low * INF)[:4] if it is not None]
    yield "all scores −∞, masses", 0.0 if torch.stack(broken).isnan().all() else INF
    large = q.clone()
    large[:, :, 5] *= 1e5
    for cap in (50.0, 1e3, 1e5):
        found, truth = run(large, k, softcap=cap), expected(large, k, softcap=cap)
        others = torch.arange(17) != 5
        found, truth = (
            [it[..., others] for it in all_of[:4] if it is not None] for all_of in (found, truth)
        )
        yield f"softcap {cap:g}, one row of large scores", error(found, truth)
    found = run(k, q, last=2**31 - 1, first=None)[3]
    truth = materialised(k, q, last=99).last
    assert found is not None
    assert truth is not None
    yield "last beyond all keys", float((found - truth).abs().max())


def main() -> None:
    """Print one line for each case."""
    warnings.simplefilter("ignore")
    everything = "--all" in sys.argv
    for T, S in SHAPES if everything else SHAPES[1:2]:
        for dtype in (torch.float32, torch.float16):  # its products of bfloat16 are wrong
            q, k = draw(0, 2, 4, T, 16, dtype=dtype), draw(1, 2, 2, S, 16, dtype=dtype)
            for name, given in cases(T, S):
                for causal in (True, False):
                    if SHAPES[1] != (T, S) and dtype != torch.float32:
                        continue
                    if not everything and (dtype != torch.float32 or causal == ("mask" in given)):
                        continue
                    given["causal"] = causal
                    off = error(run(q, k, **given), expected(q, k, **given))
                    case = f"{name}, causal {causal}, {T} × {S}, {dtype}"
                    print(json.dumps({"case": case, "error": off}), flush=True)
    for name, off in chain(bad_numbers(), extremes()):
        print(json.dumps({"case": name, "error": off}), flush=True)
    if everything:
        for size in (1, 24, 64, 128, 256):
            q, k = draw(8, 1, 2, 66, size), draw(9, 1, 1, 66, size)
            off = error(run(q, k), expected(q, k))
            print(json.dumps({"case": f"head size {size}", "error": off}), flush=True)


if __name__ == "__main__":
    main()
