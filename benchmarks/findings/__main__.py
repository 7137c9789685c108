"""Commands of the evidence; `benchmarks.findings` says which there are."""

import argparse
import json
import sys
from pathlib import Path

import benchmarks.findings as package
from benchmarks.findings._judge import as_text, judge_half, truth_table
from benchmarks.findings._run import best_of, run
from benchmarks.findings._store import LARGEST, pack, read_all, unpack

HALVES = {"choose": ["choose"], "held-out": ["held out"], "both": ["choose", "held out"]}


def main() -> int:
    """Run one of the commands; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.findings",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train all cases that are not there yet")
    train.add_argument("--out", type=Path, required=True, metavar="DIR")
    train.add_argument("--workers", type=int, default=2)
    train.add_argument("--only", default="*", metavar="PATTERN", help='names, "sick-llama-*"')
    train.add_argument("--scale", choices=["small", "full", "large"], default="full")
    train.add_argument("--device", default="cpu")
    train.add_argument("--seconds", type=float, metavar="LIMIT", help="stop after these")
    judge = commands.add_parser("judge", help="apply the rules to what was trained")
    judge.add_argument("folder", type=Path, metavar="DIR")
    judge.add_argument("--half", choices=list(HALVES), default="choose")
    judge.add_argument("--json", action="store_true")
    table = commands.add_parser("table", help="show what each training came to")
    table.add_argument("folder", type=Path, metavar="DIR")
    packing = commands.add_parser("pack", help="make one archive of a folder")
    packing.add_argument("folder", type=Path, metavar="DIR")
    packing.add_argument("archive", type=Path, metavar="FILE")
    unpacking = commands.add_parser("unpack", help="make a folder of an archive")
    unpacking.add_argument("archive", type=Path, metavar="FILE")
    unpacking.add_argument("folder", type=Path, metavar="DIR")
    given = parser.parse_args()
    match given.command:
        case "train":
            left = run(
                given.out,
                workers=given.workers,
                only=given.only,
                scale=given.scale,
                seconds=given.seconds,
                device=given.device,
            )
            print(f"{left} cases left" if left else "all cases are there")
        case "judge":
            results = [judge_half(given.folder, half) for half in HALVES[given.half]]
            if given.json:
                print(json.dumps(results, indent=1))
            else:
                print("\n\n".join(map(as_text, results)))
        case "table":
            print(truth_table(read_all(given.folder), best_of(given.folder)))
        case "pack":
            size = pack(given.folder, given.archive)
            print(f"{size / 2**20:.1f} MiB in {given.archive}")
            return int(size > LARGEST)
        case "unpack":
            print(f"{unpack(given.archive, given.folder)} cases in {given.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
