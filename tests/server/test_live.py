"""What changes reaches readers, without disturbing the run."""

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
                events.wait_for(id)
                fresh = client.get(f"/api/runs/{id}")
                if fresh.json["summary"]["last_step"] == step:
                    break
            assert fresh.headers["etag"] != known.headers["etag"]


def test_a_stream_that_is_opened_again_gets_what_it_missed(make_run: MakeRun, serve: Serve):
    run = make_run("live", done=False)
    make_run("other")
    client = serve()
    id = client.id_of("live")
    with client.events() as events:
        run.metrics.append(30, "loss", 0.5)
        run.metrics.flush()
        change, _ = events.wait_for(id)
    with client.events({"Last-Event-ID": change["event"]}) as events:
        run.metrics.append(31, "loss", 0.5)
        run.metrics.flush()
        assert events.wait_for(id)[0]["version"] != change["version"]
    with client.events({"Last-Event-ID": "other-99"}) as events:
        changes = events.changes()
        assert {next(changes)["run"] for _ in range(2)} == {id, client.id_of("other")}


def test_the_server_stops_with_open_streams(make_run: MakeRun, tmp_path):
    from tests.server._client import Client
    from tests.server.conftest import serving

    make_run()
    with serving(tmp_path / "runs") as server, Client(server.address).events() as events:
        server.stop()
        assert list(events.changes())[1:] == []
