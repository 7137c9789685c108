"""Commands of the evidence; `benchmarks.findings` says which there are."""

import argparse
import json
import sys
from pathlib import Path

import benchmarks.findings as package
from benchmarks.findings._judge import judge_half
from benchmarks.findings._run import run

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
    given = vars(parser.parse_args())
    if given.pop("command") == "train":
        left = run(given.pop("out"), **given)
        print(f"{left} cases left" if left else "all cases are there")
    else:
        results = [judge_half(given["folder"], half) for half in HALVES[given["half"]]]
        print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
