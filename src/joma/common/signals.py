"""Ctrl-C and SIGTERM as exceptions or deferred, so that a program can save its work first."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

EXIT_SIGINT = 130
EXIT_SIGTERM = 143
"""What a shell reports of a program that the signal ended."""


class TerminatedError(KeyboardInterrupt):
    """The process was sent SIGTERM, as by a scheduler; handled wherever Ctrl-C is."""


def exit_code(error: KeyboardInterrupt) -> int:
    """Return the code a program exits with after Ctrl-C or SIGTERM."""
    return EXIT_SIGTERM if isinstance(error, TerminatedError) else EXIT_SIGINT


class RaiseTerminated:
    """A handler of SIGTERM that raises TerminatedError once; later signals are ignored.

    Schedulers and wrappers may send several, which must not disturb what is being saved.

    Attributes:
        raised: Whether it came, here or where the signal was deferred.
    """

    def __init__(self) -> None:
        self.raised = False

    def __call__(self, number: int, frame: Any) -> None:
        """Handle the signal."""
        if not self.raised:
            self.raised = True
            raise TerminatedError


@contextlib.contextmanager
def raising_on_sigterm() -> Iterator[None]:
    """Raise TerminatedError where SIGTERM comes during the block.

    Where the program handles or ignores SIGTERM, or this is not the main thread, nothing changes.
    """
    if not in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, RaiseTerminated())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def in_main_thread() -> bool:
    """Return whether this is the thread that may set signal handlers."""
    return threading.current_thread() is threading.main_thread()


class StopRequest:
    """Whether a program was asked to stop, and by which signal.

    Attributes:
        asked: Whether Ctrl-C or SIGTERM came.
        terminated: Whether it was SIGTERM.
    """

    def __init__(self) -> None:
        self.asked = False
        self.terminated = False

    def error(self) -> KeyboardInterrupt:
        """Return what to raise once the work is saved."""
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
def deferring_signals() -> Iterator[StopRequest]:
    """Note Ctrl-C and SIGTERM during the block instead of raising; yield the note.

    A signal that the program handles in its own way, or ignores, is left to it. Only the main
    thread can defer signals. The earlier handlers come back at the end.
    """
    stop = StopRequest()
    deferred: dict[signal.Signals, Any] = {}
    if in_main_thread():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            deferred[signal.SIGINT] = stop.on_sigint
        usual = signal.getsignal(signal.SIGTERM)
        if usual is signal.SIG_DFL or isinstance(usual, RaiseTerminated):
            deferred[signal.SIGTERM] = stop.on_sigterm
    before = {number: signal.signal(number, handler) for number, handler in deferred.items()}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            if isinstance(handler, RaiseTerminated):
                handler.raised |= stop.terminated
            signal.signal(number, handler)
