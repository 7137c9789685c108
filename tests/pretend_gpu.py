"""A GPU that is not there, for Triton: kernels are compiled for it and launched into nothing.

What does not fit it is refused as Triton does on the real one: too much shared memory for a block,
too many threads.
"""

# pyright: reportMissingImports=false
# Triton comes with torch's CUDA builds alone.

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import max_shared_mem
from triton.runtime.driver import driver

SHARED = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes of shared memory that a block may have, by compute capability."""


class _Utils:
    def __init__(self, shared: int) -> None:
        self._shared = shared

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._shared, "multiprocessor_count": 40, "warpSize": 32}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> Any:
        return object(), 0, 0, 0, 1024


class _Driver:
    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self.utils = _Utils(SHARED[capability])
        self.launcher_cls = lambda source, metadata: lambda *arguments: None

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def pretend(capability: int) -> Iterator[None]:
    """Let Triton launch on a GPU of a compute capability, such as 89, for the block."""
    before = driver._active
    driver.set_active(_Driver(capability))
    max_shared_mem.cache_clear()
    try:
        yield
    finally:
        driver._active = before
        max_shared_mem.cache_clear()
