"""The picture of GaLore's experiment, and the order of its work."""

from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.common.paired import Paired, paired
from joma.common.quiet import need_transformers
from joma.data import corpus
from joma.experiments._experiment import Outcome, Request, publish
from joma.experiments.galore import EXPERIMENT, GROUPS, METHODS, SIZES, networks_of, tuning
from joma.experiments.galore.results import (
    GaloreResults,
    best_rates,
    collect,
    judge,
    tables,
    theory_stable_rank,
    tuning_losses,
    variants,
)
from joma.report import figures
from joma.runs import Run

_COLORS = {
    "full": figures.BLACK,
    "galore": figures.BLUE,
    "svd": figures.SKY,
    "lora": figures.VERMILLION,
}
_SWEEPS = {
    "ranks": ("Rank", "rank"),
    "gaps": ("Steps between refreshes", "gap"),
    "warm-lora": ("LoRA from a checkpoint", "step of the checkpoint"),
}
_MARKERS = {"full": "s", "galore": "o", "svd": "x", "lora": "^"}


def check_needs(request: Request) -> None:
    """Raise JomaError where transformers or the text is missing."""
    need_transformers("galore")
    size = SIZES[request.scale].with_options(request.options)
    for split in ("train", "valid"):
        corpus(size.corpus).where(split)


def reproduce(run: Run, request: Request) -> Outcome:
    """Train the networks asked for that are not done, and compare all that are."""
    from joma.experiments.galore.training import train_networks

    size = SIZES[request.scale].with_options(request.options)
    for group in request.groups or GROUPS:
        # The learning rates of all other groups follow from the tuning.
        while not (best := best_rates(run, size)):
            train_networks(run, tuning(size, tuning_losses(run, size)), size, request, "tune")
        if group != "tune":
            train_networks(run, networks_of(group, size, best), size, request, group)
    results = collect(run, size)
    outcome = judge(results, published_size=request.scale == "full")
    publish(run, EXPERIMENT, outcome, draw(results), tables(results), best=results.best)
    return outcome


def draw(results: GaloreResults) -> Figure:
    """Draw losses, sweeps and subspaces, a panel for each that was measured."""
    drawn = [
        _draw_curves,
        _draw_memory,
        *([_draw_differences] if paired_differences(results) else []),
        _draw_gradient_rank,
        _draw_captured,
        _draw_weights,
        *(partial(_draw_sweep, group=one) for one in _SWEEPS if variants(results, one)),
        *([_draw_moments] if variants(results, "moments") else []),
    ]
    figure, axes = figures.panels(len(drawn), 3, 12.6)
    for panel, ax in zip(drawn, axes, strict=True):
        panel(ax, results)
    return figure


def _draw_curves(ax: Axes, results: GaloreResults) -> None:
    for method in results.methods:
        members = range(results.size.seeds)
        curves = [results.metric("validation_loss", method, one)[:2] for one in members]
        steps = curves[0][0][1:]
        values = np.mean([curve for at, curve in curves if len(at) == len(steps) + 1], axis=0)
        ax.plot(steps, values[1:], color=_COLORS[method], label=METHODS[method])
    finals = [results.losses(method) for method in results.methods]
    if finals:
        lowest, highest = np.nanmin(finals), np.nanmax(finals)
        ax.set_ylim(0.95 * lowest, highest + 0.45 * lowest)
    ax.set(title="Validation loss", xlabel="step", ylabel="nats per byte")
    ax.legend(fontsize=7.5)


def _draw_memory(ax: Axes, results: GaloreResults) -> None:
    full = results.losses("full")
    for method in results.methods:
        own = results.outcome(method)
        state = own.get("state_bytes", np.nan) / 1e6
        label = f"{METHODS[method]}, {own.get('seconds', np.nan) * 1e3:.3g} ms a step"
        # Of methods with fewer seeds than full rank, the same seeds are compared.
        loss = float(np.nanmean(full)) + paired(results.losses(method), full).mean
        ax.plot(state, loss, _MARKERS[method], color=_COLORS[method], label=label)
    for one in variants(results, "ranks"):
        state = results.outcome("galore", rank=int(one.value)).get("state_bytes", np.nan) / 1e6
        place = (state, float(np.nanmean(one.losses)))
        ax.plot(*place, ".", color=_COLORS["galore"], ms=6)
        figures.note(ax, one.label, place, (3, 3), fontsize=7)
    ax.set(title="Loss and optimizer state", xlabel="optimizer state, MB", ylabel="last loss")
    ax.set_xlim(left=0)
    ax.legend(fontsize=7.5)


