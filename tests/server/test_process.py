"""The real program: requests that are too large, slow readers, signals."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from joma.server import Address
from tests.server._client import PATIENCE, Client
from tests.server.conftest import write_run

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def started(root: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    command = [sys.executable, "-m", "joma", "serve", str(root), "--port", "0", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r":(\d+)/(?:\?token=(\S+))?", line)
        assert found is not None, line
        yield process, Client(Address("127.0.0.1", int(found[1]), found[2]))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_signals_end_it_with_open_streams(tmp_path, number, code):
    write_run(tmp_path)
    with started(tmp_path) as (process, client), contextlib.ExitStack() as around:
        for _ in range(50):
            around.enter_context(client.events())
        idle = around.enter_context(socket.create_connection(("127.0.0.1", client.address.port)))
        idle.sendall(b"GET / HTTP/1.1\r\nHo")  # a request that never becomes complete
        start = time.monotonic()
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
        print(f"ended {time.monotonic() - start:.2f} s after the signal")
        assert process.returncode == code
        assert "Traceback" not in out + err


def test_ten_megabytes_are_refused_without_being_kept(tmp_path):
    write_run(tmp_path)
    with started(tmp_path) as (process, client):
        before = _memory(process.pid)
        piece = b"x" * 1_000_000
        start = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n"
        for _ in range(5):
            assert client.send(start, b"X: ", *[piece] * 10)[:12] in (b"HTTP/1.1 400", b"")
            length = b"Content-Length: 10000000\r\n\r\n"
            assert client.send(start + length, *[piece] * 10)[:12] in (b"HTTP/1.1 200", b"")
            assert client.send(b"GET /", *[piece] * 10)[:12] in (b"HTTP/1.1 400", b"")
        assert client.get("/api/runs").status == 200
        assert _memory(process.pid) - before < 20


def test_a_thousand_connections_that_say_nothing_do_no_harm(tmp_path):
    write_run(tmp_path)
    with started(tmp_path) as (_, client), contextlib.ExitStack() as around:
        for _ in range(900):
            raw = socket.create_connection(("127.0.0.1", client.address.port))
            around.enter_context(raw)
            raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
        assert client.get("/api/runs").status == 200


def _memory(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1000
