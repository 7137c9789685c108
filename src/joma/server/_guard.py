"""Which requests are answered at all, and the headers that every answer carries.

The server is meant for one person's browser. A web page of somebody else must not be able to read
it through that browser, so requests with a foreign `Host` (DNS rebinding) or a foreign `Origin` are
refused, and nothing but GET and HEAD is answered.
"""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Collection, Iterable, Sequence
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Names under which a browser reaches this machine, or a port that is forwarded to it."""

LONGEST_TARGET = 4096
"""Most bytes of a path with its query; the longest the pages make compare fifty runs."""

_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[0-9A-Za-z._-]+)(:(?P<port>\d{1,5}))?")


def content_policy(script: Sequence[str] = (), style: Sequence[str] = ()) -> str:
    """Return a Content-Security-Policy: the page may ask its own server, and load nothing else.

    Args:
        script: Hashes of the scripts that may run.
        style: Hashes of the style sheets that apply.
    """
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        f"connect-src 'self'; img-src data: blob:; script-src {_or_none(script)}; "
        f"style-src {_or_none(style)}"
    )


def _or_none(sources: Sequence[str]) -> str:
    return " ".join(sources) or "'none'"


_HEADERS = {
    "content-security-policy": content_policy(),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "private, no-cache",
    "vary": "Accept-Encoding, Cookie",
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
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name.encode(), value.encode())
                        for name, value in _HEADERS.items()
                        if name.encode() not in given
                    ),
                ]
            await send(message)

        answer = self._refusal(scope)
        await (answer or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a request that does not pass, None for one that does."""
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        target = len(scope.get("raw_path") or scope["path"].encode()) + len(scope["query_string"])
        if scope["http_version"] not in ("1.0", "1.1"):
            return _refuse(505, "Only HTTP/1.1 is answered.")
        if scope["method"] not in ("GET", "HEAD"):
            return _refuse(405, "Only GET and HEAD are answered.", {"allow": "GET, HEAD"})
        if "transfer-encoding" in headers or headers.get("content-length", ["0"]) != ["0"]:
            return _refuse(413, "A request must not have a body.", {"connection": "close"})
        if target > LONGEST_TARGET:
            return _refuse(414, f"A request may have at most {LONGEST_TARGET} bytes.")
        if not self._is_allowed(headers.get("host", [])):
            return _refuse(
                403,
                "This name is not among those that joma serve answers to; "
                "start it with --allow-host NAME to add one.",
            )
        if _is_foreign(headers):
            return _refuse(403, "Pages of another origin may not read this server.")
        if self._token is None or scope["path"] == "/healthz":
            return None
        return self._unknown_reader(scope, headers, self._token)

    def _is_allowed(self, given: list[str]) -> bool:
        host = _HOST.fullmatch(given[0]) if len(given) == 1 else None
        if host is None:
            return False
        name = host["name"].lower()
        return name in self._hosts or (self._token is not None and _is_address(name))

    def _unknown_reader(
        self, scope: Scope, headers: dict[str, list[str]], token: str
    ) -> Response | None:
        """Return the answer to a reader who did not show the token before, None if they did."""
        shown = [
            *_cookies(headers.get("cookie", []), self._cookie),
            *(it.removeprefix("Bearer ") for it in headers.get("authorization", [])),
        ]
        known = any(_same(it, token) for it in shown)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if given := [value for name, value in query if name == "token"]:
            if not any(_same(it, token) for it in given):
                return _refuse(401, "The token in this address is not that of this server.")
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            answer = RedirectResponse(_same_page(scope["path"], rest), status_code=303)
            answer.set_cookie(self._cookie, token, httponly=True, samesite="lax", path="/")
            answer.headers["cache-control"] = "no-store"
            return answer
        if known:
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


def _is_foreign(headers: dict[str, list[str]]) -> bool:
    """Return whether a page of another origin made the request; following a link is none."""
    host = headers["host"][0].lower()
    for origin in headers.get("origin", []):
        try:
            parts = urlsplit(origin)
        except ValueError:
            return True
        if parts.scheme not in ("http", "https") or _without_default_port(parts) != host:
            return True
    site = headers.get("sec-fetch-site", ["none"])[0]
    followed = headers.get("sec-fetch-mode", ["navigate"])[0] == "navigate"
    return site in ("cross-site", "same-site") and not followed


def _without_default_port(origin: SplitResult) -> str:
    """Return the host of an origin as a browser writes it into `Host`."""
    return origin.netloc.lower().removesuffix(":443" if origin.scheme == "https" else ":80")


def _cookies(given: Iterable[str], name: str) -> list[str]:
    """Return the values of one cookie; those of other programs may have any form."""
    pairs = (part.partition("=") for header in given for part in header.split(";"))
    return [value.strip() for key, _, value in pairs if key.strip() == name]


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _same_page(path: str, query: str) -> str:
    """Return the address of the same page relative to itself: a proxy may serve it elsewhere."""
    last = path.rpartition("/")[2]
    page = f"./{last}" if last.isalnum() or re.fullmatch(r"[\w.-]+", last) else "./"
    return f"{page}?{query}" if query else page
