"""Theorem 5 and Eqn 8 of JoMA: how often two tokens of a hierarchy occur together."""

from joma.experiments._experiment import Experiment

EXPERIMENT = Experiment(
    name="cooccurrence",
    title="Tokens co-occur the more, the lower their common ancestor stands",
    published=(
        "two tokens co-occur the less, the higher their common ancestor (Theorem 5), "
        "and at rate 1 − H/L for ρ, ρ₀ → 1 (Eqn 8)."
    ),
    run="joma.experiments.cooccurrence.figure:reproduce",
    seconds=4,
)
