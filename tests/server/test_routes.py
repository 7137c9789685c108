"""What each address answers."""

import gzip
import shutil
import time

from joma.runs import Run
from tests.server._client import PATIENCE
from tests.server.conftest import MakeRun, Serve


def test_pages_and_their_data(make_run: MakeRun, serve: Serve):
    make_run("first")
    make_run("second", lr=0.1)
    client = serve()
    runs = client.get("/api/runs").json["runs"]
    assert {run["state"] for run in runs} == {"ended"}
    assert [run["last_step"] for run in runs] == [19, 19]
    one, two = (client.id_of(name) for name in ("first", "second"))
    assert client.get(f"/api/runs/{one}").json["id"] == one
    for path in ("/", f"/runs/{one}", f"/compare?run={one}&run={two}", "/laboratory"):
        answer = client.get(path)
        assert answer.status == 200, path
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.text.lower().startswith("<!doctype html>")
    assert client.get("/healthz").text == "ok\n"
    assert client.get("/favicon.ico").status == 204


def test_ids_are_the_same_after_a_restart_and_fit_an_address(make_run: MakeRun, serve: Serve):
    make_run("a b<c>é")
    ids = [serve().get("/api/runs").json["runs"][0]["id"] for _ in range(2)]
    assert ids[0] == ids[1]
    assert ids[0].replace("-", "").isalnum()
    assert ids[0].isascii()


def test_answers_are_compressed_and_sent_once(make_run: MakeRun, serve: Serve):
    make_run()
    client = serve()
    path = f"/api/runs/{client.id_of('first')}"
    plain = client.get(path)
    small = client.get(path, {"Accept-Encoding": "br, gzip;q=0.5"})
    assert small.headers["content-encoding"] == "gzip"
    assert gzip.decompress(small.body) == plain.body
    known = client.get(path, {"If-None-Match": f'"x", {plain.headers["etag"]}'})
    assert (known.status, known.body) == (304, b"")
    head = client.get(path, method="HEAD")
    assert (head.status, head.body) == (200, b"")
    assert int(head.headers["content-length"]) == len(plain.body)


def test_what_does_not_exist_is_not_found(make_run: MakeRun, serve: Serve):
    make_run()
    client = serve()
    for path in (
        "/nothing",
        "/runs/",
        "/runs/none",
        "/api/runs/none",
        "/compare?run=none",
        "/runs/x/y",
    ):
        answer = client.get(path)
        assert answer.status == 404, path
    for query in ("", "?run=", "?" + "&".join(f"run={number}" for number in range(51))):
        assert client.get(f"/compare{query}").status in (400, 404), query
    page = client.get("/runs/x/y", {"Accept": "text/html"})
    assert '<a href="../../">' in page.text


def test_a_removed_run_is_gone(make_run: MakeRun, serve: Serve):
    run = make_run()
    client = serve()
    id = client.id_of("first")
    assert client.get(f"/runs/{id}").status == 200
    with client.events() as events:
        shutil.rmtree(run.path)
        change, _ = events.wait_for(id)
        while change["version"] is not None:
            change, _ = events.wait_for(id)
    answer = client.get(f"/runs/{id}")
    assert (answer.status, answer.text) == (410, "The folder of this run was removed.\n")
    assert client.get(f"/api/runs/{id}").status == 410
    assert client.get(f"/compare?run={id}").status == 410
    assert client.get("/api/runs").json == {"runs": []}


def test_damaged_runs_are_shown_as_damaged(make_run: MakeRun, serve: Serve):
    whole, cut, config = make_run("whole"), make_run("cut"), make_run("config")
    part = next((cut.path / "metrics").iterdir())
    part.write_bytes(part.read_bytes()[:-20])
    (config.path / "config.json").write_text("{")
    client = serve()
    states = {run["path"].rpartition("/")[2]: run for run in client.get("/api/runs").json["runs"]}
    assert states["whole"]["state"] == "ended"
    for name in ("cut", "config"):
        assert states[name]["state"] == "damaged"
        assert states[name]["reason"]
        id = states[name]["id"]
        assert client.get(f"/api/runs/{id}").json["state"] == "damaged"
        page = client.get(f"/runs/{id}")
        assert page.status == 200
        assert "damaged" in page.text
        assert client.get(f"/compare?run={id}&run={states['whole']['id']}").status == 200
    assert client.get(f"/runs/{client.id_of(whole.path.name)}").status == 200


def test_a_run_is_running_while_it_is_locked_and_then_died(make_run: MakeRun, serve: Serve):
    run = make_run("live", done=False)
    run.write_json("outcome", {"status": "running"})
    client = serve()
    id = client.id_of("live")

    def state() -> str:
        return client.get("/api/runs").json["runs"][0]["state"]

    assert state() == "died"
    with run.locked():
        run.metrics.append(20, "loss", 0.1)
        run.metrics.flush()
        _wait_until(lambda: state() == "running")
        with client.events() as events:
            pass
    with client.events() as events:
        _wait_until(lambda: state() == "died")
        events.wait_for(id)


def test_a_run_folder_and_several_folders_can_be_served(make_run: MakeRun):
    from tests.server._client import Client
    from tests.server.conftest import serving

    runs = [make_run("one"), make_run("two")]
    with serving([run.path for run in runs]) as server:
        assert len(Client(server.address).get("/api/runs").json["runs"]) == 2


def test_a_run_that_begins_later_is_found(make_run: MakeRun, serve: Serve):
    client = serve()
    assert client.get("/api/runs").json == {"runs": []}
    with client.events() as events:
        make_run("late")
        change = next(events.changes())
    assert change["run"] == client.id_of("late")
    Run.open(client.get("/api/runs").json["runs"][0]["path"])


def _wait_until(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
