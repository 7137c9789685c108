"""How `joma serve` holds many readers while a run writes.

    python -m benchmarks.serve --seconds 300 --connections 200
    python -m benchmarks.serve --seconds 60 --connections 50 --streams 200

A server in a process of its own serves a run that another process writes to (21,000 rows, and 71
more with a flush twice a second) and a few runs that have ended. `wrk` asks for pages and data over
kept connections, as fast as it gets answers; where it is missing, this process does. Event streams
are held open meanwhile, and one reader measures how long after a flush its rows can be read.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np

from joma.runs import Run

_METRICS = (
    "attention_entropy",
    "attention_effective",
    "stable_rank",
    "gradient_energy",
    "mlp_zero",
)

_STEPS_BEFORE = 300
"""Steps of the live run when it begins to be watched: some 20,000 rows."""

_WRK_SCRIPT = """
local paths = { %s }
local next = 0
request = function()
  next = next %% #paths + 1
  return wrk.format("GET", paths[next])
end
wrk.headers["Accept-Encoding"] = "gzip"
%s
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    '{"requests": %%d, "seconds": %%f, "bytes": %%d, "connect": %%d, "read": %%d, "write": %%d, ' ..
    '"status": %%d, "timeout": %%d, "p50": %%f, "p99": %%f, "max": %%f}\\n',
    summary.requests, summary.duration / 1e6, summary.bytes, e.connect, e.read, e.write,
    e.status, e.timeout, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    latency.max / 1e3))
end
"""


def write_ended(root: Path, name: str, rows: int) -> None:
    run = Run.create("ended", {"lr": 1e-3}, out=root / name)
    layers, rng = 10, np.random.default_rng(0)
    steps = np.arange(rows // (layers * len(_METRICS)))
    for metric in _METRICS:
        for layer in range(layers):
            values = np.cumsum(rng.normal(size=(len(steps), 1)), axis=0)
            run.metrics.append_many(steps, metric, values, module=f"h.{layer}", layer=layer)
    run.metrics.append_many(steps, "loss", np.exp(-steps / 100)[:, None] + 2)
    run.metrics.compact()
    run.write_json("outcome", {"status": "done"})


def write_live(folder: Path, seconds: float, every: float) -> None:
    """Write a run, and the time of each flush to standard output."""
    run = Run.create("live", {"lr": 1e-3}, out=folder)
    rng = np.random.default_rng(1)
    for metric in _METRICS:
        for layer in range(14):
            values = rng.normal(size=(_STEPS_BEFORE, 1))
            run.metrics.append_many(
                np.arange(_STEPS_BEFORE), metric, values, module=f"h.{layer}", layer=layer
            )
    end, step = time.time() + seconds, _STEPS_BEFORE
    with run.locked():
        run.write_json("outcome", {"status": "running"})
        while time.time() < end:
            run.metrics.append(step, "loss", 2 + float(np.exp(-step / 100)))
            for metric in _METRICS:
                for layer in range(14):
                    value = float(rng.normal())
                    run.metrics.append(step, metric, value, module=f"h.{layer}", layer=layer)
            run.metrics.flush()
            print(step, time.time(), flush=True)
            if step % 200 == 199:
                run.metrics.compact()
            step += 1
            time.sleep(every)
        run.metrics.compact()
        run.write_json("outcome", {"status": "done"})


@contextlib.contextmanager
def started(*words: str, read: bool = True) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(words, stdout=subprocess.PIPE if read else None, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            print(f"{words[-1]} did not end within 10 s")
            process.kill()
        if process.stdout is not None:
            process.stdout.close()


def rss(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


def cpu_seconds(pid: int) -> float:
    """Return what a process computed so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def hold_stream(port: int, heard: list[int]) -> None:
    """Hold a stream of events open, and count what comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    number = len(heard)
    heard.append(0)
    try:
        while line := await reader.readline():
            heard[number] += line.startswith(b"event: change")
    finally:
        writer.close()


async def measure_delay(port: int, id: str, flushed: dict[int, float], delays: list[float]) -> None:
    """Ask for a run whenever it is said to have changed; note how old its last rows are."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    seen = max(flushed, default=-1)
    try:
        while line := await reader.readline():
            if not line.startswith(b"data: ") or json.loads(line[6:])["run"] != id:
                continue
            payload = await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}/api/runs/{id}")
            now, last = time.time(), payload["summary"].get("last_step", -1)
            delays += [now - flushed[step] for step in range(seen + 1, last + 1) if step in flushed]
            seen = max(seen, last)
    finally:
        writer.close()


