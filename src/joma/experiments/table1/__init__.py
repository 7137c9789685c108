"""Table 1 of JoMA: do hidden nodes learn the latents? With the controls it was printed without."""

from joma.experiments._experiment import Experiment, Option, Scale

PUBLISHED_HIDDEN, PUBLISHED_RATES = (4096, 400), (1e-5, 1e-4)
"""Hidden nodes and learning rates in the paper and in its code's README."""

EXPERIMENT = Experiment(
    name="table1",
    title="Table 1: how well the best hidden node follows each latent, with controls",
    published=(
        "NCorr between latents and hidden nodes of trained 3-layer networks is .94–1.00 at s = 0 "
        "and .55–.81 at s = 1, read as latents being learned."
    ),
    run="joma.experiments.table1.figure:reproduce",
    scales={
        "tiny": Scale(seconds=12, device="2 CPU cores", memory="1 GB"),
        "small": Scale(seconds=130, device="2 CPU cores", memory="2 GB"),
        "full": Scale(seconds=400, device="one H200", memory="7 GB of GPU memory"),
    },
    default_scale="small",
    options=(
        Option("learning-rate", None, "learning rate", published=PUBLISHED_RATES),
        Option("hidden", None, "hidden nodes of each layer", int, published=PUBLISHED_HIDDEN),
    ),
    groups=tuple(f"C{classes}-N{children}" for classes in (20, 30, 50) for children in (2, 3)),
    resumable=True,
)
