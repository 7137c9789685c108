"""Fig. 8 of JoMA: the same language models of five layers at seven learning rates.

Its networks are a part of those of Fig. 6, and are not trained again where a run of it lies
next to this one.
"""

from joma.experiments._experiment import Experiment, Scale
from joma.experiments.language import REFERENCE
from joma.experiments.language._groups import SWEPT

GROUP = f"depth-{SWEPT}"


EXPERIMENT = Experiment(
    name="fig8",
    title="Fig. 8: attention entropy while language models learn at different learning rates",
    published=(
        "five layers on WikiText-2 learn best at learning rate 1e-4; attention becomes sparse at "
        "every learning rate, later at lower ones, and collapses at 1e-3 and 1e-2."
    ),
    run="joma.experiments.language.figure:fig8",
    scales={
        "tiny": Scale(seconds=9, device="2 CPU cores", memory="1 GB"),
        "small": Scale(seconds=50, device="2 CPU cores", memory="1 GB"),
        "full": Scale(seconds=340, device="one H200", memory="20 GB of GPU memory"),
    },
    default_scale="small",
    groups=(GROUP,),
    resumable=True,
    reference=REFERENCE,
    needs="joma.experiments.language.figure:needs",
)
