"""Table 1 of JoMA on true HBLT(ρ): are latents learned where inputs are many?

The papers' theory speaks of HBLT(ρ), their Table 1 of a hierarchy that is not random but for the
class. Here a class has many inputs, controls over samples say something, and what can be known of
a latent from the sequence is known exactly.
"""

from joma.experiments._experiment import Experiment, Option, Scale

EXPERIMENT = Experiment(
    name="table1-hblt",
    title="Table 1 on HBLT(ρ): how well the best hidden node follows each latent",
    published=(
        "Hidden nodes are said to learn the latents, those of the lowest level best; there are no "
        "numbers for HBLT(ρ) itself."
    ),
    run="joma.experiments.table1_hblt.figure:reproduce",
    scales={
        "tiny": Scale(seconds=9, device="2 CPU cores", memory="1 GB"),
        "small": Scale(seconds=120, device="2 CPU cores", memory="1 GB"),
        "full": Scale(seconds=240, device="one H200", memory="20 GB of GPU memory"),
    },
    default_scale="small",
    options=(Option("learning-rate", None, "learning rate"),),
    groups=("L2", "L3", "L4"),
    resumable=True,
)
