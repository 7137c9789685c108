"""`joma serve`, as far as it does not serve; tests/server has the rest."""

import socket
import sys

import pytest

from tests.cli._command import joma, sentence
from tests.server.conftest import serving


def test_folders_must_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "RUNS runs does not exist; give the folder" in sentence(joma("serve"))
    (tmp_path / "file").touch()
    assert "RUNS file is not a folder" in sentence(joma("serve", "file"))


def test_options_must_make_sense(tmp_path):
    assert "at most 65535, not '70000'" in sentence(joma("serve", str(tmp_path), "--port", "70000"))
    for name in ("http://x", "a/b", "*", "", "a:80"):
        assert "--allow-host" in sentence(joma("serve", str(tmp_path), "--allow-host", name))
    line = sentence(joma("serve", str(tmp_path), "--host", "256.1.1.1"))
    assert "cannot serve on 256.1.1.1" in line


def test_a_port_that_was_asked_for_must_be_free(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = sentence(joma("serve", str(tmp_path), "--port", str(port)))
        assert f"port {port} is in use" in line


def test_the_next_free_port_is_taken_otherwise(tmp_path):
    with serving(tmp_path, port=None) as one, serving(tmp_path, port=None) as other:
        assert 8765 <= one.address.port < other.address.port < 8785


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("joma.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    line = sentence(joma("serve", str(tmp_path)))
    assert "joma serve needs uvicorn: pip install" in line
    assert "[serve]" in line


@pytest.mark.parametrize(
    ("host", "token"), [("127.0.0.1", False), ("::1", False), ("0.0.0.0", True)]
)
def test_elsewhere_a_token_is_asked_for(tmp_path, host: str, token: bool):
    from joma.errors import JomaError

    try:
        with serving(tmp_path, host=host) as server:
            assert (server.address.token is not None) == token
            assert ("?token=" in server.address.url) == token
    except JomaError as error:
        pytest.skip(f"{host} cannot be used here: {error}")


def test_it_says_where_it_serves(tmp_path, monkeypatch):
    from joma import server

    class Interrupted:
        def __init__(self, runs, *, on_start, **options) -> None:
            self.on_start = on_start

        def run(self) -> None:
            self.on_start(server.Address("127.0.0.1", 8765, None))
            raise KeyboardInterrupt

    opened = []
    monkeypatch.setattr(server, "RunServer", Interrupted)
    monkeypatch.setattr("webbrowser.open", opened.append)
    result = joma("serve", str(tmp_path), "--open")
    assert result.exit_code == 0
    assert "at http://127.0.0.1:8765/\n" in result.stdout
    assert result.stdout.endswith("Stopped.\n")
    assert opened == ["http://127.0.0.1:8765/"]
