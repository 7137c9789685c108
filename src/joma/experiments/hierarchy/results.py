"""What the networks show, from their metrics: numbers, verdict and plain words."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from joma.experiments._experiment import Outcome, Verdict
from joma.experiments._trained import columns, groups_done, mean_and_std, read_metric
from joma.experiments.hierarchy.course import APART, LayerCourse, LayerCurves, course
from joma.experiments.hierarchy.networks import (
    DECIDES,
    DEPTH,
    GROUPS,
    HEIGHTS,
    HierarchySize,
    TreeGroup,
)
from joma.runs import Run


@dataclass(frozen=True, eq=False)
class GroupResults:
    """One group.

    Attributes:
        group: The group.
        layers: The curves of each layer.
        accuracy: Accuracy on fresh samples, (steps, seeds).
        best_accuracy: What who knows the tree would get; NaN where it is not known.
    """

    group: TreeGroup
    layers: tuple[LayerCurves, ...]
    accuracy: np.ndarray
    best_accuracy: float

    @property
    def courses(self) -> tuple[LayerCourse, ...]:
        """What happened in each layer."""
        return tuple(course(curves) for curves in self.layers)


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
    tokens of height 1 are taken up first and alone (see `LayerCourse.first`), and differs where
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
        seen = course(layers[0])
        if not comparable:
            verdict = Verdict.NOT_COMPARABLE
        elif seen.first and (seen.low_first or HEIGHTS[0] not in seen.first):
            verdict = Verdict.of(seen.low_first)
        finding = (
            f"in the lowest of {len(layers)} layers, {_first(layers[0])}; {_later(layers[0])}."
        )
    return Outcome(verdict, finding, list(_rows(results)), tuple(_paragraphs(results)))


def _first(curves: LayerCurves) -> str:
    """Return what came first, in words."""
    seen = course(curves)
    if seen.begun is None:
        return (
            f"no height is taken up in {curves.steps[-1]:,} steps (the most that one gains is "
            f"{_gain(curves.change.mean(-1).max())})"
        )
    begun = curves.steps.index(seen.begun)
    gains = ", ".join(
        f"H = {h} {_gain(g)}" for h, g in _by_height(curves.change[:, begun].mean(-1))
    )
    if seen.low_first:
        how = "low-level association comes first: H = 1"
    elif seen.first[0] == 1:
        how = (
            f"which comes first is not decided: H = {_and(seen.first)} come together, less than "
            f"{APART:g} standard errors apart"
        )
    else:
        how = f"low-level association does not come first: H = {_and(seen.first)} before H = 1"
    return f"{how} (step {seen.begun}: {gains})"


def _later(curves: LayerCurves) -> str:
    """Return what came later, in words."""
    seen = course(curves)
    if seen.peak is None:
        return "so there is nothing to follow"
    assert seen.trough is not None
    peak, trough = (curves.steps.index(step) for step in (seen.peak, seen.trough))
    if not seen.falls_back:
        return f"H = {seen.first[0]} does not fall back, so nothing takes its place"
    lowest, *others = [
        (h, f"H = {h} ({_to(own[peak], own[trough])})")
        for h, own in _by_height(curves.change.mean(-1))
        if h >= seen.first[0]
    ]
    parts = [f"{lowest[1]} falls back"]
    parts += [f"{text} {'rises' if h in seen.followers else 'does not rise'}" for h, text in others]
    words = f"from step {seen.peak} to {seen.trough:,} {', '.join(parts)}"
    if trough == len(curves.steps) - 1:
        return words
    ends = _by_height(np.exp(curves.change[:, -1].mean(-1)))
    return f"{words}; at the end {', '.join(f'H = {h} ×{end:.2f}' for h, end in ends)}"


def _by_height(values: np.ndarray) -> list[tuple[int, Any]]:
    return list(zip(HEIGHTS, values, strict=True))


def _gain(change: float) -> str:
    """Return the change of a logarithm as per cent, with a sign."""
    gain = round(float(np.expm1(change)), 2) + 0.0  # rounding may have left −0
    return f"{gain:+.0%}".replace("-", "−")


def _to(start: float, end: float) -> str:
    """Return two changes of a logarithm as factors."""
    return f"×{np.exp(start):.2f} → ×{np.exp(end):.2f}"


def _and(heights: Iterable[int]) -> str:
    return " and ".join(str(height) for height in heights)


def _paragraphs(results: Mapping[str, GroupResults]) -> Iterable[str]:
    expected = ", ".join(
        f"{p:.2f} at H = {h}" for h, p in zip(HEIGHTS, cooccurrence(GROUPS[DECIDES]), strict=True)
    )
    yield (
        f"Expected: where the query occurs, another token does with probability {expected} "
        "(Theorem 5), so H = 1 should come first. × is a height's share of the attention to other "
        "tokens, against the same network untrained; bands are two standard errors, a dot marks "
        "where a height is a tenth up."
    )
    others = [_briefly(name, of) for name, of in results.items() if name != DECIDES]
    if others:
        yield f"The lowest layer of the other networks: {'; '.join(others)}."
    yield _controls(results)
    yield _entropies(results)


def _briefly(name: str, of: GroupResults) -> str:
    """First and last of a network's lowest layer."""
    curves, seen = of.layers[0], of.courses[0]
    if seen.peak is None:
        return f"{name}, nothing is taken up"
    change, at = curves.change.mean(-1), curves.steps.index(seen.peak)
    first = f"{name}, first H = {_and(seen.first)}{' together' * (len(seen.first) > 1)}"
    if not seen.falls_back:
        ends = ", ".join(f"H = {h} ×{np.exp(own[-1]):.2f}" for h, own in _by_height(change))
        return f"{first} (step {seen.begun}), at the end {ends}"
    ends = ", ".join(f"H = {h} {_to(own[at], own[-1])}" for h, own in _by_height(change))
    return f"{first} (step {seen.begun}), from step {seen.peak} to the end {ends}"


