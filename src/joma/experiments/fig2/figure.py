"""Fig. 2 of JoMA: does the invariant predict the attention logits while they are learned?"""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.experiments._experiment import Outcome, Request, Verdict, publish
from joma.experiments._linear_block import DISTINCT, TITLES, TrainedBlock, train
from joma.experiments.fig2 import EXPERIMENT
from joma.report import figures
from joma.runs import Run
from joma.theory import invariants, memory

# Before this step both the logits and the estimate are little but their random start.
SETTLED = 500


def correlations(trained: TrainedBlock) -> dict[str, np.ndarray]:
    """Return the correlation with z of Eqn 18, its parts and the law with memory, over training.

    The law with memory also predicts the first of these without z: Eqn 18 is then compared with the
    predicted logits. The range is that of all logits within `memory.gap_bound` of them. The two
    errors are the largest over tokens, of the change of z and of z.
    """
    path = trained.path
    own, shared = invariants.softmax_logit_parts(path.block, path.v, trained.x.mean(axis=1))
    predicted = memory.logits(path.block, path.samples, path.v, path.z[0])
    expected = invariants.correlation(own + shared, predicted)
    away = memory.gap_bound(path) / np.linalg.norm(predicted, axis=1)
    angle, spread = np.arccos(np.clip(expected, -1, 1)), np.arcsin(np.minimum(away, 1.0))
    low, high = np.minimum(angle + spread, np.pi), np.maximum(angle - spread, 0.0)
    none = away >= 1
    whole, moved = own + shared, path.z - path.z[0]
    return {
        "whole_error": np.max(np.abs(whole - whole[0] - moved), axis=1),
        "memory_error": np.max(np.abs(predicted - path.z), axis=1),
        "memory": invariants.correlation(predicted, path.z),
        "predicted": expected,
        "predicted_low": np.where(none, -1.0, np.cos(low)),
        "predicted_high": np.where(none, 1.0, np.cos(high)),
        "whole": invariants.correlation(own + shared, path.z),
        "own": invariants.correlation(own, path.z),
        "shared": invariants.correlation(shared, path.z),
        "whole_centered": invariants.correlation(own + shared, path.z, centered=True),
        "own_centered": invariants.correlation(own, path.z, centered=True),
        "shared_centered": invariants.correlation(shared, path.z, centered=True),
    }


def judge(steps: np.ndarray, curves: dict[str, dict[str, np.ndarray]]) -> Outcome:
    """Agreement: once settled, the whole correlates above .9 on average, either part .15 less."""
    late = steps >= SETTLED
    agrees, each, control, predicted, remembered = True, [], [], [], []
    for kind, curve in curves.items():
        mean = {name: float(np.mean(values[late])) for name, values in curve.items()}
        part = max(abs(mean["own"]), abs(mean["shared"]))
        agrees = agrees and mean["whole"] > 0.9 and part < mean["whole"] - 0.15
        each.append(f"{kind} data: whole {mean['whole']:.3f}, the better part {part:.3f}")
        control.append(
            f"{kind} {mean['own_centered']:.3f} against {mean['whole_centered']:.3f} of the whole"
        )
        predicted.append(f"{mean['predicted']:.3f}")
        remembered.append(f"{mean['memory']:.3f}")
    return Outcome(
        Verdict.of(agrees),
        f"mean correlation from step {SETTLED} on, {'; '.join(each)}. But that contrast is mostly "
        "one of means: the correlation does not remove them, and z has mean 0 where ½Σv² has not. "
        f"With means removed ½Σv² alone reaches {', '.join(control)}. The softmax law with memory "
        f"predicts the whole's correlation from v(t) alone, {' and '.join(predicted)}; the "
        f"correlation of that law with z is {' and '.join(remembered)}.",
    )


def reproduce(run: Run, request: Request) -> Outcome:
    """Train both blocks, write the curves and draw them next to their data."""
    trained = {kind: train(kind, request.seed) for kind in TITLES}
    curves = {kind: correlations(t) for kind, t in trained.items()}
    steps = next(iter(trained.values())).steps
    outcome = judge(steps, curves)
    for kind, c in curves.items():
        run.write_table(f"correlation_{kind}", {"step": steps, **c})
        run.write_table(
            f"frequencies_{kind}",
            {
                "token": np.repeat(np.arange(len(trained[kind].x)), trained[kind].x.shape[1]),
                "class": np.tile(np.arange(trained[kind].x.shape[1]), len(trained[kind].x)),
                "frequency": trained[kind].x.ravel(),
            },
        )
    figure, axes = figures.new(10.4, 6.0, 2, 2)
    for row, kind in zip(axes, TITLES, strict=True):
        _draw_data(figure, row[0], trained[kind].x, kind)
        _draw_curves(row[1], steps, curves[kind])
    # Both panels have the same lines; in the lower one the band would run behind a legend.
    axes[0, 1].legend(loc="lower right", fontsize="small", labelspacing=0.25)
    publish(run, EXPERIMENT, figure, outcome)
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


def _draw_curves(ax: Axes, steps: np.ndarray, curves: dict[str, np.ndarray]) -> None:
    styles: list[tuple[str, str, dict[str, Any]]] = [
        ("whole", "½Σ(v² − ‖v‖²b̄), the invariant", {"color": figures.BLUE, "lw": 2.4}),
        ("own", "½Σv² alone", {"color": figures.VERMILLION, "ls": "--"}),
        (
            "own_centered",
            "½Σv² alone, means removed",
            {"color": figures.VERMILLION, "ls": ":", "lw": 1.4},
        ),
        ("shared", "−½Σ‖v‖²b̄ alone", {"color": figures.GREEN, "ls": "-."}),
    ]
    ax.fill_between(
        steps,
        curves["predicted_low"],
        curves["predicted_high"],
        color=figures.BLUE,
        alpha=0.15,
        lw=0,
        label="predicted by the law with memory",
    )
    for name, label, style in styles:
        ax.plot(steps, curves[name], label=label, **style)
    ax.set(
        title="correlation with the attention logits z(t)",
        xlabel="gradient step",
        ylabel="normalised correlation",
        ylim=(-1.05, 1.05),
        xlim=(0, steps[-1]),
    )
    ax.axhline(0, color=figures.GREY, lw=0.8)
