"""One number measured of a model."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from joma.errors import JomaError


@dataclass(frozen=True)
class Measurement:
    """One number of a model.

    Attributes:
        metric: Name of the metric, one of `joma.probes.metrics.METRICS`.
        module: Path of the module measured; attention of a block that runs several times in one
            forward pass has "#1", "#2", … after it from the second time on.
        layer: Number of the block, None for what is in none.
        head: Number of the head, None for the mean over heads.
        value: The number; never NaN or infinite.
        bound: An absolute bound on its error, where there is one.
        kind: Of attention: "self" or "cross", after the name of the tower where the model has
            several ("encoder self"); empty for everything else.
    """

    metric: str
    module: str
    layer: int | None
    head: int | None
    value: float
    bound: float | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        for name, number in (("value", self.value), ("bound", self.bound)):
            if number is not None and not math.isfinite(number):
                raise JomaError(
                    f"{self.metric} of {self.module or 'the model'} came out with {name} {number}: "
                    "the model's weights or what it computes from the text are not finite"
                )

    def as_json(self) -> dict[str, Any]:
        """Return the number as `joma probe --json` prints it."""
        return asdict(self)
