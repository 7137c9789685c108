"""Figs. 2 and 3 of JoMA: a block with linear activation, softmax attention and cross-entropy."""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.experiments._experiment import Outcome, Request, Verdict, publish
from joma.experiments.theory_figures import FIG2, FIG3
from joma.report import figures
from joma.runs import Run
from joma.theory import block, invariants, memory

CLASSES, DISTINCT, TOKENS = 20, 10, 20
STEP, STEPS, TEMPERATURE, SPREAD = 0.1, 2000, 0.5, 0.01
TITLES = {
    "smooth": "distribution shifts smoothly from class to class",
    "random": "distribution drawn at random for each class",
}
SETTLED = 500
"""Before this step both the logits and the estimate are little but their random start."""
GROWING = 0.25
"""Share of the fastest component's late growth from which a component still grows."""


@dataclass(frozen=True)
class TrainedBlock:
    """One of the two data sets and the block trained on it.

    Attributes:
        x: Frequency of each token in each class, (tokens, classes).
        path: The training, kept every tenth step.
        steps: The steps kept.
    """

    x: np.ndarray
    path: block.Trajectory
    steps: np.ndarray


def train(kind: str, seed: int) -> TrainedBlock:
    """Train the block on one kind of data, `smooth` or `random`."""
    rng = np.random.default_rng([seed, list(TITLES).index(kind)])
    x = frequencies(kind, rng)
    model = block.Block("softmax", "linear", tau=TEMPERATURE)
    samples = block.Samples(x.T, labels=np.arange(CLASSES))
    start = block.State(
        SPREAD * rng.normal(size=(TOKENS, CLASSES)),
        SPREAD * rng.normal(size=(1, TOKENS)),
        SPREAD * rng.normal(size=(1, CLASSES)),
    )
    steps = np.arange(0, STEPS + 1, 10)
    path = block.simulate(model, samples, steps * STEP, initial=start, descent_step=STEP)
    return TrainedBlock(x, path, steps)


