"""Which GPUs run the package's kernels, and how one is launched that a GPU may have no room for.

Kernels (Triton) take the place of torch's operations, which give the same and are used where there
are none: on a CPU, on a GPU that is too old or not NVIDIA's, on Windows, where torch comes without
Triton, and where Triton does not find the C compiler that it needs.
"""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from joma.common.text import first_line

_logger = logging.getLogger(__name__)

CAPABILITY = (8, 0)
"""Compute capability from which on Triton supports GPUs: Ampere and later."""

_has_kernels: dict[torch.device, bool] = {}
_said: set[str] = set()

Way = TypeVar("Way", bound=Hashable)


def has_kernels(device: torch.device) -> bool:
    """Return whether kernels run on a device; one is tried where that is asked first.

    Where they do not, a warning says why, once. While a CUDA graph is captured, or while the GPU's
    memory is full, nothing can be tried: the answer is no unless it is known.
    """
    known = _has_kernels.get(device)
    if known is not None:
        return known
    if device.type != "cuda":
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    try:
        why = _why_not(device)
    except _FullError:  # there may be room later
        return False
    if why is not None:
        warn_once(f"kernels cannot be used ({why}); torch's operations are slower")
    _has_kernels[device] = why is None
    return why is None


class _FullError(Exception):
    """A GPU has no memory left for a trial."""


def _why_not(device: torch.device) -> str | None:
    """Return what keeps kernels from running on a GPU, None where nothing does."""
    if torch.version.hip is not None:
        return "they are made for NVIDIA's GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        least, own = (".".join(map(str, it)) for it in (CAPABILITY, capability))
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {own}, Triton needs {least}"
    try:
        from joma.kernels._trial import doubles_numbers
    except ImportError as error:
        return f"Triton is not installed: {first_line(error)}"
    try:
        with waiting_allowed(device):
            return None if doubles_numbers(device) else "one gave wrong numbers"
    except torch.AcceleratorError:  # of what ran before: the GPU is of no use any more
        raise
    except Exception as error:  # of the compiler, or of what it needs
        if "out of memory" in str(error):  # Triton, which loads kernels, has no error of its own
            raise _FullError from error
        return _said_by(error)


@contextmanager
def waiting_allowed(device: torch.device) -> Iterator[None]:
    """Let the host wait for a device where `torch.cuda.set_sync_debug_mode` forbids that."""
    before = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    if not before:
        yield
        return
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged it before."""
    if message not in _said:
        _said.add(message)
        _logger.warning(message)


class DoesNotFitError(Exception):
    """A kernel cannot be launched on a GPU in any of its ways."""


class Fitting:
    """Launches a kernel in the first of several ways that a GPU has room for, and remembers it.

    What a kernel takes of a GPU its compiler alone knows, and what the compiler does not manage in
    one way it may in another.
    """

    def __init__(self) -> None:
        self._first: dict[Hashable, int] = {}
        self._reasons: dict[Hashable, str] = {}

    def launch(self, kind: Hashable, ways: tuple[Way, ...], work: Callable[[Way], None]) -> None:
        """Launch a kernel.

        Args:
            kind: With the ways, all that decides whether one fits: device, types, constants.
            ways: From the fastest to the one that takes least.
            work: Launches the kernel in a way.

        Raises:
            DoesNotFitError: No way fits.
        """
        key = (kind, ways)
        for place in range(self._first.get(key, 0), len(ways)):
            try:
                work(ways[place])
            except Exception as error:
                if not _does_not_fit(error):
                    raise
                self._reasons[key] = _said_by(error)
            else:
                self._first[key] = place
                return
        self._first[key] = len(ways)
        raise DoesNotFitError(self._reasons[key])


def _does_not_fit(error: Exception) -> bool:
    """Return whether a compiler or Triton found no room; other errors are mistakes of a kernel."""
    if type(error).__module__.split(".")[0] == "triton":
        return type(error).__name__ in ("OutOfResources", "PTXASError")
    return type(error) is RuntimeError and str(error).startswith("PassManager::run failed")


def _said_by(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
