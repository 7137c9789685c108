"""The figure of one model: attention entropy by layer and head, and the ranks of its weights."""

import re
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from joma.common.types import Record
from joma.probes.metrics import METRICS
from joma.report import figures

ROLE_NAMES = {
    "query": "queries",
    "key": "keys",
    "value": "values",
    "output": "attention output",
    "mlp_lower": "MLP lower layer",
    "mlp_up": "MLP up (gated)",
    "mlp_down": "MLP down",
}
_MARKERS = "osD^vPX"


def draw_probe(records: Sequence[Record], roles: Mapping[str, str]) -> Figure | None:
    """Draw entropy as a map over layers and heads, stable ranks as lines over layers.

    Args:
        records: measurements, with "metric", "module", "layer", "head", "value" and "bound".
        roles: what each module of a weight is, one of `ROLE_NAMES`; others are not drawn.

    Returns:
        None where neither was measured.
    """
    entropy_LH = entropies(records)
    found = [r for r in records if r["metric"] == "stable_rank" and r["layer"] is not None]
    ranks = {it: [r for r in found if roles.get(r["module"]) == it] for it in ROLE_NAMES}
    ranks = {role: points for role, points in ranks.items() if points}
    panels = (entropy_LH is not None) + bool(ranks)
    if not panels:
        return None
    figure, axes = figures.new(6.4 if panels == 1 else 11.5, 4.2, 1, panels)
    axes = list(np.atleast_1d(axes))
    if entropy_LH is not None:
        _draw_entropies(figure, axes.pop(0), entropy_LH, list(attentions(records).values()))
    if ranks:
        _draw_ranks(axes.pop(0), ranks)
    return figure


def entropies(records: Sequence[Record]) -> NDArray[np.float64] | None:
    """Return attention entropy by layer and head, NaN where there is none.

    Where several attentions share a layer there is a row for each, in the order of `attentions`.
    """
    heads = [r for r in records if r["metric"] == "attention_entropy" and r["head"] is not None]
    if not heads:
        return None
    names = attentions(records)
    rows = list(names) if names else range(max(r["layer"] for r in heads) + 1)
    place = {row: number for number, row in enumerate(rows)}
    entropy_LH = np.full((len(place), max(r["head"] for r in heads) + 1), np.nan)
    for r in heads:
        entropy_LH[place[r["module"] if names else r["layer"]], r["head"]] = r["value"]
    return entropy_LH


def attentions(records: Sequence[Record]) -> dict[str, str]:
    """Return labels of attentions by module, "0 decoder cross"; none if each has its own layer."""
    layers = {r["module"]: r for r in records if r["metric"] == "attention_entropy"}
    if len({r["layer"] for r in layers.values()}) == len(layers):
        return {}
    return {
        module: " ".join(
            (str(r["layer"]), r.get("kind", ""), *("#" + n for n in module.split("#")[1:]))
        )
        for module, r in layers.items()
    }


def _draw_entropies(
    figure: Figure, ax: Axes, entropy_LH: NDArray[np.float64], labels: Sequence[str]
) -> None:
    image = ax.imshow(entropy_LH, aspect="auto", cmap="viridis", origin="lower", vmin=0)
    figures.color_bar(figure, image, ax, METRICS["attention_entropy"].unit, pad=0.02)
    ax.set(title="Attention entropy, mean over queries", xlabel="head", ylabel="layer")
    ax.grid(False)
    for axis, count in ((ax.xaxis, entropy_LH.shape[1]), (ax.yaxis, entropy_LH.shape[0])):
        axis.set_major_locator(MaxNLocator(min(count, 12), integer=True))
    if labels:
        every = -(-len(labels) // 24)
        ax.set_yticks(range(0, len(labels), every), labels[::every], fontsize=7)
        ax.set_ylabel("")


def _draw_ranks(ax: Axes, ranks: Mapping[str, Sequence[Record]]) -> None:
    """Draw a line for each role; encoders, decoders, cross-attention and experts have their own."""
    for (role, points), color, marker in zip(
        ranks.items(), figures.PALETTE, _MARKERS, strict=False
    ):
        lines: dict[str, list[Record]] = {}  # modules of a line differ by the layer's number alone
        for point in points:
            layer = re.compile(rf"(?<![0-9]){point['layer']}(?![0-9])")
            lines.setdefault(layer.sub("{layer}", point["module"], count=1), []).append(point)
        look = {"color": color, "marker": marker, "ms": 4, "lw": 1.5, "elinewidth": 1}
        for number, line in enumerate(lines.values()):
            layers, values = ([point[name] for point in line] for name in ("layer", "value"))
            bounds = [point["bound"] or 0.0 for point in line]
            label = None if number else ROLE_NAMES[role]  # one entry of the legend for each role
            ax.errorbar(layers, values, bounds, label=label, **look)
    ax.set(title="Stable rank of the weights", xlabel="layer", ylim=(0, None))
    ax.set_ylabel("‖W‖² / σ₁²")
    ax.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
