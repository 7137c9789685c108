"""What the networks show, in numbers and plain words, and whether that is what was published."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from joma.experiments._experiment import Experiment, Outcome, Request, Verdict, publish
from joma.experiments._tables import columns, concatenated, listed, long_table, mean_and_std
from joma.experiments.language import (
    DEPTHS,
    EMBEDDED,
    FIG6,
    FIG8,
    RATES,
    SIZES,
    SWEPT,
    TEXTS,
    UNIFORM,
    WIKITEXT_2,
    LanguageSetting,
    LanguageSize,
    named,
    sized,
    training,
)
from joma.experiments.language.curves import (
    BAND,
    MAX_LOSS_GAP,
    EntropyCurves,
    Key,
    Pair,
    collect,
    compare,
    done,
    read_recorded,
)
from joma.report import figures
from joma.report.training import ranges
from joma.runs import Run

RECORDED_LOSS = dict(zip(RATES, (6.410, 5.885, 5.671, 5.229, 5.167, 5.305, 6.761), strict=True))
"""Best validation loss by learning rate, as the runs of Fig. 8 recorded it."""

NEAR = 0.03
"""How far from the published loss ours may be at each depth."""

SOUND = 1e-3
"""Share of the updates at which losses of networks on the same words may lie apart."""

SAME_BEGIN = 1e-3
"""Nats by which entropies of one network may differ: the record has four digits, a GPU tf32."""


def near(rate: float) -> float:
    """Return how far from the recorded loss ours may be at each learning rate."""
    return 0.1 if rate >= 1e-2 else 0.05


@dataclass(frozen=True)
class Check:
    """One thing asked of the numbers.

    Attributes:
        what: was asked.
        holds: whether it is so.
        seen: the numbers that decide.
    """

    what: str
    holds: bool
    seen: str

    def __str__(self) -> str:
        return f"{self.what}: {'yes' if self.holds else 'no'} ({self.seen})"


def judge_depths(curves: Mapping[Key, EntropyCurves], setting: LanguageSetting) -> Outcome:
    """Return what networks of four depths at one learning rate show (Fig. 6).

    At the published size it agrees where the best validation loss is within .03 of the published
    one at every depth, and the attention of layer 0 becomes sparse and dense again in every network
    of one and of two layers, and no arithmetic was spoiled; deeper networks do not decide. Other
    sizes and other texts are not comparable.
    """
    rate = setting.size.learning_rate
    shown = {depth: curves[depth, rate] for depth in DEPTHS if (depth, rate) in curves}
    published = setting.published
    expected = {} if published is None else {"published": published.loss}
    rows = [_row("layers", depth, own, expected) for depth, own in shown.items()]
    if missing := [depth for depth in DEPTHS if depth not in shown]:
        return Outcome(Verdict.INCOMPLETE, _missing(missing), rows, EXPLAINED)
    bounces = ", ".join(
        f"with {_name(own)} in {_layers(own.bounced, own)}" for own in shown.values()
    )
    if published is None:
        fell = _learned(shown.values(), setting)
        finding = f"{fell}. Attention becomes sparse and then dense again {bounces}."
        return Outcome(Verdict.NOT_COMPARABLE, finding, rows, EXPLAINED)
    losses = {depth: float(own.best.mean()) for depth, own in shown.items()}
    off = max(abs(losses[depth] - published.loss[depth]) for depth in DEPTHS)
    shallow = all(shown[depth].bounced[0] == shown[depth].seeds for depth in (1, 2))
    each = ", ".join(f"{loss:.3f}" for loss in losses.values())
    finding = (
        f"on {published.title} best validation loss {each} at {listed(DEPTHS)} "
        f"layers, at most {off:.3f} from the published; attention becomes sparse and then dense "
        f"again {bounces}. What is tested: every loss within {NEAR:g}, and a bounce in layer 0 of "
        "every network of 1 and 2 layers; deeper networks and upper layers are not."
    )
    spoiled = _spoiled(shown.values())
    agrees = off <= NEAR and shallow and not spoiled
    return Outcome(Verdict.of(agrees), finding + spoiled, rows, EXPLAINED)


def judge_rates(curves: Mapping[Key, EntropyCurves], setting: LanguageSetting) -> Outcome:
    """Return what networks of five layers at several learning rates show (Fig. 8).

    At the published size it agrees where the best validation loss is within .05 of the recorded one
    at every learning rate (.1 at 1e-2), lowest at 1e-4, and attention collapses in every network
    above 1e-4 and in none up to it, and no arithmetic was spoiled. Other sizes are not comparable.
    """
    rates = setting.size.learning_rates
    shown = {rate: curves[SWEPT, rate] for rate in rates if (SWEPT, rate) in curves}
    expected = {} if setting.published is None else {"recorded": RECORDED_LOSS}
    rows = [_row("lr", rate, own, expected) for rate, own in shown.items()]
    if len(shown) < len(rates):
        return Outcome(Verdict.INCOMPLETE, _missing([SWEPT]), rows, EXPLAINED)
    losses = {rate: float(own.best.mean()) for rate, own in shown.items()}
    lowest = min(losses, key=lambda rate: losses[rate])
    collapses = [named(rate) for rate, own in shown.items() if own.collapses == own.seeds]
    where = "at no learning rate does attention collapse in every network"
    if collapses:
        where = f"attention collapses in every network at {listed(collapses)}"
    words = (
        f"the best validation loss is lowest at learning rate {named(lowest)} "
        f"({losses[lowest]:.3f}); {where}"
    )
    if not expected:
        fell = _learned([shown[setting.size.learning_rate]], setting)
        return Outcome(Verdict.NOT_COMPARABLE, f"{fell}; {words}.", rows, EXPLAINED)
    off = {rate: abs(losses[rate] - RECORDED_LOSS[rate]) for rate in rates}
    collapse_as_recorded = all(
        own.collapses == (own.seeds if rate > 1e-4 else 0) for rate, own in shown.items()
    )
    finding = (
        f"{words}; losses are at most {max(off.values()):.3f} from the recorded ones. What is "
        "tested: losses, their lowest, and where attention collapses; no bounce is."
    )
    spoiled = _spoiled(shown.values())
    alike = all(off[rate] <= near(rate) for rate in rates) and lowest == 1e-4
    agrees = alike and collapse_as_recorded and not spoiled
    return Outcome(Verdict.of(agrees), finding + spoiled, rows, EXPLAINED)


def check_depths(pairs: Sequence[Pair]) -> list[Check]:
    """Return how the depths of Fig. 6 that are there compare with recorded curves."""
    alike = [p for p in pairs if p.depth <= 2 or (p.depth == SWEPT and p.layer == 0)]
    others = [p for p in pairs if p not in alike]
    first = [p for p in pairs if p.layer == 0 and p.depth <= SWEPT]
    checks = [_begins(pairs)]
    if alike:
        lowest = min(alike, key=lambda p: p.pearson)
        what = (
            "entropy curves correlate with the recorded ones by .95 or more at 1 and 2 layers and "
            "in layer 0 of 5"
        )
        seen = f"lowest {lowest.pearson:.3f}, in layer {lowest.layer} of {lowest.depth}"
        checks.append(Check(what, lowest.pearson >= 0.95, seen))
    if others:
        good = sum(p.pearson >= p.left_out - 0.05 for p in others)
        what = (
            "in 80% of the other layers as much as one recorded seed does with the rest, less .05"
        )
        checks.append(Check(what, good >= 0.8 * len(others), f"{good} of {len(others)}"))
    checks.append(_inside(pairs))
    if first:
        off = max(
            max(abs(p.lowest - p.recorded_lowest), abs(p.end - p.recorded_end)) for p in first
        )
        what = "minimum and end of layer 0 are within .15 at 1, 2 and 5 layers"
        checks.append(Check(what, off <= 0.15, f"at most {off:.3f} off"))
    return checks


def check_rates(
    pairs: Sequence[Pair],
    curves: Mapping[Key, EntropyCurves],
    recorded: Mapping[Key, EntropyCurves],
) -> list[Check]:
    """Return how the rates of Fig. 8 compare with recorded curves."""
    both = {(p.depth, p.rate): (curves[p.depth, p.rate], recorded[p.depth, p.rate]) for p in pairs}
    off = {rate: abs(float(a.best.mean() - b.best.mean())) for (_, rate), (a, b) in both.items()}
    same = [a.collapses / a.seeds == b.collapses / b.seeds for a, b in both.values()]
    losses = "best validation losses are within .05 of the recorded ones (.1 at 1e-2)"
    near_all = all(gap <= near(rate) for rate, gap in off.items())
    collapse = "as many networks have a layer whose attention collapses"
    return [
        _begins(pairs),
        Check(losses, near_all, f"at most {max(off.values()):.3f} off"),
        Check(collapse, all(same), f"at {sum(same)} of {len(same)} learning rates"),
        _inside(pairs),
    ]


def _begins(pairs: Sequence[Pair]) -> Check:
    most = max(p.begins for p in pairs)
    what = "each network begins as the recorded one of its number"
    seen = f"entropies of untrained networks are at most {most:.5f} off"
    return Check(what, most <= SAME_BEGIN, seen)


def _inside(pairs: Sequence[Pair]) -> Check:
    counts = [p.measurements for p in pairs]
    share = np.average([p.inside for p in pairs], weights=counts)
    alone = np.array([p.left_out_inside for p in pairs])
    known = np.isfinite(alone)
    seen = f"{share:.0%}"
    if known.any():
        mean = np.average(alone[known], weights=np.array(counts)[known])
        seen += f"; of one recorded seed {mean:.0%} lie in the range of the others"
    what = f"80% of the measurements lie in the recorded seeds' range ± {BAND:g}"
    return Check(what, bool(share >= 0.8), seen)


def tables(curves: Iterable[EntropyCurves]) -> dict[str, dict[str, np.ndarray]]:
    """Return a table with a row for each network, layer and counted step."""
    found = []
    for own in curves:
        depth, _, seeds = own.entropy.shape
        axes = {"layer": range(depth), "step": own.steps, "seed": range(seeds)}
        found.append(
            {
                "depth": own.depth,
                "learning_rate": own.rate,
                **long_table(own.entropy, "attention_entropy", **axes),
                "attention_entropy_mean": own.entropy_mean.ravel(),
                "stable_rank": own.stable_rank.ravel(),
                "validation_loss": np.broadcast_to(own.loss, own.entropy.shape).ravel(),
            }
        )
    return {"curves": concatenated(found)} if found else {}


def _row(
    what: str, value: float, own: EntropyCurves, expected: Mapping[str, Mapping[Any, float]]
) -> dict[str, Any]:
    first = own.mean[0]
    low = int(first.argmin())
    start, lowest, end = (round(float(first[at]), 3) + 0.0 for at in (0, low, -1))  # no −0
    return {
        what: value if what == "layers" else named(value),
        "best loss": mean_and_std(own.best, 3),
        **{source: loss[value] for source, loss in expected.items()},
        "layer 0 starts": start,
        "lowest": lowest,
        "at step": own.steps[low],
        "ends": end,
        "bounces": _layers(own.bounced, own),
        "collapses": _layers(own.collapsed, own),
        "stable rank, layer 0": _start_lowest_end(own.stable_rank[0].mean(-1)),
    }


EXPLAINED = (
    f"Entropy is in nats; evenly spread attention has {UNIFORM:.3f}. Bounces: it falls by 0.2 or "
    "more to its lowest and ends 0.2 or more above; collapses: it ends below a quarter of the even "
    "one. Both are counted in networks, of each layer in which there are any. Stable rank: start → "
    "lowest → end.",
)
"""What the columns of the table are."""


def _spoiled(shown: Iterable[EntropyCurves]) -> str:
    """Return a sentence where networks that read the same words learn as if they did not."""
    worst = max(shown, key=lambda own: own.share_apart)
    if worst.share_apart <= SOUND:
        return ""
    return (
        f" But with {_name(worst)} at learning rate {named(worst.rate)} the training loss of one "
        f"network is more than {MAX_LOSS_GAP:g} from that of the others, which read the same "
        f"words, at {worst.share_apart:.1%} of the updates: something spoils their arithmetic."
    )


def _learned(shown: Iterable[EntropyCurves], setting: LanguageSetting) -> str:
    """Return how the loss went, where there is nothing published to compare it with."""
    shown, size = list(shown), setting.size
    fell = all((own.best < own.loss[0]).all() for own in shown)
    parts = [f"{own.loss[0].mean():.2f} → {own.best.mean():.2f} with {_name(own)}" for own in shown]
    titles = {EMBEDDED: "the embedded text", **{name: it.title for name, it in TEXTS.items()}}
    text, known = titles.get(size.corpus, size.corpus), size.corpus in titles
    why = "too little for the published numbers" if known else "nothing was published of this text"
    return (
        f"{why} ({size.last:,} steps on {text}, {setting.words:,} different words, "
        f"at learning rate {named(size.learning_rate)}); the validation loss "
        f"{'goes' if fell else 'does not fall in every network:'} {', '.join(parts)}"
    )


def _missing(depths: Iterable[int]) -> str:
    names = ", ".join(f"depth-{depth}" for depth in depths)
    return f"not all networks are trained yet; what is missing: {names}."


def _name(own: EntropyCurves) -> str:
    return f"{own.depth} layer{'s' * (own.depth > 1)}"


def _layers(counts: Sequence[int], own: EntropyCurves) -> str:
    """Return the layers in which something was found, and in how many networks."""
    parts = []
    for count in sorted({count for count in counts if count}, reverse=True):
        layers = [layer for layer, own_count in enumerate(counts) if own_count == count]
        parts.append(f"layer{'s' * (len(layers) > 1)} {ranges(layers)} ({count}/{own.seeds})")
    return ", ".join(parts) or "none"


def _start_lowest_end(values: np.ndarray) -> str:
    digits = 2 if values[0] < 10 else 1
    return " → ".join(f"{v:.{digits}f}" for v in (values[0], np.fmin.reduce(values), values[-1]))


_IN_A_ROW = 5
"""Names of lines that a legend has in a row."""
_LIGHT = "#9a9a9a"

Shown = Mapping[Key, EntropyCurves]


def size_of(request: Request) -> LanguageSize:
    """Return the size that is asked for, with the text that is."""
    return sized(request.scale, request.options.get("corpus", SIZES[request.scale].corpus))


def needs(request: Request) -> None:
    """Raise `JomaError` where the text is not there or, being somebody's own, is no good."""
    size = size_of(request)
    if size.corpus in TEXTS or size.corpus == EMBEDDED:
        training.find(size)
    else:
        training.load(size)


