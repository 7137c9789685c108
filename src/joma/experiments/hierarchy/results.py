"""What attention took up first in each layer, what it let go, and what that says of Fig. 5.

All of it is said of a height's ratio against what the same untrained network had: random weights
have favourites too, and those are not learned. A change is that of the ratio's logarithm; it counts
where its mean over seeds is more than `SURE` standard errors from zero.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from joma.experiments._experiment import Outcome, Request, Verdict, publish
from joma.experiments._frame import groups_done, read_metric, train_cells
from joma.experiments._tables import (
    columns,
    concatenated,
    listed,
    long_table,
    mean_and_std,
    standard_error,
)
from joma.experiments.hierarchy import EXPERIMENT
from joma.experiments.hierarchy.networks import (
    DECIDES,
    DEPTH,
    GROUPS,
    HEIGHTS,
    SIZES,
    HierarchyNetworks,
    HierarchySize,
    TreeGroup,
)
from joma.report import figures
from joma.runs import Run

TAKEN_UP = np.log(1.1)
"""A height is taken up when its ratio is a tenth above that of the untrained network."""

SURE = 3.0
"""How many standard errors a change must have."""

DISTINCT = 2.0
"""How many standard errors must lie between two heights, or they move together."""


@dataclass(frozen=True, eq=False)
class LayerCurves:
    """One layer of a group while it learns.

    Attributes:
        steps: The steps of the measurements, the first 0.
        ratio: Share of the attention to other tokens that each height gets, over what evenly
            spread attention would give it, (heights, steps, seeds).
        shuffled: The same for the same attention with the tree under wrong leaves.
        entropy: Entropy of the attention, mean over queries, in nats, (steps, seeds).
    """

    steps: tuple[int, ...]
    ratio: np.ndarray
    shuffled: np.ndarray
    entropy: np.ndarray

    @property
    def change(self) -> np.ndarray:
        """Logarithm of the ratio over that of the same untrained network; shape as the ratio."""
        logarithm = np.log(self.ratio)
        return logarithm - logarithm[:, :1]


@dataclass(frozen=True)
class LayerHistory:
    """What happened in one layer.

    Attributes:
        first: The heights that were taken up first: at the first measurement at which one is above
            `TAKEN_UP`, that one and all that are not `DISTINCT` from it; none if nothing was.
        begun: The step of that measurement.
        taken_up: For each height, the first step at which it is above `TAKEN_UP`; None if never.
        peak: The step at which the lowest of the first begins to fall back, by the most it does.
        trough: The step at which it has; the same step where it never falls.
        falls_back: Whether that is more than the error.
        followers: The heights above that one that rise between the two.
    """

    first: tuple[int, ...]
    begun: int | None
    taken_up: tuple[int | None, ...]
    peak: int | None
    trough: int | None
    falls_back: bool
    followers: tuple[int, ...]

    @property
    def low_first(self) -> bool:
        """Whether the tokens that co-occur most with the query came first, before all others."""
        return self.first == HEIGHTS[:1]


def history(curves: LayerCurves) -> LayerHistory:
    """Return what happened in a layer."""
    change, steps = curves.change, curves.steps
    up = (change.mean(-1) >= TAKEN_UP) & _is_sure(change)
    taken_up = tuple(steps[int(own.argmax())] if own.any() else None for own in up)
    if not up.any():
        return LayerHistory((), None, taken_up, None, None, False, ())
    begun = int(up.any(0).argmax())
    now = change[:, begun]
    ahead = int(np.where(up[:, begun], now.mean(-1), -np.inf).argmax())
    together = ~_is_sure(now[ahead] - now, DISTINCT)
    first = tuple(h for h, with_it in zip(HEIGHTS, together, strict=True) if with_it)
    lowest = HEIGHTS.index(first[0])
    peak, trough = largest_fall(change[lowest].mean(-1))
    later = change[:, trough] - change[:, peak]
    rises = zip(HEIGHTS, _is_sure(later), strict=True)
    return LayerHistory(
        first=first,
        begun=steps[begun],
        taken_up=taken_up,
        peak=steps[peak],
        trough=steps[trough],
        falls_back=bool(_is_sure(-later[lowest])),
        followers=tuple(h for h, rise in rises if rise and h > first[0]),
    )


def largest_fall(curve: np.ndarray) -> tuple[int, int]:
    """Return from where to where a curve falls the most; twice the last place if it never falls."""
    highest = np.maximum.accumulate(curve)
    trough = int((highest - curve).argmax())
    if highest[trough] == curve[trough]:
        return len(curve) - 1, len(curve) - 1
    return int(curve[: trough + 1].argmax()), trough


def _is_sure(values: np.ndarray, errors: float = SURE) -> np.ndarray:
    """Return where the mean over seeds is positive by more than that many standard errors."""
    return values.mean(-1) > errors * standard_error(values)


@dataclass(frozen=True, eq=False)
class GroupResults:
    """One group.

    Attributes:
        group: The group.
        layers: The curves of each layer.
        accuracy: Accuracy on fresh samples, (steps, seeds).
        best_accuracy: That of a perfect observer who knows the tree; NaN where it is not known.
    """

    group: TreeGroup
    layers: tuple[LayerCurves, ...]
    accuracy: np.ndarray
    best_accuracy: float


def collect(run: Run, size: HierarchySize) -> dict[str, GroupResults]:
    """Return what the metrics of the groups that are done hold."""
    return {name: _read(own, GROUPS[name], size) for name, own in groups_done(run, GROUPS).items()}


def _read(own: Run, group: TreeGroup, size: HierarchySize) -> GroupResults:
    def read(name: str, *shape: Any) -> np.ndarray:
        return read_metric([own], size.measure_at, size.seeds, name, *shape)[0]

    heights = [f"H{height}" for height in HEIGHTS]
    curves = zip(
        read("attention_ratio", group.layers, heights),
        read("shuffled_ratio", group.layers, heights),
        read("attention_entropy", group.layers),
        strict=True,
    )
    best = own.metrics.read("best_accuracy")["value"]
    return GroupResults(
        group,
        tuple(LayerCurves(size.measure_at, *of) for of in curves),
        read("accuracy"),
        float(np.mean(best)) if len(best) else np.nan,
    )


def cooccurrence(group: TreeGroup) -> tuple[float, ...]:
    """Theorem 5, and beyond it at H = L: P[token l occurs | token m occurs] by height."""
    tree, level = group.tree, DEPTH - 1
    found: dict[int, float] = {}
    for leaf in range(1, tree.sizes[-1]):
        height = tree.height(tree.common_ancestor((level, 0), (level, leaf)))
        found.setdefault(height, float(tree.conditional((level, leaf), (level, 0))[1, 1]))
    return tuple(found[height] for height in HEIGHTS)


def judge(results: Mapping[str, GroupResults], comparable: bool) -> Outcome:
    """Return whether low-level association comes first, and what comes later.

    It agrees where, in the lowest layer of networks of several layers with the class as label, the
    tokens of height 1 are taken up first and alone (see `LayerHistory.first`), and differs where
    others are before them. Where height 1 and another cannot be distinguished, or nothing is taken
    up, it stays open. Whether the others follow is said next to it and does not decide.

    Args:
        results: By group.
        comparable: Whether the networks are of the full size; small ones decide nothing.
    """
    verdict = Verdict.INCOMPLETE
    finding = f"the networks that decide are not trained yet; train group {DECIDES}."
    if DECIDES in results:
        layers = results[DECIDES].layers
        seen = history(layers[0])
        if not comparable:
            verdict = Verdict.NOT_COMPARABLE
        elif seen.first and (seen.low_first or HEIGHTS[0] not in seen.first):
            verdict = Verdict.of(seen.low_first)
        first, later = _first(layers[0], seen), _later(layers[0], seen)
        finding = f"in the lowest of {len(layers)} layers, {first}; {later}."
    return Outcome(verdict, finding, list(_rows(results)), tuple(_paragraphs(results)))


def _first(curves: LayerCurves, seen: LayerHistory) -> str:
    """Return what came first, in words."""
    if seen.begun is None:
        return (
            f"no height is taken up in {curves.steps[-1]:,} steps (the most that one gains is "
            f"{_gain(curves.change.mean(-1).max())})"
        )
    if seen.low_first:
        how = "low-level association comes first: H = 1"
    elif seen.first[0] == 1:
        how = (
            f"which comes first is not decided: H = {listed(seen.first)} come together, less than "
            f"{DISTINCT:g} standard errors apart"
        )
    else:
        how = f"low-level association does not come first: H = {listed(seen.first)} before H = 1"
    change = curves.change[:, curves.steps.index(seen.begun)].mean(-1)
    gains = (f"H = {h} {_gain(own)}" for h, own in zip(HEIGHTS, change, strict=True))
    return f"{how} (step {seen.begun}: {', '.join(gains)})"


def _later(curves: LayerCurves, seen: LayerHistory) -> str:
    """Return what came later, in words."""
    if seen.peak is None or seen.trough is None:
        return "so there is nothing to follow"
    if not seen.falls_back:
        return f"H = {seen.first[0]} does not fall back, so nothing takes its place"
    at = [curves.steps.index(step) for step in (seen.peak, seen.trough)]
    factors = np.exp(curves.change.mean(-1)[:, at])
    does = {h: "rises" if h in seen.followers else "does not rise" for h in HEIGHTS}
    does[seen.first[0]] = "falls back"
    each = (
        f"H = {h} (×{start:.2f} → ×{end:.2f}) {does[h]}"
        for h, (start, end) in zip(HEIGHTS, factors, strict=True)
        if h >= seen.first[0]
    )
    return f"from step {seen.peak} to {seen.trough:,} {', '.join(each)}"


def _gain(change: float) -> str:
    """Return the change of a logarithm as per cent, with a sign."""
    gain = round(float(np.expm1(change)), 2) + 0.0  # rounding may have left −0
    return f"{gain:+.0%}".replace("-", "−")


def _paragraphs(results: Mapping[str, GroupResults]) -> Iterable[str]:
    expected = zip(HEIGHTS, cooccurrence(GROUPS[DECIDES]), strict=True)
    yield (
        "Expected: where the query occurs, another token does with probability "
        f"{', '.join(f'{p:.2f} at H = {h}' for h, p in expected)} "
        "(Theorem 5), so H = 1 should come first. × is a height's share of the attention to other "
        "tokens, against the same network untrained; bands are two standard errors, a dot marks "
        "where a height is a tenth up."
    )
    right = (
        f"{name} {of.accuracy[-1].mean():.2f}"
        + ("" if np.isnan(of.best_accuracy) else f" of {of.best_accuracy:.2f}")
        for name, of in results.items()
    )
    yield f"Accuracy at the end, of what is possible: {', '.join(right)}."
    if {DECIDES, "flat-3"} <= results.keys():
        tree, flat = (_gap(results[name].layers[0]) for name in (DECIDES, "flat-3"))
        yield (
            f"At the end H = 1 gets {tree} times as much as H = 2 on the tree (layer 0 of 3, in "
            f"brackets standard errors from even), and {flat} times on the flat one, where tokens "
            "of height 1 have no latent of their own in common."
        )


def _gap(curves: LayerCurves) -> str:
    """Return the ratio of the final gains of H = 1 and H = 2, and how many errors from 1 it is."""
    gap = curves.change[0, -1] - curves.change[1, -1]
    return f"{np.exp(gap.mean()):.2f} ({abs(gap.mean()) / standard_error(gap):.0f})"


def _rows(results: Mapping[str, GroupResults]) -> Iterable[dict[str, str]]:
    for name, of in results.items():
        expected = cooccurrence(of.group)
        for layer, curves in enumerate(of.layers):
            seen, mean = history(curves), curves.change.mean(-1)
            for i, height in enumerate(HEIGHTS):
                extreme = int(np.abs(mean[i]).argmax())
                taken_up = seen.taken_up[i]
                yield {
                    "network": name,
                    "layer": str(layer),
                    "H": str(height),
                    "P[l|m]": f"{expected[i]:.2f}",
                    "untrained": mean_and_std(curves.ratio[i, 0]),
                    "taken up": "–" if taken_up is None else str(taken_up),
                    "extreme": mean_and_std(curves.ratio[i, extreme]),
                    "at step": str(curves.steps[extreme]),
                    "end": mean_and_std(curves.ratio[i, -1]),
                    "shuffled": mean_and_std(curves.shuffled[i, -1]),
                }


def tables(results: Mapping[str, GroupResults]) -> dict[str, dict[str, Any]]:
    """Return two tables: means and deviations over networks, and the ratio of every network."""
    heights, seeds = [], []
    for name, of in results.items():
        for layer, curves in enumerate(of.layers):
            where: dict[str, Any] = {"group": name, "layer": layer}
            for i, at in np.ndindex(curves.ratio.shape[:2]):
                row = {**where, "height": HEIGHTS[i], "step": curves.steps[at]}
                for key, own in (
                    ("ratio", curves.ratio[i, at]),
                    ("shuffled", curves.shuffled[i, at]),
                    ("entropy", curves.entropy[at]),
                ):
                    row |= {key: own.mean(), f"{key}_std": own.std(ddof=1)}
                heights.append(row)
            axes = {"height": HEIGHTS, "step": curves.steps, "seed": range(curves.ratio.shape[2])}
            seeds.append({**where, **long_table(curves.ratio, "ratio", **axes)})
    return {"heights": columns(heights), "seeds": concatenated(seeds)}


_STYLES = {1: (figures.BLUE, "-"), 2: (figures.VERMILLION, "--"), 3: (figures.GREEN, ":")}
_TICKS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10)
_FINE_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 1.7, 2)


def reproduce(run: Run, request: Request) -> Outcome:
    """Train the groups asked for that are not done, and say what all that are show."""
    size = SIZES[request.scale].with_options(request.options)
    groups = {name: [group] for name, group in GROUPS.items()}
    train_cells(run, groups, HierarchyNetworks, size, request)
    results = collect(run, size)
    outcome = judge(results, comparable=request.scale == "full")
    publish(run, EXPERIMENT, outcome, draw_layers(results), tables(results))
    if (shallow := draw_one_layer(results)) is not None:
        figures.save(
            run,
            "hierarchy-one-layer",
            shallow,
            title="What attention attends to in networks of one layer",
            caption="\n".join(outcome.paragraphs[:2]),
        )
    return outcome


def draw_layers(results: Mapping[str, GroupResults]) -> Figure | None:
    """Draw every layer of the networks that decide, above the same on the flat tree, if there."""
    titles = {DECIDES: "tree of three levels", "flat-3": "control, flat tree"}
    there = [name for name in titles if name in results]
    if not there:
        return None
    columns = results[there[0]].group.layers
    figure, axes = figures.new(10.5, 2.5 * (len(there) + 1), len(there) + 1, columns)
    styles = ((figures.BLACK, "-"), (figures.GREY, "--"))
    for row, name, style in zip(axes, there, styles, strict=False):
        for layer, curves in enumerate(results[name].layers):
            _draw_ratio(row[layer], curves, cooccurrence(results[name].group))
            row[layer].set_title(f"{titles[name]}: layer {layer}")
            _draw_entropy(axes[-1, layer], curves, *style, titles[name])
            axes[-1, layer].set(title=f"entropy: layer {layer}", xlabel="step")
        row[0].set_ylabel("attention, × untrained")
    axes[-1, 0].set_ylabel("nats")
    for row in axes:
        row[0].legend(loc="lower left", fontsize=8)
    _share_ratios(list(axes[:-1].flat), columns, room=0.8)
    figures.share_limits(axes[-1], columns)
    return figure


def draw_one_layer(results: Mapping[str, GroupResults]) -> Figure | None:
    """Draw networks of one layer, with each label and on the flat tree; those that are there."""
    styles = {
        "class-1": ("class as label", figures.BLACK, "-"),
        "flat-1": ("control, flat tree", figures.GREY, "--"),
        "token-1": ("token as label", figures.PURPLE, "-."),
    }
    there = [name for name in styles if name in results]
    if not there:
        return None
    figure, axes = figures.new(3.0 * (len(there) + 1), 3.1, 1, len(there) + 1)
    for name, ax in zip(there, axes, strict=False):
        curves, (title, color, style) = results[name].layers[0], styles[name]
        _draw_ratio(ax, curves, cooccurrence(results[name].group))
        ax.set(title=title, xlabel="step")
        _draw_entropy(axes[-1], curves, color, style, title)
    axes[-1].set(title="entropy", xlabel="step", ylabel="nats")
    axes[0].set_ylabel("attention, × untrained")
    _share_ratios(list(axes[:-1]), len(there), room=0.72)
    low, high = axes[-1].get_ylim()
    axes[-1].set_ylim(low - 0.3 * (high - low), high)
    for ax in axes:
        ax.legend(loc="lower left", fontsize=8)
    return figure


def _draw_ratio(ax: Axes, curves: LayerCurves, expected: Sequence[float]) -> None:
    steps = np.maximum(curves.steps, 0.5)  # ½ stands for 0 on the logarithmic axis
    ax.axhline(1, color=figures.GREY, lw=0.8)
    taken_up_at = history(curves).taken_up
    for i, height in enumerate(HEIGHTS):
        color, style = _STYLES[height]
        label = f"H = {height}, P[l|m] = {expected[i]:.2f}"
        # Relative to the untrained network, as all is that is said of it.
        own, wrong = (np.log(of[i] / of[i, :1]) for of in (curves.ratio, curves.shuffled))
        mean, error = own.mean(-1), 2 * standard_error(own)
        ends = np.exp([mean - error, mean, mean + error])
        figures.band(ax, steps, *ends, color=color, alpha=0.18, ls=style, label=label)
        label = "tree under wrong leaves" if height == HEIGHTS[-1] else None
        ax.plot(steps, np.exp(wrong.mean(-1)), style, color="#a8a8a8", lw=0.9, label=label)
        if (taken_up := taken_up_at[i]) is not None:
            at = curves.steps.index(taken_up)
            ax.plot(steps[at], np.exp(mean[at]), "o", color=color, ms=5.5, mec="white")
    ax.set_yscale("log")
    figures.log_steps(ax, curves.steps[-1])


def _draw_entropy(ax: Axes, curves: LayerCurves, color: str, style: str, label: str) -> None:
    mean, error = curves.entropy.mean(-1), 2 * standard_error(curves.entropy)
    ends = (mean - error, mean, mean + error)
    line = {"color": color, "alpha": 0.15, "ls": style, "label": label, "lw": 1.5}
    figures.band(ax, np.maximum(curves.steps, 0.5), *ends, **line)
    figures.log_steps(ax, curves.steps[-1])


def _share_ratios(axes: Sequence[Axes], columns: int, room: float) -> None:
    """Give panels of ratios one range, with room for a legend, and round numbers as ticks."""
    figures.share_limits(axes, columns, room)
    low, high = axes[0].get_ylim()
    ticks = _FINE_TICKS if high < 3 * low else _TICKS
    inside = [tick for tick in ticks if low <= tick <= high]
    for ax in axes:
        ax.set_yticks(inside, [f"{tick:g}" for tick in inside])
        ax.yaxis.set_minor_formatter(NullFormatter())
