"""The statements of speed in README and docs: where each stands, what measures it, what it must be.

A statement without a line here is not to be made; a test looks for the words of each line where it
says they stand. `floor` is what nothing can be faster than, with its reason in a word or two;
`docs/performance.md` has the counting.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Number = Callable[[Any], float]


@dataclass(frozen=True)
class SpeedClaim:
    """One statement of speed.

    Attributes:
        name: Short name for the command line.
        sentence: What is claimed.
        stated: Where it is stated: words by file, as they stand there, white space aside.
        device: What it is measured on.
        command: Arguments of the Python interpreter; the command prints JSON. A word MODEL:FILE is
            a file in the folder that JOMA_MODELS names.
        value: Returns the number from that JSON.
        limit: What the number must not be above, or below where `at_least`.
        at_least: Whether larger numbers are better.
        unit: Unit of the number: "×" for a ratio.
        floor: What nothing can be better than, and why; empty where it is not known.
    """

    name: str
    sentence: str
    stated: Mapping[str, str]
    device: Literal["cpu", "cuda"]
    command: tuple[str, ...]
    value: Number
    limit: float
    at_least: bool = False
    unit: str = "×"
    floor: str = ""

    @property
    def mark(self) -> str:
        """The limit as it is written."""
        return f"{'≥' if self.at_least else '≤'} {self.written(self.limit)}"

    @property
    def shown_command(self) -> str:
        """The command as a person types it."""
        return " ".join(("python", *(it.removeprefix("MODEL:") for it in self.command)))

    def is_met(self, value: float) -> bool:
        """Return whether a number reaches the mark; NaN does not."""
        return value >= self.limit if self.at_least else value <= self.limit

    def written(self, value: float) -> str:
        """Return a number with its unit."""
        digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        return f"{digits}{'' if self.unit in '×%' else ' '}{self.unit}"

    def facts(self) -> dict[str, Any]:
        """Return what is claimed, in JSON types."""
        facts = {"name": self.name, "claim": self.sentence, "mark": self.mark}
        return {**facts, "floor": self.floor, "device": self.device, "unit": self.unit}


def _benchmark(name: str, *options: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{name}", *options, "--json")


def _row(rows: Any, **wanted: Any) -> Any:
    """Return the one row of a list that has these entries."""
    (found,) = [row for row in rows if all(row[key] == it for key, it in wanted.items())]
    return found


_THEORY = _benchmark("theory")
_PERFORMANCE = "docs/performance.md"

CLAIMS: tuple[SpeedClaim, ...] = (
    SpeedClaim(
        "theorem2",
        "Theorem 2 for 10⁶ components, against one vectorised `solve_ivp`",
        {_PERFORMANCE: "predicted, 16 to 21 ms measured"},
        "cpu",
        _THEORY,
        lambda found: _row(found, what="Theorem 2")["ratio_vectorised"],
        30,
        at_least=True,
        floor="38, one erfinv",
    ),
    SpeedClaim(
        "eqn6",
        "Eqn 6 for 10⁶ components, against one vectorised `solve_ivp`",
        {_PERFORMANCE: "Measured: 16 ms"},
        "cpu",
        _THEORY,
        lambda found: _row(found, what="Eqn 6")["ratio_vectorised"],
        30,
        at_least=True,
    ),
    SpeedClaim(
        "probe",
        "`joma probe` of SmolLM2-135M on 20 × 512 tokens, against loading and forward passes",
        {"docs/probes.md": "the whole command takes"},
        "cpu",
        _benchmark("probe_command", "MODEL:SmolLM2-135M-Instruct.Q4_1.gguf"),
        lambda found: found["ratio"],
        2,
        floor="about 0.8, a GGUF parsed once",
    ),
    SpeedClaim(
        "monitor",
        "Monitor inside a training of some minutes, share of its time",
        {"README.md": "A budget of 1% of the training's time.", "docs/monitor.md": "budget=0.01"},
        "cpu",
        _benchmark("monitor", "--device", "cpu", "--steps", "600", "--plain", "40"),
        lambda found: 100 * found["overhead inside step"],
        1,
        unit="%",
        floor="0",
    ),
    SpeedClaim(
        "import",
        "`import joma.train`, on top of torch and NumPy: share of the time that they take",
        {_PERFORMANCE: "`import joma.train` adds a fifth"},
        "cpu",
        _benchmark("imports"),
        lambda found: _row(found["added"], part="joma.train")["share"],
        0.4,
        floor="0",
    ),
    SpeedClaim(
        "report",
        "`joma report` of 50 runs of 20,000 rows, processor time",
        {"docs/report.md": "3 s of processor time"},
        "cpu",
        _benchmark("report"),
        lambda found: found["processor seconds"],
        6,
        unit="s",
    ),
    SpeedClaim(
        "sparse-mlp-cpu",
        "Gated MLP of a 7B model at half of its neurons, batch 1, bfloat16, one thread",
        {"docs/sparsify.md": "the MLP gained 1.1 to 1.2 × in the last runs"},
        "cpu",
        _benchmark(
            "sparse_mlp", "--scale", "1", "--copies", "1", "--pairs", "9", "--threads", "1",
            "--clock", "process", "--dtype", "bfloat16", "--batch", "1",
        ),
        lambda found: found["mlps"][0]["speedup"],
        1.1,
        at_least=True,
        floor="1.79, bytes read",
    ),
    SpeedClaim(
        "train-cpu",
        "`joma train tiny`, monitor and checkpoints on, against a plain loop, tokens/s",
        {_PERFORMANCE: "python -m benchmarks.train"},
        "cpu",
        _benchmark("train", "--preset", "tiny", "--device", "cpu", "--steps", "300", "--no-losses"),
        lambda found: found[0]["ratios"]["eager"],
        0.85,
        at_least=True,
        floor="1, no monitor",
    ),
    SpeedClaim(
        "entropy",
        "Attention entropy, 16 heads of 64, causal, 8,192 tokens, against one flash forward",
        {"README.md": "at the cost of a flash-attention pass"},
        "cuda",
        _benchmark("probes", "--spectra", "100"),
        lambda found: _row(found["attention"], T=8192)["× sdpa"],
        1.5,
        floor="0.5, one product of two",
    ),
    SpeedClaim(
        "entropy-masks",
        "Attention entropy with boolean and additive masks, 2,048 and 8,192 tokens, against "
        "attention given the same mask: the slowest",
        {"README.md": "up to 1.3 of attention given the same mask"},
        "cuda",
        _benchmark("probes", "--parts", "masks"),
        lambda found: max(
            row["device ratio"]
            for row in found["masks"]
            if row["with"] in ("bool", "added", "biased")
        ),
        1.5,
    ),
    SpeedClaim(
        "entropy-softcap",
        "Attention entropy with padding, windows and softcaps, 2,048 and 8,192 tokens, against "
        "one plain causal flash forward, scores below half of the cap: the slowest",
        {"README.md": "up to 1.5 with softcaps", "docs/probes.md": "softcaps up to 1.5 of them"},
        "cuda",
        _benchmark("probes", "--parts", "masks"),
        lambda found: max(
            row["causal sdpa, device ratio"]
            for row in found["masks"]
            if row["with"] in ("padding", "window", "softcap")
        ),
        1.5,
    ),
    SpeedClaim(
        "entropy-small",
        "Attention entropy of 2¹⁴ to 2³⁰ scores, with and without masks, against softmax written "
        "out: the slowest of 280 cases, on the device",
        {_PERFORMANCE: "the slowest takes 0.65 of written out"},
        "cuda",
        _benchmark("probes", "--parts", "shapes"),
        lambda found: max(row["device ratio"] for row in found["shapes"]),
        1.05,
    ),
    SpeedClaim(
        "stable-rank-trained",
        "Stable rank of 4096 × 11008, rank 8 plus noise of norm 0.9 of σ₈",
        {_PERFORMANCE: "1.06, 1.22, 1.42 ms"},
        "cuda",
        _benchmark("stable_rank", "times"),
        lambda found: _row(found["times"], matrix="rank 8 + noise 0.9")["ms"],
        3,
        unit="ms",
        floor="0.65, what does not depend on steps",
    ),
    SpeedClaim(
        "stable-rank-decaying",
        "Stable rank of 4096 × 11008, σ ∝ i^−½",
        {_PERFORMANCE: "0.99; 1.09 ms"},
        "cuda",
        _benchmark("stable_rank", "times"),
        lambda found: _row(found["times"], matrix="σ ∝ i^−½")["ms"],
        1,
        unit="ms",
        floor="0.65, what does not depend on steps",
    ),
    SpeedClaim(
        "stable-rank-gaussian",
        "Stable rank of a Gaussian matrix of 4096 × 11008",
        {_PERFORMANCE: "on a Gaussian matrix in 2 ms would need the steps at 0.075"},
        "cuda",
        _benchmark("stable_rank", "times"),
        lambda found: _row(found["times"], matrix="Gaussian")["ms"],
        2,
        unit="ms",
        floor="0.9, reads of the half-precision copy",
    ),
    SpeedClaim(
        "train",
        "`joma train neox-wikitext2` against a hand-written loop with CUDA graphs, tokens/s",
        {_PERFORMANCE: "Measured: 1.008", "docs/train.md": "one compiled with CUDA graphs"},
        "cuda",
        _benchmark("train", "--preset", "neox-wikitext2", "--device", "cuda"),
        lambda found: found[0]["ratios"]["CUDA graphs"],
        0.9,
        at_least=True,
        floor="1, no monitor",
    ),
    SpeedClaim(
        "train-large",
        "`joma train` of GPT-2 small (124M) against a hand-written loop with CUDA graphs, tokens/s",
        {_PERFORMANCE: "**1.05** (424k against", "docs/train.md": "1.05 times as many"},
        "cuda",
        _benchmark(
            *("train", "--preset", "gpt2-124m", "--device", "cuda", "--steps", "600"),
            *("--loop", "CUDA graphs", "--no-losses"),
        ),
        lambda found: found[0]["ratios"]["CUDA graphs"],
        0.9,
        at_least=True,
        floor="1, no monitor",
    ),
    SpeedClaim(
        "table1",
        "Table 1, 60 networks together, against a plain loop of one network each",
        {"docs/latents.md": "60 networks, 5.9 minutes on one H200"},
        "cuda",
        _benchmark("table1", "--steps", "40"),
        lambda found: sum(it["networks"] * it["plain_ms"] for it in found["groups"])
        / sum(it["step_ms"] for it in found["groups"]),
        30,
        at_least=True,
        floor="63, traffic and products of 198 s",
    ),
    SpeedClaim(
        "fig6",
        "Fig. 6 and 8, 21 networks of 5 layers together, against a plain loop of one each",
        {_PERFORMANCE: "no sums across warps; two attention programs where one was"},
        "cuda",
        _benchmark("language", "--depths", "5"),
        lambda found: found[0]["times faster"],
        40,
        at_least=True,
    ),
    SpeedClaim(
        "monitor-gpu",
        "Monitor inside a training of 178 s on a GPU, share of its time",
        {"docs/monitor.md": "1.09% of one of 178 s"},
        "cuda",
        _benchmark("monitor", "--device", "cuda", "--steps", "8500", "--plain", "200"),
        lambda found: 100 * found["overhead inside step"],
        1,
        unit="%",
        floor="0",
    ),
    SpeedClaim(
        "galore-step",
        "GaLore step without refresh, one LLaMA-1B layer, rank 512, against fused AdamW",
        {"docs/galore.md": "times the fused AdamW"},
        "cuda",
        _benchmark("galore_step"),
        lambda found: found["step_ratio"],
        1.0,
        floor="0.5, two products",
    ),
    SpeedClaim(
        "galore-refresh",
        "GaLore refresh of all subspaces of that layer",
        {"docs/galore.md": "python -m benchmarks.galore_step"},
        "cuda",
        _benchmark("galore_step"),
        lambda found: found["refresh"],
        8,
        unit="ms",
        floor="0.5, products",
    ),
    SpeedClaim(
        "cache-step",
        "Heavy-hitter cache at 10% of 32,768 keys, batch 16, against the preallocated full cache",
        {"docs/inference.md": "10.5 GB with"},
        "cuda",
        _benchmark("cache_step"),
        lambda found: _row(found["steps"], cache="heavy-hitter", batch=16)["tokens_per_s"]
        / _row(found["steps"], cache="full, preallocated", batch=16)["tokens_per_s"],
        3,
        at_least=True,
    ),
    SpeedClaim(
        "cache-attention",
        "Heavy-hitter attention, scores and eviction, batch 16, against attention on as many keys",
        {"docs/inference.md": "10.5 GB with"},
        "cuda",
        _benchmark("cache_step"),
        lambda found: _row(found["one_layer"], batch=16)["ratio"],
        1.15,
        floor="1",
    ),
    SpeedClaim(
        "sparse-mlp",
        "Gated MLP of a 7B model at half of its neurons, batch 1, predictor included",
        {"docs/sparsify.md": "that a GPU gains 1.5 ×"},
        "cuda",
        _benchmark("sparse_mlp", "--device", "cuda", "--batch", "1"),
        lambda found: found["mlps"][0]["speedup"],
        1.5,
        at_least=True,
        floor="1.79, bytes read",
    ),
)  # fmt: skip
