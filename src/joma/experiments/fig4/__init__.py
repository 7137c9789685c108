"""Fig. 4 of JoMA: salient components are learned first, entropy drops and bounces back."""

from joma.experiments._experiment import Experiment

EXPERIMENT = Experiment(
    name="fig4",
    title="Salient components are learned first: attention grows sparse, then dense again",
    published=(
        "components with a large target are learned first, the others follow; the attention's "
        "entropy drops and then rebounds."
    ),
    run="joma.experiments.fig4.figure:reproduce",
    seconds=4,
)
