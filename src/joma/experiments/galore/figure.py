"""The picture of GaLore's experiment, and the order of its work."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.common.paired import Paired, paired
from joma.common.quiet import need_transformers
from joma.data import corpus
from joma.experiments._experiment import Outcome, Request
from joma.experiments._trained import write_results
from joma.experiments.galore import EXPERIMENT
from joma.experiments.galore.findings import judge
from joma.experiments.galore.groups import networks_of, tuning
from joma.experiments.galore.results import (
    GaloreResults,
    Variant,
    best_rates,
    collect,
    tables,
    theory_stable_rank,
    tuning_losses,
    variants,
)
from joma.experiments.galore.setting import CONTROLS, GROUPS, MANY, METHODS, SIZES
from joma.report import figures
from joma.runs import Run

_COLORS = {
    "full": figures.BLACK,
    "galore": figures.BLUE,
    "svd": figures.SKY,
    "power": figures.PURPLE,
    "residual": figures.GREEN,
    "lora": figures.VERMILLION,
}
_MARKERS = {"full": "s", "galore": "o", "svd": "x", "power": "v", "residual": "D", "lora": "^"}


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
    write_results(run, EXPERIMENT, outcome, draw(results), tables(results), best=results.best)
    return outcome


def draw(results: GaloreResults) -> Figure:
    """Draw losses, sweeps and subspaces, a panel for each that was measured."""
    panels = [
        _draw_curves,
        _draw_memory,
        *([_draw_differences] if _differences(results) else []),
        *([_draw_controls] if results.size.controls else [_draw_gradient_rank]),
        _draw_captured,
        _draw_weights,
        *([_draw_ranks] if variants(results, "ranks") else []),
        *([_draw_gaps] if variants(results, "gaps") else []),
        *([_draw_moments] if _is_complete(results, "moments") else []),
        *([_draw_warm] if variants(results, "warm-lora") else []),
        *([_draw_recipe] if variants(results, "recipe") else []),
    ]
    wide = 3
    rows = -(-len(panels) // wide)
    figure, axes = figures.new(12.6, 3.3 * rows, rows, wide)
    places = list(np.ravel(axes))
    for panel, ax in zip(panels, places, strict=False):
        panel(ax, results)
    for ax in places[len(panels) :]:
        ax.set_axis_off()
    return figure


def _is_complete(results: GaloreResults, group: str) -> bool:
    """Return whether the networks of a group with several are all there."""
    return bool(variants(results, group)) and group not in results.missing


def _draw_curves(ax: Axes, results: GaloreResults) -> None:
    for method in results.methods:
        curves = [results.curve(method, one) for one in range(results.size.seeds)]
        steps = curves[0][0]
        values = np.array([curve for at, curve in curves if len(at) == len(steps)])
        shown = steps > 0
        ax.plot(
            steps[shown],
            values.mean(0)[shown],
            color=_COLORS[method],
            label=METHODS[method],
        )
    finals = [results.losses(method) for method in results.methods]
    if finals:
        lowest, highest = np.nanmin(finals), np.nanmax(finals)
        ax.set_ylim(lowest - 0.05 * lowest, highest + 0.45 * lowest)
    ax.set(title="Validation loss", xlabel="step", ylabel="nats per byte")
    ax.legend(fontsize=7.5)


def _draw_memory(ax: Axes, results: GaloreResults) -> None:
    full = results.losses("full")
    for method in results.methods:
        state = results.outcome(method).get("state_bytes", np.nan) / 1e6
        losses, label = results.losses(method), METHODS[method]
        if results.size.timed_steps:  # else other work on the device may have been timed with it
            label += f", {results.step_time(method)[0] * 1e3:.3g} ms a step"
        # Of methods with fewer seeds than full rank, the same seeds are compared.
        loss = float(np.nanmean(full)) + paired(losses, full).mean
        ax.plot(state, loss, _MARKERS[method], color=_COLORS[method], label=label)
    for one in variants(results, "ranks"):
        state = results.outcome("galore", rank=int(one.value)).get("state_bytes", np.nan) / 1e6
        ax.plot(state, np.nanmean(one.losses), ".", color=_COLORS["galore"], ms=6)
        ax.annotate(
            one.label,
            (state, float(np.nanmean(one.losses))),
            fontsize=7,
            xytext=(3, 3),
            textcoords="offset points",
        )
    ax.set(title="Loss and optimizer state", xlabel="optimizer state, MB", ylabel="last loss")
    ax.set_xlim(left=0)
    ax.legend(fontsize=7.5)


def _differences(results: GaloreResults) -> list[tuple[str, Paired, str]]:
    """Return paired differences of methods as shares of full rank's loss, with their colours."""
    full = results.losses("full")
    if results.size.seeds == 1 or not np.isfinite(full).any():
        return []
    level = float(np.nanmean(full))
    found = []
    for rank in (results.size.rank, *results.size.svd_ranks):
        galore, svd = (results.losses(one, rank=rank) for one in ("galore", "svd"))
        found.append((f"GaLore, rank {rank},\nfrom galore-torch's", galore - svd, figures.BLUE))
        if rank == results.size.rank:
            rate = results.best["galore"]
            same = results.losses("svd", rate=rate)
            others = {
                "GaLore": galore,
                "all at once": results.losses("power"),
                "SVD, aligned": results.losses("svd", rate=rate, moments="align"),
            }
            for name, one in others.items():
                label = f"{name}, from galore-torch's\nat GaLore's rate"
                found.append((label, one - same, figures.SKY))
        found += [
            (f"GaLore, rank {rank},\nfrom full rank", galore - full, figures.BLACK),
            (f"galore-torch's, rank {rank},\nfrom full rank", svd - full, figures.GREY),
        ]
    shares = [(name, paired(one / level, 0 * one), color) for name, one, color in found]
    return [one for one in shares if one[1].count > 1]


