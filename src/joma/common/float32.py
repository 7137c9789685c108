"""How float32 matrices are multiplied, whichever of its switches a process has used to say so.

torch keeps one record for all backends, which `torch.set_float32_matmul_precision` writes, and one
for each, `torch.backends.….fp32_precision`. It raises when the first is asked for after a change of
the second alone. Here both are set, so that they agree, and both come back.

The setting belongs to the process, so blocks that overlap, in one thread or in several, share it:
the first to begin notes what the user has set, and the last to end puts that back.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

Precision = Literal["ieee", "tf32"]

_FULL = ("ieee", "none")
_OLDER = {"ieee": "highest", "tf32": "high"}
"""The same in the words of the record for all backends."""


@contextmanager
def float32_products(precision: Precision) -> Iterator[None]:
    """Compute float32 products in a precision for the block; what was set before comes back.

    Within a thread the innermost block decides. Where threads ask for different precisions at the
    same time, all of them get "ieee".

    Args:
        precision: "ieee" for float32 throughout, "tf32" where the device may round factors.
    """
    block = object()
    with _lock:
        if not _blocks:
            _before[:] = [_settings()]
        _blocks[block] = threading.get_ident(), precision
        _apply()
    try:
        yield
    finally:
        with _lock:
            del _blocks[block]
            if _blocks:
                _apply()
            else:
                _set(*_before.pop())


def float32_is_coarse(device: str | None = None) -> bool:
    """Return whether products of float32 may be rounded further on some backend.

    Args:
        device: "cpu" to ask only what multiplies there, which takes a third of the time.
    """
    if device == "cpu":
        everywhere: Any = torch.backends
        return everywhere.mkldnn.matmul.fp32_precision not in _FULL
    return any(backend.fp32_precision not in _FULL for backend in _backends())


_lock = threading.Lock()
_blocks: dict[object, tuple[int, Precision]] = {}
"""Thread and precision of the blocks that are being run, in the order in which they began."""
_before: list[tuple[str, tuple[str, ...]]] = []
"""What the user has set, while there are blocks."""


def _apply() -> None:
    """Set what the blocks ask for."""
    innermost = dict(_blocks.values())
    precision = "ieee" if "ieee" in innermost.values() else "tf32"
    torch.set_float32_matmul_precision(_OLDER[precision])  # writes the others as well


def _settings() -> tuple[str, tuple[str, ...]]:
    """Return the record for all backends, and that of each ("none" where it follows another)."""
    own = _own()
    for backend in _backends():
        backend.fp32_precision = "ieee"  # where these are fine, the other can be asked for
    older = torch.get_float32_matmul_precision()
    _set(older, own)
    return older, own


def _set(older: str, own: tuple[str, ...]) -> None:
    torch.set_float32_matmul_precision(older)
    for backend, value in zip(_backends(), own, strict=True):
        backend.fp32_precision = value


def _own() -> tuple[str, ...]:
    """Return the setting of each backend itself, where asking would give that of one above it.

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
    """Return what backends follow, the topmost first; `mkldnn` sets the topmost too."""
    everywhere: Any = torch.backends
    return everywhere, everywhere.cudnn
