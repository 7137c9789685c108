"""Attack claims and their twins; `benchmarks.adversary` says how."""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import benchmarks.adversary as package
from benchmarks.adversary._twin import Twin
from joma.errors import JomaError
from joma.experiments.claims import CLAIMS, Claim
from joma.experiments.claims.adversary import attack, ratio_of
from joma.experiments.claims.claim import Point, check

DRAWS = 400
"""Points by which the share of the domain on which a twin is wrong is estimated."""


def twins(topic: str | None = None) -> list[Twin]:
    """Return the twins of a topic, or of all."""
    found: list[Twin] = []
    for path in sorted(Path(__file__).parent.glob("twins_*.py")):
        if topic is None or path.stem == f"twins_{topic}":
            found += importlib.import_module(f"benchmarks.adversary.{path.stem}").TWINS
    return found


def share_wrong(
    twin: Twin, claim: Claim, draws: int = DRAWS, seconds: float = 5.0
) -> tuple[int, int]:
    """Return at how many of some random points of the domain a twin is wrong, and of how many."""
    import time

    generator, search = np.random.default_rng(1), twin.searched(claim)
    wrong = tried = 0
    end = time.monotonic() + seconds
    for _ in range(draws):
        try:
            with np.errstate(all="ignore"):
                point = Point(search.draw(generator), int(generator.integers(2**32)))
                ratio = ratio_of(search.measure(twin.formula, point))
        except JomaError:
            continue
        except Exception:
            ratio = np.inf
        tried, wrong = tried + 1, wrong + (not ratio <= 1)
        if time.monotonic() > end:
            break
    return wrong, tried


def judge(twin: Twin, claim: Claim, seconds: float, seed: int) -> dict[str, Any]:
    """Return whether a twin passes plain verification, how much of it is wrong, and the attack."""
    plain = check(dataclasses.replace(claim, derived=twin.formula)).derived.holds
    wrong, tried = share_wrong(twin, claim)
    hunted = dataclasses.replace(claim, search=twin.searched(claim))
    found = attack(hunted, seconds, seed=seed, formula=twin.formula)
    return {
        "twin": claim.id,
        "wrong": twin.wrong,
        "was_ours": twin.was_ours,
        "passes_plain": plain,
        "should_pass": twin.plain,
        "share_wrong": wrong / max(tried, 1),
        "draws": tried,
        **found.as_json(),
    }


def main() -> int:
    """Attack what was chosen; return 1 if a claim falls or a twin stands."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.adversary",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--topic", help="a topic of claims, such as nonlinear")
    parser.add_argument("--claim", action="append", help="one claim")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--twins-only", action="store_true")
    parser.add_argument("--claims-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    chosen = [one for one in CLAIMS if given.claim is None or one.id in given.claim]
    if given.topic:
        ids = {twin.claim for twin in twins(given.topic)}
        chosen = [one for one in chosen if one.id in ids]
    records, bad = [], 0
    for claim in chosen:
        if claim.search is None or given.twins_only:
            continue
        record = attack(claim, given.seconds, seed=given.seed).as_json()
        bad += record["violated"]
        records.append(record)
        _show(record, given.json)
    by_id = {one.id: one for one in chosen}
    for twin in [] if given.claims_only else twins(given.topic):
        if twin.claim in by_id:
            record = judge(twin, by_id[twin.claim], given.seconds, given.seed)
            bad += not record["violated"] or record["passes_plain"] != record["should_pass"]
            records.append(record)
            _show(record, given.json)
    missing = [one.id for one in chosen if one.search is None and not one.fixed]
    if missing:
        print(f"neither search nor fixed: {', '.join(missing)}", file=sys.stderr)
    if given.json:
        print(json.dumps(records, indent=1))
    return int(bad > 0)


def _show(record: dict[str, Any], quiet: bool) -> None:
    if quiet:
        return
    name = f"twin of {record['twin']}" if "twin" in record else record["claim"]
    word = "FALLS" if record["violated"] else "stands"
    ratio = "∞" if record["ratio"] is None else f"{record['ratio']:.3g}"
    few = "" if record["enough"] else " (too few)"
    line = f"{name:<36} {word:<6} ratio {ratio:<9} {record['evaluations']} points{few}"
    if "twin" in record:
        plain = "passes" if record["passes_plain"] else "FAILS"
        line += f", {plain} plain, wrong on {record['share_wrong']:.1%} of {record['draws']}"
    print(f"{line}, {record['seconds']:.1f} s; {record['refused']} refused", flush=True)
    if record["violated"] or record["ratio"] is None or record["ratio"] > 0.3:
        shown = json.dumps(record["parameters"])
        print(f"    {shown[:300]} {record['failure'][:200]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
