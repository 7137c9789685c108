"""One thread that watches the run folders for all readers."""

import logging
import threading
import time
from collections.abc import Callable

from joma.server._table import RunTable

_logger = logging.getLogger(__name__)

REFRESH_SECONDS = 0.5
"""How often runs that are being written are checked."""

DISCOVER_SECONDS = 2.0
"""How often the folders are searched for new runs; less often where searching takes long."""

_SHARE = 0.1
"""Most of the time that searching may take."""


class Watcher:
    """Keeps a table of runs up to date, and says which of them changed.

    Args:
        table: The runs.
        on_change: Called in the watcher's thread with the ids of runs that changed.
    """

    def __init__(self, table: RunTable, on_change: Callable[[list[str]], None]) -> None:
        self._table = table
        self._on_change = on_change
        self._stopping = threading.Event()
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._run, name="joma-watcher", daemon=True)

    def start(self, wait: float) -> None:
        """Start to watch; wait until the folders were searched once, at most so many seconds."""
        self._thread.start()
        self._first.wait(wait)

    def stop(self) -> None:
        """End the thread; a search that is under way is not waited for."""
        self._stopping.set()
        self._thread.join(timeout=0.5)

    def _run(self) -> None:
        next_search = 0.0
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                searching = started >= next_search
                changed = self._table.discover() if searching else self._table.refresh()
                if changed:
                    self._on_change(changed)
            except Exception:  # a defect must not end the watching of all other runs
                _logger.exception("watching the run folders failed; trying again")
                searching = True
            took = time.monotonic() - started
            if searching:
                next_search = started + max(DISCOVER_SECONDS, took / _SHARE)
            self._first.set()
            self._stopping.wait(max(REFRESH_SECONDS - took, 0.05))
