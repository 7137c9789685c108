"""Fig. 3 of JoMA: with linear activation, do a few weights win and the others stop?"""

import numpy as np
from matplotlib.axes import Axes

from joma.experiments._experiment import Outcome, Request, Verdict, publish
from joma.experiments._linear_block import TITLES, TrainedBlock, train
from joma.experiments.fig3 import EXPERIMENT
from joma.report import figures
from joma.runs import Run

GROWING = 0.25  # share of the fastest component's late growth from which a component still grows


def late_growth(v: np.ndarray) -> np.ndarray:
    """Return the change of each |v| over the last fifth of training, shape (tokens,)."""
    size = np.abs(v)
    return size[-1] - size[-len(size) // 5]


def still_growing(v: np.ndarray) -> np.ndarray:
    """Return which components grow at a quarter or more of the fastest one's late speed."""
    growth = late_growth(v)
    return growth > GROWING * np.max(growth)


def judge(first: dict[str, np.ndarray]) -> Outcome:
    """Agreement: some but fewer than half of the components still grow at the end."""
    counts = {kind: int(np.sum(still_growing(v))) for kind, v in first.items()}
    share = {kind: counts[kind] / first[kind].shape[1] for kind in first}
    each = "; ".join(
        f"{kind} data: {counts[kind]} of {first[kind].shape[1]} still grow, the largest to "
        f"|v| = {np.max(np.abs(first[kind][-1])):.2f}"
        for kind in first
    )
    return Outcome(
        Verdict.of(all(0 < value < 0.5 for value in share.values())),
        f"in the last fifth of 2000 steps, {each}. With cross-entropy the gradient itself fades, "
        "so nothing diverges in finite time as it would at constant gradient (Theorem 2).",
    )


def reproduce(run: Run, request: Request) -> Outcome:
    """Train both blocks of Fig. 2 and draw v₀."""
    trained: dict[str, TrainedBlock] = {kind: train(kind, request.seed) for kind in TITLES}
    first = {kind: t.path.v[:, :, 0] for kind, t in trained.items()}
    steps = next(iter(trained.values())).steps
    outcome = judge(first)
    for kind, v in first.items():
        columns = {f"v{token}": v[:, token] for token in range(v.shape[1])}
        run.write_table(f"v0_{kind}", {"step": steps, **columns})
    figure, axes = figures.new(10.4, 4.2, 1, 2)
    for ax, kind in zip(axes, TITLES, strict=True):
        _draw(ax, steps, first[kind], kind)
    publish(run, EXPERIMENT, figure, outcome)
    return outcome


def _draw(ax: Axes, steps: np.ndarray, v: np.ndarray, kind: str) -> None:
    growing, color = still_growing(v), figures.BLUE
    for token in range(v.shape[1]):
        if growing[token]:
            ax.plot(steps, v[:, token], color=color, lw=2.2)
            text = {"va": "center", "color": color, "fontsize": 8, "annotation_clip": False}
            figures.note(ax, f"token {token}", (steps[-1], v[-1, token]), (4, 0), **text)
        else:
            ax.plot(steps, v[:, token], color="#b5b5b5", lw=1.1, zorder=1)
    ax.plot([], [], color=figures.BLUE, lw=2.2, label="still growing")
    ax.plot([], [], color="#b5b5b5", lw=1.1, label="saturated")
    ax.set(
        title=f"{kind}: {TITLES[kind]}",
        xlabel="gradient step",
        ylabel="components of v₀ (node of class 0)",
        xlim=(0, steps[-1] * 1.13),
    )
    ax.legend(loc="upper left")
