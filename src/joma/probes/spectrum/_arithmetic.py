"""The arithmetic that bounds rely on, whatever the process does elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch

_LOCK = threading.RLock()
"""What is set here is set for the whole process, and so are the buffers of captured graphs."""


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """float32 as IEEE has it, without autocast and gradients, on that device, by one thread."""
    here = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with (
        _LOCK,
        here,
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        float32_products("ieee"),
    ):
        yield


@contextmanager
def float32_products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """float32 products in that precision; what was set before comes back."""
    on_cpu = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    backends = torch.backends.cuda.matmul, on_cpu
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = precision
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value
