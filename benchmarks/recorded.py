"""What the recorded trainings of Fig. 6 and 8 show by themselves.

    python -m benchmarks.recorded FOLDER

FOLDER holds the recorded curves that `joma reproduce fig6 --reference` takes.

1. How many bounce, by the threshold: a network bounces where the attention of a layer falls by the
   threshold to its lowest and ends by as much above it (`joma.train.findings.attention_bounce`); it
   is counted in layer 0 alone and in any layer.
2. How many collapse (`attention_collapse`), by learning rate.
3. How far recorded seeds are from each other at learning rate 1e-4, by depth: the root mean square
   over steps of the difference of two seeds' validation losses, mean over pairs, and that divided
   by √3, which is what the means of three seeds of two such runs would differ by.
"""

import argparse
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from joma.experiments.language.curves import EntropyCurves, Key, read_recorded
from joma.train.findings import attention_bounce

GROUPS: tuple[tuple[str, Callable[[EntropyCurves], bool]], ...] = (
    ("1 and 2 layers", lambda own: own.depth <= 2),
    ("1 and 2 layers, rate 5e-5 and 1e-4", lambda own: own.depth <= 2 and 5e-5 <= own.rate <= 1e-4),
    ("3 and 4 layers", lambda own: 3 <= own.depth <= 4),
    ("5 to 10 layers", lambda own: own.depth >= 5),
    ("5 to 10 layers, rate 1e-2", lambda own: own.depth >= 5 and own.rate == 1e-2),
)


THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
"""Nats of fall and of rise at which bounces are counted."""


def count(curves: list[EntropyCurves], least: float, first_only: bool) -> int:
    """Return how many networks bounce."""
    return sum(
        any(
            attention_bounce(own.steps, layer[:, seed], least=least) is not None
            for layer in own.entropy[: 1 if first_only else None]
        )
        for own in curves
        for seed in range(own.seeds)
    )


def apart(own: EntropyCurves) -> float:
    """Return how far the validation losses of two seeds are apart, after the first measurement."""
    pairs = itertools.combinations(range(own.seeds), 2)
    gaps = [own.loss[1:, a] - own.loss[1:, b] for a, b in pairs]
    return float(np.mean([np.sqrt(np.mean(gap**2)) for gap in gaps]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    recorded = read_recorded(parser.parse_args().folder)
    print_bounces(recorded)
    print("\n| learning rate | networks with a layer that collapses |\n|---|---|")
    for rate in sorted({rate for _, rate in recorded}):
        curves = [own for own in recorded.values() if own.rate == rate]
        found = sum(own.collapses for own in curves)
        print(f"| {rate:g} | {found} of {sum(own.seeds for own in curves)} |")
    print("\n| layers | two seeds | means of three |\n|---|---|---|")
    for (depth, rate), own in sorted(recorded.items()):
        if rate == 1e-4 and own.seeds > 1:
            gap = apart(own)
            print(f"| {depth} | {gap:.4f} | {gap / 3**0.5:.4f} |")


def print_bounces(recorded: Mapping[Key, EntropyCurves]) -> None:
    """Print how many networks bounce, by threshold."""
    print("| networks | | " + " | ".join(f"{least:g}" for least in THRESHOLDS) + " |")
    print("|---" * (2 + len(THRESHOLDS)) + "|")
    for name, chosen in GROUPS:
        curves = [own for own in recorded.values() if chosen(own)]
        networks = sum(own.seeds for own in curves)
        for where, first_only in (("layer 0", True), ("any layer", False)):
            counts = (str(count(curves, least, first_only)) for least in THRESHOLDS)
            print(f"| {name}, {networks} | {where} | " + " | ".join(counts) + " |")


if __name__ == "__main__":
    main()
