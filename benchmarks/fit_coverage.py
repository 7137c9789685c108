"""Coverage of the intervals of `joma.theory.nonlinear.fit` on planted curves.

    python -m benchmarks.fit_coverage run [--first 0] [--count 500] [--kind v] [--noise 0.01] …
        [--processes 15]
    python -m benchmarks.fit_coverage table

A planted curve has 2 to 5 components with |μ| uniform up to 5 and a total time between 1 and 10
time scales (log-uniform), measured at 100 equally spaced times with Gaussian noise. `--targets
fig4` plants what the prior does not expect: |μ| between 1 and 4, as in Fig. 4. The fit sees the
first part. `run` writes one row per curve to runs/fit-coverage/*.csv, so that the study can be
made in pieces; `table` reads all of them. Set OMP_NUM_THREADS=1 with several processes.
"""

import argparse
import csv
import itertools
import multiprocessing
from pathlib import Path

import numpy as np

from joma.errors import JomaError
from joma.theory import nonlinear

KINDS, NOISES, PARTS = ("v", "entropy"), (0.001, 0.01, 0.05), (0.1, 0.25, 0.5)
TARGETS = {"prior": (0.0, 5.0), "fig4": (1.0, 4.0)}
POINTS, SPANS, COMPONENTS = 100, (1.0, 10.0), (2, 5)
FOLDER = Path("runs") / "fit-coverage"
FIELDS = (
    *("targets", "kind", "noise", "part", "curve", "mu_all", "mu_given", "mu_covered"),
    *("tau_given", "tau_covered", "count_given", "count_covered", "points_given"),
    *("points_covered", "low_given", "low_covered", "misfit"),
)


def plant(kind: str, noise: float, targets: str, rng: np.random.Generator):
    """Return times, noisy curve, exact curve, μ and τ of one planted curve."""
    number = int(rng.integers(COMPONENTS[0], COMPONENTS[1] + 1))
    mu = -np.sort(-rng.uniform(*TARGETS[targets], number))
    if kind == "v":
        mu = rng.permutation(mu) * rng.choice([-1, 1], number)
    tau = 1 / np.exp(rng.uniform(*np.log(SPANS)))
    t = np.arange(1, POINTS + 1) / POINTS
    v = nonlinear.weights(mu, t / tau)
    exact = v if kind == "v" else nonlinear.attention_entropy(v)
    size = noise * (np.max(np.abs(mu)) if kind == "v" else np.log(number))
    return t, exact + size * rng.normal(size=exact.shape), exact, mu, tau


def judge(kind: str, noise: float, part: float, targets: str, curve: int) -> dict[str, object]:
    """Fit one planted curve and compare every interval with the truth."""
    case = (KINDS.index(kind), NOISES.index(noise), PARTS.index(part), list(TARGETS).index(targets))
    rng = np.random.default_rng([curve, *case])
    t, measured, exact, mu, tau = plant(kind, noise, targets, rng)
    seen = round(part * POINTS)
    spans = (part * SPANS[0], part * SPANS[1]) if targets == "prior" else (0.02, 50.0)
    row: dict[str, object] = dict.fromkeys(FIELDS, 0)
    row |= {"targets": targets, "kind": kind, "noise": noise, "part": part, "curve": curve}
    row["mu_all"] = mu.size
    try:
        if kind == "v":
            found = nonlinear.fit(t[:seen], v=measured[:seen], rng=rng, spans=spans)
        else:
            found = nonlinear.fit(
                t[:seen], entropy=measured[:seen], components=COMPONENTS, rng=rng, spans=spans
            )
    except JomaError:
        return row  # too few measurements
    row["misfit"] = int(found.misfit is not None)
    given = np.isfinite(found.mu.low)
    right = found.mu.low.size == mu.size
    row["mu_all"], row["mu_given"] = found.mu.low.size, int(np.sum(given))
    row["mu_covered"] = int(np.sum(found.mu.covers(mu) & given)) if right else 0
    row["tau_given"] = int(np.isfinite(found.time_scale.low))
    row["tau_covered"] = int(found.time_scale.covers(tau))
    row["count_given"] = int(np.isfinite(found.components.low))
    row["count_covered"] = int(found.components.covers(mu.size))
    later = slice(seen + 1, None, 4)
    try:
        covered = found.predict(t[later]).covers(exact[later])
        row["points_given"], row["points_covered"] = covered.size, int(np.sum(covered))
    except JomaError:
        row["points_given"] = row["points_covered"] = 0
    try:
        lowest = found.course(1.0).minimum
        fine = np.linspace(0, 1, 200)
        truth = np.min(nonlinear.attention_entropy(nonlinear.weights(mu, fine / tau)))
        row["low_given"], row["low_covered"] = 1, int(lowest.covers(truth))
    except JomaError:
        row["low_given"] = row["low_covered"] = 0
    return row


def run(options: argparse.Namespace) -> None:
    """Fit the planted curves asked for and write a row for each."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    cases = itertools.product(
        range(options.first, options.first + options.count),
        [options.kind] if options.kind else KINDS,
        [options.noise] if options.noise else NOISES,
        [options.part] if options.part else PARTS,
    )
    path = FOLDER / f"{options.targets}-{options.first}-{options.count}.csv"
    jobs = [(kind, noise, part, options.targets, curve) for curve, kind, noise, part in cases]
    with path.open("w", newline="") as file, multiprocessing.Pool(options.processes) as pool:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for row in pool.imap_unordered(_judge, jobs):
            writer.writerow(row)
            file.flush()


def _judge(job: tuple[str, float, float, str, int]) -> dict[str, object]:
    return judge(*job)


def table(options: argparse.Namespace) -> None:
    """Print coverage and share refused for every case that has rows."""
    rows = [row for path in sorted(FOLDER.glob("*.csv")) for row in csv.DictReader(path.open())]
    print(
        "| measured | noise | seen | curves | μ | refused | curve | refused "
        "| τ | components | minimum |"
    )
    print("|---" * 11 + "|")
    for kind, noise, part in itertools.product(KINDS, NOISES, PARTS):
        own = [
            row
            for row in rows
            if (row["targets"], row["kind"]) == (options.targets, kind)
            and (float(row["noise"]), float(row["part"])) == (noise, part)
        ]
        if not own:
            continue
        total = {name: sum(int(row[name]) for row in own) for name in FIELDS[5:-1]}
        refused = np.mean([int(row["points_given"]) == 0 for row in own])
        cells = [
            _share(total["mu_covered"], total["mu_given"]),
            f"{1 - total['mu_given'] / total['mu_all']:.0%}",
            _share(
                np.sum([int(r["points_covered"]) / max(int(r["points_given"]), 1) for r in own]),
                sum(int(r["points_given"]) > 0 for r in own),
            ),
            f"{refused:.0%}",
            _share(total["tau_covered"], total["tau_given"]),
            _share(total["count_covered"], total["count_given"]) if kind == "entropy" else "given",
            _share(total["low_covered"], total["low_given"]),
        ]
        print(f"| {kind} | {noise:.1%} | {part:.0%} | {len(own)} | {' | '.join(cells)} |")


def _share(covered: float, given: float) -> str:
    return f"{covered / given:.1%}" if given else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--noise", type=float, choices=NOISES)
    parser.add_argument("--part", type=float, choices=PARTS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--targets", choices=list(TARGETS), default="prior")
    options = parser.parse_args()
    {"run": run, "table": table}[options.command](options)


if __name__ == "__main__":
    main()
