"""Server-sent events: browsers hear of a change without asking."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from joma.errors import JomaError

HEARTBEAT_SECONDS = 15.0
"""How often a stream without news sends a comment, so that no proxy closes it."""

MOST_STREAMS = 1000
"""Most streams that are open at the same time."""

_MOST_REMEMBERED = 20_000
_RECENT_SECONDS = 60.0
"""A new stream begins with the changes of this time: its page was made a moment before."""


class EventHub:
    """Passes changes on to all open streams.

    A stream holds at most one change for each run, however slow its reader is. Used in one event
    loop.
    """

    def __init__(self) -> None:
        self._start = secrets.token_hex(4)
        self._streams: set[_Stream] = set()
        self._announced: dict[str, _Change] = {}
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
        change = _Change(version, number, time.monotonic())
        self._announced.pop(id, None)
        self._announced[id] = change  # at the end: the oldest are forgotten first
        if len(self._announced) > _MOST_REMEMBERED:
            del self._announced[next(iter(self._announced))]
        for stream in self._streams:
            stream.put(id, change)

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
        return self._send(last_id)

    def _is_missed(self, last_id: str | None, change: "_Change") -> bool:
        recent = time.monotonic() - change.time < _RECENT_SECONDS
        if recent or not last_id:  # recent ones may have been announced out of their order
            return recent
        start, _, seen = last_id.partition("-")
        known = start == self._start and seen.isascii() and seen.isdigit() and len(seen) < 20
        return not known or change.number > int(seen)  # of another server: any run may have changed

    async def _send(self, last_id: str | None) -> AsyncIterator[bytes]:
        stream = _Stream()
        self._streams.add(stream)
        for id, change in self._announced.items():
            if self._is_missed(last_id, change):
                stream.put(id, change)
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
                        self._encoded(id, change)
                        for id, change in sorted(waiting.items(), key=lambda item: item[1].number)
                    )
        finally:
            self._streams.discard(stream)

    def _encoded(self, id: str, change: "_Change") -> bytes:
        data = json.dumps({"run": id, "version": change.version})
        return f"id: {self._start}-{change.number}\nevent: change\ndata: {data}\n\n".encode()


class _Change(NamedTuple):
    """A change that was announced, and when, in seconds of `time.monotonic`."""

    version: str | None
    number: int
    time: float


class _Stream:
    """What one reader is still to be sent."""

    def __init__(self) -> None:
        self.waiting: dict[str, _Change] = {}
        self.wake = asyncio.Event()

    def put(self, id: str, change: _Change) -> None:
        """Add a change, in place of an earlier one of the same run."""
        self.waiting[id] = change
        self.wake.set()
