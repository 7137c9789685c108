"""The talk's Scan&Snap: attention scans the tokens, snaps, and freezes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from joma.experiments._experiment import Outcome, Request, Verdict, publish
from joma.experiments._tables import concatenated
from joma.experiments.theory_figures import SCAN_SNAP
from joma.report import figures
from joma.runs import Run
from joma.theory import as_printed as printed
from joma.theory import scan_snap
from joma.theory.scan_snap import Balanced, ScanSnapCorpus, ScanSnapTrajectory

LENGTH, BATCH = 256, 32
TOKENS = {  # token: what it is, where its label stands, from its line's end
    3: ("distinct\nP = 0.22, 0", 8),
    2: ("in between\nP = 0.25, 0.02", -6),
    4: ("distinct\nP = 0.08, 0", 0),
    0: ("common\nP = 0.25, 0.25", 0),
}
CLASSES = ScanSnapCorpus(
    np.array([[0.25, 0.2, 0.25, 0.22, 0.08, 0.0, 0.0], [0.25, 0.2, 0.02, 0.0, 0.0, 0.35, 0.18]]),
    np.array([0, 0]),
    np.array([0.5, 0.5]),
)
RATES: dict[str, Any] = {"eta_y": 5.0, "eta_z": 1.0}
END = 100.0
DECODER_RATES = (1.0, 5.0, 25.0)
ENTROPY_ETA_Z = 5.0
EARLY, LATE = 0.5, 1e4
SPREAD = Balanced(classes=3, common=12, distinct=1, common_mass=0.7)
PHASES = Balanced(classes=6, common=3, distinct=2, common_mass=0.5)
PHASE_RATES: dict[str, Any] = {"eta_y": 1.0, "eta_z": 10.0}


@dataclass(frozen=True)
class ScanSnapData:
    """What is drawn; each pair is the population's flow and training on sampled sequences."""

    logits: tuple[ScanSnapTrajectory, ScanSnapTrajectory]
    entropy: dict[float, tuple[ScanSnapTrajectory, ScanSnapTrajectory]]
    phases: tuple[ScanSnapTrajectory, ScanSnapTrajectory]

    @property
    def snap(self) -> float:
        """t₀ of the phases' corpus."""
        corpus = self.phases[0].corpus
        return scan_snap.snapping_time(corpus.classes, corpus.tokens, PHASE_RATES["eta_y"])


