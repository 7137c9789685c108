"""Ctrl-C between steps: a training that is asked to stop first saves where it is."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], bool]]:
    """Holds the first Ctrl-C for the block; yields what says whether it came.

    A second one interrupts at once, for somebody who does not want to wait. Where Ctrl-C is not
    Python's own to answer, or this is not the main thread, nothing is held.
    """
    asked = threading.Event()
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield asked.is_set
        return

    def hold(number: int, frame: Any) -> None:
        if asked.is_set():
            signal.default_int_handler(number, frame)
        asked.set()

    signal.signal(signal.SIGINT, hold)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
