"""The pictures of sparse inference, and the order of its work."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.common.quiet import need_transformers
from joma.data import corpus
from joma.experiments._experiment import Outcome, Request, publish
from joma.experiments._tables import concatenated, standard_error
from joma.experiments.sparse_inference import (
    CUT_POLICIES,
    EXPERIMENT,
    FILES,
    POLICIES,
    POLICY_TITLES,
    SIZES,
    TITLES,
)
from joma.experiments.sparse_inference.findings import (
    KEPT,
    PREDICTORS,
    ModelResults,
    collect,
    judge,
    layer_rankings,
)
from joma.report import figures
from joma.runs import Run

_COLORS = {
    "full": figures.BLACK,
    "window": figures.VERMILLION,
    "streaming": figures.GREEN,
    "heavy-hitter": figures.BLUE,
    "random": figures.PURPLE,
    "random-recent": figures.ORANGE,
}
_MARKERS = {
    "window": "s",
    "streaming": "^",
    "heavy-hitter": "o",
    "random": "x",
    "random-recent": "D",
}
_LINEAR = 0.01
"""Nats up to which the axis of the loss is linear; logarithmic from there on."""


def check_needs(request: Request) -> None:
    """Raise JomaError where transformers, the text or a model that was given is missing."""
    from joma.experiments.sparse_inference.study import path_of

    need_transformers("sparse-inference")
    size = SIZES[request.scale].with_options(request.options)
    for split in ("train", "valid", "test"):
        corpus(size.corpus).where(split)
    for name in FILES:
        path_of(name, request)


def reproduce(run: Run, request: Request) -> Outcome:
    """Measure the models that are there and not done, and compare all that are."""
    from joma.experiments.sparse_inference.study import measure_model

    size = SIZES[request.scale].with_options(request.options)
    for name in request.groups or tuple(TITLES):
        measure_model(run, name, size, request)
    models = collect(run)
    outcome = judge(models, is_comparable=request.scale != "tiny")
    publish(run, EXPERIMENT, outcome, draw(models) if models else None, tables(models))
    if models:
        figures.save(
            run,
            "sparse-inference-bridge",
            draw_layers(models),
            title="What the probes say beforehand of the cost of cutting one layer",
            caption="Combined: all three, fitted on the other models. Costs of one half of the "
            f"windows with the other, Spearman: {_reliabilities(models)}.",
        )
    return outcome


def _reliabilities(models: Sequence[ModelResults]) -> str:
    rows = (row for row in layer_rankings(models) if row.policy == CUT_POLICIES[0])
    return ", ".join(f"{TITLES[row.model]} {row.reliability:+.2f}" for row in rows)


def tables(models: Sequence[ModelResults]) -> dict[str, dict[str, Any]]:
    """Return every number of the figures."""
    losses, streams, layers = [], [], []
    for model in models:
        name = {"model": model.name}
        for row in model.parts["text"]["rows"]:
            losses.append({**name, **row, "window": np.arange(len(row["nll"]))})
        for policy, found in model.parts["stream"]["policies"].items():
            nll = found["nll"]
            streams.append({**name, "policy": policy, "block": np.arange(len(nll)), "nll": nll})
        layers.append(
            {
                **name,
                "layer": np.arange(len(model.features)),
                **dict(zip(PREDICTORS, model.features.T, strict=True)),
                **{f"cost {policy}": model.costs(policy).mean(1) for policy in CUT_POLICIES},
            }
        )
    rankings = [
        {"model": row.model, "policy": row.policy, "predictor": [name], **asdict(one)}
        for row in layer_rankings(models)
        for name, one in {**row.single, "combined": row.combined}.items()
        if one is not None
    ]
    made = {"losses": losses, "streams": streams, "layers": layers, "rankings": rankings}
    return {name: concatenated(rows) for name, rows in made.items() if rows}


def draw(models: Sequence[ModelResults]) -> Figure:
    """Draw the loss by budget above, and along a long stream below, a column for each model."""
    wide = len(models)
    figure, axes = figures.new(max(4.4 * wide, 8.8), 7.4, 2, wide)
    panels = np.reshape(axes, (2, wide))
    for column, model in enumerate(models):
        _draw_budgets(panels[0, column], model, is_first=column == 0)
        _draw_stream(panels[1, column], model, is_first=column == 0)
    return figure


def _draw_budgets(ax: Axes, model: ModelResults, *, is_first: bool) -> None:
    shares = np.array(model.shares)
    for index, policy in enumerate(POLICIES):
        rises = [model.rise(policy, share) for share in shares]
        _error_bars(
            ax,
            100 * shares * 1.035 ** (index - 2),  # side by side, so that bars hide no others
            np.array([one.mean for one in rises]),
            np.nan_to_num([one.error for one in rises]),
            _COLORS[policy],
            _MARKERS[policy],
            label=POLICY_TITLES[policy],
            mfc="white" if policy == "random-recent" else _COLORS[policy],
        )
    ax.axhline(KEPT, color=figures.GREY, lw=0.9, ls=":")
    figures.level(ax, KEPT, f"kept: {KEPT} nats", "left", up=3)
    ax.set_xscale("log")
    ax.set_yscale("symlog", linthresh=_LINEAR)  # the best of them are no worse than the full cache
    highest = max(model.rise(*it).mean for it in product(POLICIES, shares))
    ax.set_ylim(-_LINEAR, 1.8 * max(highest, _LINEAR))
    ax.axhline(0, color=figures.GREY, lw=0.9)
    ax.set_xticks(100 * shares, [f"{share:.0%}" for share in shares])
    ax.minorticks_off()
    perplexity = float(np.exp(np.mean(model.row("full")["nll"])))
    ax.set(
        title=f"{model.title}\nfull cache: perplexity {perplexity:.1f}",
        xlabel=f"keys held, of {model.parts['text']['window']}",
        ylabel="loss above the full cache (nats)" if is_first else "",
    )
    if is_first:
        ax.legend(fontsize=8, loc="lower left")


def _draw_stream(ax: Axes, model: ModelResults, *, is_first: bool) -> None:
    found = model.parts["stream"]
    for policy in ("full", "window", "streaming"):
        curve = found["policies"][policy]["curve"]
        places = (np.arange(len(curve)) + 0.5) * found["tokens"] / len(curve)
        ax.plot(places, curve, color=_COLORS[policy], label=POLICY_TITLES[policy], lw=1.6)
    level, start = float(np.mean(found["policies"]["recomputed"]["nll"])), found["keys"]
    anew = {"color": figures.GREY, "lw": 1.2, "ls": "--", "label": "windows computed anew"}
    ax.plot([start, found["tokens"]], [level, level], **anew)
    low, high = ax.get_ylim()
    ax.set_ylim(low - 0.12 * (high - low), high + 0.45 * (high - low) * is_first)
    _mark(ax, start, f"{start} keys", 0.02)
    if found["context"] is not None and found["context"] < found["tokens"]:
        _mark(ax, found["context"], f"context {found['context']}", 0.08)
    ax.set(
        title="a stream longer than the cache",
        xlabel="token of the stream",
        ylabel="loss (nats per token)" if is_first else "",
        xlim=(0, found["tokens"]),
    )
    if is_first:
        ax.legend(fontsize=8, loc="upper right")


def _mark(ax: Axes, place: float, text: str, height: float) -> None:
    ax.axvline(place, color=figures.GREY, lw=0.9, ls=":")
    where = {"xycoords": ("data", "axes fraction"), "fontsize": 8, "color": figures.GREY}
    figures.note(ax, text, (place, height), (3, 0), **where)


def draw_layers(models: Sequence[ModelResults]) -> Figure:
    """Draw the cost of each layer, and its correlations with what the probes say."""
    figure, axes = figures.new(9.8, 4.4, 1, 2)
    _draw_costs(axes[0], models)
    _draw_correlations(axes[1], models)
    return figure


_MODEL_STYLES = {
    name: {"color": color, "marker": marker}
    for name, color, marker in zip(
        TITLES, (figures.ORANGE, figures.GREEN, figures.BLUE, figures.PURPLE), "D^os", strict=True
    )
}


def _error_bars(
    ax: Axes, x: Any, means: Any, errors: Any, color: str, marker: str, **options: Any
) -> None:
    style = {"color": color, "marker": marker, "ms": 5, "lw": 1.5, "elinewidth": 1}
    ax.errorbar(x, means, errors, **{**style, **options})


def _draw_costs(ax: Axes, models: Sequence[ModelResults]) -> None:
    policy = CUT_POLICIES[0]
    for model in models:
        costs = model.costs(policy)
        error = standard_error(costs) if costs.shape[1] > 1 else None
        style = {**_MODEL_STYLES[model.name], "ms": 4, "lw": 1.2, "label": model.title}
        _error_bars(ax, np.linspace(0, 1, len(costs)), costs.mean(1), error, **style)
    ax.axhline(0, color=figures.GREY, lw=0.9, ls=":")
    ax.set_yscale("symlog", linthresh=0.003)
    ax.set(
        title=f"one layer cut to {POLICY_TITLES[policy]}",
        xlabel="depth of the layer (0 first, 1 last)",
        ylabel="rise of the loss (nats)",
    )
    ax.legend(fontsize=8)


def _draw_correlations(ax: Axes, models: Sequence[ModelResults]) -> None:
    own = {row.model: row for row in layer_rankings(models) if row.policy == CUT_POLICIES[0]}
    words = [title.replace(" ", "\n") for title in PREDICTORS.values()]
    labels = [*words, "all three,\nmodel\nheld out"]
    for offset, model in enumerate(models):
        row = own[model.name]
        for place, one in enumerate((*row.single.values(), row.combined)):
            if one is None or np.isnan(one.value):
                continue
            x = place + 0.16 * (offset - (len(models) - 1) / 2)
            bar = [[one.value - one.low], [one.high - one.value]]
            _error_bars(
                ax, x, one.value, np.maximum(bar, 0), **_MODEL_STYLES[model.name], elinewidth=1.6
            )
    ax.axhline(0, color=figures.GREY, lw=0.9)
    ax.set_xticks(range(len(labels)), labels, fontsize=8)
    ax.set(
        title="do the probes rank the layers by cost?",
        ylabel="Spearman with the cost, 95% over layers",
        ylim=(-1.08, 1.08),
    )
