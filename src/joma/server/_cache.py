"""What readers get, computed once for each version and kept compressed.

Readers who ask for the same thing while it is computed wait for the same result. While a new
version is computed, readers get the version before it, so that a run that is being written slows
nobody down; whoever holds an event stream is told when the new one is there.
"""

import asyncio
import contextlib
import gzip
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MOST_BYTES = 64 << 20
"""Most bytes of all compressed answers together."""

STALE_SECONDS = 30.0
"""How long the version before is given to readers while the next one is computed; less than the
time of which a new event stream repeats the changes."""

UNUSED_SECONDS = 600.0
"""What nobody asked for in this time is forgotten, and no longer computed with every change."""

_LEVEL = 5

_WORKERS = 2

Key = tuple[str, ...]
_Body = tuple[int, bytes]
_Job = tuple[Callable[[], bytes], "asyncio.Future[_Body]"]


@dataclass(eq=False)
class Answer:
    """An answer that is ready to be sent.

    Attributes:
        version: Of what it shows, as it was when computing began.
        compressed: The body, compressed by gzip.
        size: Bytes of the body before.
        seconds: What computing took.
        finished: When it was ready, in seconds of `time.monotonic`.
        asked: When a reader asked for it last.
        outdated: When a newer version was noticed, None as long as there is none.
    """

    version: str
    compressed: bytes
    size: int
    seconds: float
    finished: float
    asked: float
    outdated: float | None = None

    def body(self) -> bytes:
        """Return the body as it was before it was compressed."""
        return gzip.decompress(self.compressed)


class AnswerCache:
    """Answers by key, the least recently used removed first; used in one event loop.

    Args:
        most_bytes: Most bytes of all answers together; the newest is kept in any case.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._answers: OrderedDict[Key, Answer] = OrderedDict()
        self._computing: dict[Key, asyncio.Task[Answer]] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        for number in range(_WORKERS):
            name = f"joma-answers-{number}"
            threading.Thread(target=_work, args=[self._jobs], name=name, daemon=True).start()

    def close(self) -> None:
        """End the worker threads, without waiting for what they compute."""
        for _ in range(_WORKERS):
            self._jobs.put(None)

    async def get(
        self,
        key: Key,
        version: Callable[[], str],
        make: Callable[[], bytes],
        *,
        or_before: bool = False,
    ) -> Answer:
        """Return the answer for a key, computed if needed.

        Args:
            key: What is asked for.
            version: Returns the version that there is at present.
            make: Computes the body, in a worker thread.
            or_before: Whether the version before will do for a moment while the present one is
                computed; for what is announced when it is ready.
        """
        while True:
            answer, now = self._answers.get(key), time.monotonic()
            if answer is not None:
                answer.asked = now
                self._answers.move_to_end(key)
                if answer.version == version():
                    return answer
                answer.outdated = answer.outdated or now
            begun = key in self._computing
            task = self._start(key, version, make)
            if or_before and answer is not None and now - (answer.outdated or now) < STALE_SECONDS:
                return answer
            answer = await asyncio.shield(task)
            if not begun:  # what had begun before this request may lack the last change
                return answer

    async def renew(
        self, key: Key, version: Callable[[], str], make: Callable[[], bytes]
    ) -> Answer:
        """Return the answer of the present version, computed unless it is there.

        Computing takes at most half of the time, however fast versions follow each other.
        """
        answer = self._answers.get(key)
        if answer is not None and answer.version == version():
            return answer
        if answer is not None and key not in self._computing:
            pause = answer.finished + answer.seconds - time.monotonic()
            if pause > 0:
                await asyncio.sleep(pause)
        return await asyncio.shield(self._start(key, version, make))

    def is_wanted(self, key: Key) -> bool:
        """Return whether readers have this answer or wait for it."""
        answer = self._answers.get(key)
        if answer is None:
            return key in self._computing
        return time.monotonic() - answer.asked < UNUSED_SECONDS

    def outdate(self, word: str) -> None:
        """Note that there is a newer version of every answer with this word in its key."""
        now = time.monotonic()
        for key, answer in self._answers.items():
            if word in key and answer.outdated is None:
                answer.outdated = now

    def forget(self, word: str) -> None:
        """Remove every answer with this word in its key."""
        for key in [key for key in self._answers if word in key]:
            del self._answers[key]

    @property
    def size(self) -> int:
        """Bytes of all answers together."""
        return sum(len(answer.compressed) for answer in self._answers.values())

    def _start(
        self, key: Key, version: Callable[[], str], make: Callable[[], bytes]
    ) -> "asyncio.Task[Answer]":
        task = self._computing.get(key)
        if task is None:
            task = self._computing[key] = asyncio.create_task(self._compute(key, version, make))
            task.add_done_callback(_retrieve)
        return task

    async def _compute(
        self, key: Key, version: Callable[[], str], make: Callable[[], bytes]
    ) -> Answer:
        try:
            before, started = self._answers.get(key), time.monotonic()
            label = version()  # before reading: what changes meanwhile is of the next version
            result: asyncio.Future[_Body] = asyncio.get_running_loop().create_future()
            self._jobs.put((make, result))
            size, compressed = await result
            now = time.monotonic()
            asked = before.asked if before is not None else now
            answer = Answer(label, compressed, size, now - started, now, asked)
            self._answers[key] = answer
            self._answers.move_to_end(key)
            self._shrink(now)
            return answer
        finally:
            self._computing.pop(key, None)

    def _shrink(self, now: float) -> None:
        size = self.size
        for key, answer in list(self._answers.items())[:-1]:
            if size > self._most_bytes or now - answer.asked > UNUSED_SECONDS:
                size -= len(answer.compressed)
                del self._answers[key]


def _work(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    """Compute in a thread that does not keep the program from ending, as those of pools do."""
    while (job := jobs.get()) is not None:
        make, result = job
        body, error = None, None
        try:
            whole = make()
            body = len(whole), gzip.compress(whole, _LEVEL, mtime=0)
            del whole
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            result.get_loop().call_soon_threadsafe(_settle, result, body, error)
        del job, make, result, body, error  # nothing is kept while waiting for the next


def _settle(result: "asyncio.Future[_Body]", body: _Body | None, error: Exception | None) -> None:
    if result.done():  # nobody waits for it any more
        return
    if error is not None:
        result.set_exception(error)
    elif body is not None:
        result.set_result(body)


def _retrieve(task: "asyncio.Task[Answer]") -> None:
    """Take note of an error that nobody waits for, so that asyncio does not complain of it."""
    if not task.cancelled():
        task.exception()