def fetch(url: str) -> Any:
    with urlopen(url, timeout=30) as answer:
        return json.load(answer)


async def read_flushes(writer: subprocess.Popen[str], flushed: dict[int, float]) -> None:
    assert writer.stdout is not None
    while line := await asyncio.to_thread(writer.stdout.readline):
        step, when = line.split()
        flushed[int(step)] = float(when)


async def sample(pid: int, seen: list[tuple[float, float]]) -> None:
    start = time.monotonic()
    while True:
        seen.append((time.monotonic() - start, rss(pid)))
        await asyncio.sleep(1)


async def with_wrk(port: int, paths: list[str], options: argparse.Namespace) -> dict[str, float]:
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        pause = f"delay = function() return {options.pause * 1000:.0f} end" if options.pause else ""
        script.write(_WRK_SCRIPT % (", ".join(f'"{path}"' for path in paths), pause))
        script.flush()
        process = await asyncio.create_subprocess_exec(
            *("wrk", "-t", "1", "-c", str(options.connections), "-d", f"{options.seconds}s"),
            *("--timeout", "10s", "-s", script.name, f"http://127.0.0.1:{port}"),
            stdout=subprocess.PIPE,
        )
        out, _ = await process.communicate()
    return json.loads(out.decode().splitlines()[-1])