def frequencies(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Return token frequencies: distinct tokens peak at their classes, common ones are random."""
    x = rng.uniform(0, 0.5, size=(TOKENS, CLASSES))
    if kind == "smooth":
        token, label = np.arange(DISTINCT)[:, None], np.arange(CLASSES)[None]
        x[:DISTINCT] = np.exp(-((token - label * DISTINCT / CLASSES) ** 2) / 30)
    return x / x.sum(axis=0)


def correlations(trained: TrainedBlock) -> dict[str, np.ndarray]:
    """Return the correlation with z of Eqn 18, its parts and the law with memory, over training.

    The law with memory also predicts the first of these without z: Eqn 18 is then compared with the
    predicted logits. The range is that of all logits within `memory.gap_bound` of them. The two
    errors are the largest over tokens, of the change of z and of z.
    """
    path = trained.path
    own, shared = invariants.softmax_logit_parts(path.block, path.v, trained.x.mean(axis=1))
    whole, moved = own + shared, path.z - path.z[0]
    predicted = memory.logits(path.block, path.samples, path.v, path.z[0])
    expected = invariants.correlation(whole, predicted)
    distance = memory.gap_bound(path) / np.linalg.norm(predicted, axis=1)
    angle, spread = np.arccos(np.clip(expected, -1, 1)), np.arcsin(np.minimum(distance, 1.0))
    low, high = np.minimum(angle + spread, np.pi), np.maximum(angle - spread, 0.0)
    parts = {"whole": whole, "own": own, "shared": shared}
    return {
        "whole_error": np.max(np.abs(whole - whole[0] - moved), axis=1),
        "memory_error": np.max(np.abs(predicted - path.z), axis=1),
        "memory": invariants.correlation(predicted, path.z),
        "predicted": expected,
        "predicted_low": np.where(distance >= 1, -1.0, np.cos(low)),
        "predicted_high": np.where(distance >= 1, 1.0, np.cos(high)),
        **{name: invariants.correlation(part, path.z) for name, part in parts.items()},
        **{
            f"{name}_centered": invariants.correlation(part, path.z, centered=True)
            for name, part in parts.items()
        },
    }


def judge_fig2(steps: np.ndarray, curves: dict[str, dict[str, np.ndarray]]) -> Outcome:
    """Agreement: once settled, the whole correlates above .9 on average, either part .15 less."""
    names = ("whole", "own", "shared", "whole_centered", "own_centered", "predicted", "memory")
    late = steps >= SETTLED
    rows, each, agrees = [], [], True
    for kind, curve in curves.items():
        mean = {name: float(np.mean(curve[name][late])) for name in names}
        part = max(abs(mean["own"]), abs(mean["shared"]))
        agrees = agrees and mean["whole"] > 0.9 and part < mean["whole"] - 0.15
        rows.append({"data": kind, **{name: round(value, 3) for name, value in mean.items()}})
        each.append(
            f"{kind} data: whole {mean['whole']:.3f}, the better part {part:.3f} (with means "
            f"removed {mean['own_centered']:.3f} against {mean['whole_centered']:.3f} of the whole)"
        )
    return Outcome(
        Verdict.of(agrees),
        f"mean correlation from step {SETTLED} on, {'; '.join(each)}. That contrast is mostly one "
        "of means: the correlation does not remove them, and z has mean 0 where ½Σv² has not.",
        rows,
        (
            "Predicted: the whole's correlation from v(t) alone, by the softmax law with memory; "
            "memory: the correlation of that law with z.",
        ),
    )


def reproduce_fig2(run: Run, request: Request) -> Outcome:
    """Train both blocks, write the curves and draw them next to their data."""
    tables, curves, steps = {}, {}, np.arange(0)
    figure, axes = figures.new(10.4, 6.0, 2, 2)
    for row, kind in zip(axes, TITLES, strict=True):
        trained = train(kind, request.seed)
        steps, curves[kind] = trained.steps, correlations(trained)
        tables[f"correlation_{kind}"] = {"step": steps, **curves[kind]}
        places = zip(("token", "class"), np.indices(trained.x.shape), strict=True)
        frequencies = {"frequency": trained.x.ravel()}
        tables[f"frequencies_{kind}"] = {name: of.ravel() for name, of in places} | frequencies
        _draw_data(figure, row[0], trained.x, kind)
        _draw_correlations(row[1], steps, curves[kind])
    # Both panels have the same lines; in the lower one the band would run behind a legend.
    axes[0, 1].legend(loc="lower right", fontsize="small", labelspacing=0.25)
    outcome = judge_fig2(steps, curves)
    publish(run, FIG2, outcome, figure, tables)
    return outcome


def _draw_data(figure: Figure, ax: Axes, x: np.ndarray, kind: str) -> None:
    image = ax.imshow(x, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    ax.grid(False)
    ax.set(title=f"{kind}: {TITLES[kind]}", xlabel="class", ylabel="token")
    if kind == "smooth":
        ax.axhline(DISTINCT - 0.5, color=figures.BLACK, lw=0.8, ls="--")
        ax.set_ylabel("← common     token     distinct →")
    ax.set(xticks=[0, 5, 10, 15, 19], yticks=[0, 5, 10, 15, 19])
    figure.colorbar(image, ax=ax, label="frequency", shrink=0.9)


def _draw_correlations(ax: Axes, steps: np.ndarray, curves: dict[str, np.ndarray]) -> None:
    low, high = curves["predicted_low"], curves["predicted_high"]
    label = "predicted by the law with memory"
    ax.fill_between(steps, low, high, label=label, color=figures.BLUE, alpha=0.15, lw=0)
    for name, label, color, style, width in (
        ("whole", "½Σ(v² − ‖v‖²b̄), the invariant", figures.BLUE, "-", 2.4),
        ("own", "½Σv² alone", figures.VERMILLION, "--", 1.8),
        ("own_centered", "½Σv² alone, means removed", figures.VERMILLION, ":", 1.4),
        ("shared", "−½Σ‖v‖²b̄ alone", figures.GREEN, "-.", 1.8),
    ):
        ax.plot(steps, curves[name], style, label=label, color=color, lw=width)
    ax.set(title="correlation with the attention logits z(t)", ylabel="normalised correlation")
    ax.set(xlabel="gradient step", ylim=(-1.05, 1.05), xlim=(0, steps[-1]))
    ax.axhline(0, color=figures.GREY, lw=0.8)


def still_growing(v: np.ndarray) -> np.ndarray:
    """Return which components grow at a quarter or more of the fastest one's late speed.

    Late is the last fifth of training.
    """
    size = np.abs(v)
    growth = size[-1] - size[-len(size) // 5]
    return growth > GROWING * np.max(growth)


def judge_fig3(first: dict[str, np.ndarray]) -> Outcome:
    """Agreement: some but fewer than half of the components still grow at the end."""
    counts = {kind: int(np.sum(still_growing(v))) for kind, v in first.items()}
    each = "; ".join(
        f"{kind} data: {counts[kind]} of {v.shape[1]} still grow, the largest to "
        f"|v| = {np.max(np.abs(v[-1])):.2f}"
        for kind, v in first.items()
    )
    return Outcome(
        Verdict.of(all(0 < counts[kind] < v.shape[1] / 2 for kind, v in first.items())),
        f"in the last fifth of 2000 steps, {each}. With cross-entropy the gradient itself fades, "
        "so nothing diverges in finite time as it would at constant gradient (Theorem 2).",
    )


def reproduce_fig3(run: Run, request: Request) -> Outcome:
    """Train both blocks of Fig. 2 and draw v₀."""
    first, tables = {}, {}
    figure, axes = figures.new(10.4, 4.2, 1, 2)
    for ax, kind in zip(axes, TITLES, strict=True):
        trained = train(kind, request.seed)
        first[kind] = v = trained.path.v[:, :, 0]
        components = {f"v{token}": own for token, own in enumerate(v.T)}
        tables[f"v0_{kind}"] = {"step": trained.steps, **components}
        _draw_growth(ax, trained.steps, v, kind)
    outcome = judge_fig3(first)
    publish(run, FIG3, outcome, figure, tables)
    return outcome


def _draw_growth(ax: Axes, steps: np.ndarray, v: np.ndarray, kind: str) -> None:
    grown = {"color": figures.BLUE, "lw": 2.2}
    saturated = {"color": "#b5b5b5", "lw": 1.1, "zorder": 1}
    for token, grows in enumerate(still_growing(v)):
        ax.plot(steps, v[:, token], **(grown if grows else saturated))
        if grows:
            text = {"va": "center", "color": figures.BLUE, "fontsize": 8, "annotation_clip": False}
            figures.note(ax, f"token {token}", (steps[-1], v[-1, token]), (4, 0), **text)
    ax.plot([], [], label="still growing", **grown)
    ax.plot([], [], label="saturated", **saturated)
    ax.set(title=f"{kind}: {TITLES[kind]}", ylabel="components of v₀ (node of class 0)")
    ax.set(xlabel="gradient step", xlim=(0, steps[-1] * 1.13))
    ax.legend(loc="upper left")
