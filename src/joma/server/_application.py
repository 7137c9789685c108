"""The application: which address answers with what."""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from http import HTTPStatus
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from joma.server import _pages
from joma.server._guard import Guard
from joma.server._runs import RunTable, ServedRun

_logger = logging.getLogger(__name__)

MOST_COMPARED = 50
"""Most runs on one page."""

_START = secrets.token_hex(4)
"""Part of every ETag and event id: another start of the server counts changes anew."""

_CHECK_SECONDS = 0.5
"""How often the folders are checked, unless that would take more than a tenth of the time."""

_POLL_SECONDS = 0.2
_HEARTBEAT_SECONDS = 15.0
_RECENT_SECONDS = 60.0
"""A new event stream begins with the changes of this time: its page was made a moment before."""

_MOST_ANSWERS = 64


def application(
    runs: Path | str | Sequence[Path | str],
    *,
    token: str | None = None,
    allowed_hosts: Collection[str] = (),
) -> Starlette:
    """Return the web application that shows run folders, for any ASGI server.

    Args:
        runs: A run folder, a folder of runs, or several of them.
        token: A word that a reader must show: `?token=…` on the first visit. Needed wherever other
            people can reach the server.
        allowed_hosts: Names in the address under which the server is reached, in addition to
            localhost, 127.0.0.1 and [::1]; without a port.
    """
    roots = [runs] if isinstance(runs, Path | str) else list(runs)
    server = _Pages(RunTable([Path(root) for root in roots]))
    guard = Middleware(Guard, token=token, allowed_hosts=allowed_hosts)
    app = Starlette(
        routes=[
            Route("/", server.list),
            Route("/runs/{id}", server.run),
            Route("/compare", server.compare),
            Route("/laboratory", server.laboratory),
            Route("/api/runs", server.list_data),
            Route("/api/runs/{id}", server.run_data),
            Route("/api/events", server.events),
            Route("/healthz", lambda _: PlainTextResponse("ok\n")),
            Route("/favicon.ico", lambda _: Response(status_code=204)),
        ],
        middleware=[guard, Middleware(GZipMiddleware, compresslevel=5)],
        exception_handlers={HTTPException: _answer_error, Exception: _answer_defect},
        lifespan=server.lifespan,
    )
    app.router.redirect_slashes = False  # would send absolute addresses, which proxies break
    app.state.close_streams = server.closing.set
    return app


