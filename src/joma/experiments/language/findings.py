"""What the networks show, in numbers and plain words, and whether that is what was published."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from joma.experiments._experiment import Outcome, Verdict
from joma.experiments._frame import long_table, mean_and_std
from joma.experiments.language.curves import BAND, MAX_LOSS_GAP, EntropyCurves, Key, Pair
from joma.experiments.language.setting import (
    DEPTHS,
    EMBEDDED,
    RATES,
    SWEPT,
    TEXTS,
    UNIFORM,
    LanguageSetting,
    named,
)

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
    expected = None if published is None else published.loss
    rows = [_row("layers", depth, own, expected) for depth, own in shown.items()]
    paragraphs = _paragraphs(shown.values(), "layers")
    if missing := [depth for depth in DEPTHS if depth not in shown]:
        return Outcome(Verdict.INCOMPLETE, _missing(missing), rows, paragraphs)
    bounces = ", ".join(
        f"with {_name(own)} in {_layers(own.bounced, own)}" for own in shown.values()
    )
    if published is None:
        fell = _learned(shown.values(), setting)
        finding = f"{fell}. Attention becomes sparse and then dense again {bounces}."
        return Outcome(Verdict.NOT_COMPARABLE, finding, rows, paragraphs)
    losses = {depth: float(own.best.mean()) for depth, own in shown.items()}
    off = max(abs(losses[depth] - published.loss[depth]) for depth in DEPTHS)
    shallow = all(shown[depth].bounced[0] == shown[depth].seeds for depth in (1, 2))
    each = ", ".join(f"{loss:.3f}" for loss in losses.values())
    finding = (
        f"on {published.title} best validation loss {each} at {_words(DEPTHS)} "
        f"layers, at most {off:.3f} from the published; attention becomes sparse and then dense "
        f"again {bounces}. What is tested: every loss within {NEAR:g}, and a bounce in layer 0 of "
        "every network of 1 and 2 layers; deeper networks and upper layers are not."
    )
    spoiled = _spoiled(shown.values())
    agrees = off <= NEAR and shallow and not spoiled
    return Outcome(Verdict.of(agrees), finding + spoiled, rows, paragraphs)


def judge_rates(curves: Mapping[Key, EntropyCurves], setting: LanguageSetting) -> Outcome:
    """Return what networks of five layers at several learning rates show (Fig. 8).

    At the published size it agrees where the best validation loss is within .05 of the recorded one
    at every learning rate (.1 at 1e-2), lowest at 1e-4, and attention collapses in every network
    above 1e-4 and in none up to it, and no arithmetic was spoiled. Other sizes are not comparable.
    """
    rates = setting.size.learning_rates
    shown = {rate: curves[SWEPT, rate] for rate in rates if (SWEPT, rate) in curves}
    published = setting.published is not None
    rows = [
        _row("lr", rate, own, RECORDED_LOSS if published else None) for rate, own in shown.items()
    ]
    paragraphs = _paragraphs(shown.values(), "lr")
    if len(shown) < len(rates):
        return Outcome(Verdict.INCOMPLETE, _missing([SWEPT]), rows, paragraphs)
    losses = {rate: float(own.best.mean()) for rate, own in shown.items()}
    lowest = min(losses, key=lambda rate: losses[rate])
    collapses = [named(rate) for rate, own in shown.items() if own.collapses == own.seeds]
    words = (
        f"the best validation loss is lowest at learning rate {named(lowest)} "
        f"({losses[lowest]:.3f}); "
        + (
            f"attention collapses in every network at {_words(collapses)}"
            if collapses
            else "at no learning rate does attention collapse in every network"
        )
    )
    if not published:
        fell = _learned([shown[setting.size.learning_rate]], setting)
        return Outcome(Verdict.NOT_COMPARABLE, f"{fell}; {words}.", rows, paragraphs)
    off = {rate: abs(losses[rate] - RECORDED_LOSS[rate]) for rate in rates}
    expected = all(
        own.collapses == (own.seeds if rate > 1e-4 else 0) for rate, own in shown.items()
    )
    finding = (
        f"{words}; losses are at most {max(off.values()):.3f} from the recorded ones. What is "
        "tested: losses, their lowest, and where attention collapses; no bounce is."
    )
    spoiled = _spoiled(shown.values())
    alike = all(off[rate] <= near(rate) for rate in rates) and lowest == 1e-4 and expected
    return Outcome(Verdict.of(alike and not spoiled), finding + spoiled, rows, paragraphs)


def check_depths(pairs: Sequence[Pair]) -> list[Check]:
    """Return how the depths of Fig. 6 that are there compare with recorded curves."""
    alike = [p for p in pairs if p.depth <= 2 or (p.depth == SWEPT and p.layer == 0)]
    others = [p for p in pairs if p not in alike]
    first = [p for p in pairs if p.layer == 0 and p.depth <= SWEPT]
    checks = [_begins(pairs)]
    if alike:
        lowest = min(alike, key=lambda p: p.pearson)
        checks.append(
            Check(
                "entropy curves correlate with the recorded ones by .95 or more at 1 and 2 layers "
                "and in layer 0 of 5",
                lowest.pearson >= 0.95,
                f"lowest {lowest.pearson:.3f}, in layer {lowest.layer} of {lowest.depth}",
            )
        )
    if others:
        good = sum(p.pearson >= p.left_out - 0.05 for p in others)
        checks.append(
            Check(
                "in 80% of the other layers as much as one recorded seed does with the rest, "
                "less .05",
                good >= 0.8 * len(others),
                f"{good} of {len(others)}",
            )
        )
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
    both = {(p.depth, p.rate) for p in pairs}
    off = {key: abs(float(curves[key].best.mean() - recorded[key].best.mean())) for key in both}
    same = [
        curves[key].collapses / curves[key].seeds == recorded[key].collapses / recorded[key].seeds
        for key in both
    ]
    return [
        _begins(pairs),
        Check(
            "best validation losses are within .05 of the recorded ones (.1 at 1e-2)",
            all(off[key] <= near(key[1]) for key in both),
            f"at most {max(off.values()):.3f} off",
        ),
        Check(
            "as many networks have a layer whose attention collapses",
            all(same),
            f"at {sum(same)} of {len(both)} learning rates",
        ),
        _inside(pairs),
    ]


def _begins(pairs: Sequence[Pair]) -> Check:
    most = max(p.begins for p in pairs)
    return Check(
        "each network begins as the recorded one of its number",
        most <= SAME_BEGIN,
        f"entropies of untrained networks are at most {most:.5f} off",
    )


def _inside(pairs: Sequence[Pair]) -> Check:
    total = sum(p.measurements for p in pairs)
    share = sum(p.inside * p.measurements for p in pairs) / total
    seen, known = f"{share:.0%}", [p for p in pairs if np.isfinite(p.left_out_inside)]
    if known:
        alone = sum(p.left_out_inside * p.measurements for p in known) / sum(
            p.measurements for p in known
        )
        seen += f"; of one recorded seed {alone:.0%} lie in the range of the others"
    return Check(
        f"80% of the measurements lie in the recorded seeds' range ± {BAND:g}",
        share >= 0.8,
        seen,
    )


def tables(curves: Iterable[EntropyCurves]) -> dict[str, dict[str, np.ndarray]]:
    """Return a table with a row for each network, layer and counted step."""
    parts = []
    for own in curves:
        depth, _, seeds = own.entropy.shape
        axes = {"layer": range(depth), "step": own.steps, "seed": range(seeds)}
        table = long_table(own.entropy, "attention_entropy", **axes)
        count = own.entropy.size
        parts.append(
            {
                "depth": np.full(count, own.depth),
                "learning_rate": np.full(count, own.rate),
                **table,
                "attention_entropy_mean": own.entropy_mean.ravel(),
                "stable_rank": own.stable_rank.ravel(),
                "validation_loss": np.broadcast_to(own.loss, own.entropy.shape).ravel(),
            }
        )
    if not parts:
        return {}
    return {"curves": {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}}


def _row(
    what: str, value: float, own: EntropyCurves, published: Mapping[Any, float] | None
) -> dict[str, Any]:
    first = own.mean[0]
    low = int(first.argmin())
    row: dict[str, Any] = {
        what: value if what == "layers" else named(value),
        "best loss": mean_and_std(own.best, 3),
    }
    if published is not None:
        row["published" if what == "layers" else "recorded"] = published[value]
    return {
        **row,
        "layer 0 starts": _rounded(first[0]),
        "lowest": _rounded(first[low]),
        "at step": own.steps[low],
        "ends": _rounded(first[-1]),
        "bounces": _layers(own.bounced, own),
        "collapses": _layers(own.collapsed, own),
        "stable rank, layer 0": _start_lowest_end(own.stable_rank[0].mean(-1)),
    }


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


def _rounded(entropy: float) -> float:
    return round(float(entropy), 3) + 0.0  # rounding may have left −0


def _paragraphs(shown: Iterable[EntropyCurves], what: str) -> tuple[str, ...]:
    shown = list(shown)
    if not shown:
        return ()
    means = "; ".join(
        f"{_label(own, what)} {_start_lowest_end(own.entropy_mean[0].mean(-1))}" for own in shown
    )
    ranks = "; ".join(
        f"{_label(own, what)} {_start_lowest_end(own.stable_rank[-1].mean(-1))}" for own in shown
    )
    return (
        f"Entropy is in nats; evenly spread attention has {UNIFORM:.3f}. Bounces: it falls by 0.2 "
        "or more to its lowest and ends 0.2 or more above; collapses: it ends below a quarter "
        "of the even one. Both are counted in networks, of each layer in which there are any.",
        f"Entropy of layer 0 over the whole validation text, start → lowest → end: {means}.",
        f"Stable rank of the top layer's lower MLP weights, start → lowest → end: {ranks}.",
    )


def _learned(shown: Iterable[EntropyCurves], setting: LanguageSetting) -> str:
    """Return how the loss went, where there is nothing published to compare it with."""
    shown, size = list(shown), setting.size
    fell = all((own.best < own.loss[0]).all() for own in shown)
    parts = [f"{own.loss[0].mean():.2f} → {own.best.mean():.2f} with {_name(own)}" for own in shown]
    short = size.corpus in (*TEXTS, EMBEDDED)
    why = "too little for the published numbers" if short else "nothing was published of this text"
    return (
        f"{why} ({size.last:,} steps on {_text(size.corpus)}, {setting.words:,} different words, "
        f"at learning rate {named(size.learning_rate)}); the validation loss "
        f"{'goes' if fell else 'does not fall in every network:'} {', '.join(parts)}"
    )


def _text(corpus: str) -> str:
    if corpus == EMBEDDED:
        return "the embedded text"
    return TEXTS[corpus].title if corpus in TEXTS else corpus


def _missing(depths: Iterable[int]) -> str:
    names = ", ".join(f"depth-{depth}" for depth in depths)
    return f"not all networks are trained yet; what is missing: {names}."


def _name(own: EntropyCurves) -> str:
    return f"{own.depth} layer{'s' * (own.depth > 1)}"


def _label(own: EntropyCurves, what: str) -> str:
    return _name(own) if what == "layers" else named(own.rate)


def _layers(counts: Sequence[int], own: EntropyCurves) -> str:
    """Return the layers in which something was found, and in how many networks."""
    parts = []
    for count in sorted({count for count in counts if count}, reverse=True):
        layers = [layer for layer, own_count in enumerate(counts) if own_count == count]
        parts.append(f"layer{'s' * (len(layers) > 1)} {_ranges(layers)} ({count}/{own.seeds})")
    return ", ".join(parts) or "none"


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers in a row as one range: 0, 2–4."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _start_lowest_end(values: np.ndarray) -> str:
    digits = 2 if values[0] < 10 else 1
    return " → ".join(f"{v:.{digits}f}" for v in (values[0], np.fmin.reduce(values), values[-1]))


def _words(parts: Iterable[Any]) -> str:
    *first, last = [str(part) for part in parts]
    return f"{', '.join(first)} and {last}" if first else last
