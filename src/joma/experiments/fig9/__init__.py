"""Fig. 9 of JoMA: the curve G(y), and for which clusters a line through 0 meets it twice."""

from joma.experiments._experiment import Experiment

EXPERIMENT = Experiment(
    name="fig9",
    title="A node rests where a line through 0 meets G(y) twice: for equal Gaussians, nowhere",
    published=(
        "G(y) = F(θ₁⁻¹(y)) rises from 0 to infinity, and lines G = ky can meet it twice, which "
        "gives critical points."
    ),
    run="joma.experiments.fig9.figure:reproduce",
    seconds=3,
)
