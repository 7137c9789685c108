"""What the numbers say: verdict, table and sentences, each computed from the networks' losses."""

import math
from typing import Any

import numpy as np
from scipy import stats

from joma.common.paired import Paired, paired
from joma.experiments._experiment import Outcome, Verdict
from joma.experiments.galore.results import GaloreResults, Variant, theory_stable_rank, variants
from joma.experiments.galore.setting import METHODS, LearningRate

PUBLISHED = {
    "60M": (34.88, 34.06),
    "130M": (25.36, 25.08),
    "350M": (18.95, 18.80),
    "1B": (15.64, 15.56),
}
"""Perplexity of GaLore and of full rank on C4, by LLaMA."""

MOST_LOST = 0.01
"""Largest share of the loss by which GaLore may exceed full rank and still agree with print.

Where it is lower than full rank by as much, the setting does not decide: in print it never is, so
that full rank is then not at its best, or both are far from what they can reach.
"""
MOST_BY_GAP = 0.005
"""Largest share of the loss by which the default gap may exceed the shortest gap that is tried."""
WANTED_ERROR = 0.005
"""Standard error, as a share of the loss, below which a comparison of methods is precise."""


def published_losses() -> dict[str, float]:
    """Return by what share of the loss GaLore exceeds full rank in print, by LLaMA."""
    return {
        name: math.log(galore / full) / math.log(full) for name, (galore, full) in PUBLISHED.items()
    }


def judge(results: GaloreResults, published_size: bool) -> Outcome:
    """Return whether ours shows what was published, and all else that the numbers say.

    At the full scale it agrees where GaLore's loss exceeds that of tuned full rank by at most 1%,
    and the loss with the default gap that of the shortest one by at most 0.5%. It is not decided
    where two standard errors reach across one of these limits, where GaLore is lower than full rank
    by more than 1%, and with one seed. Other scales are not comparable.
    """
    rows, paragraphs = _rows(results), _paragraphs(results)
    if not results.best or "full" not in results.methods or "galore" not in results.methods:
        finding = "the learning rates are not tuned yet."
        return Outcome(Verdict.INCOMPLETE, finding, rows, paragraphs)
    full, galore = results.losses("full"), results.losses("galore")
    lost, level = paired(galore, full), float(np.nanmean(full))
    printed = published_losses().values()
    tried = len(results.tried("full")) or len(results.size.rates["full"])
    tuned = "at one learning rate" if tried == 1 else f"tuned over {tried} learning rates"
    finding = (
        f"GaLore at rank {results.size.rank} of {results.size.width} ends {lost} nats per byte "
        f"from full rank {tuned} ({level:.4f}), {lost.mean / level:+.2%} of the loss; published "
        f"{min(printed):+.1%} to {max(printed):+.1%}."
    )
    if not published_size:
        return Outcome(Verdict.NOT_COMPARABLE, finding, rows, paragraphs)
    if needed := [one for one in ("tune", "seeds", "gaps") if one in results.missing]:
        finding += f" Networks of {', '.join(needed)} are missing."
        return Outcome(Verdict.INCOMPLETE, finding, rows, paragraphs)
    by_gap = paired(galore, results.losses("galore", gap=min(results.size.gaps)))
    finding += (
        f" With the default gap it ends {by_gap} from that with the shortest one. What is tested: "
        f"at most {MOST_LOST:.0%} and {MOST_BY_GAP:.1%} of the loss."
    )
    limits = ((lost, MOST_LOST * level), (by_gap, MOST_BY_GAP * level))
    below = lost.mean - 2 * lost.error < -MOST_LOST * level
    if below:
        finding += " GaLore is too far below full rank for this setting to decide."
    # A standard error of one seed is NaN, which is in no order with anything.
    if below or not all(abs(one.mean - limit) > 2 * one.error for one, limit in limits):
        return Outcome(Verdict.INCOMPLETE, finding, rows, paragraphs)
    agrees = all(one.mean <= limit for one, limit in limits)
    return Outcome(Verdict.of(agrees), finding, rows, paragraphs)


