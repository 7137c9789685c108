"""Which requests are answered at all, and the headers that every answer carries.

The server is meant for one person's browser. A web page of somebody else must not be able to read
it through that browser, so requests with a foreign `Host` (DNS rebinding) or a foreign `Origin` are
refused, and nothing but GET and HEAD is answered.
"""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from joma.server._pages import policy

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Names under which a browser reaches this machine, or a port that is forwarded to it."""

_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[0-9A-Za-z._-]+)(:\d{1,5})?")

_HEADERS = {
    "content-security-policy": policy(b""),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "private, no-cache",
}


class Guard:
    """Refuses what is not a plain request of the server's own pages.

    Args:
        app: What answers the requests that pass.
        token: The word a reader must show, in the query of the first visit and afterwards in a
            cookie; None where every process of this machine may read.
        allowed_hosts: Names accepted in `Host`, in addition to those of this machine. With a token,
            addresses in digits are accepted too: no name leads to them.
    """

    def __init__(
        self, app: ASGIApp, *, token: str | None = None, allowed_hosts: Collection[str] = ()
    ) -> None:
        self._app = app
        self._token = token
        self._hosts = LOOPBACK_HOSTS | {name.lower() for name in allowed_hosts}
        mark = hashlib.sha256((token or "").encode()).hexdigest()[:8]
        self._cookie = f"joma-{mark}"  # cookies ignore the port: two servers need two names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.add_vary_header("Cookie")
            await send(message)

        await (self._refusal(Request(scope)) or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that does not pass, None for one that does."""
        if request.method not in ("GET", "HEAD"):
            return _refuse(405, "Only GET and HEAD are answered.", {"allow": "GET, HEAD"})
        if not self._is_allowed(request.headers.getlist("host")):
            return _refuse(
                403,
                "This name is not among those that joma serve answers to; "
                "start it with --allow-host NAME to add one.",
            )
        if _is_foreign(request):
            return _refuse(403, "Pages of another origin may not read this server.")
        if self._token is None or request.url.path == "/healthz":
            return None
        return self._unknown_reader(request, self._token)

    def _is_allowed(self, given: list[str]) -> bool:
        host = _HOST.fullmatch(given[0]) if len(given) == 1 else None
        if host is None:
            return False
        name = host["name"].lower()
        return name in self._hosts or (self._token is not None and _is_address(name))

    def _unknown_reader(self, request: Request, token: str) -> Response | None:
        """Return the answer to a reader who did not show the token before, None if they did."""
        query = request.query_params.multi_items()
        if given := [value for name, value in query if name == "token"]:
            if not any(_same(it, token) for it in given):
                return _refuse(401, "The token in this address is not that of this server.")
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            answer = RedirectResponse(_same_page(request.scope["path"], rest), status_code=303)
            answer.set_cookie(self._cookie, token, httponly=True, samesite="lax", path="/")
            answer.headers["cache-control"] = "no-store"
            return answer
        shown = request.headers.get("authorization", "").removeprefix("Bearer ")
        if _same(shown, token) or _same(request.cookies.get(self._cookie, ""), token):
            return None
        return _refuse(
            401, "This server asks for a token: open the address that joma serve printed."
        )


def _refuse(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{sentence}\n", status_code=status, headers=headers)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _is_foreign(request: Request) -> bool:
    """Return whether a page of another origin made the request; following a link is none."""
    for origin in request.headers.getlist("origin"):
        try:
            parts = urlsplit(origin)
        except ValueError:
            return True
        port = ":443" if parts.scheme == "https" else ":80"  # browsers leave it out of Host
        if parts.scheme not in ("http", "https"):
            return True
        if parts.netloc.lower().removesuffix(port) != request.headers["host"].lower():
            return True
    site = request.headers.get("sec-fetch-site", "none")
    followed = request.headers.get("sec-fetch-mode", "navigate") == "navigate"
    return site in ("cross-site", "same-site") and not followed


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _same_page(path: str, query: str) -> str:
    """Return the address of the same page relative to itself: a proxy may serve it elsewhere."""
    last = path.rpartition("/")[2]
    page = f"./{last}" if re.fullmatch(r"[\w.-]+", last) else "./"
    return f"{page}?{query}" if query else page
