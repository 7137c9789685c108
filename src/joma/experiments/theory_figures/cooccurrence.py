"""Theorem 5 and Eqn 8 of JoMA: how often two tokens of a hierarchy occur together."""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from joma.experiments._experiment import Outcome, Request, Verdict, publish
from joma.experiments.theory_figures import COOCCURRENCE
from joma.report import figures
from joma.runs import Run
from joma.theory import as_printed as printed
from joma.theory import hblt

DEPTH, RHO, SAMPLES = 4, 0.9, 20_000
CLASS_PROBS = np.full(5, 0.2)
CHILD_OFF_PROBS = np.array([0.05, 0.95, 0.95, 0.95, 0.95])
HEIGHTS = np.arange(1, DEPTH)
NEAR_ONE_HEIGHTS = (1, 3)  # at H = L/2 the limit is exact
EPSILON = 2.0 ** -np.arange(2, 11)


@dataclass(frozen=True)
class CooccurrenceData:
    """What is drawn; the last three have the shape (heights, epsilons)."""

    derived: np.ndarray
    printed: np.ndarray
    sampled: np.ndarray
    standard_error: np.ndarray
    exact: np.ndarray
    limit_error: np.ndarray
    expansion_error: np.ndarray


def compute(seed: int) -> CooccurrenceData:
    """Return the sampled tree, both readings of Theorem 5, and the errors of Eqn 8."""
    sampled, standard_error = _sample(np.random.default_rng(seed))
    height = np.array(NEAR_ONE_HEIGHTS)[:, None]
    exact = hblt.cooccurrence(height, DEPTH, 1 - EPSILON, 1 - EPSILON)
    rho0 = [module.root_uncertainty(CLASS_PROBS, CHILD_OFF_PROBS) for module in (hblt, printed)]
    return CooccurrenceData(
        derived=hblt.cooccurrence(HEIGHTS, DEPTH, RHO, rho0[0]),
        printed=hblt.cooccurrence(HEIGHTS, DEPTH, RHO, rho0[1]),
        sampled=sampled,
        standard_error=standard_error,
        exact=exact,
        limit_error=np.abs(printed.cooccurrence_near_one(height, DEPTH, EPSILON) - exact),
        expansion_error=np.abs(hblt.cooccurrence_near_one(height, DEPTH, EPSILON) - exact),
    )


def judge(data: CooccurrenceData) -> Outcome:
    """Return whether co-occurrence falls with height as Theorem 5 says and tends to 1 − H/L.

    That ρ₀ and the order of Eqn 8's error are misprinted does not touch this; it is said.
    """
    fall = -np.diff(data.sampled)
    off = np.abs(data.printed - data.sampled) / data.standard_error
    ours = np.abs(data.derived - data.sampled) / data.standard_error
    orders = _orders(data.limit_error)
    return Outcome(
        Verdict.of(
            bool(np.all(fall > 4 * data.standard_error[1:]))
            and float(ours.max()) <= 4
            and float(orders.min()) > 0.9
        ),
        finding=f"it falls from {data.sampled[0]:.2f} to {data.sampled[-1]:.2f}, within "
        f"{ours.max():.1f} standard errors of Theorem 5 if ρ₀ = Σ p₀(k)(2P[y=0|k] − 1); the "
        f"printed ρ₀ = Σ p₀(k)P[y=0|k] is {off.min():.0f} to {off.max():.0f} off. 1 − H/L is the "
        f"limit, but its error is of order {orders.min():.2f} in ε, not 2 as printed. Both "
        "formulas need their erratum, the observation stands.",
    )


