"""The arithmetic that bounds rely on, whatever the process does elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch

_LOCK = threading.RLock()
"""What is set here is set for the whole process, and so are the buffers of captured graphs."""


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """float32 as IEEE has it, without autocast and gradients, on that device, by one thread."""
    # Only what is not so already: entering all of it takes as long as a small kernel.
    with _LOCK, torch.no_grad(), ExitStack() as around:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            around.enter_context(torch.cuda.device(device))
        if torch.is_autocast_enabled(device.type):
            around.enter_context(torch.autocast(device.type, enabled=False))
        if any(backend.fp32_precision != "ieee" for backend in _backends()):
            around.enter_context(float32_products("ieee"))
        yield


@contextmanager
def float32_products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """float32 products in that precision; what was set before comes back."""
    backends = _backends()
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = precision
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


def _backends() -> tuple[Any, ...]:
    on_cpu = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    return torch.backends.cuda.matmul, on_cpu