def fig6(run: Run, request: Request) -> Outcome:
    """Train the depths asked for that are not done, and say what all that are show."""
    return _reproduce(run, request, FIG6)


def fig8(run: Run, request: Request) -> Outcome:
    """Train five layers at every learning rate, unless they are done, and say what they show."""
    return _reproduce(run, request, FIG8)


def _reproduce(run: Run, request: Request, experiment: Experiment) -> Outcome:
    references = {} if request.reference is None else read_recorded(request.reference)
    text = training.load(size_of(request))
    setting, of_depths = text.setting, experiment is FIG6
    done(run, setting, experiment.groups)  # refuses what was trained on another text
    groups = request.groups or experiment.groups
    # Both figures show the networks of five layers at the one learning rate.
    training.train_groups(run, groups, text, request, [FIG8.name if of_depths else FIG6.name])
    curves = collect(run, setting, experiment.groups)
    if of_depths:
        rate = setting.size.learning_rate
        curves = {key: own for key, own in curves.items() if own.rate == rate}
    outcome = (judge_depths if of_depths else judge_rates)(curves, setting)
    made: dict[str, Any] = tables(curves.values())
    summary: dict[str, Any] = {}
    if request.reference is not None:
        if setting.published is not WIKITEXT_2:
            references = {}
            words = (
                f"The recorded curves are those of {WIKITEXT_2.title} at the full size; they are "
                "not compared with these."
            )
        elif pairs := compare(curves, references):
            made["comparison"] = columns(map(asdict, pairs))
            checks = check_depths(pairs)
            if not of_depths:
                checks = check_rates(pairs, curves, references)
            summary["comparison"] = [asdict(one) for one in checks]
            words = f"Next to the recorded curves: {'; '.join(map(str, checks))}."
        else:
            words = "The recorded curves have nothing in common with these to be compared."
        outcome = replace(outcome, paragraphs=(*outcome.paragraphs, words))
    figure = (draw_depths if of_depths else draw_rates)(curves, references)
    publish(run, experiment, outcome, figure, made, **summary)
    return outcome


