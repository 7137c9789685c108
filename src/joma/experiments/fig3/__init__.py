"""Fig. 3 of JoMA: with linear activation, do a few weights win and the others stop?"""

from joma.experiments._experiment import Experiment

EXPERIMENT = Experiment(
    name="fig3",
    title="Linear activation: a few components of v₀ keep growing, the rest saturate",
    published=(
        "after convergence only some components of v₀ have grown; the remaining ones saturate "
        "after an initial growth."
    ),
    run="joma.experiments.fig3.figure:reproduce",
    seconds=3,
)
