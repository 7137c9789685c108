"""What checkpoints cost a training: with them and without, on the same machine, in turns.

    python -m benchmarks.checkpoints [--device auto|cpu|cuda] [--scale full|small|tiny]
        [--group C20-N2] [--steps 2000] [--every 5] [--rounds 3] [--json]
    python -m benchmarks.checkpoints --write 1

Both sides train the networks of a group of Table 1 with `joma.train.fit`: one never saves, the
other every few seconds. From the difference follows what one checkpoint costs, and the overhead at
the default of a checkpoint every 45 s (a kill then costs at most 60 s). A third side writes the
checkpoints before it continues, as was done before, at the same steps. With `--write` a checkpoint
of so many GiB is written alone, while another thread measures how long it cannot run: that is how
long a training would wait that launches the work of a GPU.

Predicted, before it was measured: on an H200 a state of 5 GB is copied within the GPU in 3 ms and
moved to the host at about 10 GB/s by the thread, which takes some launches' time; 0.05 s for each
checkpoint, 0.1% at the default, where writing first would take 5 to 8 s and 15%. On two CPU cores,
where the thread takes a core from the training while it writes: copying at 5 GB/s and writing with
SHA-256 at 0.5 GB/s make about 2 s for a GB, under 1% for the small networks that are trained there.
"""

import argparse
import json
import platform
import resource
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from joma.experiments import Request
from joma.experiments.table1.printed import GROUPS, SIZES, Table1Networks
from joma.runs import Checkpoints, Run
from joma.train import _checkpointing, fit, loop

NEVER = 1e9
FIRST = 32
"""Steps that do not count."""
DEFAULT_SECONDS = 45.0
"""Between two checkpoints, at the default."""


class _Counting(_checkpointing.CheckpointWriter):
    """Counts checkpoints, and may wait for each."""

    saved = 0
    waits = False

    def save(self, *given: Any, **named: Any) -> None:
        """Save a checkpoint."""
        super().save(*given, **named)
        type(self).saved += 1
        if self.waits:
            self.finish()


class _Clock:
    """Reads the clock at the first steps that count and at the last, once the device is done.

    Args:
        device: That of the training.
    """

    started = ended = 0.0

    def __init__(self, device: str) -> None:
        self._device = device

    def __call__(self, done: int, total: int) -> None:
        """Tell it that steps are done."""
        if (done >= FIRST and not self.started) or done == total:
            if self._device == "cuda":
                torch.cuda.synchronize()
            self.ended = time.perf_counter()
            self.started = self.started or self.ended


def train(group: str, scale: str, device: str, steps: int, every: float) -> dict[str, float]:
    """Return the seconds that training takes, how many checkpoints it saved, and their size.

    Counted from step `FIRST` on, once CUDA graphs are captured, to the last step.
    """
    options = {"learning-rate": None, "hidden": None}
    clock = _Clock(device)
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create("bench", {}, out=Path(folder) / "run", device=device)
        request = Request(device=device, options=options)
        ensemble = Table1Networks(run, GROUPS[group], SIZES[scale], request).ensemble
        state = sum(tensor.nbytes for _, tensor in ensemble.state())
        _Counting.saved = 0
        fit(ensemble, run, steps, checkpoint_seconds=every, progress=clock)
    seconds = clock.ended - clock.started
    return {"seconds": seconds, "checkpoints": _Counting.saved, "state_bytes": state}


def write(gigabytes: float) -> dict[str, float]:
    """Return how long writing a checkpoint takes, and how long it keeps other threads waiting."""
    count = int(gigabytes * 16)
    arrays = {
        str(i): np.random.default_rng(i).random(2**24, dtype=np.float32) for i in range(count)
    }
    longest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder) / "checkpoints")
        thread = threading.Thread(target=checkpoints.save, args=(1, arrays, {}))
        start = last = time.perf_counter()
        thread.start()
        while thread.is_alive():
            time.sleep(1e-3)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": last - start, "longest_pause": longest, "peak_gib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=float, metavar="GiB", help="write one checkpoint alone")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--scale", choices=list(SIZES))
    parser.add_argument("--group", choices=list(GROUPS), default="C20-N2")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=float, default=5.0, help="seconds that a kill may cost")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.write is not None:
        print(json.dumps(write(options.write)))
        return
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = options.scale or ("full" if device == "cuda" else "tiny")
    loop.CheckpointWriter = _Counting  # type: ignore[misc]
    sides = {"without": (NEVER, False), "thread": (options.every, False)}
    sides["waiting"] = (options.every, True)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(options.rounds):  # in turns: a machine that slows down slows all
        for name, (every, waits) in sides.items():
            _Counting.waits = waits
            one = train(options.group, scale, device, options.steps, every)
            found[name].append(one)
            print(name, one, file=sys.stderr, flush=True)
    plain = statistics.median(one["seconds"] for one in found["without"])
    rows = []
    for name, each in found.items():
        seconds = statistics.median(one["seconds"] for one in each)
        count = statistics.median(one["checkpoints"] for one in each)
        cost = (seconds - plain) / count if count else 0.0
        row = {"side": name, "seconds": seconds, "checkpoints": count, "each_s": cost}
        row["overhead_at_default"] = cost / DEFAULT_SECONDS
        rows.append({**row, "all_seconds": [one["seconds"] for one in each]})
    size = found["without"][0]["state_bytes"]
    title = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    if options.json:
        record = {"device": title, "torch": torch.__version__, "state_bytes": size, "rows": rows}
        print(json.dumps({**record, "scale": scale, "group": options.group}))
        return
    print(f"torch {torch.__version__}, {title}, {options.group} {scale}, {size / 1e9:.3g} GB each")
    print("| checkpoints | training | saved | each costs | overhead at the default |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['side']} | {row['seconds']:.2f} s | {row['checkpoints']:.0f} "
            f"| {row['each_s']:.3f} s | {row['overhead_at_default']:.2%} |"
        )


if __name__ == "__main__":
    main()
