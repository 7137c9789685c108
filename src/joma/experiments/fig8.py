"""Fig. 8 of JoMA: the same language models of five layers at seven learning rates.

Its networks are a part of those of Fig. 6, and are not trained again where a run of that lies
beside this one.
"""

from joma.experiments._experiment import Experiment, Outcome, Request, Scale
from joma.experiments.language._groups import SWEPT
from joma.runs import Run

TITLE = "Fig. 8: attention entropy while language models learn at different learning rates"
PUBLISHED = (
    "five layers on WikiText-2 learn best at learning rate 1e-4; attention becomes sparse at every "
    "learning rate, later at lower ones, and collapses at 1e-3 and 1e-2."
)
GROUP = f"depth-{SWEPT}"


def reproduce(run: Run, request: Request) -> Outcome:
    """Trains the networks unless they are done, and compares them."""
    from joma.experiments.language import _draw, _figure, _summary

    return _figure.reproduce(
        run,
        request,
        _figure.Figures(
            name="fig8",
            title=TITLE,
            published=PUBLISHED,
            groups=(GROUP,),
            beside=("fig6",),
            select=lambda curves, setting: curves,
            judge=_summary.judge_rates,
            check=_summary.check_rates,
            draw=_draw.draw_rates,
        ),
    )


def needs(request: Request) -> None:
    """Raises a `ValueError` where the text is not there."""
    from joma.experiments.language import _figure

    _figure.needs(request)


EXPERIMENT = Experiment(
    name="fig8",
    title=TITLE,
    published=PUBLISHED,
    reproduce=reproduce,
    scales={
        "tiny": Scale(seconds=9, device="2 CPU cores", memory="1 GB"),
        "small": Scale(seconds=50, device="2 CPU cores", memory="1 GB"),
        "full": Scale(seconds=340, device="one H200", memory="20 GB of GPU memory"),
    },
    default_scale="small",
    groups=(GROUP,),
    resumable=True,
    comparable=True,
    needs=needs,
)
