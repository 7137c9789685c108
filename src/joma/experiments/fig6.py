"""Fig. 6 of JoMA: attention entropy of language models of 1, 2, 5 and 10 layers while they learn.

The setting is that of the paper's WikiText-2 runs, with its odd corners: see
`joma.experiments.language`. What the paper does not show, the stable rank of the MLP's lower
layers, is drawn below. A network of five layers is trained at all learning rates of Fig. 8 at once;
Fig. 6 shows one of them.
"""

from joma.experiments._experiment import Experiment, Outcome, Request, Scale
from joma.experiments.language._groups import GROUPS
from joma.runs import Run

TITLE = "Fig. 6: attention entropy while language models of 1 to 10 layers learn"
PUBLISHED = (
    "on WikiText-2 attention first becomes sparse and then dense again; the best validation loss "
    "is 5.357, 5.255, 5.169 and 5.110 at 1, 2, 5 and 10 layers."
)


def reproduce(run: Run, request: Request) -> Outcome:
    """Trains the groups asked for that are not done, and compares all that are."""
    from joma.experiments.language import _draw, _figure, _summary

    return _figure.reproduce(
        run,
        request,
        _figure.Figures(
            name="fig6",
            title=TITLE,
            published=PUBLISHED,
            groups=tuple(GROUPS),
            beside=("fig8",),
            select=lambda curves, setting: {
                key: own for key, own in curves.items() if own.rate == setting.size.learning_rate
            },
            judge=_summary.judge_depths,
            check=lambda pairs, curves, recorded: _summary.check_depths(pairs),
            draw=_draw.draw_depths,
        ),
    )


EXPERIMENT = Experiment(
    name="fig6",
    title=TITLE,
    published=PUBLISHED,
    reproduce=reproduce,
    scales={
        "tiny": Scale(seconds=12, device="2 CPU cores", memory="1 GB"),
        "small": Scale(seconds=150, device="2 CPU cores", memory="1 GB"),
        "full": Scale(seconds=830, device="one H200", memory="20 GB of GPU memory"),
    },
    default_scale="small",
    groups=tuple(GROUPS),
    resumable=True,
    comparable=True,
)
