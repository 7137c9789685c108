"""Fig. 2 of JoMA: does the invariant predict the attention logits while they are learned?"""

from joma.experiments._experiment import Experiment

EXPERIMENT = Experiment(
    name="fig2",
    title="The invariant of Theorem 1 predicts softmax attention, better than its halves",
    published=(
        "the estimate from the weights correlates highly with the attention logits in both data "
        "sets, while each of its two parts alone does not."
    ),
    run="joma.experiments.fig2.figure:reproduce",
    seconds=4,
)
