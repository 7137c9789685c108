"""Eqn 6 fitted to the first part of measured curves, and compared with the steps it did not see.

    python -m benchmarks.prediction train            # makes the curves of `joma train`
    python -m benchmarks.prediction fit [--source fig4] [--source fig6] [--source train]
    python -m benchmarks.prediction table
    python -m benchmarks.prediction figure OUT.png

Sources: the recursion of Fig. 4 as drawn (ten seeds); recorded attention entropies of Fig. 6's
WikiText-2 networks of 1, 2, 5 and 10 layers, one seed (needs JOMA_SHARED); and attention entropies
of `joma train tiny`, three seeds. Baselines: the last value seen, and the exponential
a + b exp(-t/c) fitted to the part seen. `fit` keeps its results in runs/prediction; `table` and
`figure` read them.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from joma.errors import JomaError
from joma.experiments.theory_figures import fig4
from joma.report import figures
from joma.runs import Run
from joma.theory import nonlinear

PARTS = (0.25, 0.35, 0.5)
FOLDER = Path("runs") / "prediction"
SEEDS = 3
RATE, DEPTHS, SEED = 1e-4, (1, 2, 5, 10), 1
SHARED = Path(os.environ.get("JOMA_SHARED", "../shared"))
Array = np.ndarray


class Curve(NamedTuple):
    """A measured entropy curve; v is given where it was measured as well."""

    source: str
    name: str
    t: Array
    entropy: Array
    scale: float = 1.0
    v: Array | None = None


def read_fig4() -> Iterator[Curve]:
    """Ten networks of Fig. 4 as drawn: 100 of the 5,000 steps of the recursion."""
    for seed in range(10):
        course = fig4.as_drawn(fig4.targets(seed))
        at = np.arange(50, 5001, 50)
        yield Curve(
            "fig4", f"seed {seed}", course.t[at], course.entropy[at], fig4.SHARPNESS, course.v[at]
        )


def read_fig6() -> Iterator[Curve]:
    """Recorded entropies of every layer of the networks at one learning rate."""
    path = SHARED / "reference" / "wikitext2_entropy.csv"
    if not path.is_file():
        raise SystemExit(f"{path.name} is not there; set JOMA_SHARED to the folder that has it")
    rows: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    with path.open() as file:
        for row in csv.DictReader(file):
            wanted = float(row["lr"]) == RATE and int(row["layers"]) in DEPTHS
            if wanted and int(row["seed"]) == SEED:
                key = int(row["layers"]), int(row["layer"])
                rows[key][int(row["step"])] = float(row["attention_entropy"])
    for (depth, layer), points in sorted(rows.items()):
        steps = sorted(points)
        values = np.array([points[step] for step in steps])
        name = f"{depth} layers, layer {layer}"
        yield Curve("fig6", name, np.array(steps, float), values)


def read_train() -> Iterator[Curve]:
    """Entropies of every layer that the monitor saw in `joma train tiny`."""
    for seed in range(SEEDS):
        folder = FOLDER / f"train-{seed}"
        if not folder.is_dir():
            raise SystemExit("no trainings: run `python -m benchmarks.prediction train` first")
        log = Run.open(folder).metrics.read()
        mean = (log["name"] == "attention_entropy") & (log["head"] < 0)
        for layer in np.unique(log["layer"][mean]):
            own = mean & (log["layer"] == layer) & (log["step"] % 6 == 0)
            order = np.argsort(log["step"][own])
            yield Curve(
                "train",
                f"seed {seed}, layer {layer}",
                log["step"][own][order].astype(float),
                log["value"][own][order],
            )


SOURCES: dict[str, Callable[[], Iterator[Curve]]] = {
    "fig4": read_fig4,
    "fig6": read_fig6,
    "train": read_train,
}


def exponential(t: Array, values: Array, later: Array) -> Array:
    """A + b exp(-t/c) fitted to the part seen, at later times."""
    span = t[-1] - t[0]
    best, found = np.inf, np.full(later.size, values[-1])
    for decay in np.geomspace(0.02, 20, 60) * span:
        basis = np.column_stack([np.ones_like(t), np.exp(-(t - t[0]) / decay)])
        solution, *_ = np.linalg.lstsq(basis, values, rcond=None)
        error = float(np.sum((basis @ solution - values) ** 2))
        if error < best:
            best = error
            found = solution[0] + solution[1] * np.exp(-(later - t[0]) / decay)
    return found


def judge(curve: Curve, part: float) -> dict[str, object]:
    """Fit the first part of a curve, and compare prediction and baselines with the rest."""
    seen = max(round(part * curve.t.size), 4)
    t, later = curve.t[:seen], curve.t[seen:]
    truth = curve.entropy[seen:]
    row: dict[str, object] = {"source": curve.source, "name": curve.name, "part": part}
    row["persistence"] = _error(np.full(later.size, curve.entropy[seen - 1]), truth)
    row["exponential"] = _error(exponential(t, curve.entropy[:seen], later), truth)
    try:
        found = nonlinear.fit(
            t, entropy=curve.entropy[:seen], components=(2, 4), multiplicity=True, scale=curve.scale
        )
        row |= _compared_with("entropy", found, later, truth)
    except JomaError as error:  # too few measurements
        row["entropy_refused"] = str(error)
    if curve.v is not None:
        found = nonlinear.fit(t, v=curve.v[:seen], scale=curve.scale)
        row |= _compared_with("v", found, later, truth)
    return row


def _compared_with(
    kind: str, found: nonlinear.Eqn6Fit, later: Array, truth: Array
) -> dict[str, object]:
    row: dict[str, object] = {f"{kind}_misfit": found.misfit}
    try:
        prediction = found.predict_entropy(later)
    except JomaError as error:
        return row | {f"{kind}_refused": str(error)}
    row[f"{kind}_error"] = _error(prediction.median, truth)
    row[f"{kind}_covered"] = float(np.mean(prediction.covers(truth)))
    row[f"{kind}_band"] = [
        prediction.median.tolist(),
        prediction.low.tolist(),
        prediction.high.tolist(),
    ]
    return row


def _error(predicted: Array, truth: Array) -> float:
    return float(np.sqrt(np.mean((predicted - truth) ** 2)))


def train() -> None:
    """Train `joma train tiny` with three seeds at a constant learning rate."""
    for seed in range(SEEDS):
        settings = ("training.steps=300", f"training.seed={seed}", "optimizer.schedule=constant")
        command = [sys.executable, "-m", "joma", "train", "tiny", "--device", "cpu"]
        command += ["--out", str(FOLDER / f"train-{seed}")]
        for setting in (*settings, "monitor.every=6"):
            command += ["--set", setting]
        subprocess.run(command, check=True)


def fit(sources: list[str]) -> None:
    """Fit all curves of the sources and keep the results."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for source in sources:
        path = FOLDER / f"{source}.jsonl"
        done = sum(1 for _ in path.open()) if path.exists() else 0
        jobs = [(curve, part) for curve in SOURCES[source]() for part in PARTS]
        with path.open("a") as file:
            for curve, part in jobs[done:]:
                file.write(json.dumps(judge(curve, part)) + "\n")
                file.flush()


