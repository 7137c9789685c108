"""What the networks show, from their metrics: numbers, verdict and plain words."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from joma.experiments._experiment import Outcome, Verdict
from joma.experiments._trained import is_done
from joma.experiments.hierarchy._course import APART, Course, Curves, course
from joma.experiments.hierarchy._groups import DECIDES, DEPTH, GROUPS, HEIGHTS, Group, Size
from joma.runs import Run


@dataclass(frozen=True, eq=False)
class Results:
    """One group.

    Attributes:
        group: which.
        layers: the curves of each.
        accuracy: on fresh samples, (looks, seeds).
        best_accuracy: what who knows the tree would get; NaN where it is not known.
    """

    group: Group
    layers: tuple[Curves, ...]
    accuracy: np.ndarray
    best_accuracy: float

    @property
    def courses(self) -> tuple[Course, ...]:
        """What happened in each layer."""
        return tuple(course(curves) for curves in self.layers)


def collect(run: Run, size: Size) -> dict[str, Results]:
    """Reads the metrics of the groups that are done."""
    return {
        name: _read(Run.open(run.path / "groups" / name), group, size)
        for name, group in GROUPS.items()
        if is_done(run, name)
    }


def _read(own: Run, group: Group, size: Size) -> Results:
    look = {step: i for i, step in enumerate(size.looks)}
    heights = {f"H{height}": i for i, height in enumerate(HEIGHTS)}

    def read(name: str, *shape: int) -> np.ndarray:
        """(…, looks, seeds), in front the layers and heights that the shape asks for."""
        values = np.full((*shape, len(look), size.seeds), np.nan)
        log = own.metrics.read(name)
        columns = (log[key] for key in ("layer", "module", "step", "member", "value"))
        for layer, module, step, member, value in zip(*columns, strict=True):
            where = (int(layer), heights.get(str(module), 0))[: len(shape)]
            values[(*where, look[int(step)], int(member))] = value
        return values

    ratio, shuffled = (
        read(name, group.layers, len(HEIGHTS)) for name in ("attention_ratio", "shuffled_ratio")
    )
    entropy = read("attention_entropy", group.layers)
    best = own.metrics.read("best_accuracy")["value"]
    return Results(
        group,
        tuple(Curves(size.looks, *of) for of in zip(ratio, shuffled, entropy, strict=True)),
        read("accuracy"),
        float(np.mean(best)) if len(best) else np.nan,
    )


def cooccurrence(group: Group) -> tuple[float, ...]:
    """Theorem 5, and beyond it at H = L: P[token l occurs | token m occurs] by height."""
    tree, level = group.tree, DEPTH - 1
    found: dict[int, float] = {}
    for leaf in range(1, tree.sizes[-1]):
        height = tree.height(tree.common_ancestor((level, 0), (level, leaf)))
        found.setdefault(height, float(tree.conditional((level, leaf), (level, 0))[1, 1]))
    return tuple(found[height] for height in HEIGHTS)


def judge(results: Mapping[str, Results], comparable: bool) -> Outcome:
    """Whether low-level association comes first, and what comes later.

    It agrees where, in the lowest layer of networks of several layers with the class as label, the
    tokens of height 1 are taken up first and alone (see `Course.first`), and differs where others
    are before them. Where height 1 and another are not told apart, or nothing is taken up, it stays
    open. Whether the others follow is said next to it and does not decide.

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


def _first(curves: Curves) -> str:
    """What came first, in words."""
    seen = course(curves)
    if seen.begun is None:
        return (
            f"no height is taken up in {curves.steps[-1]:,} steps (the most that one gains is "
            f"{_gain(curves.change.mean(-1).max())})"
        )
    look = curves.steps.index(seen.begun)
    gains = ", ".join(f"H = {h} {_gain(g)}" for h, g in _by_height(curves.change[:, look].mean(-1)))
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


def _later(curves: Curves) -> str:
    """What came later, in words."""
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
    """The change of a logarithm as per cent, with a sign."""
    gain = round(float(np.expm1(change)), 2) + 0.0  # rounding may have left −0
    return f"{gain:+.0%}".replace("-", "−")


def _to(start: float, end: float) -> str:
    """Two changes of a logarithm as factors."""
    return f"×{np.exp(start):.2f} → ×{np.exp(end):.2f}"


def _and(heights: Iterable[int]) -> str:
    return " and ".join(str(height) for height in heights)


def _paragraphs(results: Mapping[str, Results]) -> Iterable[str]:
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


def _briefly(name: str, of: Results) -> str:
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


def _controls(results: Mapping[str, Results]) -> str:
    """What untrained networks, a shuffled tree and the flat tree say."""
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


def _gap(curves: Curves) -> tuple[float, float]:
    """Logarithm of how much more H = 1 gained than H = 2 at the end, and its standard error."""
    gap = curves.change[0, -1] - curves.change[1, -1]
    return float(gap.mean()), float(gap.std(ddof=1) / np.sqrt(gap.size))


def _entropies(results: Mapping[str, Results]) -> str:
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


def _rows(results: Mapping[str, Results]) -> Iterable[dict[str, str]]:
    for name, of in results.items():
        expected = cooccurrence(of.group)
        for layer, (curves, seen) in enumerate(zip(of.layers, of.courses, strict=True)):
            mean = curves.change.mean(-1)
            for i, height in enumerate(HEIGHTS):

                def read(values: np.ndarray) -> str:
                    return f"{values.mean():.2f} ± {values.std(ddof=1):.2f}"

                extreme = int(np.abs(mean[i]).argmax())
                taken_up = seen.taken_up[i]
                yield {
                    "network": name,
                    "layer": str(layer),
                    "H": str(height),
                    "P[l|m]": f"{expected[i]:.2f}",
                    "untrained": read(curves.ratio[i, 0]),
                    "taken up": "–" if taken_up is None else str(taken_up),
                    "extreme": read(curves.ratio[i, extreme]),
                    "at step": str(curves.steps[extreme]),
                    "end": read(curves.ratio[i, -1]),
                    "shuffled": read(curves.shuffled[i, -1]),
                }


def table(results: Mapping[str, Results]) -> dict[str, list]:
    """A row for each layer, height and look: means and standard deviations over seeds."""
    columns: dict[str, list] = {
        name: []
        for name in (
            "group",
            "layer",
            "height",
            "step",
            "ratio",
            "ratio_std",
            "shuffled",
            "shuffled_std",
            "entropy",
            "entropy_std",
        )
    }
    for name, of in results.items():
        for layer, curves in enumerate(of.layers):
            for (i, height), (look, step) in (
                (h, s) for h in enumerate(HEIGHTS) for s in enumerate(curves.steps)
            ):
                measured = (curves.ratio[i, look], curves.shuffled[i, look], curves.entropy[look])
                numbers = [n for own in measured for n in (own.mean(), own.std(ddof=1))]
                row = (name, layer, height, step, *numbers)
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
    return columns


def seeds_table(results: Mapping[str, Results]) -> dict[str, list]:
    """Return a table with a row for each layer, height, step and network."""
    columns: dict[str, list] = {
        name: [] for name in ("group", "layer", "height", "step", "seed", "ratio")
    }
    for name, of in results.items():
        for layer, curves in enumerate(of.layers):
            for (i, look, seed), ratio in np.ndenumerate(curves.ratio):
                row = (name, layer, HEIGHTS[i], curves.steps[look], seed, float(ratio))
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
    return columns