def _rows(results: GaloreResults) -> list[dict[str, Any]]:
    rows = []
    full = results.losses("full")
    state = results.outcome("full").get("state_bytes")
    for method in results.methods:
        losses, own = results.losses(method), results.outcome(method)
        mean, slowest = results.step_time(method)
        longest = "" if math.isnan(slowest) else f" ({slowest * 1e3:.1f})"
        rows.append(
            {
                "method": METHODS[method],
                "lr": str(results.best[method]),
                "loss": _mean(losses),
                "from full rank": "" if method == "full" else _signed(paired(losses, full)),
                "state, MB": round(own.get("state_bytes", 0) / 1e6, 3),
                "of AdamW's": f"{own.get('state_bytes', 0) / state:.0%}" if state else "",
                "ms a step (longest)": f"{mean * 1e3:.1f}{longest}",
            }
        )
    return rows


def _paragraphs(results: GaloreResults) -> tuple[str, ...]:
    return (
        *_tuned(results),
        *_against_svd(results),
        *_lora(results),
        *_moments(results),
        *_sweep(results, "ranks", "ranks"),
        *_sweep(results, "gaps", "gaps"),
        *_gradient_rank(results),
        *_consecutive(results),
        *_weights(results),
        *_sweep(results, "warm-lora", "first steps in full rank before LoRA"),
        *_by_chance(results),
    )


def _tuned(results: GaloreResults) -> list[str]:
    """Say which learning rates were tried."""
    parts = []
    for method in METHODS:
        tried = results.tried(method)
        if len(tried) < 2 or method not in results.best:
            continue
        best = results.best[method]
        if results.size.climb:
            parts.append(f"{METHODS[method]}: {best} of {len(tried)}{_next_best(tried, best)}")
        else:
            parts.append(f"{METHODS[method]}: {best} of {', '.join(map(str, tried))}")
    if not parts:
        return []
    how = "by the first seed's validation loss"
    if results.size.climb:
        how = (
            "on a seed that is not judged, by factors of two of either rate until the best was "
            "better than its four neighbours"
        )
    return [
        f"Learning rates were tuned {how} (a × b is a for embeddings, norms and output layer and "
        f"a·b for matrices): {'; '.join(parts)}."
    ]


def _next_best(tried: dict[LearningRate, float], best: LearningRate) -> str:
    """Say by how much the neighbours of the best learning rate are worse."""
    losses = [tried[one] for one in best.neighbours if one in tried]
    if not losses:
        return ""
    low, high = (end / tried[best] - 1 for end in (min(losses), max(losses)))
    return f" (its neighbours {low:+.1%} to {high:+.1%})"


def _against_svd(results: GaloreResults) -> list[str]:
    """Compare with galore-torch's method, each at its own rate and both at GaLore's."""
    galore, found = results.losses("galore"), []
    for rates, changed in (
        ("each at its own learning rate", {}),
        ("both at GaLore's", {"rate": results.best.get("galore")}),
    ):
        svd = results.losses("svd", **changed)
        difference = paired(galore, svd)
        if not difference.count:
            continue
        words = (
            f"Power iteration and staggered refreshes against galore-torch's method (SVD, all at "
            f"once), {rates}: {difference} nats per byte"
        )
        if difference.count > 1:
            level = float(np.nanmean(svd))
            clear = "more" if difference.is_clear else "not more"
            share = difference.error / level
            enough = "below" if share <= WANTED_ERROR else "above"
            words += (
                f", {difference.mean / level:+.2%} of the loss, {clear} than two standard errors; "
                f"the standard error is {share:.2%} of the loss, {enough} the {WANTED_ERROR:.1%} "
                "wanted"
            )
        found.append(f"{words}.")
    return found


def _lora(results: GaloreResults) -> list[str]:
    if not {"lora", "galore"} <= set(results.methods):
        return []
    difference = paired(results.losses("lora"), results.losses("galore"))
    return [f"Loss next to GaLore's at the same rank: {METHODS['lora']} {difference}."]


def _moments(results: GaloreResults) -> list[str]:
    found = variants(results, "moments")
    if not found:
        return []
    parts = "; ".join(f"{one.label} {one.difference}" for one in found[1:])
    return [f"Moments when the basis turns, next to keeping them: {parts}. {lowest(found)}"]


def _sweep(results: GaloreResults, group: str, what: str) -> list[str]:
    found = variants(results, group)
    if not found:
        return []
    losses = ", ".join(f"{one.label} {_mean(one.losses)}" for one in found)
    sentence = f"Loss by {what}: {losses}. {lowest(found)}"
    if group == "ranks":
        full = results.losses("full")
        gaps = "; ".join(f"{one.label} {paired(one.losses, full)}" for one in found)
        sentence += f" From full rank: {gaps}."
    return [sentence]


