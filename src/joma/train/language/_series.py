"""Models of a series that are copied at once and written while training continues."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from joma.train._checkpointing import Mover

_logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 32
"""Bytes of models that wait to be written; beyond it the training waits for them."""

_Write = Callable[[int, dict[str, Tensor]], Any]


class SeriesWriter:
    """Writes models on a thread, in the order they are given.

    On a GPU the training waits for a copy within its memory alone, which leaves a quarter of it
    free; otherwise for a copy to the host. An error of the thread is raised by the next call of
    `add` or `finish`; models after it are not written.

    Args:
        write: Writes the model of a step, given its tensors on the host.
    """

    def __init__(self, write: _Write) -> None:
        self._write = write
        self._waiting: deque[tuple[int, dict[str, Tensor]]] = deque()
        self._writing = False
        self._error: BaseException | None = None
        self._movers: dict[torch.device, Mover] = {}
        self._changed = threading.Condition()
        self._bytes = 0

    def add(self, step: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a model as it is now, and write it as soon as those before are written.

        Args:
            step: After which it is copied.
            weights: Names and tensors; one at a time is asked for, and may be made for it.
        """
        self.check()
        copies: dict[str, Tensor] = {}
        room: dict[torch.device, int] = {}
        for name, tensor in weights:
            copies[name] = self._copied(tensor.detach(), room)
        for device in room:
            if device not in self._movers:
                self._movers[device] = Mover(device)
            self._movers[device].follow()
        size = sum(one.nbytes for one in copies.values())
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes or self._bytes + size <= MOST_BYTES)
            self._bytes += size
            self._waiting.append((step, copies))
            if not self._writing:
                self._writing = True
                # A daemon: a second Ctrl-C ends the program without waiting for a slow disk.
                threading.Thread(target=self._work, daemon=True, name="series").start()

    def check(self) -> None:
        """Raise the error of the thread, if it had one."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self) -> None:
        """Wait until all models are written; raise the error of the thread if it had one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)
        self.check()

    def close(self) -> None:
        """Wait until all models are written, after an error that is more important than theirs."""
        try:
            self.finish()
        except Exception as error:
            _logger.warning(f"the last model of the series could not be written: {error}")

    def _copied(self, tensor: Tensor, room: dict[torch.device, int]) -> Tensor:
        device = tensor.device
        if not tensor.is_cuda:
            return tensor.clone(memory_format=torch.contiguous_format)
        if device not in room:
            free, total = torch.cuda.mem_get_info(device)
            spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            room[device] = free + spare - total // 4
        room[device] -= tensor.nbytes
        if room[device] < 0:
            return tensor.cpu().contiguous()
        return tensor.clone(memory_format=torch.contiguous_format)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._writing = False
                    self._changed.notify_all()
                    return
                step, copies = self._waiting.popleft()
            size = sum(one.nbytes for one in copies.values())
            try:
                if self._error is None:
                    self._write(step, self._on_host(copies))
            except BaseException as error:
                self._error = error
            copies.clear()
            with self._changed:
                self._bytes -= size
                self._changed.notify_all()

    def _on_host(self, copies: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors on the host; those on a GPU are given up one by one."""
        there: dict[str, Tensor] = {}
        for name in list(copies):
            tensor = copies.pop(name)
            there[name] = self._movers[tensor.device].moved(tensor) if tensor.is_cuda else tensor
        return there
