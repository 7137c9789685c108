"""Answers are computed once, shared, and forgotten in time."""

import asyncio
import os
import threading
import time
from collections.abc import Callable

import pytest

from joma.server import _cache
from joma.server._cache import AnswerCache


def noise(size: int) -> Callable[[], bytes]:
    return lambda: os.urandom(size)  # does not become smaller when it is compressed


def test_readers_share_one_computation():
    count = []

    def make() -> bytes:
        count.append(1)
        time.sleep(0.05)
        return b"body"

    async def ask() -> list[bytes]:
        cache = AnswerCache()
        answers = await asyncio.gather(*(cache.get(("a",), lambda: "1", make) for _ in range(50)))
        cache.close()
        return [answer.body() for answer in answers]

    assert asyncio.run(ask()) == [b"body"] * 50
    assert len(count) <= 2  # the first, and one for those who came while it was computed


def test_the_version_before_serves_while_the_next_is_computed():
    async def ask() -> None:
        cache, version, release = AnswerCache(), "1", threading.Event()
        first = await cache.get(("a",), lambda: version, lambda: b"one")
        version = "2"
        cache.outdate("a")

        def slow() -> bytes:
            release.wait(5)
            return b"two"

        again = await cache.get(("a",), lambda: version, slow, or_before=True)
        assert again is first
        release.set()
        second = await cache.get(("a",), lambda: version, slow)
        assert (second.version, second.body()) == ("2", b"two")
        cache.close()

    asyncio.run(ask())


def test_what_is_long_outdated_does_not_serve(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_cache, "STALE_SECONDS", 0.0)

    async def ask() -> None:
        cache, version = AnswerCache(), "1"
        await cache.get(("a",), lambda: version, lambda: b"one")
        version = "2"
        answer = await cache.get(("a",), lambda: version, lambda: b"two", or_before=True)
        assert answer.body() == b"two"
        cache.close()

    asyncio.run(ask())


def test_the_least_recently_used_are_removed():
    async def ask() -> None:
        cache = AnswerCache(most_bytes=10_000)
        for name in "abc":
            await cache.get((name,), lambda: "1", noise(3000))
        await cache.get(("a",), lambda: "1", noise(3000))
        await cache.get(("d",), lambda: "1", noise(3000))
        assert cache.size <= 10_000
        assert [cache.is_wanted((name,)) for name in "abcd"] == [True, False, True, True]
        await cache.get(("large",), lambda: "1", noise(50_000))
        assert 50_000 <= cache.size < 51_000
        cache.forget("large")
        assert cache.size == 0
        cache.close()

    asyncio.run(ask())


def test_an_error_is_raised_to_every_reader_and_tried_again():
    def fail() -> bytes:
        raise OSError("no")

    async def ask() -> None:
        cache = AnswerCache()
        asked = [cache.get(("a",), lambda: "1", fail) for _ in range(3)]
        assert [type(it) for it in await asyncio.gather(*asked, return_exceptions=True)] == [
            OSError
        ] * 3
        assert (await cache.get(("a",), lambda: "1", lambda: b"well")).body() == b"well"
        cache.close()

    asyncio.run(ask())


def test_a_reader_who_leaves_does_not_stop_the_computation():
    async def ask() -> None:
        cache = AnswerCache()

        def slow() -> bytes:
            time.sleep(0.1)
            return b"body"

        leaving = asyncio.create_task(cache.get(("a",), lambda: "1", slow))
        await asyncio.sleep(0.02)
        staying = asyncio.create_task(cache.get(("a",), lambda: "1", slow))
        await asyncio.sleep(0.02)
        leaving.cancel()
        assert (await staying).body() == b"body"
        cache.close()

    asyncio.run(ask())
