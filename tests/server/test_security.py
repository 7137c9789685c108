"""What a server must refuse."""

import json
import os
import re
from collections.abc import Iterator

import pytest

from tests.server._client import Client
from tests.server.conftest import MakeRun, Serve, serving, write_run

SECRET = "root:x:0:0"

TRAVERSALS = [
    "/runs/../../../../etc/passwd",
    "/runs/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
    "/runs/..%252f..%252fetc%252fpasswd",
    "/runs/..%c0%af..%c0%afetc/passwd",
    "/runs/%2fetc%2fpasswd",
    "/runs/first/config.json",
    "/runs/first%00.html",
    "/api/runs/..%2f..%2fetc%2fpasswd",
    "/api/runs/%2e%2e%2fconfig.json",
    "/compare?run=..%2f..%2fetc%2fpasswd&run=%00",
    "/static/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/runs/" + "%2e%2e%2f" * 300 + "etc/passwd",
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    root = tmp_path_factory.mktemp("runs")
    write_run(root)
    with serving(root) as server:
        yield Client(server.address)


def test_paths_lead_nowhere_but_to_runs(client: Client):
    for path in TRAVERSALS:
        answer = client.get(path)
        assert answer.status in (400, 404, 414), path
        assert SECRET not in answer.text, path
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil.example", "",
     "127.0.0.1@evil.example", "localhost:99999999", "localhost:x", "127.0.0.1,evil.example",
     "10.0.0.1", "[::2]", "0.0.0.0", "local host", "2130706433", "[::1", "localhost/"],
)  # fmt: skip
def test_foreign_hosts_are_refused(client: Client, host: str):
    answer = client.get("/api/runs", {"Host": host})
    assert answer.status in (400, 403)
    assert b"runs" not in answer.body


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:8765", "[::1]"]
)
def test_any_forwarded_port_is_answered(client: Client, host: str):
    assert client.get("/api/runs", {"Host": host}).status == 200


def test_two_hosts_are_refused(client: Client):
    request = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert client.send(request).startswith(b"HTTP/1.1 400")
    assert client.send(b"GET /api/runs HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert client.send(b"GET /api/runs HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 403")
    absolute = b"GET http://evil.example/api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert not client.send(absolute).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:8765.evil.example"},
        {"Origin": "http://[::1"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
    ],
)
def test_foreign_origins_are_refused(client: Client, headers: dict[str, str]):
    answer = client.get("/api/runs", {"Host": "localhost:8765", **headers})
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers


def test_own_origin_and_followed_links_are_answered(client: Client):
    own = {"Host": "localhost:8765", "Origin": "http://localhost:8765"}
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    proxy = {"Host": "localhost", "Origin": "https://localhost:443"}
    for headers in (own, link, proxy):
        assert client.get("/", headers).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO"])
def test_other_methods_are_refused(client: Client, method: str):
    answer = client.get("/api/runs", method=method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


def test_oversized_heads_are_refused_and_the_server_stays(client: Client):
    start = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    million = b"a" * 1_000_000
    for head in (
        [start, *(b"X: ", *[million] * 10)],
        [b"GET /", *[million] * 10, b" HTTP/1.1\r\n\r\n"],
        [start, *[b"X-%d: y\r\n" % number for number in range(20_000)], b"\r\n"],
        [million * 3],
    ):
        assert client.send(*head)[:12] in (b"HTTP/1.1 400", b"")
    assert client.get("/healthz").status == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n bad: folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /runs/\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n",
        b"",
    ],
)
def test_malformed_requests_are_refused(client: Client, request_: bytes):
    answer = client.send(request_)
    assert not answer or answer.startswith(b"HTTP/1.1 4")
    assert client.get("/healthz").status == 200


def test_every_answer_carries_the_headers(client: Client):
    paths = ("/", "/api/runs", "/none", f"/runs/{client.id_of('first')}", "/laboratory", "/healthz")
    for path in paths:
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        policy = headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy
        assert "default-src 'none'" in policy
        script = re.search(r"script-src ([^;]*)", policy)
        assert script is not None
        assert "unsafe" not in script[1]
        assert "server" not in headers
    foreign = client.get("/", {"Host": "evil.example"}).headers
    assert foreign["x-content-type-options"] == "nosniff"


