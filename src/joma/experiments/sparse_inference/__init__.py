"""What a smaller cache costs on real models: StreamingLLM's and H2O's claims, and the probes.

Here live the setting and, next to it, the models, their texts and what is measured of each
(`study`), what that shows (`findings`) and the pictures (`figure`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from joma.experiments._experiment import ChoiceOption, Experiment, Scale, corpus_option

RELU, STORIES, SMOLLM, GEMMA = "relu", "stories15m", "smollm2-135m", "gemma-3-270m"
TITLES = {
    RELU: "ReLU model (OPT)",
    STORIES: "stories15M",
    SMOLLM: "SmolLM2-135M",
    GEMMA: "Gemma-3-270m",
}
"""The models, which are also the groups of the experiment, and what figures call them."""

FILES = {
    STORIES: ("stories15M.bin", "stories/stories15M.bin"),
    SMOLLM: ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
    GEMMA: ("gemma-3-270m-q4_k_m.gguf", "gemma-3-270m"),
}
"""Names under which a model is looked for in the folder that JOMA_MODELS names."""

PARTS = ("text", "alone", "stream", "layers")
"""What is measured of each model, in order; each is kept when it is done."""

POLICIES = ("window", "streaming", "heavy-hitter", "random", "random-recent")
"""The policies that are compared at each budget."""
CHUNKED = ("heavy-hitter", "random", "random-recent")
"""Those of them that evict after each chunk, so that their loss depends on its length."""
POLICY_TITLES = {
    "full": "full cache",
    "window": "window (recency)",
    "streaming": "sinks and window",
    "heavy-hitter": "heavy hitters and recent",
    "random": "random",
    "random-recent": "random and recent",
}
CUT_POLICIES = ("heavy-hitter", "window")
"""The policies to which one layer alone is cut."""

SMALL_MODELS = (RELU, STORIES)
MORE_WINDOWS = 4
"""How many times as many windows the small models read, which take little time."""

SINKS = 4
BLOCKS = 8
"""Parts of a stream over which its standard errors are taken, for each row."""


@dataclass(frozen=True)
class ReluSize:
    """How large the model is that is trained here, and how long it is trained.

    Attributes:
        width: Width of the residual stream.
        layers: Layers.
        heads: Heads of each layer.
        vocabulary: Tokens of its vocabulary.
        context: Its longest text, in tokens.
        steps: Training steps.
        batch: Sequences of each step.
    """

    width: int
    layers: int
    heads: int
    vocabulary: int
    context: int
    steps: int
    batch: int


@dataclass(frozen=True)
class StudySize:
    """How much is measured of each model.

    Attributes:
        corpus: The text.
        window: Tokens of a window.
        windows: Windows whose loss is measured.
        shares: Budgets, as shares of the window.
        chunk: Tokens read at once where policies are compared.
        long_chunk: Tokens read at once where one layer is cut.
        stream_rows: Streams that are longer than the cache.
        stream: Tokens of each.
        stream_keys: Keys of the cache that reads them.
        cut_windows: Windows on which one layer alone is cut.
        cut_share: The budget of that layer, as a share of the window.
        probed: Windows of other text that the layers are probed on.
        dtype: What the larger models compute in.
        relu: The model that is trained here.
    """

    corpus: str
    window: int
    windows: int
    stream_rows: int
    stream: int
    stream_keys: int
    cut_windows: int
    probed: int
    relu: ReluSize
    shares: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5)
    chunk: int = 8
    long_chunk: int = 16
    cut_share: float = 0.1
    dtype: str = "float32"

    def windows_of(self, name: str) -> int:
        """Return how many windows of a model are judged."""
        return self.windows * (MORE_WINDOWS if name in SMALL_MODELS else 1)

    def with_options(self, options: Mapping[str, Any]) -> "StudySize":
        """Return the same size with the options that were given."""
        given = {name: options.get(name) for name in ("corpus", "dtype")}
        return replace(self, **{name: value for name, value in given.items() if value})


SIZES = {
    "tiny": StudySize(
        "embedded",
        window=32,
        windows=4,
        stream_rows=2,
        stream=48,
        stream_keys=12,
        cut_windows=2,
        probed=2,
        relu=ReluSize(32, 2, 2, 300, context=80, steps=4, batch=2),
        shares=(0.2, 0.5),
    ),
    "small": StudySize(
        "embedded",
        window=192,
        windows=6,
        stream_rows=1,
        stream=1024,
        stream_keys=128,
        cut_windows=3,
        probed=3,
        relu=ReluSize(128, 6, 4, 1024, context=192, steps=400, batch=8),
        dtype="bfloat16",
    ),
    "full": StudySize(
        "wikitext-2",
        window=256,
        windows=16,
        stream_rows=2,
        stream=2048,
        stream_keys=256,
        cut_windows=8,
        probed=8,
        relu=ReluSize(192, 6, 4, 2048, context=256, steps=1500, batch=8),
        dtype="bfloat16",
    ),
}


def keys_of(share: float, length: int) -> int:
    """Return the keys of a budget, at least two."""
    return max(2, round(share * length))


def policy_of(name: str, keys: int) -> Any:
    """Return one of `POLICIES` with a number of keys, "full" without a limit.

    Half of the keys of heavy hitters are recent ones, as in the published setting.
    """
    from joma.inference import Full, HeavyHitter, Random, Streaming, Window

    recent = keys // 2
    sinks = min(SINKS, recent)
    return {
        "full": lambda: Full(),
        "window": lambda: Window(keys),
        "streaming": lambda: Streaming(sinks=sinks, window=keys - sinks),
        "heavy-hitter": lambda: HeavyHitter(heavy=keys - recent, recent=recent),
        "random": lambda: Random(keys),
        "random-recent": lambda: Random(keys, recent=recent),
    }[name]()


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
