"""What a metric says of itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Needs = Literal[
    "attention",
    "activations",
    "residual",
    "embedding",
    "weights",
    "norms",
    "step",
    "gradients",
    "updates",
    "theorem1",
    "projection",
]
"""What a metric is measured of, which decides how its `measure` is called.

- "attention": calls of `watch_attention`. `measure(means)` takes `AttentionMeans`, returns a number
  for each head, or one where the means are of a layer.
- "activations": what enters the second matrix of an MLP. `measure(statistics)` takes
  `ActivationStatistics`.
- "residual": outputs of blocks. `measure(overlap)` takes `EmbeddingOverlap`.
- "embedding", "weights": the token embedding, or any weight matrix. `measure(matrix, effort)` takes
  a tensor and an `Effort`, and returns something with `value` and `bound`. It raises JomaError
  where a quick measurement is not possible.
- "gradients": `measure(found)` takes `GradientRank` and returns estimates by the name that they are
  recorded under.
- "projection": a matrix that a GaLore optimizer projects. `measure(matrix)` takes what its
  `subspaces` yields of it, and returns a number or None.
- "norms", "step", "updates", "theorem1": of a training alone; `joma.train.monitor` measures them.
"""

COLLECTED: Mapping[str, frozenset[str]] = {
    "attention": frozenset({"first", "last"}),
    "activations": frozenset({"top"}),
    "gradients": frozenset({"ranks"}),
}
"""What `Metric.collects` may ask for. A further statistic of attention rows has to be added to
`joma.probes.attention`, its blocked and its Triton version first, and then here."""

Cadence = Literal["every measurement", "one step after every measurement", "every tenth"]


class Effort(NamedTuple):
    """How much a measurement of a matrix may take.

    Attributes:
        tolerance: Relative tolerance of iterative estimates.
        seed: Seed of random starts and samples.
        quick: Whether it is repeated in a training, and has to be cheap.
    """

    tolerance: float
    seed: int
    quick: bool = False


class BoundedValue(NamedTuple):
    """A number and a bound on its error, None where there is none."""

    value: float
    bound: float | None = None


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: What it is asked for by, and recorded under.
        sentence: What it is, for people.
        per: What there is a number for: "head, layer".
        column: Heading of a table column.
        needs: What it is measured of.
        unit: Unit of the number; "" for a share or a count.
        measure: Measures it; see `Needs`. None where only the monitor can.
        collects: What has to be collected for it: options of the function that collects.
        by_default: Whether a probe measures it unless asked for others.
        probed: Whether a probe measures it at all.
        monitored: How often a monitor measures it, None for never.
        repeated: Returns an object that measures the same matrices again and again, faster than
            `measure`; takes an `Effort`. For "weights".
        of_spectrum: Measures matrices by their singular values (N, d) in float64. For "weights".
        streamed: Returns an object that is shown activations, tokens by nodes, with `update`, and
            gives a number with `compute`. For "activations" that a monitor measures.
    """

    name: str
    sentence: str
    per: str
    column: str
    needs: Needs
    unit: str = ""
    measure: Callable[..., Any] | None = None
    collects: Mapping[str, Any] = field(default_factory=dict)
    by_default: bool = False
    probed: bool = True
    monitored: Cadence | None = None
    repeated: Callable[[Effort], Any] | None = None
    of_spectrum: Callable[[Any], Any] | None = None
    streamed: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        """Check `collects`, since one unknown entry would stop all metrics of the same calls."""
        unknown = set(self.collects) - COLLECTED.get(self.needs, frozenset())
        if unknown:
            available = ", ".join(sorted(COLLECTED.get(self.needs, ()))) or "nothing"
            raise ValueError(
                f"the metric {self.name} collects {', '.join(sorted(unknown))}, but what is "
                f"collected of {self.needs} is {available}: see COLLECTED in {__name__}"
            )
