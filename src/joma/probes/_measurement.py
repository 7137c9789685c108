"""What can be measured of a model, and one number of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from joma.errors import JomaError

METRICS: Mapping[str, str] = {
    "attention_entropy": "mean entropy of attention rows in nats, by head and by layer",
    "attention_first": "mean attention on the first token, by head and by layer",
    "attention_last": "mean attention on the last 16 tokens, by head and by layer",
    "attention_effective": "mean of exp(entropy), tokens a row attends to, by head and by layer",
    "mlp_inactive": "share of MLP activations near zero: |a| at most 1% of the token's rms",
    "mlp_zero": "share of MLP activations that are exactly zero",
    "mlp_dead": "share of MLP nodes that are near zero at every token looked at",
    "mlp_top1": "share of an MLP's energy in the strongest 1% of the nodes of each token",
    "mlp_top10": "share of an MLP's energy in the strongest 10% of the nodes of each token",
    "mlp_kurtosis": "kurtosis of MLP activations, 3 for normal numbers",
    "residual_overlap": "mean |cosine| of the residual stream at different tokens, by layer",
    "embedding_overlap": "mean |cosine| of the embeddings of different tokens",
    "stable_rank": "‖W‖_F² / ‖W‖₂² of every weight probed, with its error bound",
    "effective_rank": "exp of the entropy of the normalised singular values of every weight",
}
"""Everything that can be asked for, and what it is."""

DEFAULT_METRICS = (
    "attention_entropy",
    "attention_first",
    "mlp_inactive",
    "residual_overlap",
    "embedding_overlap",
    "stable_rank",
)
"""What is measured unless something else is asked for."""

WEIGHT_METRICS = ("embedding_overlap", "stable_rank", "effective_rank")
"""Those of the weights alone, which need no text."""

LAST = 16
"""Tokens up to the query's own that count as the last."""

TOKENS_LOOKED_AT, VECTORS_COMPARED, PAIRS_COMPARED = 1024, 512, 2**16
"""Sizes of samples: they cost little beside forward passes over 10,000 tokens, and means of
overlaps are right to about 0.01."""

Progress = Callable[[str, int, int], None]
"""Takes what is being done, how much of it is done, and how much there is."""


def unseen(what: str, done: int, total: int) -> None:
    """Progress that nobody follows."""


@dataclass(frozen=True)
class Measurement:
    """One number of a model.

    Attributes:
        metric: its name, one of `METRICS`.
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
        """As `joma probe --json` prints it."""
        return asdict(self)


def checked_metrics(
    metrics: Sequence[str], available: Sequence[str] = tuple(METRICS)
) -> tuple[str, ...]:
    """The metrics, each once, if there are such.

    Raises:
        ValueError: there are none, or one is not available.
    """
    if isinstance(metrics, str) or not metrics:
        raise JomaError(f"metrics must be a list of {', '.join(available)}, got {metrics!r}")
    for metric in metrics:
        if metric not in available:
            raise JomaError(f"metrics must be among {', '.join(available)}, got {metric!r}")
    return tuple(dict.fromkeys(metrics))
