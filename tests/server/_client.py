"""A small client: requests that no library would send, and streams of events."""

import gzip
import json
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

from joma.server import Address

PATIENCE = 120
"""Seconds after which something that does not come fails a test: a busy machine needs many."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        body = gzip.decompress(self.body) if "content-encoding" in self.headers else self.body
        return body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True)
class Client:
    """Sends requests to a server of the tests."""

    address: Address

    def get(
        self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> Answer:
        """Return the answer to one request; the path is sent as it is."""
        connection = HTTPConnection("127.0.0.1", self.address.port, timeout=PATIENCE)
        try:
            given = headers or {}
            connection.putrequest(method, path, "Host" in given, "Accept-Encoding" in given)
            for name, value in (headers or {}).items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, named, answer.read())
        finally:
            connection.close()

    def id_of(self, name: str) -> str:
        """Return the id of the run in the folder of this name."""
        runs = self.get("/api/runs").json["runs"]
        return next(run["id"] for run in runs if run["path"].endswith(f"/{name}"))

    def send(self, *pieces: bytes) -> bytes:
        """Return what comes back for raw bytes, until the server closes; b"" if it says nothing."""
        with socket.create_connection(("127.0.0.1", self.address.port), timeout=PATIENCE) as raw:
            received = b""
            try:
                for piece in pieces:
                    raw.sendall(piece)
                raw.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # refused before all was sent
            try:
                while data := raw.recv(65536):
                    received += data
            except ConnectionError:
                pass
            return received

    def events(self, headers: Mapping[str, str] | None = None) -> "Events":
        return Events(self.address.port, headers or {})


class Events:
    """An open stream of events."""

    def __init__(self, port: int, headers: Mapping[str, str]) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        lines = ["GET /api/events HTTP/1.1", f"Host: 127.0.0.1:{port}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())
        self._file = self._socket.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        while self._file.readline().strip():
            pass

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def changes(self) -> Iterator[dict[str, Any]]:
        """Yield the data of each change, with the event's id under "event".

        Raises:
            TimeoutError: Nothing but heartbeats came for `PATIENCE` seconds.
        """
        last, until = "", time.monotonic() + PATIENCE
        for line in self._file:
            if time.monotonic() > until:
                raise TimeoutError("no change came")
            if line.startswith(b"id: "):
                last = line[4:].decode().strip()
            elif line.startswith(b"data: "):
                yield {**json.loads(line[6:]), "event": last}
                until = time.monotonic() + PATIENCE

    def wait_for(self, run: str) -> tuple[dict[str, Any], float]:
        """Return the next change of a run, and how long it took to come."""
        started = time.monotonic()
        for change in self.changes():
            if change["run"] == run:
                return change, time.monotonic() - started
        raise AssertionError("the stream ended")
