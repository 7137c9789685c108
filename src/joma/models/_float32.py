"""How float32 matrices are multiplied, whichever of its switches a process has used to say so.

torch keeps one record for all backends, which `torch.set_float32_matmul_precision` writes, and one
for each, `torch.backends.….fp32_precision`. It raises when the first is asked for after a change of
the second alone. Here both are set, so that they agree, and both come back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

_OLDER = {"ieee": "highest", "tf32": "high"}
"""The same in the words of the record for all backends."""


@contextmanager
def float32_products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """float32 products in that precision; what was set before comes back."""
    before = _Setting.now()
    try:
        torch.set_float32_matmul_precision(_OLDER[precision])  # writes the others as well
        yield
    finally:
        before.put_back()


def float32_is_coarse() -> bool:
    """Whether products of float32 may be rounded further than float32 is, on some backend."""
    return any(backend.fp32_precision not in ("ieee", "none") for backend in _backends())


@dataclass(frozen=True)
class _Setting:
    """What the process has set.

    Attributes:
        older: of the record for all backends.
        own: of each backend; "none" where it follows what is set above it.
    """

    older: str
    own: tuple[str, ...]

    @classmethod
    def now(cls) -> "_Setting":
        own = _own()
        for backend in _backends():
            backend.fp32_precision = "ieee"  # where these are fine, the other can be asked for
        found = cls(torch.get_float32_matmul_precision(), own)
        found.put_back()
        return found

    def put_back(self) -> None:
        torch.set_float32_matmul_precision(self.older)
        for backend, value in zip(_backends(), self.own, strict=True):
            backend.fp32_precision = value


def _own() -> tuple[str, ...]:
    """What is set of each backend itself: where it follows another, asking gives the other's.

    So nothing is set of those others while this asks. Another thread may see that: products that
    follow them are then in full precision, convolutions as torch has them where nothing is set.
    """
    if torch.backends.flags_frozen():
        return _read()
    above = []
    for place in _above():  # in this order, each is asked when it has nobody left to follow
        above.append(place.fp32_precision)
        place.fp32_precision = "none"
    own = _read()
    for place, value in zip(_above(), above, strict=True):
        place.fp32_precision = value
    return own


def _read() -> tuple[str, ...]:
    return tuple(backend.fp32_precision for backend in _backends())


def _backends() -> tuple[Any, ...]:
    everywhere: Any = torch.backends
    return everywhere.cuda.matmul, everywhere.mkldnn.matmul


def _above() -> tuple[Any, ...]:
    """What backends follow, the topmost first; `torch.backends.mkldnn` sets the topmost too."""
    everywhere: Any = torch.backends
    return everywhere, everywhere.cudnn
