"""Fig. 5 of JoMA: does attention associate low-level tokens first, and reach the others later?

The paper draws the picture and gives no experiment for it. Here networks learn from HBLT(ρ), and
what every row of attention goes to is sorted by the height H of the common ancestor of query and
key, the lower the more often they occur together (Theorem 5).

A sequence shows its tokens in random order, so that neighbours mean nothing, and every token is as
often the query as any other. A height's ratio is its share of the attention that goes to other
tokens, over what evenly spread attention would give it. What "first" and "later" mean is defined
in `findings`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from joma.experiments._experiment import ChoiceOption, Experiment, Option, Scale

OPTIMIZERS = ("adam", "sgd")

SGD_STEPS = 3
"""How many times as many steps gradient descent makes as Adam."""

SCALES = {
    "tiny": Scale(seconds=7, device="2 CPU cores", memory="1 GB"),
    "small": Scale(seconds=135, device="2 CPU cores", memory="1 GB"),
    "full": Scale(seconds=80, device="one H200", memory="2 GB of GPU memory"),
}


def estimate(options: Mapping[str, Any]) -> dict[str, Scale]:
    """Return what the scales take; gradient descent makes more steps than Adam."""
    if options["optimizer"] == OPTIMIZERS[0]:
        return SCALES
    return {
        name: replace(scale, seconds=SGD_STEPS * scale.seconds, device=f"{scale.device}, estimated")
        for name, scale in SCALES.items()
    }


EXPERIMENT = Experiment(
    name="hierarchy",
    title="What attention attends to while it learns, by height of the common ancestor",
    published=(
        "attention first associates the tokens of the same lowest hierarchy as the query, which "
        "co-occur most with it, then gradually reaches out to those that co-occur less (Fig. 5)."
    ),
    run="joma.experiments.hierarchy.results:reproduce",
    scales=SCALES,
    default_scale="small",
    options=(
        Option("learning-rate", None, "learning rate"),
        ChoiceOption(
            "optimizer",
            dict.fromkeys(SCALES, OPTIMIZERS[0]),
            "adam, or sgd for plain gradient descent; adam if not given",
            OPTIMIZERS,
        ),
    ),
    groups=tuple(f"{kind}-{layers}" for layers in (3, 1) for kind in ("class", "token", "flat")),
    resumable=True,
    estimate=estimate,
)
