"""Fig. 9 of JoMA: the curve G(y), and for which clusters a line through 0 meets it twice."""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from joma.experiments._experiment import Outcome, Request, Verdict, publish
from joma.experiments._tables import columns, concatenated
from joma.experiments.theory_figures import FIG9
from joma.report import figures
from joma.runs import Run
from joma.theory import clusters, marginals

DISTANCE = 2.0
FAMILIES: dict[str, marginals.Marginal] = {
    "Gaussian": marginals.Gaussian(),
    "Student t₃": marginals.StudentT(3),
    "Laplace": marginals.Laplace(),
}


@dataclass(frozen=True)
class GCurve:
    """G of one family, and its critical points at the distance drawn."""

    s: np.ndarray
    y: np.ndarray
    g: np.ndarray
    points: list[clusters.CriticalPoint]


def trace(marginal: marginals.Marginal) -> GCurve:
    """Return the curve where the cluster's share on the active side goes from 0 to almost 1."""
    s = np.concatenate([-np.geomspace(60, 0.02, 300), np.linspace(0, 6, 300)])
    y, g = clusters.curve(marginal, s)
    return GCurve(s, y, g, clusters.critical_points(marginal, DISTANCE))


def judge(curves: dict[str, GCurve]) -> Outcome:
    """Agreement: G rises for all, and a line meets it twice for some family but not for all."""
    rising = all(np.all(np.diff(c.g) >= 0) and c.g[-1] > 5 for c in curves.values())
    found = {name: c.points[0] for name, c in curves.items() if c.points}
    none = [name for name, c in curves.items() if not c.points]
    some = "; ".join(
        f"{name}: y = {float(FAMILIES[name].theta1(p.s_minus)):.3f} and "
        f"{float(FAMILIES[name].theta1(p.s_plus)):.3f}, a₋/a₊ = {p.ratio:.2f}"
        for name, p in found.items()
    )
    return Outcome(
        Verdict.of(rising and bool(found)),
        f"G rises in every family. At cluster distance {DISTANCE:g}, {some}; for "
        f"{' and '.join(none) or 'none'} no line meets G twice, so that clusters of equal width "
        "have no critical point. For Laplace the curve is straight up to y = ½: a continuum.",
    )


def reproduce(run: Run, request: Request) -> Outcome:
    """Trace the curves and draw them with their lines; nothing here is random."""
    del request
    curves = {name: trace(marginal) for name, marginal in FAMILIES.items()}
    outcome = judge(curves)
    points = [{"family": name, **p._asdict()} for name, c in curves.items() for p in c.points]
    tables = {
        "curves": concatenated(
            {"family": name, "s": c.s, "y": c.y, "g": c.g} for name, c in curves.items()
        ),
        "critical_points": columns(points),
    }
    figure, axes = figures.new(11.4, 3.9, 1, 3)
    for ax, (name, c) in zip(axes, curves.items(), strict=True):
        _draw(ax, name, c)
    publish(run, FIG9, outcome, figure, tables)
    return outcome


def _draw(ax: Axes, name: str, c: GCurve) -> None:
    ax.plot(c.y, c.g, color=figures.BLUE, lw=2.2, label="G(y)")
    ends = np.array([0.0, 1.0])
    slopes = np.interp([0.3, 0.75, 0.9], c.y, c.g) / np.array([0.3, 0.75, 0.9])
    for i, k in enumerate(slopes):
        label = "lines G = ky" if i == 0 else None
        ax.plot(ends, k * ends, color=figures.GREY, lw=0.9, ls="--", label=label)
    if c.points:
        y = FAMILIES[name].theta1(np.array(c.points[0][:2]))
        g = np.interp(y, c.y, c.g)
        ax.plot(ends, g[1] / y[1] * ends, color=figures.VERMILLION, lw=1.6)
        resting = "a node rests here" if name != "Laplace" else "one of many such pairs"
        ax.plot(y, g, "o-", color=figures.VERMILLION, lw=1.6, ms=7, label=resting, zorder=4)
        title = f"{name}: rests at a₋/a₊ = {c.points[0].ratio:.2f}"
    else:
        title = f"{name}: each line meets G once"
    ax.set(title=title, xlabel="y = θ₁(s)", ylabel="G(y) = F(s)", xlim=(0, 1), ylim=(0, 2.2))
    ax.legend(loc="upper left")