async def without_wrk(port: int, paths: list[str], options: argparse.Namespace) -> dict[str, float]:
    """Ask as `wrk` does, in this process."""
    took: list[float] = []
    counts = {"connect": 0, "read": 0, "write": 0, "status": 0, "timeout": 0, "bytes": 0}
    end = time.monotonic() + options.seconds

    async def ask(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < end:
            number += 1
            path, begun = paths[number % len(paths)], time.monotonic()
            head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: gzip\r\n\r\n"
            writer.write(head.encode())
            answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = re.search(r"content-length: (\d+)", answer)
            counts["bytes"] += len(await reader.readexactly(int(length[1]) if length else 0))
            counts["status"] += " 200 " not in answer.split("\r\n")[0]
            took.append(time.monotonic() - begun)
            await asyncio.sleep(options.pause)
        writer.close()

    await asyncio.gather(*(ask(number) for number in range(options.connections)))
    p50, p99 = (float(np.percentile(took, it)) * 1e3 for it in (50, 99))
    longest = max(took) * 1e3
    return {"requests": len(took), "seconds": options.seconds, **counts} | {
        "p50": p50, "p99": p99, "max": longest}  # fmt: skip


async def measure(port: int, pid: int, writer: Any, options: argparse.Namespace) -> None:
    base = f"http://127.0.0.1:{port}"
    while len(runs := fetch(f"{base}/api/runs")["runs"]) < options.runs + 1:
        await asyncio.sleep(0.2)
    live = next(run["id"] for run in runs if run["name"] == "live")
    ended = next(run["id"] for run in runs if run["name"] == "ended")
    paths = ["/", "/api/runs", f"/runs/{live}", f"/api/runs/{live}", f"/api/runs/{ended}"]
    paths = [path for path in paths if not options.only or path.startswith(options.only)]
    flushed: dict[int, float] = {}
    delays: list[float] = []
    heard: list[int] = []
    seen: list[tuple[float, float]] = []
    background = [
        asyncio.create_task(it)
        for it in (
            read_flushes(writer, flushed),
            sample(pid, seen),
            *(hold_stream(port, heard) for _ in range(options.streams)),
        )
    ]
    await asyncio.sleep(2)  # what was flushed before anybody listened does not count
    background.append(asyncio.create_task(measure_delay(port, live, flushed, delays)))
    load = with_wrk if shutil.which("wrk") and not options.no_wrk else without_wrk
    cpu, begun = cpu_seconds(pid), time.monotonic()
    result = await load(port, paths, options)
    result["cpu"] = (cpu_seconds(pid) - cpu) / (time.monotonic() - begun)
    for task in background:
        task.cancel()
    with contextlib.suppress(ProcessLookupError):
        writer.terminate()
    show(result, seen, delays, heard, options)


def show(
    result: dict[str, float],
    seen: list[tuple[float, float]],
    delays: list[float],
    heard: list[int],
    options: argparse.Namespace,
) -> None:
    errors = {it: result[it] for it in ("connect", "read", "write", "status", "timeout")}
    rate = result["requests"] / result["seconds"]
    print(f"{options.connections} connections, {options.streams} streams, {options.seconds} s, "
          f"load averages {', '.join(f'{it:.1f}' for it in os.getloadavg())}")  # fmt: skip
    print(f"requests {result['requests']:,.0f}, {rate:,.0f}/s, {result['bytes'] / 2**20:,.0f} MiB")
    print(f"the server had {result['cpu'] * 100:.0f}% of a core")
    print(f"errors {sum(errors.values()):.0f} {errors}")
    print(f"latency p50 {result['p50']:.1f} ms, p99 {result['p99']:.1f} ms, "
          f"max {result['max']:.1f} ms")  # fmt: skip
    warm = [value for second, value in seen if second >= options.warm_up][:5]
    last = [value for _, value in seen][-5:]
    before, after = float(np.median(warm)), float(np.median(last))
    grown, most = (after / before - 1) * 100, max(it for _, it in seen)
    print(f"memory {before:.1f} MiB after {options.warm_up:.0f} s, {after:.1f} MiB at the end, "
          f"{grown:+.2f}%, most {most:.1f} MiB")  # fmt: skip
    if delays:
        p50, p99 = np.percentile(delays, [50, 99])
        print(f"rows readable after their flush: p50 {p50:.2f} s, p99 {p99:.2f} s, "
              f"max {max(delays):.2f} s, {len(delays)} flushes")  # fmt: skip
    if heard:
        print(f"events heard by each stream: {min(heard)} to {max(heard)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--streams", type=int, default=0, help="Open event streams.")
    parser.add_argument("--runs", type=int, default=5, help="Runs that have ended.")
    parser.add_argument("--rows", type=int, default=20_000, help="Rows of each of them.")
    parser.add_argument("--every", type=float, default=0.5, help="Seconds between flushes.")
    parser.add_argument("--warm-up", type=float, default=20, help="Seconds before memory counts.")
    parser.add_argument("--pause", type=float, default=0, help="Seconds a reader waits in between.")
    parser.add_argument("--only", default="", help="Ask only for addresses that begin so.")
    parser.add_argument("--no-wrk", action="store_true")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_live(options.write, options.seconds, options.every)
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number in range(options.runs):
            write_ended(root, f"ended-{number}", options.rows)
        writing = ("-m", "benchmarks.serve", "--write", str(root / "live"), "--every",
                   str(options.every), "--seconds", str(options.seconds + 30))  # fmt: skip
        serving = ("-m", "joma", "serve", folder, "--port", "0")
        with (
            started(sys.executable, *serving) as server,
            started(sys.executable, *writing) as writer,
        ):
            assert server.stdout is not None
            found = re.search(r":(\d+)/", server.stdout.readline())
            assert found is not None
            asyncio.run(measure(int(found[1]), server.pid, writer, options))


if __name__ == "__main__":
    main()