def draw_depths(curves: Shown, references: Shown) -> Figure | None:
    """Draw Fig. 6: a column for each depth that is there, entropy above and stable rank below."""
    shown = sorted(curves.values(), key=lambda own: own.depth)
    if not shown:
        return None
    count = len(shown)
    figure, axes = figures.panels(2 * count, count, max(3.1 * count, 6.4), 2.7)
    for own, above, below in zip(shown, axes, axes[count:], strict=False):
        _entropies(above, own, references.get((own.depth, own.rate)))
        loss = f"best validation loss {own.best.mean():.3f}"
        above.set_title(f"{own.depth} layer{'s' * (own.depth > 1)}\n{loss}")
        for layer, values in enumerate(own.stable_rank):
            _curve(below, own.steps, values, *_line_style(layer, own.depth))
        below.set_xlabel("step")
        _step_axis(below, own.steps)
    axes[0].set_ylabel("attention entropy (nats)")
    axes[count].set_ylabel("stable rank of lower layer")
    _finish_entropies(axes[:count], count)
    figures.share_limits(axes[count:], count)
    for own, ax in zip(shown, axes, strict=False):
        _legend(ax, own.depth, bool(references) and own is shown[0])
    return figure


def draw_rates(curves: Shown, references: Shown) -> Figure | None:
    """Draw Fig. 8: a panel for each learning rate that is there, and the loss over all of them."""
    shown = sorted(curves.values(), key=lambda own: own.rate)
    if not shown:
        return None
    count = len(shown) + 1
    columns = min((4, 3), key=lambda columns: -count % columns) if count > 2 else count
    figure, axes = figures.panels(count, columns, max(3.1 * columns, 6.4), 2.75)
    recorded = [references.get((SWEPT, own.rate)) for own in shown]
    for number, (own, ax) in enumerate(zip(shown, axes, strict=False)):
        _entropies(ax, own, recorded[number])
        ax.set_title(f"learning rate {named(own.rate)}")
        ax.set_xlabel("step" if number + columns >= count else "")
        ax.set_ylabel("attention entropy (nats)" if number % columns == 0 else "")
    _finish_entropies(axes[:-1], columns)
    _losses(axes[-1], shown, recorded)
    _legend(axes[0], shown[0].depth, bool(references))
    return figure