def lowest(found: list[Variant]) -> str:
    """Say which variant has the lowest loss, and whether that is clear next to the second."""
    first, second = sorted(found, key=lambda one: one.difference.mean)[:2]
    difference = paired(first.losses, second.losses)
    if difference.count < 2:
        return f"{first.label} is lowest, of one seed."
    words = "clear of" if difference.is_clear else "within two standard errors of"
    return f"{first.label} is lowest, {words} {second.label} ({difference})."


def _gradient_rank(results: GaloreResults) -> list[str]:
    """Say how the gradient's stable rank changes, and next to it what the theory says of its own.

    The theory has fixed B and C, exact gradients and plain descent, none of which holds in the
    training, and says where the rank ends, not how it gets there.
    """
    ranks = results.by_step("gradient_stable_rank")
    if len(ranks) < 2:
        return []
    captured = results.by_step("gradient_captured")[max(ranks)].mean()
    falling, bent = theory_stable_rank(), theory_stable_rank(realizable=True)
    return [
        f"The stable rank of a batch's gradient {rise_or_fall(ranks)}, mean over matrices of at "
        f"most {results.size.width}; its {results.size.rank} leading directions then have "
        f"{captured:.1%} of its energy. The theory of a reversible gradient (B and C fixed, exact "
        "gradient, plain descent) has it fall in the end, and not on the way: in our examples from "
        f"{falling[0]:.1f} to {falling[-1]:.1f} where the first gradient is Gaussian, and from "
        f"{bent[0]:.1f} up to {bent.max():.1f} and down to {bent[-1]:.1f} where it lies along the "
        "largest curvature. A rank that rises before convergence does not contradict it."
    ]


def rise_or_fall(by_step: dict[int, np.ndarray]) -> str:
    """Return how a measure of matrices changes from the first step to the last."""
    (first, start), *between, (last, end) = by_step.items()
    way = "falls" if end.mean() < start.mean() else "rises"
    middle = ""
    if between:
        step, most = max(between, key=lambda one: one[1].mean())
        if most.mean() > 1.1 * max(start.mean(), end.mean()):
            middle = f" (most at step {step}, {most.mean():.2f})"
    return (
        f"{way} from {start.mean():.2f} at step {first} to {end.mean():.2f} at step {last}{middle}"
    )


def _consecutive(results: GaloreResults) -> list[str]:
    parts, own = [], results.by_step("gradient_captured")
    for lag in results.size.lags:
        old = results.by_step(f"captured_after_{lag}")
        if old:
            first, last = min(old), max(old)
            parts.append(
                f"{lag} later {old[first].mean():.0%} from step {first} and "
                f"{old[last].mean():.0%} from step {last}"
            )
    if not parts:
        return []
    return [
        f"Energy of a later gradient in the {results.size.rank} leading directions of an earlier "
        f"one, means over matrices: {'; '.join(parts)}. The gradient itself has "
        f"{own[min(own)].mean():.0%} there at first and {own[max(own)].mean():.0%} at the end, a "
        f"random subspace {results.size.rank / results.size.width:.0%}."
    ]


def _weights(results: GaloreResults) -> list[str]:
    overlap = results.by_step("weight_overlap")
    if len(overlap) < 2:
        return []
    parts = [
        f"{values.mean():.0%} at step {step}"
        for step, values in overlap.items()
        if step < results.size.steps - 1
    ]
    return [
        f"Of the {results.size.rank} leading directions of what the weights learned by then, this "
        f"share lies in those at the end: {', '.join(parts)}; by chance "
        f"{results.size.rank / results.size.width:.0%}."
    ]


def _by_chance(results: GaloreResults) -> list[str]:
    """Say how often a difference exceeds two standard errors where there is none."""
    counts = sorted({results.size.seeds, results.size.variant_seeds or results.size.seeds})
    parts = [
        f"{2 * stats.t.sf(2, count - 1):.0%} of comparisons of {count} seeds"
        for count in counts
        if count > 1
    ]
    if not parts or len(results.methods) < 2:
        return []
    return [
        "Between equal methods a difference exceeds two standard errors by chance in "
        f"{' and '.join(parts)}."
    ]


def _mean(losses: np.ndarray) -> str:
    there = losses[np.isfinite(losses)]
    if len(there) < 2:
        return f"{there.mean():.4f}"
    return f"{there.mean():.4f} ± {there.std(ddof=1) / math.sqrt(len(there)):.4f}"


def _signed(one: Paired) -> str:
    return f"{one.mean:+.4f}" if one.count == 1 else f"{one.mean:+.4f} ± {one.error:.4f}"
