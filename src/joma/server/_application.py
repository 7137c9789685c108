"""The application: which address answers with what."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from joma.errors import JomaError
from joma.server import _views
from joma.server._cache import Answer, AnswerCache
from joma.server._events import EventHub
from joma.server._guard import Guard
from joma.server._table import RunTable, ServedRun
from joma.server._watching import Watcher

_logger = logging.getLogger(__name__)

MOST_COMPARED = 50
"""Most runs on one page."""

_START = secrets.token_hex(4)
"""Part of every ETag: another start may count otherwise, and be of another version of joma."""

_FIRST_SEARCH_SECONDS = 5.0
_LARGE = 1 << 16
_HTML = "text/html; charset=utf-8"


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
    return _Server([Path(root) for root in roots]).application(token, allowed_hosts)


class _Server:
    """What the requests of one application share."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.table = RunTable(roots)
        self.cache = AnswerCache()
        self.lists = AnswerCache()  # quickly made, and not to wait for what is not
        self.hub = EventHub()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._renewing: dict[str, asyncio.Task[None]] = {}

    def application(self, token: str | None, allowed_hosts: Collection[str]) -> Starlette:
        routes = [
            Route("/", self.show_list),
            Route("/runs/{id}", self.show_run),
            Route("/compare", self.show_comparison),
            Route("/laboratory", self.show_laboratory),
            Route("/api/runs", self.send_list),
            Route("/api/runs/{id}", self.send_run),
            Route("/api/events", self.send_events),
            Route("/healthz", self.send_health),
            Route("/favicon.ico", self.send_nothing),
        ]
        app = Starlette(
            routes=routes,
            middleware=[Middleware(Guard, token=token, allowed_hosts=allowed_hosts)],
            exception_handlers={HTTPException: _answer_error, Exception: _answer_defect},
            lifespan=self.lifespan,
        )
        app.router.redirect_slashes = False  # would send absolute addresses, which proxies break
        app.state.close_streams = self.hub.close
        return app

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Watch the folders while the application runs."""
        self._loop = asyncio.get_running_loop()
        watcher = Watcher(self.table, self._hear)
        await asyncio.gather(
            asyncio.to_thread(watcher.start, _FIRST_SEARCH_SECONDS),
            asyncio.to_thread(_views.prepare),
        )
        try:
            yield
        finally:
            self.hub.close()
            for task in list(self._renewing.values()):
                task.cancel()
            await asyncio.to_thread(watcher.stop)
            self.cache.close()
            self.lists.close()

    def _hear(self, changed: list[str]) -> None:
        """Pass changes from the watcher's thread to the event loop."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._take, changed)

    def _take(self, changed: list[str]) -> None:
        """Announce changes: of a run that somebody reads, as soon as its new data is ready."""
        self.lists.outdate("list page")
        for id in changed:
            run = self.table.get(id)
            self.cache.outdate(id)
            if run is None:
                self.cache.forget(id)
                self.hub.announce(id, None, self.table.number)
            elif not self.cache.is_wanted(("data", id)):
                self.cache.forget(id)
                self.hub.announce(id, run.version, run.number)
            elif id not in self._renewing:
                self._renewing[id] = asyncio.create_task(self._renew(id))

    async def _renew(self, id: str) -> None:
        """Compute the data of a run until it is that of the present version; announce each."""
        version, make = self._data(id)
        shown = None
        try:
            while shown != version():
                shown = (await self.cache.renew(("data", id), version, make)).version
                self.hub.announce(id, shown, self._known(id).number)
        except _GoneError:
            pass  # announced when it was noticed
        except Exception:
            _logger.exception("computing what is shown of run %s failed", id)
        finally:
            del self._renewing[id]  # in the same moment: the next change begins another one

    def _data(self, id: str) -> tuple[Callable[[], str], Callable[[], bytes]]:
        """Return how to get the version of a run, and what is shown of it."""
        return lambda: self._known(id).version, lambda: _views.payload(self._known(id))

    def _known(self, id: str) -> ServedRun:
        run = self.table.get(id)
        if run is None:
            raise _GoneError(id)
        return run

    async def _payload(self, id: str) -> Answer:
        return await self.cache.get(("data", id), *self._data(id), or_before=True)

    async def _page(self, key: tuple[str, ...], ids: Sequence[str], home: str) -> Answer:
        """Return the page of some runs; `home` is the address of their list, relative to it."""
        answers = [await self._payload(id) for id in ids]
        version = "-".join(answer.version for answer in answers)

        def make() -> bytes:
            return _views.run_page([answer.body() for answer in answers], home)

        return await self.cache.get(key, lambda: version, make, or_before=True)

    async def show_list(self, request: Request) -> Response:
        """Answer `/`: the list of runs."""
        number = str(self.table.number)
        answer = await self.lists.get(
            ("list page",),
            lambda: number,
            lambda: _views.list_page(self.table.runs()),
            or_before=True,  # its stream begins with the changes of the last minute
        )
        return await _answer(request, answer, _HTML, policy=_views.list_policy())

    async def show_run(self, request: Request) -> Response:
        """Answer `/runs/ID`: what a run measured."""
        run = self._find(request.path_params["id"])
        answer = await self._page(("page", run.id), [run.id], "../")
        return await _answer(request, answer, _HTML, policy=_views.run_policy())

    async def show_comparison(self, request: Request) -> Response:
        """Answer `/compare?run=A&run=B`: several runs next to each other."""
        ids = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 1 <= len(ids) <= MOST_COMPARED:
            raise HTTPException(
                400, f"Name between 1 and {MOST_COMPARED} runs, as /compare?run=ID&run=ID does."
            )
        for id in ids:
            self._find(id)
        answer = await self._page(("comparison", *ids), ids, "./")
        return await _answer(request, answer, _HTML, policy=_views.run_policy())

    async def show_laboratory(self, request: Request) -> Response:
        """Answer `/laboratory`."""
        answer = await self.cache.get(("laboratory",), lambda: "1", _views.laboratory_page)
        return await _answer(request, answer, _HTML, policy=_views.laboratory_policy())

    async def send_list(self, request: Request) -> Response:
        """Answer `/api/runs`: the list of runs as JSON."""
        number = str(self.table.number)
        answer = await self.lists.get(
            ("list",), lambda: number, lambda: _views.run_list(self.table.runs())
        )
        return await _answer(request, answer, "application/json")

    async def send_run(self, request: Request) -> Response:
        """Answer `/api/runs/ID`: what a run measured, as JSON."""
        run = self._find(request.path_params["id"])
        return await _answer(request, await self._payload(run.id), "application/json")

    async def send_events(self, request: Request) -> Response:
        """Answer `/api/events`: a stream of changes."""
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        try:
            stream = self.hub.open(request.headers.get("last-event-id"))
        except JomaError as error:
            raise HTTPException(503, f"{error}.") from error
        headers = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def send_health(self, request: Request) -> Response:
        """Answer `/healthz`."""
        return PlainTextResponse("ok\n")

    async def send_nothing(self, request: Request) -> Response:
        """Answer `/favicon.ico`, which browsers ask for by themselves."""
        return Response(status_code=204)

    def _find(self, id: str) -> ServedRun:
        run = self.table.get(id)
        if run is not None:
            return run
        raise (
            _GoneError(id)
            if self.table.name_of_removed(id) is not None
            else HTTPException(404, "There is no run of this id.")
        )


