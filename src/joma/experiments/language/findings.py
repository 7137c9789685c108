"""What the networks show, in numbers and plain words, and whether that is what was published."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from joma.experiments._experiment import Outcome, Verdict
from joma.experiments._frame import concatenated, listed, long_table, mean_and_std
from joma.experiments.language import (
    DEPTHS,
    EMBEDDED,
    RATES,
    SWEPT,
    TEXTS,
    UNIFORM,
    LanguageSetting,
    named,
)
from joma.experiments.language.curves import BAND, MAX_LOSS_GAP, EntropyCurves, Key, Pair
from joma.report.marks import ranges

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
