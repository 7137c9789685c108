"""Checkpoints that are copied at once and written while training continues.

On a GPU the training waits for a copy within its memory alone: a thread moves that copy to the
host, on a stream of its own, and writes the file. Where memory is short, and on a CPU, the training
waits for a copy to the host.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from joma.runs import Checkpoints, GivenUpError

_logger = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 60.0
"""The most work that a kill costs, in seconds, unless given otherwise."""

_PINNED_BYTES = 1 << 26
_SPARE = 0.25  # of that time, which is left for writing and for a long step or measurement


class Mover:
    """Moves tensors from a GPU to the host on a stream of its own, through little pinned memory.

    Pinning all of a large training's state would take seconds, during which the GPU waits. Made by
    the thread that trains: a CUDA graph that is being captured forbids allocations to all others.

    Args:
        device: The GPU to move from.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            # Of high priority, since torch hands out streams of the other kind to trainings too.
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._pinned = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        self._device = device

    def follow(self) -> None:
        """Wait, on its stream, for the work of the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor of the GPU on the host, once it is there."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        source, target = (it.view(-1).view(torch.uint8) for it in (tensor, host))
        for start in range(0, source.numel(), _PINNED_BYTES):
            part = source[start : start + _PINNED_BYTES]
            pinned = self._pinned[: part.numel()]
            with torch.cuda.stream(self._stream):
                pinned.copy_(part, non_blocking=True)
            self._stream.synchronize()
            target[start : start + _PINNED_BYTES].copy_(pinned)
        return host


class CheckpointWriter:
    """Writes the checkpoints of a training on a thread, at most one at a time.

    A context manager, which waits for the last one at its end. An error of the thread is raised
    by the next call of `check`, `save`, `finish` or `end`.

    Args:
        checkpoints: Where they go; None on a process that saves nothing itself.
        seconds: The most work that a kill may cost; 0 saves whenever `due` is asked.
    """

    def __init__(
        self, checkpoints: Checkpoints | None, seconds: float = CHECKPOINT_SECONDS
    ) -> None:
        self._checkpoints, self._seconds = checkpoints, seconds
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._taken_at = self._safe_at = time.monotonic()
        self._given_up = threading.Event()
        self._bytes_on: dict[torch.device, int] = {}
        self._movers: dict[torch.device, Mover] = {}
        self._writing = 0.0  # seconds that the last write took

    def __enter__(self) -> "CheckpointWriter":
        """Begin to count the time that a kill would cost."""
        self._taken_at = self._safe_at = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the checkpoint that is being written; its error yields to one in the block."""
        if error is None:
            self.finish()
            return
        self._join()
        if self._error is not None:
            _logger.warning(f"the last checkpoint could not be written: {self._error}")

    def due(self, longest: float = 0.0) -> bool:
        """Return whether a checkpoint should be saved now.

        Args:
            longest: Seconds that the training may take until it asks again.
        """
        if self._checkpoints is None or (self.busy and self._seconds):
            return False
        spare = max(_SPARE * self._seconds, 1.25 * self._writing + longest)
        wait = max(self._seconds - spare, self._seconds / 2)
        return self._seconds == 0 or time.monotonic() - self._taken_at >= wait

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether a checkpoint could not be written, which `check` raises."""
        return self._error is not None

    def check(self) -> None:
        """Raise the error of the thread, if it had one."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return a copy of tensors as they are now; waits for the checkpoint before.

        Copies on a GPU leave a quarter of its memory free; others are on the host.

        Args:
            tensors: Names and tensors; one at a time is asked for, and may be made for it.
        """
        self.finish()
        self._taken_at = time.monotonic()
        before, self._bytes_on = self._bytes_on, {}  # torch keeps the memory of the last copies
        room: dict[torch.device, int] = {}

        def copied(tensor: Tensor) -> Tensor:
            device = tensor.device
            if tensor.is_cuda and device not in room:
                free, total = torch.cuda.mem_get_info(device)
                room[device] = before.get(device, 0) + free - total // 4
                self._bytes_on[device] = 0
            if tensor.is_cuda and self._bytes_on[device] + tensor.nbytes <= room[device]:
                self._bytes_on[device] += tensor.nbytes
            elif device.type != "cpu":
                return tensor.cpu().contiguous()
            return tensor.clone(memory_format=torch.contiguous_format)

        copies: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if self._checkpoints is not None:
                copies[name] = copied(tensor.detach())
        for device in self._bytes_on:
            if device not in self._movers:
                self._movers[device] = Mover(device)
            # Of the training's own stream: what it does next, it does after the copies.
            self._movers[device].follow()
        return copies

    def save(self, step: int, copies: dict[str, Tensor], about: Mapping[str, Any]) -> None:
        """Write a checkpoint on a thread.

        Args:
            step: After which the copy was made.
            copies: What `copy` returned last; those on a GPU are given up one by one.
            about: What is saved with it.
        """
        self.finish()
        # A daemon: a second Ctrl-C ends the program without waiting for a slow disk.
        self._thread = threading.Thread(
            target=self._write,
            args=(step, copies, dict(about), self._taken_at),
            daemon=True,
            name="checkpoint",
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; raise its error if it had one."""
        self._join()
        self.check()

    def end(self) -> None:
        """Give up the checkpoint that is being written, of a training that has ended.

        If a kill would cost too much before it is known that the training has ended, wait for it.
        """
        if time.monotonic() - self._safe_at <= self._seconds:
            self._given_up.set()
        self.finish()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(
        self, step: int, copies: dict[str, Tensor], about: dict[str, Any], taken_at: float
    ) -> None:
        start = time.monotonic()

        def wanted() -> bool:
            return not self._given_up.is_set()

        assert self._checkpoints is not None, "there is something to save"
        try:
            arrays: dict[str, Any] = {}
            for name in list(copies):
                tensor = copies.pop(name)
                if not wanted():
                    raise GivenUpError
                moved = self._movers[tensor.device].moved(tensor) if tensor.is_cuda else tensor
                arrays[name] = moved.numpy()
            self._checkpoints.save(step, arrays, about, wanted=wanted)
            self._safe_at = taken_at
        except GivenUpError:
            return
        except BaseException as error:
            self._error = error
        self._writing = time.monotonic() - start
