"""GaLore on a small Llama: loss, memory and time next to full rank and LoRA, and why it works.

Here live the networks and their sizes (`setting`), the model, its text, the optimizer of each
method and what is measured of gradients and weights (`training`), what the run folders hold
(`results`), what that says (`findings`) and the picture (`figure`).
"""

from joma.experiments._experiment import Experiment, Option, Scale, corpus_option
from joma.experiments.galore.setting import GROUPS

EXPERIMENT = Experiment(
    name="galore",
    title="GaLore: loss, memory and time of a small Llama, and the subspaces of its gradients",
    published=(
        "GaLore at a quarter to a third of full rank reaches perplexity 34.88, 25.36, 18.95 and "
        "15.64 on C4 with LLaMA 60M to 1B, full rank 34.06, 25.08, 18.80 and 15.56; consecutive "
        "gradients are similar, so that the projection need not change at every step."
    ),
    run="joma.experiments.galore.figure:reproduce",
    scales={
        "tiny": Scale(seconds=15, device="2 CPU cores", memory="1 GB"),
        "small": Scale(seconds=150, device="2 CPU cores", memory="1 GB"),
        "medium": Scale(seconds=1800, device="one CPU core, estimated", memory="1 GB"),
        "full": Scale(seconds=5000, device="one H200, estimated", memory="10 GB of GPU memory"),
    },
    default_scale="small",
    options=(
        Option("steps", None, "training steps of each network", int),
        corpus_option(
            {
                "tiny": "embedded",
                "small": "embedded",
                "medium": "wikitext-2",
                "full": "wikitext-2",
            }
        ),
    ),
    groups=GROUPS,
    resumable=True,
    needs="joma.experiments.galore.figure:check_needs",
)
