"""Fig. 5 of JoMA: does attention associate low-level tokens first, and reach the others later?

The paper draws the picture and gives no experiment for it. Here networks learn from HBLT(ρ), and
what every row of attention looks at is sorted by the height H of the common ancestor of query and
key, the lower the more often they occur together (Theorem 5).

A sequence shows its tokens in random order, so that neighbours mean nothing, and every token is as
often the query as any other. A height's ratio is its share of the attention that goes to other
tokens, over what evenly spread attention would give it. What "first" and "later" mean is defined
in `_course`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from joma.experiments._experiment import (
    Choice,
    Experiment,
    Option,
    Outcome,
    Request,
    Scale,
    publish,
)
from joma.experiments.hierarchy._groups import GROUPS, OPTIMIZERS, SGD_STEPS, SIZES
from joma.report import figures
from joma.runs import Run

TITLE = "What attention looks at while it learns, by height of the common ancestor"
PUBLISHED = (
    "attention first associates the tokens of the same lowest hierarchy as the query, which "
    "co-occur most with it, then gradually reaches out to those that co-occur less (Fig. 5)."
)


def reproduce(run: Run, request: Request) -> Outcome:
    """Trains the groups asked for that are not done, and says what all that are show."""
    from joma.experiments.hierarchy import _draw, _summary
    from joma.experiments.hierarchy._train import train_group

    size = SIZES[request.scale].with_options(request.options)
    for name in request.groups or GROUPS:
        train_group(run, name, size, request)
    results = _summary.collect(run, size)
    outcome = _summary.judge(results, comparable=request.scale == "full")
    run.write_table("heights", _summary.table(results))
    run.write_table("seeds", _summary.seeds_table(results))
    run.write_json("summary", {"table": outcome.table, "paragraphs": outcome.paragraphs})
    if (deep := _draw.draw_layers(results)) is not None:
        publish(run, "hierarchy", deep, outcome, title=TITLE, published=PUBLISHED)
    if (shallow := _draw.draw_one_layer(results)) is not None:
        figures.save(
            run,
            "hierarchy-one-layer",
            shallow,
            title="The same in networks of one layer",
            caption="\n".join(outcome.paragraphs[:2]),
        )
    return outcome


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
    title=TITLE,
    published=PUBLISHED,
    reproduce=reproduce,
    scales=SCALES,
    default_scale="small",
    options=(
        Option("learning-rate", None, "learning rate"),
        Choice(
            "optimizer",
            dict.fromkeys(SIZES, OPTIMIZERS[0]),
            "sgd is plain gradient descent, of which the theory speaks",
            OPTIMIZERS,
        ),
    ),
    groups=tuple(GROUPS),
    resumable=True,
    estimate=estimate,
)
