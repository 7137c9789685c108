"""How many recorded trainings bounce, by the threshold of a bounce.

    python -m benchmarks.bounces FOLDER

FOLDER holds the recorded curves that `joma reproduce fig6 --reference` takes. A network bounces
where the attention of a layer falls by the threshold to its lowest and ends by as much above it
(`joma.train.findings.attention_bounce`); it is counted in layer 0 alone and in any layer.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from joma.experiments.language import _reference
from joma.experiments.language._curves import Curves
from joma.experiments.language._summary import THRESHOLDS
from joma.train.findings import attention_bounce

GROUPS: tuple[tuple[str, Callable[[Curves], bool]], ...] = (
    ("1 and 2 layers", lambda own: own.depth <= 2),
    ("1 and 2 layers, rate 5e-5 and 1e-4", lambda own: own.depth <= 2 and 5e-5 <= own.rate <= 1e-4),
    ("3 and 4 layers", lambda own: 3 <= own.depth <= 4),
    ("5 to 10 layers", lambda own: own.depth >= 5),
    ("5 to 10 layers, rate 1e-2", lambda own: own.depth >= 5 and own.rate == 1e-2),
)


def count(curves: list[Curves], least: float, first_only: bool) -> int:
    """Return how many networks bounce."""
    return sum(
        any(
            attention_bounce(own.steps, layer[:, seed], least=least) is not None
            for layer in own.entropy[: 1 if first_only else None]
        )
        for own in curves
        for seed in range(own.seeds)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    recorded = _reference.read(parser.parse_args().folder)
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