def _finish_entropies(axes: Sequence[Axes], columns: int) -> None:
    figures.share_limits(axes, columns, high=1.06)
    for ax in axes:
        ax.set_ylim(bottom=-0.06)
    figures.level(axes[0], UNIFORM, "even attention", "right", up=2)


def _entropies(ax: Axes, own: EntropyCurves, references: EntropyCurves | None) -> None:
    ax.axhline(UNIFORM, color=figures.GREY, lw=1.0, ls=":")
    for layer in range(own.depth):
        if references is not None:
            steps = [step for step in references.steps if step <= own.steps[-1]]
            mean = references.mean[layer, : len(steps)]
            ax.plot(steps, mean, color=_LIGHT, lw=0.8, zorder=3)
        _curve(ax, own.steps, own.entropy[layer], *_line_style(layer, own.depth))
    _step_axis(ax, own.steps)


def _losses(
    ax: Axes, shown: Sequence[EntropyCurves], references: Sequence[EntropyCurves | None]
) -> None:
    rates = [own.rate for own in shown]
    for own in shown:
        ax.semilogx([own.rate] * own.seeds, own.best, ".", color=figures.BLUE, ms=4, alpha=0.6)
    ax.semilogx(rates, [own.best.mean() for own in shown], "o-", color=figures.BLUE, label="here")
    there = [(own.rate, own.best.mean()) for own in references if own is not None]
    if there:
        ring = {"color": figures.BLACK, "mfc": "none", "ms": 10, "label": "recorded"}
        ax.semilogx(*zip(*there, strict=True), "o", **ring)
        ax.legend(loc="upper center", fontsize=8)
    ax.set(title="best validation loss", xlabel="learning rate")


