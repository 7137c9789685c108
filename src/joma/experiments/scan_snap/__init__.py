"""The talk's Scan&Snap: attention scans the tokens, snaps, and freezes."""

from joma.experiments._experiment import Experiment

EXPERIMENT = Experiment(
    name="scan-snap",
    title="Attention scans all tokens, snaps to the discriminating ones, and freezes",
    published=(
        "common tokens fall, distinct ones rise, the frequent ones faster; B grows as ln t while "
        "scanning and as ln ln t after t₀ = O(2K ln M/η_Y), a larger η_Y leaving attention denser "
        "(Scan&Snap, Theorems 3 and 4)."
    ),
    run="joma.experiments.scan_snap.figure:reproduce",
    seconds=7,
)