def paired_differences(results: GaloreResults) -> list[tuple[str, Paired, str]]:
    """Return paired differences of methods as shares of full rank's loss, with their colours."""
    full, galore, svd = (results.losses(one) for one in ("full", "galore", "svd"))
    same = results.losses("svd", rate=results.best.get("galore"))
    level = float(np.nanmean(full)) if np.isfinite(full).any() else np.nan
    shares = [
        (name, paired(ours / level, other / level), color)
        for name, ours, other, color in (
            ("GaLore,\nfrom galore-torch's", galore, svd, figures.BLUE),
            ("GaLore, from galore-torch's\nat GaLore's rate", galore, same, figures.SKY),
            ("GaLore,\nfrom full rank", galore, full, figures.BLACK),
            ("galore-torch's,\nfrom full rank", svd, full, figures.GREY),
        )
    ]
    return [one for one in shares if one[1].count > 1]


def _draw_differences(ax: Axes, results: GaloreResults) -> None:
    names, found, colors = zip(*paired_differences(results), strict=True)
    labels = [f"{name} ({one.count} seeds)" for name, one in zip(names, found, strict=True)]
    means, errors = zip(*((100 * one.mean, 100 * one.error) for one in found), strict=True)
    figures.intervals(ax, labels, means, errors, colors)
    ax.set(title="Paired differences", xlabel="% of the loss (± 2 SE)")


def _draw_moments(ax: Axes, results: GaloreResults) -> None:
    found = variants(results, "moments")
    differences = [(one.difference.mean, one.difference.error) for one in found]
    means, errors = zip(*differences, strict=True)
    figures.intervals(ax, [one.label for one in found], means, errors, [figures.BLUE] * len(found))
    ax.set(title="Moments as the basis turns", xlabel="loss, from keeping them (± 2 SE)")


def _draw_gradient_rank(ax: Axes, results: GaloreResults) -> None:
    for layer in range(results.size.layers):
        means = results.by_step("gradient_stable_rank", layer)
        shade = 0.25 + 0.75 * layer / max(1, results.size.layers - 1)
        line = {"color": figures.BLUE, "alpha": shade, "label": f"layer {layer}"}
        ax.plot([step + 1 for step in means], [one.mean() for one in means.values()], **line)
    for start, style in (("Gaussian", "--"), ("along curvature", "-.")):
        expected = theory_stable_rank(realizable=start != "Gaussian")
        at = np.linspace(1, results.size.steps, len(expected))
        ax.plot(at, expected, style, color=figures.GREY, lw=1.2, label=f"theory, {start} start")
    ax.set(
        title="Stable rank of the gradient, full rank",
        xlabel="step + 1 (theory: scaled)",
        xscale="log",
        ylabel="mean over matrices",
    )
    ax.legend(fontsize=7)


def _draw_captured(ax: Axes, results: GaloreResults) -> None:
    lines = [
        (f"captured_after_{lag}", "o-", color, f"{lag} step{'s' * (lag > 1)} later")
        for lag, color in zip(results.size.lags, figures.PALETTE, strict=False)
    ]
    lines.append(("gradient_captured", ":", figures.BLACK, "the same gradient"))
    for name, style, color, label in lines:
        found = results.by_step(name)
        means = [one.mean() for one in found.values()]
        ax.plot([step + 1 for step in found], means, style, ms=4, color=color, label=label)
    ax.axhline(results.size.rank / results.size.width, color=figures.GREY, lw=1, ls="--")
    ax.set(
        title=f"Energy in an old basis of rank {results.size.rank}",
        xlabel="step of the basis + 1",
        xscale="log",
        ylabel="share of ‖G‖²",
        ylim=(0, 1.03),
    )
    ax.legend(fontsize=7.5)


def _draw_weights(ax: Axes, results: GaloreResults) -> None:
    overlap = results.by_step("weight_overlap")
    steps = list(overlap)
    if steps:
        ends = np.transpose([np.quantile(one, (0.1, 0.5, 0.9)) for one in overlap.values()])
        figures.band(ax, steps, *ends, color=figures.BLUE, alpha=0.2, marker="o", ms=4)
    ax.axhline(results.size.rank / results.size.width, color=figures.GREY, lw=1, ls="--")
    ax.set(
        title="Weight subspace, early in late",
        xlabel="step",
        ylabel="overlap with the last",
        ylim=(0, 1.03),
    )


def _draw_sweep(ax: Axes, results: GaloreResults, group: str) -> None:
    found = variants(results, group)
    places = range(len(found))
    for place, one in zip(places, found, strict=True):
        ax.plot(np.full(len(one.losses), place), one.losses, ".", color=figures.SKY, ms=7)
    means = [np.nanmean(one.losses) for one in found]
    ax.plot(places, means, "-o", ms=4, color=figures.BLUE)
    full = float(np.nanmean(results.losses("full")))
    ax.axhline(full, color=figures.BLACK, lw=1, label="full rank")
    ax.legend(fontsize=7.5)
    ax.set_xticks(places, [one.label.split()[-1] for one in found])
    title, label = _SWEEPS[group]
    ax.set(title=title, xlabel=label, ylabel="last loss")
