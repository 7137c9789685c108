"""Server-sent events: browsers hear of a change without asking."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator

from joma.errors import JomaError
from joma.server._table import RunTable

HEARTBEAT_SECONDS = 15.0
"""How often a stream without news sends a comment, so that no proxy closes it."""

MOST_STREAMS = 1000
"""Most streams that are open at the same time."""

_RECENT_SECONDS = 60.0
"""A new stream begins with the changes of this time: its page was made a moment before."""


class EventHub:
    """Passes changes on to all open streams.

    A stream holds at most one change for each run, however slow its reader is. Used in one event
    loop.

    Args:
        table: The runs.
    """

    def __init__(self, table: RunTable) -> None:
        self._table = table
        self._start = secrets.token_hex(4)
        self._streams: set[_Stream] = set()
        self._closing = False

    @property
    def count(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    def announce(self, id: str, version: str | None, number: int) -> None:
        """Send a change to all streams.

        Args:
            id: Of the run.
            version: The version that readers now get; None if the run is gone.
            number: Of the change; streams that are opened again continue after it.
        """
        for stream in self._streams:
            stream.put(id, version, number)

    def close(self) -> None:
        """End all streams."""
        self._closing = True
        for stream in self._streams:
            stream.wake.set()

    def open(self, last_id: str | None) -> AsyncIterator[bytes]:
        """Return a stream of events.

        Args:
            last_id: The id of the last event that the reader has, from an earlier stream.
        """
        if len(self._streams) >= MOST_STREAMS:
            raise JomaError(f"{MOST_STREAMS} event streams are open already, which is the most")
        stream = _Stream()
        for run in self._table.runs():
            if self._is_missed(last_id, run.number, run.changed):
                stream.put(run.id, run.version, run.number)
        return self._send(stream)

    def _is_missed(self, last_id: str | None, number: int, changed: float) -> bool:
        recent = time.monotonic() - changed < _RECENT_SECONDS
        if recent or not last_id:  # recent ones may have been announced out of their order
            return recent
        start, _, seen = last_id.partition("-")
        known = start == self._start and seen.isascii() and seen.isdigit() and len(seen) < 20
        return not known or number > int(seen)  # of another server: any run may have changed

    async def _send(self, stream: "_Stream") -> AsyncIterator[bytes]:
        self._streams.add(stream)
        try:
            yield b"retry: 1000\n\n"
            while not self._closing:
                if not stream.waiting:
                    try:
                        await asyncio.wait_for(stream.wake.wait(), HEARTBEAT_SECONDS)
                    except TimeoutError:
                        yield b": still here\n\n"
                        continue
                waiting, stream.waiting = stream.waiting, {}
                stream.wake.clear()
                if waiting and not self._closing:
                    yield b"".join(
                        self._encoded(id, *change)
                        for id, change in sorted(waiting.items(), key=lambda item: item[1][1])
                    )
        finally:
            self._streams.discard(stream)

    def _encoded(self, id: str, version: str | None, number: int) -> bytes:
        data = json.dumps({"run": id, "version": version})
        return f"id: {self._start}-{number}\nevent: change\ndata: {data}\n\n".encode()


class _Stream:
    """What one reader is still to be sent."""

    def __init__(self) -> None:
        self.waiting: dict[str, tuple[str | None, int]] = {}
        self.wake = asyncio.Event()

    def put(self, id: str, version: str | None, number: int) -> None:
        self.waiting[id] = version, number
        self.wake.set()
