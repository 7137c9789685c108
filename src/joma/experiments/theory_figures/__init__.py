"""Figures that need no training of networks: the papers' theory, computed in seconds."""

from joma.experiments._experiment import Experiment

FIG2 = Experiment(
    name="fig2",
    title="The invariant of Theorem 1 predicts softmax attention, better than its halves",
    published=(
        "the estimate from the weights correlates highly with the attention logits in both data "
        "sets, while each of its two parts alone does not."
    ),
    run="joma.experiments.theory_figures.linear_block:reproduce_fig2",
    seconds=4,
)
FIG3 = Experiment(
    name="fig3",
    title="Linear activation: a few components of v₀ keep growing, the rest saturate",
    published=(
        "after convergence only some components of v₀ have grown; the remaining ones saturate "
        "after an initial growth."
    ),
    run="joma.experiments.theory_figures.linear_block:reproduce_fig3",
    seconds=3,
)
FIG4 = Experiment(
    name="fig4",
    title="Salient components are learned first: attention grows sparse, then dense again",
    published=(
        "components with a large target are learned first, the others follow; the attention's "
        "entropy drops and then rebounds."
    ),
    run="joma.experiments.theory_figures.fig4:reproduce",
    seconds=4,
)
FIG9 = Experiment(
    name="fig9",
    title="A node rests where a line through 0 meets G(y) twice: for equal Gaussians, nowhere",
    published=(
        "G(y) = F(θ₁⁻¹(y)) rises from 0 to infinity, and lines G = ky can meet it twice, which "
        "gives critical points."
    ),
    run="joma.experiments.theory_figures.fig9:reproduce",
    seconds=3,
)
COOCCURRENCE = Experiment(
    name="cooccurrence",
    title="Tokens co-occur the more, the lower their common ancestor stands",
    published=(
        "two tokens co-occur the less, the higher their common ancestor (Theorem 5), "
        "and at rate 1 − H/L for ρ, ρ₀ → 1 (Eqn 8)."
    ),
    run="joma.experiments.theory_figures.cooccurrence:reproduce",
    seconds=4,
)
SCAN_SNAP = Experiment(
    name="scan-snap",
    title="Attention scans all tokens, snaps to the discriminating ones, and freezes",
    published=(
        "common tokens fall, distinct ones rise, the frequent ones faster; B grows as ln t while "
        "scanning and as ln ln t after t₀ = O(2K ln M/η_Y), a larger η_Y leaving attention denser "
        "(Scan&Snap, Theorems 3 and 4)."
    ),
    run="joma.experiments.theory_figures.scan_snap:reproduce",
    seconds=7,
)