class _GoneError(HTTPException):
    """A run whose folder was removed while it was served."""

    def __init__(self, id: str) -> None:
        super().__init__(410, "The folder of this run was removed.")
        self.id = id


async def _answer(
    request: Request, answer: Answer, media_type: str, policy: str | None = None
) -> Response:
    """Return an answer of the cache: not at all if the reader has it, compressed if possible."""
    headers = {"etag": f'W/"{_START}-{answer.version}"'}
    if policy is not None:
        headers["content-security-policy"] = policy
    known = request.headers.get("if-none-match", "")
    if headers["etag"] in (tag.strip() for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    if _takes_gzip(request.headers.get("accept-encoding", "")):
        headers["content-encoding"] = "gzip"
        return Response(answer.compressed, media_type=media_type, headers=headers)
    small = answer.size < _LARGE
    body = answer.body() if small else await asyncio.to_thread(answer.body)
    return Response(body, media_type=media_type, headers=headers)


def _takes_gzip(accepted: str) -> bool:
    for coding in accepted.lower().split(","):
        name, _, quality = coding.partition(";")
        if name.strip() in ("gzip", "*"):
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer what cannot be answered with a sentence: a page for browsers, text for others."""
    assert isinstance(error, HTTPException)
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse(f"{error.detail}\n", status_code=error.status_code)
    depth = max(request.url.path.count("/") - 1, 0)
    title = HTTPStatus(error.status_code).phrase.capitalize()
    page = _views.message_page(title, error.detail, "../" * depth or "./")
    headers = {"content-security-policy": _views.policy(page)}
    return Response(page, error.status_code, headers, media_type="text/html")


async def _answer_defect(request: Request, error: Exception) -> Response:
    return PlainTextResponse("This is a defect of joma.\n", status_code=500)


def close_streams(app: Any) -> None:
    """End the event streams of an application, so that its server can stop at once."""
    app.state.close_streams()
