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
        own: of each backend; "none" where it follows what is set for all of torch.
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
    """What is set of each backend itself: where it follows another, asking gives the other's."""
    if torch.backends.flags_frozen():
        return _read()
    everywhere: Any = torch.backends
    above = everywhere.fp32_precision
    answers = []
    for trial in ("ieee", "tf32"):
        everywhere.fp32_precision = trial
        answers.append(_read())
    everywhere.fp32_precision = above
    return tuple(one if one == other else "none" for one, other in zip(*answers, strict=True))


def _read() -> tuple[str, ...]:
    return tuple(backend.fp32_precision for backend in _backends())


def _backends() -> tuple[Any, ...]:
    everywhere: Any = torch.backends
    return everywhere.cuda.matmul, everywhere.mkldnn.matmul
