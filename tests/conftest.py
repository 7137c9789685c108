"""What every test relies on: threads, signals, and where property tests take their examples from.

Two test processes share two cores, so each computes with one thread.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

# `make test` takes the same examples each time; `make slow` draws new ones. Neither judges by the
# clock, which on a busy machine says nothing of the code.
_TIMELESS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, database=None, **_TIMELESS)
settings.register_profile("random", print_blob=True, database=None, **_TIMELESS)
settings.load_profile("fixed")


@pytest.fixture(scope="session", autouse=True)
def _answered_signals() -> Iterator[None]:
    """Give SIGINT and SIGTERM their default handlers, also where the tests were started without.

    A shell starts what it puts in the background with SIGINT ignored, and an ignored signal stays
    ignored in every process that a test starts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in signals.items()}
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    yield
    for number, handler in before.items():
        if handler is not None:  # None: whoever set it was not Python
            signal.signal(number, handler)


@pytest.fixture
def pictures() -> None:
    """Let monitors draw the picture of a run when they close."""


@pytest.fixture(autouse=True)
def _no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the pictures of monitored runs, a second each, where a test does not ask."""
    record = sys.modules.get("joma.train.monitor._record")
    if record is not None and "pictures" not in request.fixturenames:
        monkeypatch.setattr(record.Recorder, "draw", lambda self: None)