def _curve(ax: Axes, steps: Sequence[int], values_KS: np.ndarray, color: str, width: float) -> None:
    """Draw the mean over seeds, in their range."""
    ends = values_KS.min(-1), values_KS.mean(-1), values_KS.max(-1)
    figures.band(ax, steps, *ends, color=color, alpha=0.12, lw=width, zorder=4)


def _line_style(layer: int, depth: int) -> tuple[str, float]:
    """Return the colour and width of a layer's line: from dark below to light on top."""
    share = layer / max(depth - 1, 1)
    color = matplotlib.colormaps["viridis"](0.88 * share)
    return to_hex(color), 2.2 if layer == 0 else 1.5


def _legend(ax: Axes, depth: int, references: bool) -> None:
    """Say what the lines of a panel are, in the room that collapsed attention would take."""
    handles = []
    shown = range(depth) if depth <= _IN_A_ROW else (0, depth // 2, depth - 1)
    for layer in shown:  # neighbours of ten colours are too alike to be named one by one
        color, width = _line_style(layer, depth)
        words = "layer 0" if layer == 0 else f"{layer}"
        handles.append(Line2D([], [], color=color, lw=width, label=words))
    if references:
        handles.append(Line2D([], [], color=_LIGHT, lw=0.8, label="recorded"))
    tight = {"handlelength": 1.2, "columnspacing": 0.9, "fontsize": 8}
    ax.legend(handles=handles, loc="lower center", ncols=len(handles), **tight)


def _step_axis(ax: Axes, steps: Sequence[int]) -> None:
    if steps[-1] < 10_000:
        return
    ticks = range(0, steps[-1] + 1, 20_000 if steps[-1] < 100_000 else 50_000)
    ax.set_xticks(ticks, ["0", *(f"{tick // 1000}k" for tick in ticks[1:])])