def read_results() -> list[dict]:
    """All results that are there."""
    return [json.loads(line) for path in sorted(FOLDER.glob("*.jsonl")) for line in path.open()]


def table() -> None:
    """Print errors of prediction and baselines: medians over the curves that were predicted."""
    print(
        "| curves | seen | from | predicted | error: Eqn 6 | last value | exponential "
        "| better than last value | than exponential | in 90% interval | misfit found |"
    )
    print("|---" * 11 + "|")
    results = read_results()
    for source in SOURCES:
        for kind in ("entropy", "v"):
            for part in PARTS:
                own = [r for r in results if (r["source"], r["part"]) == (source, part)]
                own = [r for r in own if f"{kind}_error" in r or f"{kind}_refused" in r]
                if own:
                    print(_row(source, kind, part, own))


def _row(source: str, kind: str, part: float, own: list[dict]) -> str:
    given = [r for r in own if f"{kind}_error" in r]
    start = f"| {source} | {part:.0%} | {kind} | {len(given)} of {len(own)} | "
    if not given:
        return start + " | ".join(["–"] * 7) + " |"
    errors = {
        name: np.array([r[name] for r in given])
        for name in (f"{kind}_error", "persistence", "exponential")
    }
    ours, last, exp = errors.values()
    cells = [f"{np.median(each):.3f}" for each in errors.values()]
    cells += [f"{np.sum(ours < last)} of {len(given)}", f"{np.sum(ours < exp)} of {len(given)}"]
    cells.append(f"{np.mean([r[f'{kind}_covered'] for r in given]):.0%}")
    found = sum(r[f"{kind}_misfit"] is not None for r in given)
    cells.append(f"{found} of {len(given)}")
    return start + " | ".join(cells) + " |"


