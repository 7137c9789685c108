"""Ctrl-C and SIGTERM between steps: a training that is asked to stop first saves a checkpoint."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from joma.common.signals import RaiseTerminated, TerminatedError, in_main_thread


class StopRequest:
    """Whether a training was asked to stop, and by which signal.

    Attributes:
        asked: Whether Ctrl-C or SIGTERM came.
        terminated: Whether it was SIGTERM.
    """

    def __init__(self) -> None:
        self.asked = False
        self.terminated = False

    def error(self) -> KeyboardInterrupt:
        """Return what to raise once the training is saved."""
        return TerminatedError() if self.terminated else KeyboardInterrupt()

    def on_sigint(self, number: int, frame: Any) -> None:
        """Note Ctrl-C; the second one interrupts at once, for a user who does not want to wait."""
        if self.asked:
            signal.default_int_handler(number, frame)
        self.asked = True

    def on_sigterm(self, number: int, frame: Any) -> None:
        """Note SIGTERM; schedulers may send several, and SIGKILL to those that take too long."""
        self.asked = self.terminated = True


@contextlib.contextmanager
def interrupts_held() -> Iterator[StopRequest]:
    """Hold Ctrl-C and SIGTERM for the block; yield what says whether one came.

    A signal that the program handles in its own way, or ignores, is left to it. Only the main
    thread can hold signals. The handlers that were there come back at the end.
    """
    stop = StopRequest()
    held: dict[signal.Signals, Any] = {}
    if in_main_thread():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            held[signal.SIGINT] = stop.on_sigint
        usual = signal.getsignal(signal.SIGTERM)
        if usual is signal.SIG_DFL or isinstance(usual, RaiseTerminated):
            held[signal.SIGTERM] = stop.on_sigterm
    before = {number: signal.signal(number, handler) for number, handler in held.items()}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            if isinstance(handler, RaiseTerminated):
                handler.raised |= stop.terminated
            signal.signal(number, handler)