def _draw_differences(ax: Axes, results: GaloreResults) -> None:
    found = _differences(results)
    for place, (_, one, color) in enumerate(found):
        mean, error = 100 * one.mean, 200 * one.error
        ax.errorbar(mean, place, xerr=error, fmt="o", color=color, capsize=3)
    ax.axvline(0, color=figures.GREY, lw=1)
    labels = [f"{name} ({one.count} seeds)" for name, one, _ in found]
    ax.set_yticks(range(len(found)), labels, fontsize=7)
    ax.set_ylim(len(found) - 0.5, -0.5)
    ax.set(title="Paired differences", xlabel="% of the loss (± 2 SE)")


def _draw_controls(ax: Axes, results: GaloreResults) -> None:
    """Draw the stable rank of gradients in the training and in what comes closer to the theory."""
    curves = {
        "training, one batch": (results.by_step("gradient_stable_rank"), figures.BLUE, "o-"),
        f"training, {MANY * results.size.averaged} batches": (
            results.by_step("averaged_stable_rank", control=CONTROLS[0]),
            figures.SKY,
            "o-",
        ),
    }
    colors = figures.GREEN, figures.ORANGE, figures.VERMILLION
    for control, color in zip(CONTROLS[1:], colors, strict=True):
        found = results.by_step("gradient_stable_rank", control=control)
        curves[control] = (found, color, "s--")
    for label, (by_step, color, style) in curves.items():
        if by_step:
            steps = [step + 1 for step in by_step]
            means = [one.mean() for one in by_step.values()]
            ax.plot(steps, means, style, ms=3.5, color=color, label=label)
    for realizable, style in ((False, ":"), (True, "-.")):
        expected = theory_stable_rank(realizable=realizable)
        at = np.linspace(1, results.size.steps, len(expected))
        start = "along curvature" if realizable else "Gaussian"
        ax.plot(at, expected, style, color=figures.GREY, lw=1.2, label=f"theory, {start} start")
    ax.set(
        title="Stable rank of the gradient, full rank",
        xlabel="step + 1 (theory: scaled)",
        xscale="log",
        ylabel="mean over matrices",
    )
    ax.set_ylim(0, 1.75 * ax.get_ylim()[1])  # room for the legend
    ax.legend(fontsize=6.5, ncols=2, loc="upper left")


def _draw_gradient_rank(ax: Axes, results: GaloreResults) -> None:
    found: dict[int, dict[int, list[float]]] = {}
    for member in range(results.size.seeds):
        steps, values, modules = results.metric("gradient_stable_rank", "full", member)
        for step, value, module in zip(steps, values, modules, strict=True):
            layer = int(str(module).split(".")[0])
            found.setdefault(layer, {}).setdefault(int(step), []).append(float(value))
    for layer, by_step in sorted(found.items()):
        shade = 0.25 + 0.75 * layer / max(1, len(found) - 1)
        ax.plot(
            [step + 1 for step in by_step],
            [np.mean(values) for values in by_step.values()],
            color=figures.BLUE,
            alpha=shade,
            label=f"layer {layer}",
        )
    expected = theory_stable_rank()
    at = np.linspace(1, results.size.steps, len(expected))
    ax.plot(at, expected, "--", color=figures.GREY, lw=1.2, label="reversible gradient (theory)")
    ax.set(
        title="Stable rank of the gradient, full rank",
        xlabel="step + 1 (theory: scaled)",
        xscale="log",
        ylabel="mean over matrices",
    )
    ax.legend(fontsize=7)


