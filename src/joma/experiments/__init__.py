"""What the papers claim and show, done again: claims behind `verify`, one file per figure or table.

An experiment makes numbers, compares them with the published ones and draws the comparison; it
holds no mathematics, no model and no drawing style of its own. `EXPERIMENTS` lists them by the name
that `joma reproduce` takes. To list them must not take long: what needs torch is imported when an
experiment is done, not here.
"""

from joma.experiments import (
    cooccurrence,
    fig2,
    fig3,
    fig4,
    fig6,
    fig8,
    fig9,
    hierarchy,
    scan_snap,
    table1,
    table1_hblt,
)
from joma.experiments._experiment import (
    Choice,
    Experiment,
    Option,
    Outcome,
    Request,
    Scale,
    Verdict,
)

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        fig2,
        fig3,
        fig4,
        fig9,
        cooccurrence,
        scan_snap,
        fig6,
        fig8,
        hierarchy,
        table1,
        table1_hblt,
    )
}

__all__ = [
    "EXPERIMENTS",
    "Choice",
    "Experiment",
    "Option",
    "Outcome",
    "Request",
    "Scale",
    "Verdict",
]
