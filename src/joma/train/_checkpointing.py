"""Tensors that are copied to the host at once and written by a thread while training continues."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from joma.runs import Checkpoints

_logger = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 60.0
"""The most work that a kill costs, in seconds, unless given otherwise."""

_SPARE = 0.25  # of that time, which is left for writing and for a long step or measurement


def host_copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies of tensors on the host, by name; one tensor at a time is asked for."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors
    }


class BackgroundWriter:
    """Writes files on a thread, one set at a time.

    A context manager, which waits for the last set at its end. An error of the thread is raised by
    the next call of `start` or `finish`, and at the end unless another error is more important.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Wait for what is being written; its error yields to one in the block."""
        try:
            self.finish()
        except BaseException as own:
            if error is None:
                raise
            _logger.warning(f"what was copied last could not be written: {own}")

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: Callable[[], None]) -> None:
        """Call a function on the thread, once what was started before has ended."""
        self.finish()

        def work() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error

        # A daemon: a second Ctrl-C ends the program without waiting for a slow disk.
        self._thread = threading.Thread(target=work, daemon=True, name="writer")
        self._thread.start()

    def finish(self) -> None:
        """Wait for what is being written; raise its error if it had one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error


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
        self._taken_at = self._asked_at = time.monotonic()
        self._longest = 0.0  # seconds between two questions, the last ones above all
        self._writing = 0.0  # seconds that the last write took

    def due(self) -> bool:
        """Return whether a checkpoint should be saved now; the training asks again and again."""
        now = time.monotonic()
        self._longest = max(0.9 * self._longest, now - self._asked_at)
        self._asked_at = now
        if self._checkpoints is None or (self.busy and self._seconds):
            return False
        spare = max(_SPARE * self._seconds, 1.25 * self._writing + self._longest)
        return now - self._taken_at >= max(self._seconds - spare, self._seconds / 2)

    def save(self, step: int, copies: dict[str, Tensor], about: Mapping[str, Any]) -> None:
        """Write a checkpoint on the thread.

        Args:
            step: The step after which the copies were made.
            copies: What `host_copies` returned.
            about: What is saved with them.
        """
        checkpoints = self._checkpoints
        assert checkpoints is not None, "this process saves"
        self._taken_at = time.monotonic()

        def write() -> None:
            arrays = {name: tensor.numpy() for name, tensor in copies.items()}
            start = time.monotonic()
            checkpoints.save(step, arrays, about)
            self._writing = time.monotonic() - start

        self.start(write)