def test_links_that_lead_outside_are_not_followed(make_run: MakeRun, serve: Serve, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "findings.json").write_text(json.dumps([{"kind": "secret", "sentence": SECRET}]))
    run = make_run("linked")
    (run.path / "findings.json").symlink_to(outside / "findings.json")
    moved = make_run("moved")
    (moved.path / "metrics").rename(outside / "metrics")
    (moved.path / "metrics").symlink_to(outside / "metrics")
    hidden = make_run("hidden")
    hidden.path.rename(outside / "run")
    (tmp_path / "runs" / "link").symlink_to(outside / "run")
    client = serve()
    runs = client.get("/api/runs").json["runs"]
    assert {run["state"] for run in runs} == {"damaged"}
    assert len(runs) == 2
    for run in runs:
        assert "symbolic link" in run["reason"]
        for path in (f"/runs/{run['id']}", f"/api/runs/{run['id']}"):
            assert SECRET not in client.get(path).text


HOSTILE = [
    "<script>alert(1)<", "'\"><img src=x onerror=alert(1)>", "a\nb\r\nSet-Cookie: x=y",
    "x" * 200, "日本語 ünï", "--help", "‮gnp", "&lt;b&gt;", "</script><script>alert(1)<",
    "%2e%2e", "$(touch x)", "{{7*7}}",
]  # fmt: skip


def test_hostile_names_are_escaped(make_run: MakeRun, serve: Serve, tmp_path):
    for number, name in enumerate(HOSTILE):
        run = make_run(f"run{number}", rows=2, note=f"<script>{name}</script>")
        run.write_json("findings", {"findings": [
            {"kind": "<i>", "severity": "critical", "step": 1, "sentence": f"</script>{name}"},
        ]})  # fmt: skip
        config = json.loads((run.path / "config.json").read_text())
        (run.path / "manifest.json").unlink()
        (run.path / "config.json").write_text(json.dumps({**config, "name": f"<b>{name}</b>"}))
        run.path.rename(run.path.with_name(name.replace("/", "∕")))
    strange = make_run("strange", rows=2)
    os.rename(strange.path, os.fsencode(strange.path.parent) + b"/caf\xe9 is not UTF-8")
    client = serve()
    runs = client.get("/api/runs").json["runs"]
    assert len(runs) == len(HOSTILE) + 1
    ids = [run["id"] for run in runs]
    query = "&".join(f"run={id}" for id in ids)
    for path in ("/", *(f"/runs/{id}" for id in ids[-2:]), f"/compare?{query}"):
        answer = client.get(path)
        assert answer.status == 200, answer.text
        assert "set-cookie" not in answer.headers
        for bad in ("<script>alert(1)", "<img src=x", "<b>", "<i>", "</script><script>alert"):
            assert bad not in answer.text, (path, bad)


class TestToken:
    def test_first_visit_sets_a_cookie_that_is_asked_for(self, make_run: MakeRun, serve: Serve):
        make_run()
        client = serve(ask_token=True)
        token = client.address.token
        assert token is not None
        assert client.address.url.endswith(f"/?token={token}")
        assert client.get("/").status == 401
        assert client.get("/api/events").status == 401
        assert client.get("/healthz").status == 200
        first = client.get(f"/?token={token}")
        assert first.status == 303
        assert first.headers["location"] == "./"
        cookie = first.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=lax" in cookie.lower()
        pair = cookie.partition(";")[0]
        assert client.get("/", {"Cookie": f'a={{"b":1}}; {pair}; c'}).status == 200
        assert client.get("/api/runs", {"Authorization": f"Bearer {token}"}).status == 200

    def test_other_tokens_are_refused(self, serve: Serve):
        client = serve(ask_token=True)
        token = client.address.token
        assert token is not None
        cookie = client.get(f"/?token={token}").headers["set-cookie"].partition("=")[0]
        for wrong in ("", token[:-1], token + "x", token.swapcase(), "%00", "é", "%ff"):
            assert client.get(f"/?token={wrong}".replace("é", "%C3%A9")).status == 401
        for header in (f"{cookie}=", f"{cookie}={token[:-1]}", f"x={token}", cookie, ";;;=", "é"):
            assert client.get("/", {"Cookie": header}).status == 401

    def test_the_way_back_is_relative(self, serve: Serve):
        client = serve(ask_token=True)
        token = client.address.token
        for path, back in (
            (f"/runs/abc-1?x=1&token={token}", "./abc-1?x=1"),
            (f"/compare?token={token}&run=a&run=b", "./compare?run=a&run=b"),
            (f"//evil.example/?token={token}", "./"),
            (f"/%2f%2fevil.example?token={token}", "./evil.example"),
            (f"/https:evil?token={token}", "./"),
            (f"/a%0d%0ab?token={token}", "./"),
        ):
            assert client.get(path).headers["location"] == back

    def test_no_token_is_logged(self, serve: Serve, caplog, capfd):
        client = serve(ask_token=True)
        client.get(f"/?token={client.address.token}")
        client.get(f"/none?token={client.address.token}")
        assert client.address.token not in caplog.text
        out = capfd.readouterr()
        assert client.address.token not in out.out + out.err
