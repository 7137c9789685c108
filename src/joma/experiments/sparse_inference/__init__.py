"""What a smaller cache costs on real models: StreamingLLM's and H2O's claims, and the probes.

Here live the setting (`setting`), the models, their texts and what is measured of each (`study`),
what that shows (`findings`) and the pictures (`figure`).
"""

from joma.experiments._experiment import ChoiceOption, Experiment, Scale, corpus_option
from joma.experiments.sparse_inference.setting import FILES, SIZES, TITLES


def _given(path: str) -> str:
    """Return a model's place as it was given."""
    return path


EXPERIMENT = Experiment(
    name="sparse-inference",
    title="What a smaller key-value cache costs: window, sinks, heavy hitters and random keys",
    published=(
        "StreamingLLM: a window of recent keys alone breaks once the first tokens are evicted, and "
        "four sinks keep the perplexity (models of 2.9 to 70 billion parameters); H2O: 20% of the "
        "keys, half of them heavy hitters and half recent, keep the quality (accuracy of tasks, "
        "models of 6.7 to 66 billion parameters)."
    ),
    run="joma.experiments.sparse_inference.figure:reproduce",
    scales={
        "tiny": Scale(seconds=8, device="one CPU core", memory="1 GB"),
        "small": Scale(seconds=1200, device="one CPU core, with all models", memory="3 GB"),
        "full": Scale(seconds=3700, device="one CPU core, with all models", memory="5 GB"),
    },
    default_scale="small",
    options=(
        corpus_option({scale: size.corpus for scale, size in SIZES.items()}),
        *(
            ChoiceOption(
                name,
                {scale: "none" if scale == "tiny" else "found" for scale in SIZES},
                f"file or folder of {TITLES[name]}, found (in the folder JOMA_MODELS) or none",
                ("found", "none"),
                _given,
            )
            for name in FILES
        ),
        ChoiceOption(
            "dtype",
            {scale: size.dtype for scale, size in SIZES.items()},
            "what the two largest models compute in, float32 or bfloat16",
            ("float32", "bfloat16"),
        ),
    ),
    groups=tuple(TITLES),
    resumable=True,
    needs="joma.experiments.sparse_inference.figure:check_needs",
)