def _controls(results: Mapping[str, GroupResults]) -> str:
    """Return what untrained networks, a shuffled tree and the flat tree say."""
    every = [curves for of in results.values() for curves in of.layers]
    untrained = np.concatenate([np.log(curves.ratio[:, 0]) for curves in every], -1)
    wrong = np.concatenate(
        [np.log(curves.shuffled[:, -1]).mean(-1, keepdims=True) for curves in every], -1
    )
    spread = ", ".join(f"{np.exp(own.mean()):.2f} ± {own.std(ddof=1):.2f}" for own in untrained)
    text = (
        f"Controls: untrained networks give {spread} to H = {_and(HEIGHTS)} (mean and spread over "
        f"networks). With the tree under wrong leaves, trained ones give "
        f"{np.exp(wrong.min()):.2f} to {np.exp(wrong.max()):.2f}."
    )
    if not {DECIDES, "flat-3"} <= results.keys():
        return text
    gaps = [_gap(results[name].layers[0]) for name in (DECIDES, "flat-3")]
    return (
        f"{text} At the end H = 1 gets {np.exp(gaps[0][0]):.2f} times as much as H = 2 on the tree "
        f"(layer 0 of 3; {abs(gaps[0][0]) / gaps[0][1]:.0f} standard errors from even), and "
        f"{np.exp(gaps[1][0]):.2f} times ({abs(gaps[1][0]) / gaps[1][1]:.0f}) on the flat one, "
        "where tokens of height 1 have no latent of their own in common."
    )


def _gap(curves: LayerCurves) -> tuple[float, float]:
    """Return the log ratio of the final gains of H = 1 and H = 2, and its standard error."""
    gap = curves.change[0, -1] - curves.change[1, -1]
    return float(gap.mean()), float(gap.std(ddof=1) / np.sqrt(gap.size))


def _entropies(results: Mapping[str, GroupResults]) -> str:
    parts = []
    for name, of in results.items():
        for layer, (curves, seen) in enumerate(zip(of.layers, of.courses, strict=True)):
            mean = curves.entropy.mean(-1)
            parts.append(
                f"{name} layer {layer} {mean[0]:.2f} → {mean.min():.2f} (step {seen.dip}) → "
                f"{mean[-1]:.2f}{'' if seen.bounces else ', no bounce'}"
            )
    right = [
        f"{name} {of.accuracy[-1].mean():.2f}"
        + ("" if np.isnan(of.best_accuracy) else f" of {of.best_accuracy:.2f}")
        for name, of in results.items()
    ]
    return (
        f"Entropy of the attention, in nats: {'; '.join(parts)}. Accuracy at the end, of what is "
        f"possible: {', '.join(right)}."
    )


def _rows(results: Mapping[str, GroupResults]) -> Iterable[dict[str, str]]:
    for name, of in results.items():
        expected = cooccurrence(of.group)
        for layer, (curves, seen) in enumerate(zip(of.layers, of.courses, strict=True)):
            mean = curves.change.mean(-1)
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


def tables(results: Mapping[str, GroupResults]) -> dict[str, dict[str, list]]:
    """Return two tables: means and deviations over networks, and the ratio of every network."""
    heights, seeds = [], []
    for name, of in results.items():
        for layer, curves in enumerate(of.layers):
            for i, at in np.ndindex(curves.ratio.shape[:2]):
                where = {"group": name, "layer": layer, "height": HEIGHTS[i]}
                where["step"] = curves.steps[at]
                measured = {
                    "ratio": curves.ratio[i, at],
                    "shuffled": curves.shuffled[i, at],
                    "entropy": curves.entropy[at],
                }
                numbers = {}
                for key, own in measured.items():
                    numbers |= {key: own.mean(), f"{key}_std": own.std(ddof=1)}
                heights.append({**where, **numbers})
                seeds += [
                    {**where, "seed": seed, "ratio": float(ratio)}
                    for seed, ratio in enumerate(curves.ratio[i, at])
                ]
    return {"heights": columns(heights), "seeds": columns(seeds)}
