"""Table 1 of JoMA: do hidden nodes learn the latents? With the controls it was printed without."""

from joma.experiments._experiment import Experiment, Option, Outcome, Request, Scale, publish
from joma.experiments.table1._cells import GROUPS, SIZES
from joma.report import figures
from joma.runs import Run

TITLE = "Table 1: how well the best hidden node follows each latent, with controls"
PUBLISHED = (
    "NCorr between latents and hidden nodes of trained 3-layer networks is .94–1.00 at s = 0 and "
    ".55–.81 at s = 1, read as latents being learned."
)
PUBLISHED_HIDDEN, PUBLISHED_RATES = (4096, 400), (1e-5, 1e-4)
"""Hidden nodes and learning rates in the paper and in its code's README."""


def reproduce(run: Run, request: Request) -> Outcome:
    """Trains the groups asked for that are not done, and compares all that are."""
    from joma.experiments.table1 import _draw, _summary
    from joma.experiments.table1._train import largest_possible, train_group

    size = SIZES[request.scale].with_options(request.options)
    for group in request.groups or GROUPS:
        train_group(run, group, size, request)
    bounds = largest_possible(_summary.cells_done(run), size, request.seed)
    results = _summary.collect(run, size, bounds)
    published_size = (
        request.scale == "full"
        and size.hidden in PUBLISHED_HIDDEN
        and size.learning_rate in PUBLISHED_RATES
    )
    outcome = _summary.judge(results, published_size)
    for name, columns in zip(("seeds", "means"), _summary.tables(results), strict=True):
        run.write_table(name, columns)
    run.write_json("summary", {"table": outcome.table, "paragraphs": outcome.paragraphs})
    publish(run, "table1", _draw.draw_cells(results), outcome, title=TITLE, published=PUBLISHED)
    figures.save(
        run,
        "table1-training",
        _draw.draw_training(results),
        title="NCorr while the networks of Table 1 learn",
        caption=" ".join(outcome.paragraphs[:2]),
    )
    return outcome


EXPERIMENT = Experiment(
    name="table1",
    title=TITLE,
    published=PUBLISHED,
    reproduce=reproduce,
    scales={
        "tiny": Scale(seconds=12, device="2 CPU cores", memory="1 GB"),
        "small": Scale(seconds=130, device="2 CPU cores", memory="2 GB"),
        "full": Scale(seconds=400, device="one H200", memory="7 GB of GPU memory"),
    },
    default_scale="small",
    options=(
        Option(
            "learning-rate",
            None,
            "learning rate",
            published=PUBLISHED_RATES,
        ),
        Option(
            "hidden",
            None,
            "hidden nodes of each layer",
            kind=int,
            published=PUBLISHED_HIDDEN,
        ),
    ),
    groups=tuple(GROUPS),
    resumable=True,
)
