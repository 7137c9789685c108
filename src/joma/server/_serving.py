"""Run the application on an address: choose the port, print where it is, end on Ctrl-C."""

import errno
import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from joma.errors import JomaError
from joma.server._application import application

DEFAULT_PORT = 8765
_PORTS_TRIED = 20


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
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        host = f"[{host}]" if ":" in host else host
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
        own = {host} if local else {host, socket.gethostname(), socket.getfqdn()}
        app = application(runs, token=token, allowed_hosts={*allowed_hosts, *own})
        self._listener = _listener(host, port)
        self.address = Address(host, self._listener.getsockname()[1], token)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # bad requests are no news
        config = uvicorn.Config(
            app,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,  # addresses hold the token
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=1 << 15,
            limit_concurrency=2000,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
        )
        on_end = app.state.close_streams
        self._server = _Uvicorn(config, lambda: on_start(self.address), on_end)

    def run(self) -> None:
        """Serve until `stop`, Ctrl-C or SIGTERM; signals then continue as Python raises them."""
        with self._listener:
            self._server.run(sockets=[self._listener])

    def stop(self) -> None:
        """Ask the server to stop, from any thread."""
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """A server that says when it listens, and ends event streams when it stops."""

    def __init__(
        self, config: uvicorn.Config, on_start: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_start, self._on_end = on_start, on_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; streams that never end by themselves are ended first."""
        self._on_end()
        await super().shutdown(sockets)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
