"""`joma probe` as a person runs it, against a script that only loads the model and reads the text.

    python -m benchmarks.probe_command MODEL [--windows 20] [--window 512] [--rounds 3] [--json]

Both are processes of their own, in turns, from their start to their end: imports, loading, forward
passes, and on one side tokenizer, measurements, run folder and figure. The script loads the model
with transformers and reads random tokens in batches of the same size, without the output layer. The
ratio is that of the medians; processor time is printed too, for a machine that does other work.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_PLAIN = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
source, windows, window, batch = Path(sys.argv[1]), *map(int, sys.argv[2:5])
options = {"gguf_file": source.name} if source.suffix == ".gguf" else {}
folder = source.parent if source.suffix == ".gguf" else source
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
tokens = torch.randint(model.config.vocab_size, (windows, window))
with torch.inference_mode():
    for part in tokens.split(batch):
        model.base_model(part, use_cache=False)
"""
"""Load and forward passes, and nothing else."""


def run(command: list[str]) -> tuple[float, float]:
    """Run a process; return its seconds and its seconds of processor time."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed: {said.decode()[-500:]}")
    return time.perf_counter() - start, used.ru_utime + used.ru_stime


def phases(model: str, windows: int, window: int) -> dict[str, float]:
    """Return where the seconds of a probe go, by what it says it does, in this process."""
    start = time.perf_counter()
    from joma.analysis.probing import Probing, measure
    from joma.data.text import read_text

    seconds = {"import": time.perf_counter() - start}
    last = ["import", time.perf_counter()]

    def report(words: str, done: int, total: int) -> None:
        now = time.perf_counter()
        seconds[last[0]] = seconds.get(last[0], 0.0) + now - last[1]
        last[:] = [words.split()[0], now]

    probing = Probing(windows=windows, window=window)
    measure(model, read_text("embedded"), probing, progress=report)
    report("end", 1, 1)
    return seconds


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("model", help="a GGUF file or a folder with a decoder")
    arguments.add_argument("--windows", type=int, default=20)
    arguments.add_argument("--window", type=int, default=512)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--phases", action="store_true", help="only where the time goes")
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    result: dict[str, Any]
    if given.phases:
        result = phases(given.model, given.windows, given.window)
    else:
        result = compared(given.model, given.windows, given.window, given.rounds)
    if given.json:
        print(json.dumps(result, indent=1))
    else:
        print(", ".join(f"{name} {value:.4g}" for name, value in result.items()))


def compared(model: str, windows: int, window: int, rounds: int) -> dict[str, Any]:
    """Return seconds of both sides and their ratio."""
    sizes = [str(windows), str(window), str(max(1, 2048 // window))]
    plain = [sys.executable, "-c", _PLAIN, model, *sizes]
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "probe": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            out = str(Path(folder) / str(number))
            sized = ["--windows", str(windows), "--window", str(window)]
            probe = [sys.executable, "-m", "joma", "probe", model, *sized, "--out", out]
            times["plain"].append(run(plain))
            times["probe"].append(run(probe))
    wall = {name: statistics.median(it[0] for it in found) for name, found in times.items()}
    used = {name: statistics.median(it[1] for it in found) for name, found in times.items()}
    return {
        "windows": windows,
        "tokens each": window,
        "load and forward s": wall["plain"],
        "joma probe s": wall["probe"],
        "ratio": wall["probe"] / wall["plain"],
        "load and forward, processor s": used["plain"],
        "joma probe, processor s": used["probe"],
        "processor ratio": used["probe"] / used["plain"],
    }


if __name__ == "__main__":
    main()
