"""What a monitor measures."""

from collections.abc import Mapping, Sequence

from joma.errors import JomaError

METRICS: Mapping[str, str] = {
    "attention_entropy": "mean entropy of attention rows in nats, by layer and head",
    "attention_effective": "mean number of tokens a row attends to, by layer and head",
    "stable_rank": "of the MLPs' lower layers and of Wqᵀ·Wk of every head",
    "effective_rank": "of the same",
    "mlp_dead": "share of each MLP's hidden nodes that are near zero at every held token",
    "embedding_overlap": "mean |cosine| of the embeddings of different tokens",
    "gradient_norm": "of every weight matrix of the layers, with the weight's own (weight_norm)",
    "update_relative": "by what share of its size one step moved each weight",
    "gradient_stable_rank": "of every weight matrix of the layers",
    "gradient_energy": "share of the gradient's energy in its top r directions, by r",
    "update_stable_rank": "of how each weight moved since the last measurement of its kind",
    "theorem1_residual": "of one layer, chosen by theorem1=",
}
"""What is measured, by name."""


def chosen_metrics(metrics: Sequence[str] | None, theorem1: int | None) -> tuple[str, ...]:
    """The metrics asked for, each once, if there are such; otherwise all that can be."""
    if metrics is None:
        return tuple(
            name for name in METRICS if name != "theorem1_residual" or theorem1 is not None
        )
    if isinstance(metrics, str) or not metrics:
        raise JomaError(f"metrics must be a list of {', '.join(METRICS)}, got {metrics!r}")
    for metric in metrics:
        if metric not in METRICS:
            raise JomaError(f"metrics must be among {', '.join(METRICS)}, got {metric!r}")
    if "theorem1_residual" in metrics and theorem1 is None:
        raise JomaError("theorem1 must be the layer to measure theorem1_residual on, got None")
    return tuple(dict.fromkeys(metrics))