def compute(seed: int) -> ScanSnapData:
    """Three settings, each on the flow and on sequences of finite length."""
    rng = np.random.default_rng(seed)
    t = np.concatenate([[0.0], np.geomspace(0.05, 1e7, 160)])

    def both(
        corpus: ScanSnapCorpus, times: np.ndarray, end: float, step: float, rates: dict[str, Any]
    ) -> tuple[ScanSnapTrajectory, ScanSnapTrajectory]:
        """Return the flow, and training on sequences with steps of `step` of its time."""
        steps = round(end / step)
        own = {name: step * rate for name, rate in rates.items()}
        every = max(1, steps // 2000)
        run = scan_snap.train_on_samples(corpus, LENGTH, steps, BATCH, rng=rng, every=every, **own)
        sampled = ScanSnapTrajectory(corpus, run.t * step, run.z, run.y, run.b)
        return scan_snap.evolve(corpus, times, **rates), sampled

    return ScanSnapData(
        logits=both(CLASSES, np.linspace(0, END, 200), END, 0.05, RATES),
        entropy={
            eta_y: both(
                SPREAD.corpus,
                t[t < 1e5],
                0.5 * END,
                0.5 / max(eta_y, 5),
                {"eta_y": eta_y, "eta_z": ENTROPY_ETA_Z},
            )
            for eta_y in DECODER_RATES
        },
        phases=both(PHASES.corpus, t, 300.0, 0.1, PHASE_RATES),
    )


def judge(data: ScanSnapData) -> Outcome:
    """Return whether fates, their order, both phases and the effect of η_Y are as published.

    The flow must show all of it, sampled sequences all but the far end of ln ln t. That one of
    several common tokens can rise, that η_Y acts the other way early, and the slide's constant
    before ln ln t do not affect the verdict; they are reported.
    """
    last = [run.z[-1, 0] for run in data.logits]
    fates = all(z[0] < 0 < z[4] < z[3] for z in last)
    early, late = (
        [float(np.interp(t, run.t, run.entropy[:, 0])) for run, _ in data.entropy.values()]
        for t in (EARLY, LATE)
    )
    sampled = [float(run.entropy[-1, 0]) for _, run in data.entropy.values()]
    scanning, snapping, straight = _slopes(data)
    start, b = _anchor(data)
    flow = data.phases[0]
    talk = printed.late_b(flow.t[-1], PHASES, anchor=(start, b), **PHASE_RATES)
    grown = float(flow.b[-1, 0]) - b
    gap, end = _largest_gap(data), data.phases[1].t[-1]
    return Outcome(
        Verdict.of(
            bool(fates)
            and bool(np.all(np.diff(late) > 0))
            and bool(np.all(np.diff(sampled) > 0))
            and scanning <= PHASES.scanning_slope_limit
            and snapping < 0.2 * scanning
            and straight > 0.999
            and gap < 0.1
        ),
        finding=f"so it is, on the flow and on sequences of {LENGTH} tokens (B, mean over classes, "
        f"within {gap:.0%} to t = {end:g}); late, B is straight in ln ln t (R² = {straight:.4f})."
        f" But one of three common tokens rises ({last[0][2]:+.2f}), early on a larger η_Y is "
        f"{'sparser' if np.all(np.diff(early) < 0) else 'not sparser'}, and "
        f"from 100 t₀ on B grows by {grown:.2f}, not by the {float(talk) - b:.2f} of the slide's "
        "constant.",
    )


def reproduce(run: Run, request: Request) -> Outcome:
    """Write three tables and the figure."""
    data = compute(request.seed)
    outcome = judge(data)
    figure, axes = figures.new(13.2, 4.2, 1, 3)
    _draw_logits(axes[0], data)
    _draw_entropy(axes[1], data)
    _draw_phases(axes[2], data)
    publish(run, SCAN_SNAP, outcome, figure, _tables(data))
    return outcome


def _anchor(data: ScanSnapData) -> tuple[float, float]:
    """100 t₀, or the next time computed, and B there."""
    flow = data.phases[0]
    at = int(np.searchsorted(flow.t, 100 * data.snap))
    return float(flow.t[at]), float(flow.b[at, 0])


def _largest_gap(data: ScanSnapData) -> float:
    """Return how far the mean B on sequences is from the flow's, relative, from t₀/3 on."""
    flow, sampled = data.phases
    at = sampled.t >= data.snap / 3
    b = np.interp(np.log(sampled.t[at]), np.log(flow.t[1:]), flow.b[1:, 0])
    return float(np.max(np.abs(sampled.b[at].mean(axis=1) / b - 1)))


def _slopes(data: ScanSnapData) -> tuple[float, float, float]:
    """Return dB/d ln t, the steepest before t₀ and the last, and R² of late B against ln ln t."""
    flow = data.phases[0]
    t, b = flow.t[1:], flow.b[1:, 0]
    slope = np.diff(b) / np.diff(np.log(t))
    late = t >= 100 * data.snap
    correlation = np.corrcoef(np.log(np.log(t[late])), b[late])[0, 1]
    return float(slope[t[1:] <= data.snap].max()), float(slope[-1]), float(correlation**2)


def _tables(data: ScanSnapData) -> dict[str, dict[str, Any]]:
    settings = {
        "logits": {RATES["eta_y"]: data.logits},
        "entropy": data.entropy,
        "phases": {PHASE_RATES["eta_y"]: data.phases},
    }
    return {
        table: concatenated(
            {
                "source": name,
                "eta_y": eta_y,
                "t": path.t,
                "b": path.b.mean(axis=1),
                "entropy": path.entropy[:, 0],
                **{f"z_{token}": z for token, z in enumerate(path.z[:, 0].T)},
            }
            for eta_y, pair in pairs.items()
            for name, path in zip(("flow", "sampled"), pair, strict=True)
        )
        for table, pairs in settings.items()
    }


def _draw_logits(ax: Axes, data: ScanSnapData) -> None:
    flow, sampled = data.logits
    colors = (figures.BLUE, figures.ORANGE, figures.SKY, figures.VERMILLION)
    few = slice(None, None, max(1, sampled.t.size // 14))
    for (token, (name, up)), color in zip(TOKENS.items(), colors, strict=True):
        ax.plot(flow.t, flow.z[:, 0, token], color=color)
        ax.plot(sampled.t[few], sampled.z[few, 0, token], "o", ms=4, color=color)
        figures.note(ax, name, (END, flow.z[-1, 0, token]), (8, up), va="center", fontsize=9)
    ax.plot([], [], color=figures.GREY, label="population flow")
    ax.plot([], [], "o", ms=4, color=figures.GREY, label=f"sequences of {LENGTH} tokens")
    ax.set(
        title="Common tokens fall, distinct ones rise",
        xlabel=r"training time $t$   ($\eta_Y = 5$, $\eta_Z = 1$)",
        ylabel=r"attention logit $z$",
        xlim=(-3, 1.5 * END),
        ylim=(-0.68, 0.34),
        xticks=np.arange(0, END + 1, 25),
    )
    ax.legend(loc="center left", bbox_to_anchor=(0.22, 0.5))


def _draw_entropy(ax: Axes, data: ScanSnapData) -> None:
    colors = (figures.GREEN, figures.BLUE, figures.PURPLE)
    for (eta_y, (flow, sampled)), color in zip(data.entropy.items(), colors, strict=True):
        ax.plot(flow.t[1:], flow.entropy[1:, 0], color=color, label=rf"$\eta_Y = {eta_y:g}$")
        few = _spaced(sampled, 0.3)
        ax.plot(sampled.t[few], sampled.entropy[few, 0], "o", ms=4, color=color)
    ax.set(
        title=r"A larger $\eta_Y$: sparser early, denser late",
        xlabel=rf"training time $t$   ($\eta_Z = {ENTROPY_ETA_Z:g}$)",
        ylabel="entropy of attention (nats)",
        xscale="log",
    )
    ax.legend(loc="lower left")


def _draw_phases(ax: Axes, data: ScanSnapData) -> None:
    flow, sampled = data.phases
    t, b = flow.t[1:], flow.b[1:, 0]
    ax.axvspan(t[0], data.snap, color=figures.SKY, alpha=0.15, lw=0)
    ax.plot(t, b, color=figures.BLUE, label="population flow")
    few = _spaced(sampled, 0.3)
    ax.plot(sampled.t[few], sampled.b[few].mean(axis=1), "o", ms=4, color=figures.BLUE)
    top = 1.25 * b[-1]
    slope = np.diff(b) / np.diff(np.log(t))
    steep = int(np.argmax(np.where(t[1:] <= data.snap, slope, 0)))
    line = b[steep] + slope[steep] * np.log(t / t[steep])
    shown = (line > 0) & (line < top)
    ax.plot(t[shown], line[shown], "--", color=figures.GREY, label=r"straight in $\ln t$")
    frozen, snapped = t >= _anchor(data)[0], t >= data.snap
    fit = np.polynomial.Polynomial.fit(np.log(np.log(t[frozen])), b[frozen], 1)
    fitted, label = fit(np.log(np.log(t[snapped]))), r"straight in $\ln \ln t$"
    ax.plot(t[snapped], fitted, ":", color=figures.BLACK, lw=2.2, label=label)
    for end, text in ((t[0], "scanning"), (t[-1], "snapped")):
        place = (np.sqrt(end * data.snap), 1.02 * top)
        ax.text(*place, text, ha="center", va="bottom", color=figures.GREY)
    figures.note(ax, r"$t_0 = 2K \ln M/\eta_Y$", (data.snap, 0), (6, 6))
    ax.set(
        title=r"$B$ grows as $\ln t$, then as $\ln \ln t$",
        xlabel=rf"training time $t$   ($\eta_Y = 1$, $\eta_Z = {PHASE_RATES['eta_z']:g}$)",
        ylabel=r"$B(t)$",
        xscale="log",
        xlim=(t[0], t[-1]),
        ylim=(0, 1.12 * top),
    )
    ax.legend(loc="center right", bbox_to_anchor=(1, 0.3))


def _spaced(path: ScanSnapTrajectory, start: float) -> np.ndarray:
    """Return indices evenly spaced on a logarithmic axis."""
    wanted = np.geomspace(start, path.t[-1], 10)
    return np.unique(np.minimum(np.searchsorted(path.t, wanted), path.t.size - 1))
