"""How long it takes to import parts of joma, next to torch and NumPy alone, in turns.

    python -m benchmarks.imports [--rounds 11] [--json]

Every import is a process of its own, started when the files are in the system's cache; medians of
the time from start to end of the process, less that of one which imports nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

ALONE = "import torch, numpy"
PARTS = ("joma.probes.attention", "joma.probes.spectrum", "joma.optim", "joma.train")


def seconds(code: str) -> float:
    """Return how long a process takes that runs this code."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def measured(rounds: int) -> dict[str, Any]:
    """Return the median seconds of torch and NumPy, and what each part adds, as a share of them."""
    codes = ["pass", ALONE, *(f"{ALONE}, {part}" for part in PARTS)]
    for code in codes:
        seconds(code)  # compiles Python's files
    times = [[seconds(code) for code in codes] for _ in range(rounds)]
    nothing, alone, *_ = (statistics.median(column) for column in zip(*times, strict=True))
    added = {
        part: statistics.median(row[place] - row[1] for row in times)
        for place, part in enumerate(PARTS, 2)
    }
    base = alone - nothing
    rows = [{"part": part, "s": it, "share": it / base} for part, it in added.items()]
    return {"torch and NumPy s": base, "added": rows}


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--rounds", type=int, default=11)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    found = measured(given.rounds)
    if given.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    print(f"torch and NumPy: {found['torch and NumPy s']:.2f} s")
    for row in found["added"]:
        print(f"{row['part']}: {row['s']:.2f} s more, {row['share']:.2f} of it")


if __name__ == "__main__":
    main()
