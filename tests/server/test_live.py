"""What changes reaches readers, without disturbing the run."""

import threading
import time

from joma.server import _events, _views, _watching
from joma.server._events import EventHub
from tests.server._client import PATIENCE
from tests.server.conftest import MakeRun, Serve


def test_a_change_is_announced_once_it_can_be_read(make_run: MakeRun, serve: Serve):
    run = make_run("live", done=False)
    client = serve()
    id = client.id_of("live")
    with run.locked(), client.events() as events:
        for step in range(20, 23):
            known = client.get(f"/api/runs/{id}")
            run.metrics.append(step, "loss", 0.5)
            run.metrics.flush()
            while True:
                _, took = events.wait_for(id)
                print(f"announced after {took:.2f} s")
                fresh = client.get(f"/api/runs/{id}")
                if fresh.json["summary"]["last_step"] == step:
                    break
            assert fresh.headers["etag"] != known.headers["etag"]


def test_all_readers_hear_the_same_and_ask_for_nothing_twice(
    make_run: MakeRun, serve: Serve, monkeypatch
):
    computed = []
    original = _views.payload
    monkeypatch.setattr(_views, "payload", lambda run: computed.append(run) or original(run))
    run = make_run("live", done=False)
    client = serve()
    id = client.id_of("live")
    answers: list[int] = []

    def read() -> None:
        with client.events() as events:
            events.wait_for(id)
            answers.append(client.get(f"/api/runs/{id}").status)

    readers = [threading.Thread(target=read) for _ in range(20)]
    for reader in readers:
        reader.start()
    run.metrics.append(30, "loss", 0.5)
    run.metrics.flush()
    for reader in readers:
        reader.join()
    assert answers == [200] * 20
    assert len(computed) <= 4


def test_a_stream_that_is_opened_again_gets_what_it_missed(
    make_run: MakeRun, serve: Serve, monkeypatch
):
    monkeypatch.setattr(_events, "_RECENT_SECONDS", 0.0)
    run = make_run("live", done=False)
    make_run("other")
    client = serve()
    id = client.id_of("live")
    with client.events() as events:
        run.metrics.append(30, "loss", 0.5)
        run.metrics.flush()
        change, _ = events.wait_for(id)
    time.sleep(1.2)
    with client.events({"Last-Event-ID": change["event"]}) as events:
        run.metrics.append(31, "loss", 0.5)
        run.metrics.flush()
        assert events.wait_for(id)[0]["version"] != change["version"]
    with client.events({"Last-Event-ID": "other-99"}) as events:
        changes = events.changes()
        assert {next(changes)["run"] for _ in range(2)} == {id, client.id_of("other")}


def test_a_quiet_stream_sends_heartbeats(serve: Serve, monkeypatch):
    monkeypatch.setattr(_events, "HEARTBEAT_SECONDS", 0.05)
    with serve().events() as events:
        lines = [events._file.readline() for _ in range(12)]
    assert sum(b": still here" in line for line in lines) >= 2


def test_streams_are_limited(serve: Serve, monkeypatch):
    monkeypatch.setattr(_events, "MOST_STREAMS", 2)
    client = serve()
    with client.events() as one, client.events() as two:
        time.sleep(0.1)
        assert (one.status, two.status) == (200, 200)
        assert client.get("/api/events").status == 503


def test_the_server_stops_with_open_streams(make_run: MakeRun, tmp_path):
    from tests.server._client import Client
    from tests.server.conftest import serving

    make_run()
    with serving(tmp_path / "runs") as server, Client(server.address).events() as events:
        server.stop()
        assert list(events.changes())[1:] == []


def test_the_lock_of_a_run_is_not_taken_from_it(make_run: MakeRun, serve: Serve, monkeypatch):
    monkeypatch.setattr(_watching, "REFRESH_SECONDS", 0.0)
    run = make_run("live", done=False)
    run.write_json("outcome", {"status": "running"})
    serve()
    for _ in range(30):
        with run.locked():
            run.write_json("note", {"time": time.time()})


def test_a_run_can_be_read_while_its_log_is_merged(make_run: MakeRun, serve: Serve):
    run = make_run("live", done=False)
    client = serve()
    id = client.id_of("live")
    with run.locked():
        for step in range(20, 41):
            run.metrics.append(step, "loss", 0.5)
            run.metrics.flush()
            if step % 10 == 0:
                run.metrics.compact()
            assert client.get(f"/api/runs/{id}").json["state"] != "damaged"


def test_a_slow_reader_holds_one_change_for_each_run():
    hub = EventHub()
    stream = _events._Stream()
    hub._streams.add(stream)
    for number in range(1000):
        hub.announce("a", str(number), number)
        hub.announce("b", str(number), number)
    assert {id: change.version for id, change in stream.waiting.items()} == {"a": "999", "b": "999"}


def test_a_new_stream_hears_only_of_what_can_be_read(make_run: MakeRun, serve: Serve, monkeypatch):
    computing, release = threading.Event(), threading.Event()
    original = _views.payload

    def slow(run):
        if run.summary.last_step == 50:
            computing.set()
            release.wait(PATIENCE)
        return original(run)

    monkeypatch.setattr(_views, "payload", slow)
    run = make_run("live", done=False)
    client = serve()
    id = client.id_of("live")
    client.get(f"/api/runs/{id}")
    run.metrics.append(50, "loss", 0.5)
    run.metrics.flush()
    assert computing.wait(PATIENCE)
    with client.events() as events:
        before = events.wait_for(id)[0]["version"]
        assert client.get(f"/api/runs/{id}").json["version"] == before
        release.set()
        change, _ = events.wait_for(id)
        assert client.get(f"/api/runs/{id}").json["version"] == change["version"] != before