def reproduce(run: Run, request: Request) -> Outcome:
    """Write both tables and the figure."""
    data = compute(request.seed)
    outcome = judge(data)
    heights, epsilons = np.meshgrid(NEAR_ONE_HEIGHTS, EPSILON, indexing="ij")
    near_one = {"height": heights, "epsilon": epsilons}
    near_one |= {name: getattr(data, name) for name in ("exact", "limit_error", "expansion_error")}
    by_height = ("derived", "printed", "sampled", "standard_error")
    tables = {
        "cooccurrence": {"height": HEIGHTS, **{name: getattr(data, name) for name in by_height}},
        "near_one": {name: values.ravel() for name, values in near_one.items()},
    }
    figure, axes = figures.new(9.2, 3.9, 1, 2)
    _draw_theorem(axes[0], data)
    _draw_limit(axes[1], data)
    publish(run, COOCCURRENCE, outcome, figure, tables)
    return outcome


def _sample(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return frequencies of y_l = 1 among trees with y_m = 1, and their standard errors."""
    tree = hblt.Tree.regular(DEPTH, 2, RHO, CLASS_PROBS, CHILD_OFF_PROBS)
    leaves = tree.sample(SAMPLES, rng)[1][-1]
    first_at = {
        tree.height(tree.common_ancestor((DEPTH - 1, 0), (DEPTH - 1, other))): other
        for other in reversed(range(tree.sizes[-1]))
    }
    others = leaves[leaves[:, 0] == 1][:, [first_at[int(height)] for height in HEIGHTS]]
    frequency = others.mean(axis=0)
    return frequency, np.sqrt(frequency * (1 - frequency) / len(others))


def _orders(error: np.ndarray) -> np.ndarray:
    """Return the power of ε by which the error of each height falls, over the smaller ε."""
    small = np.median(EPSILON) >= EPSILON
    return np.polyfit(np.log(EPSILON[small]), np.log(error[:, small]).T, 1)[0]


def _draw_theorem(ax: Axes, data: CooccurrenceData) -> None:
    ax.plot(HEIGHTS, data.derived, "-o", color=figures.BLUE, label="derived ρ₀", ms=5)
    ax.plot(HEIGHTS, data.printed, "--s", color=figures.VERMILLION, label="printed ρ₀", ms=5)
    bars = {"fmt": "_", "color": figures.BLACK, "capsize": 5, "ms": 11, "elinewidth": 1.2}
    label = f"{SAMPLES:,} sampled trees, ± 4 SE"
    ax.errorbar(HEIGHTS, data.sampled, 4 * data.standard_error, label=label, zorder=3, **bars)
    ax.set(title=f"Theorem 5, L = {DEPTH}, ρ = {RHO:g}", xlabel="height H of the common ancestor")
    ax.set(ylabel="P[token l occurs | token m occurs]", ylim=(0.4, 0.95))
    ax.set(xticks=HEIGHTS, xlim=(0.7, DEPTH - 0.7))
    ax.legend(loc="upper right")


def _draw_limit(ax: Axes, data: CooccurrenceData) -> None:
    for errors, color, name in (
        (data.limit_error, figures.VERMILLION, "1 − H/L (printed)"),
        (data.expansion_error, figures.BLUE, "with the term in ε (derived)"),
    ):
        for height, error, style in zip(NEAR_ONE_HEIGHTS, errors, ("-o", "--D"), strict=True):
            label = f"{name}, H = {height}"
            ax.loglog(EPSILON, error, style, color=color, label=label, ms=4.5)
    ends = EPSILON[[0, -1]]
    for order, anchor, at, offset, side in (
        (1, 1.6, 0.004, (-8, 9), "right"),
        (2, 0.045, 0.06, (8, -12), "left"),
    ):
        ax.loglog(ends, anchor * ends**order, ":", color=figures.GREY, lw=1.3)
        place = (at, anchor * at**order)
        figures.note(ax, f"slope {order}", place, offset, ha=side, color=figures.GREY)
    ax.set(title=f"Eqn 8, ρ = ρ₀ = 1 − ε, L = {DEPTH}", ylabel="|approximation − exact|")
    ax.set(xlabel="ε", ylim=(1e-8, 1))
    ax.legend(loc="lower right", fontsize=8)