SHOWN = 0.5
"""Part of the curve from which the predictions in the figure are made."""


def figure(out: Path) -> None:
    """Draw one curve of each source with its prediction, and all errors next to the baseline."""
    results = [r for r in read_results() if r["part"] == SHOWN]
    drawing, axes = figures.new(10.4, 7.0, 2, 2)
    for source, ax in zip(SOURCES, axes.flat, strict=False):
        own = [r for r in results if r["source"] == source and "entropy_band" in r]
        if own:  # the curve with the median error
            ordered = sorted(own, key=lambda r: r["entropy_error"])
            _draw_curve(ax, ordered[len(ordered) // 2])
    _draw_errors(axes.flat[3], results)
    title = "Eqn 6 fitted to the first half of measured entropies, and the second half"
    caption = (
        "Shaded: 90% interval of the prediction. Each of the three curves is the one with the "
        "median error of its kind. Bottom right: every predicted curve; below the line, Eqn 6 "
        "predicts better than the last value seen."
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create("prediction", {}, out=Path(folder) / "run", device="cpu")
        png = figures.save(run, "prediction", drawing, title=title, caption=caption)[0]
        shutil.copyfile(png, out)


TITLES = {
    "fig4": "Fig. 4 as drawn",
    "fig6": "WikiText-2, recorded",
    "train": "joma train tiny",
}


def _draw_curve(ax: Axes, result: dict) -> None:
    (curve,) = [c for c in SOURCES[result["source"]]() if c.name == result["name"]]
    seen = max(round(result["part"] * curve.t.size), 4)
    later = curve.t[seen:]
    ax.plot(curve.t, curve.entropy, "o", color=figures.BLACK, ms=2.5, label="measured")
    ax.axvline(curve.t[seen - 1], color=figures.GREY, lw=1.0, ls=":", label="end of the part seen")
    for kind, colour in (("entropy", figures.PURPLE), ("v", figures.BLUE)):
        if f"{kind}_band" in result:
            median, low, high = (np.array(part) for part in result[f"{kind}_band"])
            ax.fill_between(later, low, high, color=colour, alpha=0.25, lw=0)
            ax.plot(later, median, color=colour, label=f"Eqn 6, from {kind}")
    fitted = exponential(curve.t[:seen], curve.entropy[:seen], later)
    ax.plot(later, fitted, color=figures.ORANGE, ls="--", lw=1.3, label="exponential")
    low, high = np.min(curve.entropy), np.max(curve.entropy)
    ax.set_ylim(low - 0.35 * (high - low), high + 0.15 * (high - low))
    ax.set(title=f"{TITLES[curve.source]}: {curve.name}", ylabel="attention entropy (nats)")
    ax.set_xlabel("time" if curve.source == "fig4" else "step")
    ax.legend(fontsize=8)


def _draw_errors(ax: Axes, results: list[dict]) -> None:
    every = []
    for (source, title), mark in zip(TITLES.items(), "o^s", strict=True):
        for kind, colour in (("entropy", figures.PURPLE), ("v", figures.BLUE)):
            own = [r for r in results if r["source"] == source and f"{kind}_error" in r]
            if own:
                x = [r["persistence"] for r in own]
                y = [r[f"{kind}_error"] for r in own]
                label = f"{title}, from {kind}"
                ax.loglog(x, y, mark, color=colour, ms=4.5, alpha=0.7, mew=0, label=label)
                every += x + y
    ends = [0.8 * min(every, default=1e-3), 1.25 * max(every, default=1.0)]
    ax.plot(ends, ends, color=figures.GREY, lw=1.0)
    ax.set(
        title="errors on the second half (nats)",
        xlabel="last value seen",
        ylabel="Eqn 6",
        xlim=ends,
        ylim=ends,
    )
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(FixedLocator([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.legend(fontsize=8, loc="lower right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["train", "fit", "table", "figure"])
    parser.add_argument("out", nargs="?", type=Path, default=Path("prediction.png"))
    parser.add_argument("--source", action="append", choices=list(SOURCES))
    options = parser.parse_args()
    if options.command == "train":
        train()
    elif options.command == "fit":
        fit(options.source or list(SOURCES))
    elif options.command == "table":
        table()
    else:
        figure(options.out)


if __name__ == "__main__":
    main()
