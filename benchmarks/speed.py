"""Every statement of speed in README and docs, measured again: claim, measured, mark, floor.

    python -m benchmarks.speed [--device auto|cpu|cuda] [--only NAME …] [--list] [--keep] [--json]

A claim is one line of `benchmarks.speed_claims`: where it stands, the command that measures both of
its sides, the mark it must reach and the floor below which nothing can be. Claims that share a
command run it once. What was measured replaces the last result in `results.json`, from which
`RESULTS.md` is written; claims of the other device keep theirs, with their date. `--list` measures
nothing, `--keep` writes nothing. Models are looked for in the folder that JOMA_MODELS names.

Exits with 1 where a command failed or a mark was missed. No test depends on a time.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed_claims import CLAIMS, SpeedClaim

HERE = Path(__file__).parent
RECORD, PAGE = HERE / "results.json", HERE / "RESULTS.md"
_SECONDS = 3600
"""A command that takes longer has failed."""

_HEAD = """# Benchmark results

Written by `python -m benchmarks.speed` from `benchmarks/results.json`: every statement of speed in
README and docs with its last result. Ratios are from one run that timed both sides; timing never
fails a test. Rows of GPUs were not measured by this command but by those that they name, and were
taken over by hand from [MEASUREMENTS.md](MEASUREMENTS.md), which also has conditions, spread over
repeated runs and what was tried. The counting is in [docs/performance.md](../docs/performance.md).
The marks of `report`, `sparse-mlp-cpu` and `train-cpu` were set after results were known: they
tell when something becomes slower, not that a goal was reached.
"""


def read_record() -> dict[str, dict[str, Any]]:
    """Return the last result of each claim, by its name."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def page(record: Mapping[str, Mapping[str, Any]]) -> str:
    """Return RESULTS.md."""
    parts = [_HEAD]
    for device, title in (("cpu", "On a CPU"), ("cuda", "On a GPU")):
        parts.append(
            f"\n## {title}\n\n{_table([it for it in CLAIMS if it.device == device], record)}"
        )
    return "".join(parts)


def _table(claims: Iterable[SpeedClaim], record: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| claim | measured | mark | floor | when, where, command |", "|---|---|---|---|---|"]
    for claim in claims:
        found = record.get(claim.name)
        measured, where = "not measured", f"`{claim.shown_command}`"
        if found is not None:
            verdict = "" if claim.is_met(found["value"]) else ", **missed**"
            measured = f"{claim.written(found['value'])}{verdict}"
            where = f"{found['date']}, {found['machine']}; `{found['command']}`"
        lines.append(
            f"| {claim.sentence} | {measured} | {claim.mark} | {claim.floor or '–'} | {where} |"
        )
    return "\n".join(lines) + "\n"


def measured(command: Sequence[str]) -> Any:
    """Run a benchmark in a process of its own and return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(said[-1] if said else f"it ended with {done.returncode}")
    return json.loads(done.stdout)


def machine(device: str) -> str:
    """Return what the numbers are of: device, versions, and how busy the machine is."""
    import torch

    versions = f"torch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}"
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, {versions}"
    busy = f", load average {os.getloadavg()[0]:.1f} before" if hasattr(os, "getloadavg") else ""
    return f"{os.cpu_count()} cores, {platform.machine()}, {versions}{busy}"


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    arguments.add_argument("--only", nargs="+", choices=[it.name for it in CLAIMS], metavar="NAME")
    arguments.add_argument("--list", action="store_true", help="the last results, nothing run")
    arguments.add_argument("--keep", action="store_true", help="leave the files as they are")
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    record = read_record()
    if given.list:
        _show(CLAIMS, record, given.json)
        return
    import torch

    device = given.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = [it for it in CLAIMS if it.device == device and it.name in (given.only or it.name)]
    commands: dict[tuple[str, ...], list[SpeedClaim]] = {}
    for claim in chosen:
        commands.setdefault(claim.command, []).append(claim)
    missed = 0
    new: dict[str, dict[str, Any]] = {}
    for command, claims in commands.items():
        where, start = machine(device), time.perf_counter()
        try:
            found = measured([_with_model(it) for it in command])
            values = {claim.name: float(claim.value(found)) for claim in claims}
        except Exception as error:
            print(f"{claims[0].shown_command}: {error}", file=sys.stderr, flush=True)
            missed += len(claims)
            continue
        for claim in claims:
            new[claim.name] = {
                "value": values[claim.name],
                "date": datetime.date.today().isoformat(),
                "machine": where,
                "command": claim.shown_command,
                "seconds": round(time.perf_counter() - start, 1),
            }
            missed += not claim.is_met(values[claim.name])
        if not given.json:
            _show(claims, new, as_json=False)
        if not given.keep:
            record |= new
            _write(RECORD, json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
            _write(PAGE, page(record))
    if given.json:
        _show(chosen, new, as_json=True)
    raise SystemExit(1 if missed else 0)


def _with_model(word: str) -> str:
    if not word.startswith("MODEL:"):
        return word
    path = Path(os.environ.get("JOMA_MODELS", "models")) / word.removeprefix("MODEL:")
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; JOMA_MODELS must name the folder it is in")
    return str(path)


def _write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def _show(
    claims: Sequence[SpeedClaim], record: Mapping[str, Mapping[str, Any]], as_json: bool
) -> None:
    if as_json:
        rows = [{**it.facts(), **record.get(it.name, {"value": None})} for it in claims]
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    for claim in claims:
        found = record.get(claim.name)
        value = "not measured" if found is None else claim.written(found["value"])
        verdict = "" if found is None or claim.is_met(found["value"]) else "  MISSED"
        floor = f", floor {claim.floor}" if claim.floor else ""
        print(f"{claim.name}: {value} (mark {claim.mark}{floor}){verdict}", flush=True)


if __name__ == "__main__":
    main()
