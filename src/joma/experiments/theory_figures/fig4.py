"""Fig. 4 of JoMA: salient components are learned first, entropy drops and bounces back."""

from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes

from joma.experiments._experiment import Outcome, Request, Verdict, publish
from joma.experiments.theory_figures import FIG4
from joma.report import figures
from joma.runs import Run
from joma.theory import nonlinear

COMPONENTS, START, STEP, STEPS, SHARPNESS = 10, 0.05, 0.02, 5000, 1 / 3


@dataclass(frozen=True)
class Fig4Curves:
    """Components over time: t (T,), v (T, components), entropy (T,)."""

    t: np.ndarray
    v: np.ndarray
    entropy: np.ndarray

    def learned(self, mu: np.ndarray) -> np.ndarray:
        """When each component first reaches 90% of its target; inf if never."""
        reached = self.v >= 0.9 * mu
        return np.where(reached.any(axis=0), self.t[np.argmax(reached, axis=0)], np.inf)


def targets(seed: int) -> np.ndarray:
    """Ten targets, uniform between 1 and 4, in increasing order."""
    return np.sort(1 + 3 * np.random.default_rng(seed).uniform(size=COMPONENTS))


def as_printed(mu: np.ndarray) -> Fig4Curves:
    """Eqn 6 in closed form, entropy of softmax(v²)."""
    t = np.concatenate([[0.0], np.geomspace(1e-2, 10, 400)])
    v = nonlinear.weights(mu, t)
    return Fig4Curves(t, v, nonlinear.attention_entropy(v))


def as_drawn(mu: np.ndarray) -> Fig4Curves:
    """Return the published figure's own recursion: the gate is softmax(v²/3), not exp(v²/2)."""
    v = np.full(mu.size, START)
    path = [v]
    for _ in range(STEPS):
        gate = np.exp(SHARPNESS * (v**2 - np.max(v**2)))
        v = v + STEP * (mu - v) * gate / np.sum(gate)
        path.append(v)
    every = np.array(path)
    t = STEP * np.arange(STEPS + 1)
    return Fig4Curves(t, every, nonlinear.attention_entropy(every, scale=SHARPNESS))


def judge(mu: np.ndarray, versions: dict[str, Fig4Curves]) -> Outcome:
    """Agreement: larger targets are reached earlier, and entropy falls and rises by .1 nats."""
    agrees, each = True, []
    for name, curves in versions.items():
        drop, rebound = map(float, nonlinear.drop_and_rebound(curves.entropy))
        learned = curves.learned(mu)
        ordered = bool(np.all(learned[:-1] >= learned[1:]))
        agrees = agrees and ordered and drop > 0.1 and rebound > 0.1
        each.append(
            f"{name}: entropy falls by {drop:.2f} and rises by {rebound:.2f} nats, "
            f"{'every' if ordered else 'not every'} larger target is learned first"
        )
    return Outcome(Verdict.of(agrees), f"{'; '.join(each)}.")


def reproduce(run: Run, request: Request) -> Outcome:
    """Compute both versions, write them and draw them side by side."""
    mu = targets(request.seed)
    versions = {"Eqn 6 as printed": as_printed(mu), "recursion as drawn": as_drawn(mu)}
    outcome = judge(mu, versions)
    tables = {"targets": {"mu": mu}}
    figure, axes = figures.new(10.4, 6.2, 2, 2)
    for row, name, curves in zip(axes, ("as_printed", "as_drawn"), versions.values(), strict=True):
        columns = {f"v{j}": curves.v[:, j] for j in range(mu.size)}
        tables[name] = {"t": curves.t, "entropy": curves.entropy, **columns}
        _draw_components(row[0], curves, mu, log=name == "as_printed")
        _draw_entropy(row[1], curves, log=name == "as_printed")
    publish(run, FIG4, outcome, figure, tables)
    return outcome


def _draw_components(ax: Axes, curves: Fig4Curves, mu: np.ndarray, *, log: bool) -> None:
    shades = colormaps["viridis"](np.linspace(0.9, 0.0, mu.size))
    for v, target, shade in zip(curves.v.T, mu, shades, strict=True):
        ax.plot(curves.t, v, color=shade, lw=1.7)
        ax.axhline(target, color=shade, lw=0.8, ls=":")
    title = "as drawn: gate softmax(v²/3), v(0) = 0.05"
    if log:
        title = "Eqn 6: v̇ = (μ − v) exp(v²/2), closed form"
        ax.plot([], [], color=shades[-1], label="most salient")
        ax.plot([], [], color=shades[0], label="least salient")
        ax.plot([], [], color=figures.GREY, lw=0.9, ls=":", label="targets μ")
        ax.legend(loc="upper left", bbox_to_anchor=(0.0, 0.85))
    ax.set(title=title, ylabel="component v(t)", ylim=(0, mu[-1] * 1.06))
    _time_axis(ax, curves, log)


def _draw_entropy(ax: Axes, curves: Fig4Curves, *, log: bool) -> None:
    low = int(np.argmin(curves.entropy))
    ax.plot(curves.t, curves.entropy, color=figures.PURPLE, lw=2.2)
    ax.plot(curves.t[low], curves.entropy[low], "o", color=figures.BLACK, ms=5)
    text = f"lowest: {curves.entropy[low]:.2f} at t = {curves.t[low]:.3g}"
    offset, side = ((-9, 8), "right") if log else ((0, -16), "left")
    figures.note(ax, text, (curves.t[low], curves.entropy[low]), offset, ha=side)
    uniform = np.log(COMPONENTS)
    ax.set(ylabel="entropy (nats)", ylim=(-0.08, uniform * 1.05))
    ax.set_title(f"entropy of the attention softmax({'v²' if log else 'v²/3'})")
    ax.axhline(uniform, color=figures.GREY, lw=0.9, ls=":")
    figures.level(ax, uniform, "uniform", "right", up=-11)
    _time_axis(ax, curves, log)


def _time_axis(ax: Axes, curves: Fig4Curves, log: bool) -> None:
    ax.set_xlabel("time t (logarithmic)" if log else f"time t ({STEPS} steps of {STEP})")
    ax.set_xscale("log" if log else "linear")
    ax.set_xlim(curves.t[1] if log else 0, curves.t[-1])
