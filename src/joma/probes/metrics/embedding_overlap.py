"""Overlap of token embeddings."""

from typing import TYPE_CHECKING

from joma.probes.metrics._metric import BoundedValue, Effort, Metric

if TYPE_CHECKING:
    from torch import Tensor

PAIRS, QUICK_PAIRS, QUICK_EXACT = 2**16, 2**14, 512
"""Pairs of embeddings compared: where it is quick, the mean is right to about 0.005."""


def measure(table: "Tensor", effort: Effort) -> BoundedValue:
    """Return the mean |cosine| of the rows of an embedding."""
    from joma.probes.embedding import embedding_overlap

    if effort.quick:
        found = embedding_overlap(
            table, exact_up_to=QUICK_EXACT, pairs=QUICK_PAIRS, seed=effort.seed
        )
    else:
        found = embedding_overlap(table, pairs=PAIRS, seed=effort.seed)
    return BoundedValue(found.mean)


METRIC = Metric(
    name="embedding_overlap",
    order=120,
    sentence="mean |cosine| of the embeddings of different tokens",
    per="model",
    column="overlap of embeddings",
    needs="embedding",
    measure=measure,
    by_default=True,
    monitored="every tenth",
)
