"""Checkpoints that are copied at once and written while training continues.

A copy costs the training what a transfer to the host takes, and no more: on a GPU it is queued on
the training's own stream, into pinned memory, so that it is complete before the next step changes
the weights, and the program does not wait for it. A thread then writes the file.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from joma.runs import Checkpoints

_logger = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 60.0
"""The most work that a kill costs, in seconds, unless given otherwise."""

_SPARE = 0.25  # of that time, which is left for writing and for a long step or measurement


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A copy of tensors on the host.

    Attributes:
        tensors: By name. They may be read once `copied` says so.
        copied: The event of a GPU that the copies are complete at; None where they are complete.
    """

    tensors: dict[str, Tensor]
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self.copied is not None:
            self.copied.synchronize()


class CheckpointWriter:
    """Writes the checkpoints of a training on a thread, at most one at a time.

    A context manager, which waits for the last one at its end. An error of the thread is raised
    by the next call of `check`, `save` or `finish`.

    Args:
        checkpoints: Where they go.
        seconds: The most work that a kill may cost; 0 saves whenever `due` is asked.
    """

    def __init__(self, checkpoints: Checkpoints, seconds: float = CHECKPOINT_SECONDS) -> None:
        self._checkpoints, self._seconds = checkpoints, seconds
        self._pinned: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._taken = time.monotonic()
        self._writing = 0.0  # seconds that the last write took

    def __enter__(self) -> "CheckpointWriter":
        """Begin to count the time that a kill would cost."""
        self._taken = time.monotonic()
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
        if self._seconds == 0:
            return True
        if self.busy:
            return False
        spare = max(_SPARE * self._seconds, 1.25 * self._writing + longest)
        wait = max(self._seconds - spare, self._seconds / 2)
        return time.monotonic() - self._taken >= wait

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

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> Snapshot:
        """Return a copy of tensors as they are now; waits for the checkpoint before.

        Args:
            tensors: Names and tensors; one at a time is asked for, and may be made for it.
        """
        self._join()  # it may still read the pinned memory
        self.check()
        self._taken = time.monotonic()
        copies: dict[str, Tensor] = {}
        device = None
        for name, tensor in tensors:
            copies[name] = self._copied(name, tensor.detach())
            device = tensor.device if tensor.is_cuda else device
        if device is None:
            return Snapshot(copies, None)
        copied = torch.cuda.Event(blocking=True)
        copied.record(torch.cuda.current_stream(device))
        return Snapshot(copies, copied)

    def save(self, step: int, snapshot: Snapshot, about: Mapping[str, Any]) -> None:
        """Write a checkpoint on a thread.

        Args:
            step: After which the copy was made.
            snapshot: What `copy` returned last.
            about: What is saved with it.
        """
        self._join()
        self.check()
        # A daemon: a second Ctrl-C ends the program without waiting for a slow disk.
        self._thread = threading.Thread(
            target=self._write, args=(step, snapshot, dict(about)), daemon=True, name="checkpoint"
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; raise its error if it had one."""
        self._join()
        self.check()

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.clone()
        pinned = self._pinned.get(name)
        if pinned is None or pinned.shape != tensor.shape or pinned.dtype != tensor.dtype:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._pinned[name] = pinned
        return pinned.copy_(tensor, non_blocking=True)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, snapshot: Snapshot, about: dict[str, Any]) -> None:
        start = time.monotonic()
        try:
            snapshot.wait()
            arrays = {name: tensor.numpy() for name, tensor in snapshot.tensors.items()}
            self._checkpoints.save(step, arrays, about)
        except BaseException as error:
            self._error = error
        self._writing = time.monotonic() - start
