"""What the networks of Table 1 show, from their metrics: numbers, verdict and plain words."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from joma.experiments._experiment import Outcome, Verdict
from joma.experiments._ncorr import PLANTED, planted_name, seeds_and_means
from joma.experiments._trained import columns, groups_done, mean_and_std, read_metric
from joma.experiments.table1.networks import (
    CELLS,
    GROUPS,
    LEVELS,
    Table1Cell,
    Table1Size,
    largest_possible,
)
from joma.runs import Run

CLOSE = 0.05
"""How close to the published mean counts as the same."""

ENOUGH = 20 / 24
"""Of the published numbers must be that close."""

SURE = 3.0
"""How many standard errors a change of NCorr in training must have to be named."""

MEASURES = (
    "ncorr",
    "held_out_classes",
    "shuffled_classes",
    "held_out_samples",
    "shuffled_samples",
    "counted_classes",
    *map(planted_name, PLANTED),
)


@dataclass(frozen=True)
class Table1Results:
    """NCorr and its controls of the cells that are done.

    Attributes:
        cells: The cells that are done.
        steps: The steps of the measurements.
        values: By measure, (cells, LEVELS, steps, seeds); NaN where it was not taken.
        accuracy: (cells, steps, seeds).
        bounds: What NCorr cannot exceed, as latents that no class uses count as 0:
            (cells, LEVELS, seeds).
    """

    cells: tuple[Table1Cell, ...]
    steps: tuple[int, ...]
    values: dict[str, np.ndarray]
    accuracy: np.ndarray
    bounds: np.ndarray

    def at(self, measure: str, step: int) -> np.ndarray:
        """Return a measure at a step: (cells, LEVELS, seeds)."""
        return self.values[measure][:, :, self.steps.index(step)]

    def mean(self, measure: str, step: int) -> np.ndarray:
        """Return its mean over seeds: (cells, LEVELS)."""
        return self.at(measure, step).mean(-1)

    def std(self, measure: str, step: int) -> np.ndarray:
        """Return its standard deviation over seeds, with n − 1: (cells, LEVELS)."""
        return self.at(measure, step).std(-1, ddof=1)


def collect(run: Run, size: Table1Size, seed: int) -> Table1Results:
    """Return what the metrics of the groups that are done hold."""
    done = groups_done(run, GROUPS)
    cells = tuple(cell for group in done for cell in GROUPS[group])
    read = partial(read_metric, done.values(), size.measure_at, size.seeds)
    return Table1Results(
        cells,
        size.measure_at,
        {name: read(name, LEVELS) for name in MEASURES},
        read("accuracy"),
        largest_possible(cells, size, seed),
    )


def close_ones(results: Table1Results, step: int | None = None) -> np.ndarray:
    """Return which of the published numbers ours are close to: (cells, 2).

    Args:
        results: Of the cells that are done.
        step: The step of the measurement; the last where None.
    """
    published = np.array([cell.published for cell in results.cells])
    mean = results.mean("ncorr", results.steps[-1] if step is None else step)
    return np.abs(mean[:, :2] - published) <= CLOSE


def judge(results: Table1Results, published_size: bool) -> Outcome:
    """Return whether ours shows what was published, and what that is worth.

    At a published size it agrees where at least 20 of 24 means are within .05 of print. That is a
    description and no test: how many of untrained networks are as close is said next to it. Other
    sizes have other numbers of nodes to choose from and are not comparable.

    Args:
        results: Of the cells that are done.
        published_size: Whether the networks have the size and the learning rate that was published.
    """
    last = results.steps[-1]
    trained, untrained = (results.mean("ncorr", step) for step in (last, 0))
    close, before = close_ones(results), close_ones(results, 0)
    verdict = Verdict.NOT_COMPARABLE
    if results.cells != CELLS:
        verdict = Verdict.INCOMPLETE
    elif published_size:
        verdict = Verdict.of(bool(close.mean() >= ENOUGH))
    how = (
        f"{close.sum()} of {close.size} numbers of trained networks lie within {CLOSE:g} of the "
        f"published ones, and {before.sum()} of untrained ones"
    )
    gain = (trained - untrained)[:, :2].mean(0)
    return Outcome(
        verdict,
        finding=f"{how}; untrained networks read {_pair(untrained)} where trained ones read "
        f"{_pair(trained)} (s = 0, s = 1, mean over cells): training adds {gain[0]:+.2f} and "
        f"{gain[1]:+.2f} by its last step.",
        table=list(_rows(results)),
        paragraphs=(
            _what_training_adds(results),
            _what_it_shows(results),
            _power(results),
            _what_differs(results),
        ),
    )


def _pair(values: np.ndarray) -> str:
    return " and ".join(f"{value:.2f}" for value in values[:, :2].mean(0))


def _rows(results: Table1Results) -> Iterable[dict[str, str]]:
    last = results.steps[-1]
    for i, cell in enumerate(results.cells):
        for s in range(LEVELS):

            def read(measure: str, step: int, i: int = i, s: int = s) -> str:
                values = results.at(measure, step)[i, s]
                if np.isnan(values).any():  # a class varies in one half of the classes alone
                    return "–"
                return mean_and_std(values)

            yield {
                "cell": f"C={cell.classes} N={cell.children} {cell.latents}",
                "s": str(s),
                "published": f"{cell.published[s]:.2f}" if s < 2 else "–",
                "at most": f"{results.bounds[i, s].mean():.2f}",
                "trained": read("ncorr", last),
                "untrained": read("ncorr", 0),
                "after 1 step": read("ncorr", 1),
                "new classes": read("held_out_classes", last),
                "new classes, untrained": read("held_out_classes", 0),
                "shuffled": read("shuffled_classes", last),
            }


def _what_training_adds(results: Table1Results) -> str:
    last = results.steps[-1]
    kept = [results.mean("held_out_classes", step)[:, :2].mean(0) for step in (last, 0)]
    chance = results.mean("shuffled_classes", last)[:, :2].mean(0)
    counted = results.mean("counted_classes", last)[:, :2].mean(0)
    right = results.accuracy[:, [-1, 0]].mean((0, 2))
    return (
        f"After {last:,} steps the networks classify {right[0]:.0%} of the samples right, before "
        f"training {right[1]:.0%}. A node chosen on half of the classes correlates with its latent "
        f"on the other half by {kept[0][0]:.2f} at s = 0 and {kept[0][1]:.2f} at s = 1 after "
        f"training, {kept[1][0]:.2f} and {kept[1][1]:.2f} before it (over the {counted[0]:.1f} and "
        f"{counted[1]:.1f} latents that vary in both halves). With the latents given to other "
        f"classes, NCorr still reads {chance[0]:.2f} and {chance[1]:.2f}."
    )


def _what_it_shows(results: Table1Results) -> str:
    """Return what training adds to NCorr and to its control, in words that the numbers choose."""
    last = results.steps[-1]
    gains, kept_gains = (
        (results.mean(name, last) - results.mean(name, 0))[:, :2].mean(0)
        for name in ("ncorr", "held_out_classes")
    )
    by_samples = results.mean("held_out_samples", last)[:, :2].mean(0)
    table = f"{_effect(gains, 'Mean over cells', 'NCorr')} {_by_cell(results)}"
    new = _effect(kept_gains, "On classes that the node was not chosen on", "the correlation")
    return (
        f"{table} {new} Controls over samples cannot tell: on the other half of the samples the "
        f"chosen nodes read {by_samples[0]:.2f} and {by_samples[1]:.2f}, for every half of the "
        "samples has every input."
    )


def _by_cell(results: Table1Results) -> str:
    """In which cells training changes NCorr, network by network, beyond its error."""
    change = results.at("ncorr", results.steps[-1]) - results.at("ncorr", 0)
    mean, error = change.mean(-1), change.std(-1, ddof=1) / np.sqrt(change.shape[-1])
    error = np.maximum(error, 1e-6)  # networks that move alike to rounding
    found = [
        f"{cell.name} {mean[i, s]:+.2f} at s = {s} ({abs(mean[i, s]) / error[i, s]:.0f})"
        for i, cell in enumerate(results.cells)
        for s in range(2)
        if abs(mean[i, s]) > max(SURE * error[i, s], 0.01)
    ]
    if not found:
        return f"In no cell is the change more than {SURE:g} standard errors."
    return (
        f"By more than {SURE:g} standard errors (their number in brackets) in {len(found)} of "
        f"{mean[:, :2].size}: {', '.join(found)}."
    )


def _power(results: Table1Results) -> str:
    """Return how much the control over classes reads of correlations that are there, by classes."""
    last, texts = results.steps[-1], []
    for classes in dict.fromkeys(cell.classes for cell in results.cells):
        own = [cell.classes == classes for cell in results.cells]
        levels = []
        for s in range(2):
            read = [
                f"{results.mean(planted_name(known), last)[own, s].mean():.2f} of {known:g}"
                for known in PLANTED
            ]
            levels.append(f"s = {s} {', '.join(read)}")
        texts.append(f"C = {classes}: {'; '.join(levels)}")
    return (
        "Power of the control over classes: with one more node for each latent in these trained "
        f"networks, of a known correlation with it over all classes, it reads at "
        f"{'. '.join(texts)}. What it does not read may still be there."
    )


def _what_differs(results: Table1Results) -> str:
    """Return where ours lies from what was published, and what bears on it."""
    last = results.steps[-1]
    over_time, chance = (
        results.values[name][:, 1].mean((0, 2)) for name in ("ncorr", "shuffled_classes")
    )
    best = int(over_time.argmax())
    course = (
        f"At s = 1 the mean over cells goes from {over_time[0]:.2f} to {over_time[best]:.2f} after "
        f"{results.steps[best]:,} steps, its highest, and {over_time[-1]:.2f} at the end; with the "
        f"latents given to other classes from {chance[0]:.2f} to {chance[best]:.2f} and "
        f"{chance[-1]:.2f}."
    )
    published = np.array([cell.published for cell in results.cells])
    gap = results.mean("ncorr", last)[:, :2] - published
    unlike = [
        f"{cell.name} {gap[i, s]:+.2f} at s = {s}"
        for i, cell in enumerate(results.cells)
        for s in range(2)
        if abs(gap[i, s]) > CLOSE
    ]
    beyond = [
        f"{cell.name} at s = {s} ({published[i, s]:.2f} against at most {bound:.2f})"
        for i, cell in enumerate(results.cells)
        for s, bound in enumerate(results.bounds[i, :2].mean(-1))
        if published[i, s] > bound
    ]
    sentences = [course]
    if unlike:
        sentences.append(f"Further than {CLOSE:g} from the published mean: {'; '.join(unlike)}.")
    if beyond:
        sentences.append(
            "Latents that no class uses count as 0, and with those of the hierarchies drawn here "
            f"NCorr cannot reach what was published of {'; '.join(beyond)}."
        )
    return " ".join(sentences)


def _effect(gains: np.ndarray, begin: str, what: str) -> str:
    """Return one sentence on what training adds at s = 0 and s = 1."""
    shown = " and ".join(
        f"{gain:+.2f} at s = {s}{'' if abs(gain) > CLOSE else ' (less than 0.05)'}"
        for s, gain in enumerate(gains)
    )
    return f"{begin}: training changes {what} by {shown}."


def tables(results: Table1Results) -> dict[str, dict[str, list]]:
    """Return two tables: a row for each number of every network, and one for each mean."""

    def label(measure: str, i: int, s: int, k: int) -> dict[str, Any]:
        return {"cell": results.cells[i].name, "s": s, "step": results.steps[k]}

    seeds, means = seeds_and_means(results.values, label)
    published = {cell.name: cell.published for cell in results.cells}
    for row in means:
        known = row["measure"] == "ncorr" and row["s"] < 2
        row["published"] = published[row["cell"]][row["s"]] if known else np.nan
    return {"seeds": columns(seeds), "means": columns(means)}
