"""The table of metrics, in the order in which they are shown.

To add a metric of a kind that is there (see `Needs`), add an entry here, and its test;
`python tools/metrics_table.py` updates the tables of the docs. Nothing here imports torch before it
measures.
"""

from operator import attrgetter
from typing import TYPE_CHECKING

from joma.errors import JomaError
from joma.probes.metrics import _stable_rank as stable_rank
from joma.probes.metrics._metric import BoundedValue, Effort, Metric

if TYPE_CHECKING:
    from torch import Tensor

    from joma.probes.gradient import GradientRank
    from joma.probes.spectrum import EffectiveRank

_QUICK_SIDE = 2048
"""Shorter side beyond which an effective rank is not quick: it needs every singular value."""
_PAIRS, _QUICK_PAIRS, _QUICK_EXACT = 2**16, 2**14, 512
"""Pairs of embeddings compared: where it is quick, the mean is right to about 0.005."""


def _effective_rank(matrix: "Tensor", effort: Effort) -> "EffectiveRank":
    from joma.probes.spectrum import effective_rank

    if effort.quick and min(matrix.shape) > _QUICK_SIDE:
        shape = tuple(matrix.shape)
        raise JomaError(f"it needs all singular values of a matrix of shape {shape}")
    return effective_rank(matrix)


def _effective_ranks(values_ND: "Tensor") -> "Tensor":
    """Return the effective ranks of matrices with these singular values, 0 of a zero one."""
    share = values_ND / values_ND.sum(-1, keepdim=True).clamp(min=1e-300)
    entropy = -share.xlogy(share).sum(-1)  # `entr` is compiled at its first call
    return entropy.exp() * (values_ND[:, 0] > 0)


def _embedding_overlap(table: "Tensor", effort: Effort) -> BoundedValue:
    from joma.probes.embedding import embedding_overlap

    if effort.quick:
        found = embedding_overlap(
            table, exact_up_to=_QUICK_EXACT, pairs=_QUICK_PAIRS, seed=effort.seed
        )
    else:
        found = embedding_overlap(table, pairs=_PAIRS, seed=effort.seed)
    return BoundedValue(found.mean)


def _gradient_energy(found: "GradientRank") -> dict[str, BoundedValue]:
    """Return the energies in the top r directions, by r; nothing of a gradient that is zero."""
    return {
        f"gradient_energy_{rank}": BoundedValue(energy.value, energy.bound)
        for rank, energy in found.energy.items()
        if found.norm > 0
    }


def _gradient_stable_rank(found: "GradientRank") -> dict[str, BoundedValue]:
    rank = found.stable_rank
    return {"gradient_stable_rank": BoundedValue(rank.value, rank.bound)}


class DeadNodes:
    """The share of dead nodes over activations that come in batches, at one comparison each."""

    def __init__(self) -> None:
        self._alive: Tensor | None = None

    def update(self, hidden: "Tensor") -> None:
        """Add the activations (tokens, nodes) of a batch."""
        from joma.probes.activations import NEAR

        near = NEAR * hidden.square().mean(-1, keepdim=True).sqrt()
        alive = (hidden.abs() > near).any(0)
        self._alive = alive if self._alive is None else self._alive | alive

    def compute(self) -> float:
        """Return the share of nodes that were near zero at every token."""
        assert self._alive is not None, "update comes first"
        return 1 - float(self._alive.float().mean())


