"""Run the application on an address: choose the port, print where it is, end on Ctrl-C."""

import asyncio
import errno
import ipaddress
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from joma.errors import JomaError
from joma.server._application import application, close_streams

DEFAULT_PORT = 8765
_PORTS_TRIED = 20
_LARGEST_HEAD = 1 << 15
_SECONDS_FOR_A_REQUEST = 20.0
_MOST_CONNECTIONS = 2000
_SWITCH_SECONDS = 0.001
"""How long Python lets a thread that computes an answer keep the thread that sends waiting."""


@dataclass(frozen=True)
class Address:
    """Where a server can be reached.

    Attributes:
        host: The address it is bound to.
        port: The port.
        token: What readers must show, None where they need not.
    """

    host: str
    port: int
    token: str | None

    @property
    def url(self) -> str:
        """The address to open in a browser, with the token where there is one."""
        host = self.host
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        elif ":" in host:
            host = f"[{host}]"
        query = f"?token={self.token}" if self.token else ""
        return f"http://{host}:{self.port}/{query}"


class RunServer:
    """A server of run folders that is bound to its address; `run` serves until a signal.

    Args:
        runs: A run folder, a folder of runs, or several of them.
        host: The address to bind to. Anywhere but on this machine's loopback, a token is asked for.
        port: The port; otherwise 8765, or the next one that is free. 0 takes any free one.
        allowed_hosts: Names under which readers may reach the server, in addition to the usual.
        ask_token: Whether a token is asked for on the loopback too.
        on_start: Called with the address once the server listens.

    Attributes:
        address: Where it can be reached.

    Raises:
        JomaError: A folder does not exist, or the address cannot be used.
    """

    def __init__(
        self,
        runs: Path | str | Sequence[Path | str],
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        allowed_hosts: Collection[str] = (),
        ask_token: bool = False,
        on_start: Callable[[Address], None] = lambda address: None,
    ) -> None:
        local = _is_loopback(host)
        token = secrets.token_urlsafe(24) if ask_token or not local else None
        names = {*allowed_hosts, *({host} if local else _own_names(host))}
        app = application(runs, token=token, allowed_hosts=names)
        self._listener = _listener(host, port)
        self.address = Address(host, self._listener.getsockname()[1], token)
        self._server = _Uvicorn(_config(app), lambda: on_start(self.address))

    def run(self) -> None:
        """Serve until `stop`, Ctrl-C or SIGTERM; signals then continue as Python raises them."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            with self._listener:
                self._server.run(sockets=[self._listener])
        finally:
            sys.setswitchinterval(before)

    def stop(self) -> None:
        """Ask the server to stop, from any thread."""
        self._server.should_exit = True


def _config(app: Any) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # bad requests are no news
    return uvicorn.Config(
        app,
        http=_BoundedProtocol,
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # addresses hold the token
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=_LARGEST_HEAD,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
    )


class _Uvicorn(uvicorn.Server):
    """A server that says when it listens, and ends event streams when it stops."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start
        self._ignored = [
            number
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) is signal.SIG_IGN
        ]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        if self.started:
            self._on_start()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop at a signal, unless the program was started with it ignored."""
        if sig not in self._ignored:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; streams that never end by themselves are ended first."""
        close_streams(self.config.app)
        await super().shutdown(sockets)


class _BoundedProtocol(H11Protocol):
    """HTTP in which a request that does not become complete ends the connection after a while."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; what was asked for before it on the connection is left out."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # half of an answer was sent
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Set the deadline while a request is incomplete; later pieces do not move it."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY) or self.transport.is_closing():
            self._cancel()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(_SECONDS_FOR_A_REQUEST, self.transport.close)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _own_names(host: str) -> set[str]:
    """Return the names that readers on other machines may know this one by."""
    names = {host, socket.gethostname(), socket.getfqdn()}
    return {name for name in names if name and ":" not in name}


def _listener(host: str, port: int | None) -> socket.socket:
    """Return a socket that is bound; to the next free port, where none was asked for."""
    ports = range(DEFAULT_PORT, DEFAULT_PORT + _PORTS_TRIED) if port is None else (port,)
    for candidate in ports:
        try:
            return _bound(host, candidate)
        except (OSError, UnicodeError) as error:
            if not isinstance(error, OSError) or error.errno != errno.EADDRINUSE:
                why = getattr(error, "strerror", None) or "this is not the name of a machine"
                raise JomaError(f"cannot serve on {host} port {candidate}: {why}") from error
    if port is not None:
        raise JomaError(
            f"port {port} is in use; give --port another one, or leave it out for the next free one"
        )
    raise JomaError(f"ports {ports[0]} to {ports[-1]} are in use; give another one by --port")


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
