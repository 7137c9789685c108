"""Tensors that are copied at once and written while training continues.

On a GPU the training waits for a copy within its memory alone: a thread moves that copy to the
host, on a stream of its own, and writes the file. Where memory is short, and on a CPU, the training
waits for a copy to the host.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from joma.runs import Checkpoints

_logger = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 60.0
"""The most work that a kill costs, in seconds, unless given otherwise."""

_PINNED_BYTES = 1 << 26
_SPARE = 0.25  # of that time, which is left for writing and for a long step or measurement


class _Mover:
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


class BackgroundWriter:
    """Copies tensors at once and writes them on a thread, one set at a time.

    A context manager, which waits for the last set at its end. An error of the thread is raised by
    the next call of `copy` or `finish`, and at the end unless another error is more important.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._movers: dict[torch.device, _Mover] = {}

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what is being written; its error yields to one in the block."""
        if error is None:
            self.finish()
            return
        self._join()
        if self._error is not None:
            _logger.warning(f"what was copied last could not be written: {self._error}")

    @property
    def failed(self) -> bool:
        """Whether something could not be written, which `finish` raises."""
        return self._error is not None

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self._thread is not None and self._thread.is_alive()

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return a copy of tensors as they are now; waits until the copy before is written.

        Copies on a GPU leave a quarter of its memory free; others are on the host.

        Args:
            tensors: Names and tensors; one at a time is asked for, and may be made for it.
        """
        self.finish()
        room: dict[torch.device, int] = {}
        copies = {name: self._copied(tensor.detach(), room) for name, tensor in tensors}
        for device in room:
            if device not in self._movers:
                self._movers[device] = _Mover(device)
            # Of the training's own stream: what it does next, it does after the copies.
            self._movers[device].follow()
        return copies

    def _copied(self, tensor: Tensor, room: dict[torch.device, int]) -> Tensor:
        device = tensor.device
        if tensor.is_cuda:
            if device not in room:
                free, total = torch.cuda.mem_get_info(device)
                spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
                room[device] = free + spare - total // 4
            room[device] -= tensor.nbytes
            if room[device] < 0:
                return tensor.cpu().contiguous()
        return tensor.clone(memory_format=torch.contiguous_format)

    def start(self, copies: dict[str, Tensor], write: Callable[[dict[str, Tensor]], None]) -> None:
        """Call `write` on a thread with copies on the host; those on a GPU are given up."""
        # A daemon: a second Ctrl-C ends the program without waiting for a slow disk.
        self._thread = threading.Thread(
            target=self._work, args=(copies, write), daemon=True, name="writer"
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait for what is being written; raise its error if it had one."""
        self._join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self, copies: dict[str, Tensor], write: Callable[[dict[str, Tensor]], None]) -> None:
        try:
            there: dict[str, Tensor] = {}
            for name in list(copies):
                one = copies.pop(name)
                there[name] = self._movers[one.device].moved(one) if one.is_cuda else one
            write(there)
        except BaseException as error:
            self._error = error


class CheckpointWriter(BackgroundWriter):
    """Writes the checkpoints of a training on a thread, at most one at a time.

    Args:
        checkpoints: Where they go; None on a process that saves nothing itself.
        seconds: The most work that a kill may cost; 0 saves whenever `due` is asked.
    """

    def __init__(
        self, checkpoints: Checkpoints | None, seconds: float = CHECKPOINT_SECONDS
    ) -> None:
        super().__init__()
        self._checkpoints, self._seconds = checkpoints, seconds
        self._taken_at = time.monotonic()
        self._writing = 0.0  # seconds that the last write took

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

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return a copy of tensors as they are now, none on a process that saves nothing."""
        self._taken_at = time.monotonic()
        if self._checkpoints is None:
            for _ in tensors:  # all processes go through them
                pass
            return {}
        return super().copy(tensors)

    def save(self, step: int, copies: dict[str, Tensor], about: Mapping[str, Any]) -> None:
        """Write a checkpoint on a thread.

        Args:
            step: After which the copy was made.
            copies: What `copy` returned last.
            about: What is saved with it.
        """
        self.finish()
        checkpoints, kept = self._checkpoints, dict(about)
        assert checkpoints is not None, "there is something to save"

        def write(tensors: dict[str, Tensor]) -> None:
            start = time.monotonic()
            arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
            checkpoints.save(step, arrays, kept)
            self._writing = time.monotonic() - start

        self.start(copies, write)