TABLE = (
    Metric(
        "attention_entropy",
        "mean entropy of attention rows, −Σ p ln p in nats",
        per="head, layer",
        column="entropy",
        needs="attention",
        unit="nats",
        measure=attrgetter("entropy"),
        by_default=True,
        monitored="every measurement",
    ),
    Metric(
        "attention_first",
        "mean attention on the first token",
        per="head, layer",
        column="on first token",
        needs="attention",
        measure=attrgetter("first"),
        collects={"first": 1},
        by_default=True,
    ),
    Metric(
        "attention_last",
        "mean attention on the last 16 tokens up to the query",
        per="head, layer",
        column="on last 16",
        needs="attention",
        measure=attrgetter("last"),
        collects={"last": 16},
    ),
    Metric(
        "attention_effective",
        "mean of exp(entropy): to how many tokens a row attends",
        per="head, layer",
        column="tokens attended",
        needs="attention",
        unit="tokens",
        measure=attrgetter("effective"),
        monitored="every measurement",
    ),
    Metric(
        "mlp_inactive",
        "share of MLP activations near zero: |a| at most 1% of the token's rms",
        per="MLP, expert",
        column="MLP near 0",
        needs="activations",
        measure=attrgetter("near_zero"),
        by_default=True,
    ),
    Metric(
        "mlp_zero",
        "share of MLP activations that are exactly zero",
        per="MLP, expert",
        column="MLP zero",
        needs="activations",
        measure=attrgetter("zero"),
    ),
    Metric(
        "mlp_dead",
        "share of MLP nodes that are near zero at every token",
        per="MLP, expert",
        column="MLP dead",
        needs="activations",
        measure=lambda statistics: statistics.dead / len(statistics.activity),
        monitored="every measurement",
        streamed=DeadNodes,
    ),
    Metric(
        "mlp_top1",
        "share of an MLP's energy in the strongest 1% of the nodes of each token",
        per="MLP, expert",
        column="MLP top 1%",
        needs="activations",
        measure=lambda statistics: statistics.top_energy[0.01],
        collects={"top": (0.01,)},
    ),
    Metric(
        "mlp_top10",
        "share of an MLP's energy in the strongest 10% of the nodes of each token",
        per="MLP, expert",
        column="MLP top 10%",
        needs="activations",
        measure=lambda statistics: statistics.top_energy[0.1],
        collects={"top": (0.1,)},
    ),
    Metric(
        "mlp_kurtosis",
        "kurtosis of MLP activations, 3 for normal numbers",
        per="MLP, expert",
        column="MLP kurtosis",
        needs="activations",
        measure=attrgetter("kurtosis"),
    ),
    Metric(
        "residual_overlap",
        "mean |cosine| of the residual stream at different tokens",
        per="layer",
        column="overlap",
        needs="residual",
        measure=attrgetter("mean"),
        by_default=True,
    ),
    Metric(
        "embedding_overlap",
        "mean |cosine| of the embeddings of different tokens",
        per="model",
        column="overlap of embeddings",
        needs="embedding",
        measure=_embedding_overlap,
        by_default=True,
        monitored="every tenth",
    ),
    Metric(
        "stable_rank",
        "‖W‖_F² / ‖W‖₂² of a weight, with its error bound",
        per="weight",
        column="rank",
        needs="weights",
        measure=stable_rank.measure,
        by_default=True,
        monitored="every measurement",
        repeated=stable_rank.StableRanks,
        of_spectrum=stable_rank.of_spectrum,
    ),
    Metric(
        "effective_rank",
        "exp of the entropy of the normalised singular values of a weight",
        per="weight",
        column="effective rank",
        needs="weights",
        measure=_effective_rank,
        monitored="every tenth",
        of_spectrum=_effective_ranks,
    ),
    Metric(
        "gradient_norm",
        "Frobenius norm of the gradient in `.grad`, and of the weight (`weight_norm`)",
        per="weight",
        column="gradient norm",
        needs="norms",
        probed=False,
        monitored="every measurement",
    ),
    Metric(
        "update_relative",
        "‖ΔW‖/‖W‖ of one single step; `frozen` is 1 where it did not move the weight at all",
        per="weight",
        column="update",
        needs="step",
        probed=False,
        monitored="one step after every measurement",
    ),
    Metric(
        "gradient_stable_rank",
        "stable rank of a weight's gradient",
        per="weight",
        column="gradient rank",
        needs="gradients",
        measure=_gradient_stable_rank,
        probed=False,
        monitored="every tenth",
    ),
    Metric(
        "gradient_energy",
        "share of ‖G‖_F² in a gradient's top r directions (`gradient_energy_8`, …)",
        per="weight",
        column="gradient energy",
        needs="gradients",
        measure=_gradient_energy,
        collects={"ranks": True},
        probed=False,
        monitored="every tenth",
    ),
    Metric(
        "update_stable_rank",
        "stable rank of how a weight moved since the last such measurement",
        per="weight",
        column="update rank",
        needs="updates",
        probed=False,
        monitored="every tenth",
    ),
    Metric(
        "theorem1_residual",
        "how far one layer, chosen by `theorem1=`, is from Theorem 1 of JoMA",
        per="layer",
        column="theorem 1",
        needs="theorem1",
        probed=False,
        monitored="every measurement",
    ),
    Metric(
        "projection_energy",
        "share of a gradient's ‖G‖_F² in the subspace that a GaLore optimizer projects it to",
        per="weight",
        column="projection energy",
        needs="projection",
        measure=attrgetter("energy"),
        probed=False,
        monitored="every measurement",
    ),
    Metric(
        "projection_angle_max",
        "largest principal angle between the last two subspaces of a GaLore optimizer",
        per="weight",
        column="largest angle",
        needs="projection",
        unit="degrees",
        measure=lambda matrix: None if matrix.angles is None else matrix.angles[0],
        probed=False,
        monitored="every measurement",
    ),
    Metric(
        "projection_angle_mean",
        "mean principal angle between the last two subspaces of a GaLore optimizer",
        per="weight",
        column="mean angle",
        needs="projection",
        unit="degrees",
        measure=lambda matrix: None if matrix.angles is None else matrix.angles[1],
        probed=False,
        monitored="every measurement",
    ),
    Metric(
        "projection_refreshes",
        "how often a GaLore optimizer has chosen the subspace",
        per="weight",
        column="refreshes",
        needs="projection",
        measure=lambda matrix: float(matrix.refreshes),
        probed=False,
        monitored="every measurement",
    ),
)