class _Pages:
    """Answers the requests of one application."""

    def __init__(self, table: RunTable) -> None:
        self.table = table
        self.closing = asyncio.Event()
        self._answers: OrderedDict[tuple[str, ...], tuple[str, asyncio.Task[bytes]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Watch the folders while the application runs."""
        await asyncio.to_thread(self.table.update)
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self.closing.set()
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            start = time.monotonic()
            try:
                await asyncio.to_thread(self.table.update)
            except Exception:  # a defect must not end the watching of all other runs
                _logger.exception("watching the run folders failed; trying again")
            await asyncio.sleep(max(_CHECK_SECONDS, 9 * (time.monotonic() - start)))

    async def _made(self, key: tuple[str, ...], version: str, make: Callable[[], bytes]) -> bytes:
        """Return an answer, made once for each version in a thread."""
        known, task = self._answers.get(key, ("", None))
        if task is None or known != version:
            task = asyncio.create_task(asyncio.to_thread(make))
        self._answers[key] = version, task
        self._answers.move_to_end(key)
        while len(self._answers) > _MOST_ANSWERS:
            self._answers.popitem(last=False)
        try:
            return await asyncio.shield(task)
        except Exception:
            self._answers.pop(key, None)
            raise

    async def _payload(self, run: ServedRun) -> bytes:
        return await self._made(("data", run.id), run.version, lambda: _pages.payload(run))

    async def _page(self, request: Request, ids: Sequence[str], home: str) -> Response:
        runs = [self._find(id) for id in ids]
        version = "-".join(run.version for run in runs)
        payloads = [await self._payload(run) for run in runs]
        page = await self._made(("page", *ids), version, lambda: _pages.run_page(payloads, home))
        return _answer(request, page, version, _pages.run_policy())

    def _find(self, id: str) -> ServedRun:
        run = self.table.get(id)
        if run is not None:
            return run
        if self.table.is_removed(id):
            raise HTTPException(410, "The folder of this run was removed.")
        raise HTTPException(404, "There is no run of this id.")

    async def list(self, request: Request) -> Response:
        """Answer `/`: the list of runs."""
        number = str(self.table.number)
        page = await self._made(("list",), number, lambda: _pages.list_page(self.table.runs()))
        return _answer(request, page, number, _pages.list_policy())

    async def run(self, request: Request) -> Response:
        """Answer `/runs/ID`: what a run measured."""
        return await self._page(request, [request.path_params["id"]], "../")

    async def compare(self, request: Request) -> Response:
        """Answer `/compare?run=A&run=B`: several runs next to each other."""
        ids = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 1 <= len(ids) <= MOST_COMPARED:
            raise HTTPException(
                400, f"Name between 1 and {MOST_COMPARED} runs, as /compare?run=ID&run=ID does."
            )
        return await self._page(request, ids, "./")

    async def laboratory(self, request: Request) -> Response:
        """Answer `/laboratory`."""
        page = await self._made(("laboratory",), "1", _pages.laboratory_page)
        return _answer(request, page, "1", _pages.policy(page))

    async def list_data(self, request: Request) -> Response:
        """Answer `/api/runs`: the list of runs as JSON."""
        number = str(self.table.number)
        made = await self._made(("runs",), number, lambda: _pages.run_list(self.table.runs()))
        return _answer(request, made, number)

    async def run_data(self, request: Request) -> Response:
        """Answer `/api/runs/ID`: what a run measured, as JSON."""
        run = self._find(request.path_params["id"])
        return _answer(request, await self._payload(run), run.version)

    async def events(self, request: Request) -> Response:
        """Answer `/api/events`: a stream of changes."""
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        stream = self._changes(request.headers.get("last-event-id", ""))
        headers = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def _changes(self, last_id: str) -> AsyncIterator[bytes]:
        """Yield server-sent events: changes after the one that the reader saw last."""
        start, _, number = last_id.partition("-")
        known = start == _START and number.isdecimal() and len(number) < 20
        seen, since = int(number) if known else 0, 0.0
        if not last_id:
            since = time.monotonic() - _RECENT_SECONDS
        yield b"retry: 1000\n\n"
        quiet = 0.0
        while not self.closing.is_set():
            for id, change in self.table.changes(seen, since):
                data = json.dumps({"run": id, "version": change.version})
                yield f"id: {_START}-{change.number}\nevent: change\ndata: {data}\n\n".encode()
                seen, quiet = change.number, 0.0
            if quiet >= _HEARTBEAT_SECONDS:  # so that no proxy closes the stream
                yield b": still here\n\n"
                quiet = 0.0
            await asyncio.sleep(_POLL_SECONDS)
            quiet += _POLL_SECONDS


def _answer(request: Request, body: bytes, version: str, policy: str | None = None) -> Response:
    """Return a page (with its policy) or JSON; without a body if the reader has it already."""
    headers = {"etag": f'W/"{_START}-{version}"'}
    if policy is not None:
        headers["content-security-policy"] = policy
    tags = request.headers.get("if-none-match", "").split(",")
    if headers["etag"] in (tag.strip() for tag in tags):
        return Response(status_code=304, headers=headers)
    media_type = "application/json" if policy is None else "text/html; charset=utf-8"
    return Response(body, media_type=media_type, headers=headers)


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer what cannot be answered with a sentence: a page for browsers, text for others."""
    assert isinstance(error, HTTPException)
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse(f"{error.detail}\n", status_code=error.status_code)
    depth = max(request.url.path.count("/") - 1, 0)
    title = HTTPStatus(error.status_code).phrase.capitalize()
    page = _pages.message_page(title, error.detail, "../" * depth or "./")
    headers = {"content-security-policy": _pages.policy(page)}
    return Response(page, error.status_code, headers, media_type="text/html")


async def _answer_defect(request: Request, error: Exception) -> Response:
    return PlainTextResponse("This is a defect of joma.\n", status_code=500)