def _draw_captured(ax: Axes, results: GaloreResults) -> None:
    for lag, color in zip(results.size.lags, figures.PALETTE, strict=False):
        old = results.by_step(f"captured_after_{lag}")
        steps = [step + 1 for step in old]
        values = [one.mean() for one in old.values()]
        ax.plot(steps, values, "o-", ms=4, color=color, label=f"{lag} step{'s' * (lag > 1)} later")
    own = results.by_step("gradient_captured")
    ax.plot(
        [step + 1 for step in own],
        [one.mean() for one in own.values()],
        "k:",
        lw=1.2,
        label="the same gradient",
    )
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
        low, middle, high = (
            [np.quantile(one, share) for one in overlap.values()] for share in (0.1, 0.5, 0.9)
        )
        ax.fill_between(steps, low, high, color=figures.BLUE, alpha=0.2, lw=0)
        ax.plot(steps, middle, "o-", ms=4, color=figures.BLUE)
    ax.axhline(results.size.rank / results.size.width, color=figures.GREY, lw=1, ls="--")
    ax.set(
        title="Weight subspace, early in late",
        xlabel="step",
        ylabel="overlap with the last",
        ylim=(0, 1.03),
    )


def _draw_ranks(ax: Axes, results: GaloreResults) -> None:
    found = variants(results, "ranks")
    _points(ax, found, [one.value for one in found])
    full = float(np.nanmean(results.losses("full")))
    ax.axhline(full, color=figures.BLACK, lw=1, label="full rank")
    ax.set(title="Rank", xlabel="rank", xscale="log", ylabel="last loss")
    ax.set_xticks([one.value for one in found], [f"{one.value:g}" for one in found])
    ax.minorticks_off()
    ax.legend(fontsize=7.5)


def _draw_gaps(ax: Axes, results: GaloreResults) -> None:
    found = variants(results, "gaps")
    _points(ax, found, list(range(len(found))))
    ax.set_xticks(range(len(found)), [one.label.removeprefix("gap ") for one in found])
    ax.set(title="Steps between refreshes", xlabel="gap", ylabel="last loss")


def _draw_moments(ax: Axes, results: GaloreResults) -> None:
    found = variants(results, "moments")
    _bars(ax, found, "Moments as the basis turns", "loss, from keeping them")


def _draw_warm(ax: Axes, results: GaloreResults) -> None:
    found = variants(results, "warm-lora")
    _points(ax, found, list(range(len(found))))
    ax.axhline(float(np.nanmean(results.losses("full"))), color=figures.BLACK, lw=1, label="full")
    ax.set_xticks(range(len(found)), [f"{one.value:g}" for one in found])
    ax.set(title="LoRA from a checkpoint", xlabel="step of the checkpoint", ylabel="last loss")
    ax.legend(fontsize=7.5)


def _draw_recipe(ax: Axes, results: GaloreResults) -> None:
    found = variants(results, "recipe")
    _bars(ax, found, "Readings of the 7B recipe", "loss, from the first")


def _points(ax: Axes, found: list[Variant], places: Sequence[float]) -> None:
    for place, one in zip(places, found, strict=True):
        ax.plot(np.full(len(one.losses), place), one.losses, ".", color=figures.SKY, ms=7)
    means = [np.nanmean(one.losses) for one in found]
    ax.plot(places, means, "-o", ms=4, color=figures.BLUE)


def _bars(ax: Axes, found: list[Variant], title: str, label: str) -> None:
    for place, one in enumerate(found):
        error = one.difference.error
        ax.errorbar(
            one.difference.mean,
            place,
            xerr=None if np.isnan(error) else 2 * error,
            fmt="o",
            color=figures.BLUE,
            capsize=3,
        )
    ax.axvline(0, color=figures.GREY, lw=1)
    ax.set_yticks(range(len(found)), [one.label.replace(", ", ",\n") for one in found], fontsize=8)
    ax.invert_yaxis()
    ax.set(title=title, xlabel=f"{label} (± 2 SE)")
