"""Table 1 of JoMA on true HBLT(ρ): are latents learned where inputs are many?

The papers' theory speaks of HBLT(ρ), their Table 1 of a hierarchy that is not random but for the
class. Here a class has many inputs, controls over samples tell something, and what can be known of
a latent from the sequence is known exactly.
"""

from joma.experiments._experiment import Experiment, Option, Outcome, Request, Scale, publish
from joma.experiments.table1_hblt._cells import GROUPS, SIZES
from joma.report import figures
from joma.runs import Run

TITLE = "Table 1 on HBLT(ρ): how well the best hidden node follows each latent"
PUBLISHED = (
    "Hidden nodes are said to learn the latents, those of the lowest level best; there are no "
    "numbers for HBLT(ρ) itself."
)


def reproduce(run: Run, request: Request) -> Outcome:
    """Trains the groups asked for that are not done, and compares all that are."""
    from joma.experiments.table1_hblt import _draw, _summary
    from joma.experiments.table1_hblt._train import train_group

    size = SIZES[request.scale].with_options(request.options)
    for group in request.groups or GROUPS:
        train_group(run, group, size, request)
    results = _summary.collect(run, size)
    outcome = _summary.judge(results)
    for name, columns in zip(("seeds", "means"), _summary.tables(results), strict=True):
        run.write_table(name, columns)
    run.write_table("every", _summary.every_table(results))
    run.write_json("summary", {"table": outcome.table, "paragraphs": outcome.paragraphs})
    figure = _draw.draw_cells(results)
    publish(run, "table1-hblt", figure, outcome, title=TITLE, published=PUBLISHED)
    figures.save(
        run,
        "table1-hblt-training",
        _draw.draw_training(results),
        title="NCorr while networks learn from HBLT(ρ)",
        caption="\n".join(outcome.paragraphs),
    )
    return outcome


EXPERIMENT = Experiment(
    name="table1-hblt",
    title=TITLE,
    published=PUBLISHED,
    reproduce=reproduce,
    scales={
        "tiny": Scale(seconds=9, device="2 CPU cores", memory="1 GB"),
        "small": Scale(seconds=120, device="2 CPU cores", memory="1 GB"),
        "full": Scale(seconds=240, device="one H200", memory="20 GB of GPU memory"),
    },
    default_scale="small",
    options=(Option("learning-rate", None, "learning rate"),),
    groups=tuple(GROUPS),
    resumable=True,
)
