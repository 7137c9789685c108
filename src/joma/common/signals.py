"""SIGTERM as an exception, so that a program which is asked to end can first save its work.

Every other room may import this module; it imports none.
"""

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
        raised: Whether the signal came, or was delivered after it had been blocked.
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
