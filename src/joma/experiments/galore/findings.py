"""What the numbers say: verdict, table and sentences, each computed from the networks' losses."""

import math
from typing import Any

import numpy as np

from joma.experiments._experiment import Outcome, Verdict
from joma.experiments.galore.results import (
    GaloreResults,
    Paired,
    Variant,
    paired,
    theory_stable_rank,
    variants,
)
from joma.experiments.galore.setting import METHODS, READINGS, Method

PUBLISHED = {
    "60M": (34.88, 34.06),
    "130M": (25.36, 25.08),
    "350M": (18.95, 18.80),
    "1B": (15.64, 15.56),
}
"""Perplexity of GaLore and of full rank on C4, by LLaMA."""

MOST_LOST = 0.01
"""Largest share of the loss by which GaLore may exceed full rank and still agree with print."""
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
    and the loss with the default gap that of the shortest one by at most 0.5%; where two standard
    errors reach across one of these limits, it is not decided. Other scales are not comparable.
    """
    rows, paragraphs = _rows(results), _paragraphs(results)
    needed = [one for one in ("tune", "seeds", "gaps") if one in results.missing]
    if not results.best or "full" not in results.methods or "galore" not in results.methods:
        return Outcome(
            Verdict.INCOMPLETE, "the learning rates are not tuned yet.", rows, paragraphs
        )
    full = results.losses("full")
    lost = paired(results.losses("galore"), full)
    level = float(np.nanmean(full))
    printed = published_losses().values()
    finding = (
        f"GaLore at rank {results.size.rank} of {results.size.width} ends {lost} nats per byte "
        f"from full rank {_tuning_of(results)} ({level:.4f}), {lost.mean / level:+.2%} of the "
        f"loss; published {min(printed):+.1%} to {max(printed):+.1%}."
    )
    if not published_size:
        return Outcome(Verdict.NOT_COMPARABLE, finding, rows, paragraphs)
    if needed:
        words = f"{finding} Networks of {', '.join(needed)} are missing."
        return Outcome(Verdict.INCOMPLETE, words, rows, paragraphs)
    by_gap = _by_gap(results)
    finding += (
        f" With the default gap it ends {by_gap} from that with the shortest one. What is tested: "
        f"at most {MOST_LOST:.0%} and {MOST_BY_GAP:.1%} of the loss."
    )
    limits = ((lost, MOST_LOST * level), (by_gap, MOST_BY_GAP * level))
    if any(abs(one.mean - limit) <= 2 * one.error for one, limit in limits):
        return Outcome(Verdict.INCOMPLETE, finding, rows, paragraphs)
    agrees = all(one.mean <= limit for one, limit in limits)
    return Outcome(Verdict.of(agrees), finding, rows, paragraphs)


def _tuning_of(results: GaloreResults) -> str:
    tried = len(results.size.rates["full"])
    return "at one learning rate" if tried == 1 else f"tuned over {tried} learning rates"


def _by_gap(results: GaloreResults) -> Paired:
    shortest = min(results.size.gaps)
    return paired(results.losses("galore"), results.losses("galore", gap=shortest))


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
    found = [
        *_tuned(results),
        *_against_svd(results),
        *_others(results),
        *_moments(results),
        *_sweep(results, "ranks", "ranks"),
        *_sweep(results, "gaps", "gaps"),
        *_gradient_rank(results),
        *_consecutive(results),
        *_weights(results),
        *_sweep(results, "warm-lora", "first steps in full rank before LoRA"),
        *_recipe(results),
    ]
    return tuple(found)


def _tuned(results: GaloreResults) -> list[str]:
    """Say which learning rates were tried."""
    parts = []
    for method in METHODS:
        rates = results.size.rates.get(method, ())
        if len(rates) < 2 or method not in results.best:
            continue
        tried = ", ".join(map(str, rates))
        parts.append(f"{METHODS[method]}: {results.best[method]} of {tried}")
    if not parts:
        return []
    return [
        "Learning rates were tuned by the first seed's validation loss (a × b is a for embeddings, "
        f"norms and output layer and a·b for matrices): {'; '.join(parts)}."
    ]


def _against_svd(results: GaloreResults) -> list[str]:
    if "svd" not in results.methods:
        return []
    difference = paired(results.losses("galore"), results.losses("svd"))
    level = float(np.nanmean(results.losses("svd")))
    words = (
        f"Power iteration and staggered refreshes against galore-torch's method (SVD, all at once) "
        f"at rank {results.size.rank}: {difference} nats per byte"
    )
    if difference.count < 2:
        return [f"{words}."]
    clear = "more" if difference.is_clear else "not more"
    share = difference.error / level
    enough = "below" if share <= WANTED_ERROR else "above"
    return [
        f"{words}, {clear} than two standard errors; the standard error is {share:.2%} of the "
        f"loss, {enough} the {WANTED_ERROR:.1%} wanted."
    ]


def _others(results: GaloreResults) -> list[str]:
    shown: list[Method] = [one for one in results.methods if one in ("residual", "lora")]
    if not shown or "galore" not in results.methods:
        return []
    galore = results.losses("galore")
    parts = [f"{METHODS[one]} {paired(results.losses(one), galore)}" for one in shown]
    return ["Loss next to GaLore's at the same rank: " + "; ".join(parts) + "."]


def _moments(results: GaloreResults) -> list[str]:
    found = variants(results, "moments")
    if not found:
        return []
    return [
        "Moments when the basis turns, next to keeping them: "
        + "; ".join(f"{one.label} {one.difference}" for one in found[1:])
        + f". {_best(found)}"
    ]


def _sweep(results: GaloreResults, group: str, what: str) -> list[str]:
    found = variants(results, group)
    if not found:
        return []
    losses = ", ".join(f"{one.label} {_mean(one.losses)}" for one in found)
    return [f"Loss by {what}: {losses}. {_best(found)}"]


def _best(found: list[Variant]) -> str:
    """Say which is lowest, and whether that is clear next to the second."""
    first, second = sorted(found, key=lambda one: float(np.nanmean(one.losses)))[:2]
    difference = paired(first.losses, second.losses)
    if difference.count < 2:
        return f"{first.label} is lowest, of one seed."
    words = "clear of" if difference.is_clear else "within two standard errors of"
    return f"{first.label} is lowest, {words} {second.label} ({difference})."


def _gradient_rank(results: GaloreResults) -> list[str]:
    ranks = results.by_step("gradient_stable_rank")
    if len(ranks) < 2:
        return []
    (first, start), *_, (last, end) = ranks.items()
    expected = theory_stable_rank()
    way = "falls" if end.mean() < start.mean() else "rises"
    agrees = "as" if way == "falls" else "not as"
    captured = results.by_step("gradient_captured")[last].mean()
    return [
        f"The gradient's stable rank {way}, {agrees} the theory of a reversible gradient has it "
        f"(there from {expected[0]:.1f} to {expected[-1]:.1f}): the mean over matrices is "
        f"{start.mean():.2f} at step {first} and {end.mean():.2f} at step {last}, between "
        f"{end.min():.1f} and {end.max():.1f}, of at most {results.size.width}. The "
        f"{results.size.rank} leading directions then have {captured:.1%} of its energy."
    ]


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
    chance = results.size.rank / results.size.width
    return [
        f"Energy of a later gradient in the {results.size.rank} leading directions of an earlier "
        f"one, means over matrices: {'; '.join(parts)}. The gradient itself has "
        f"{own[min(own)].mean():.0%} there at first and {own[max(own)].mean():.0%} at the end, a "
        f"random subspace {chance:.0%}."
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
    chance = results.size.rank / results.size.width
    return [
        f"Of the {results.size.rank} leading directions of what the weights learned by then, this "
        f"share lies in those at the end: {', '.join(parts)}; by chance {chance:.0%}."
    ]


def _recipe(results: GaloreResults) -> list[str]:
    found = {one.label: one for one in variants(results, "recipe")}
    if any(reading not in found for reading in READINGS):
        return []
    clipped, plain, at_once = (found[reading] for reading in READINGS)
    first, last = (results.outcome("galore", reading=READINGS[one]) for one in (0, 2))
    return [
        f"Two readings of the published 7B recipe, {results.size.recipe_steps} batches in "
        f"{results.size.micro_batches} micro-batches: with one update a batch the norm is clipped "
        f"in {first['clipped']:.0%} of the {first['updates']} updates and the loss ends at "
        f"{_mean(clipped.losses)}, without clipping {plain.difference}. With a hook that moves "
        f"each parameter as its gradient arrives there are {last['updates']} updates, no gradient "
        f"is left to clip (norm {max(last['norms']):g} after each batch), and the loss ends "
        f"{at_once.difference} from the first reading; the subspace is chosen "
        f"{last['refreshes']} times instead of {first['refreshes']}."
    ]


def _mean(losses: np.ndarray) -> str:
    there = losses[np.isfinite(losses)]
    if len(there) < 2:
        return f"{there.mean():.4f}"
    return f"{there.mean():.4f} ± {there.std(ddof=1) / math.sqrt(len(there)):.4f}"


def _signed(one: Paired) -> str:
    return f"{one.mean:+.4f}" if one.count == 1 else f"{one.mean:+.4f} ± {one.error:.4f}"
