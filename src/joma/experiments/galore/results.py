"""What the run folders hold, the verdict from it, and the sentences and tables of its numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from scipy import stats

from joma.common.paired import Paired, paired
from joma.experiments._experiment import Outcome, Verdict
from joma.experiments._frame import groups_done
from joma.experiments._tables import columns, mean_and_error
from joma.experiments.galore import (
    GROUPS,
    KEPT_MOMENTS,
    METHODS,
    NEVER,
    GaLoreNetwork,
    GaloreSize,
    LearningRate,
    Method,
    networks_of,
    tuning,
)
from joma.runs import Run
from joma.theory import galore as theory

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


@dataclass(frozen=True, eq=False)
class GaloreResults:
    """What was measured of the networks that are done.

    Attributes:
        size: Size of the experiment.
        best: Learning rate of each method; empty where the tuning is not done.
        outcomes: What came of each network.
        runs: The run of each.
        missing: Groups of which networks are missing.
    """

    size: GaloreSize
    best: Mapping[str, LearningRate]
    outcomes: Mapping[GaLoreNetwork, Mapping[str, Any]]
    runs: Mapping[GaLoreNetwork, Run]
    missing: tuple[str, ...]

    def losses(self, method: str, **changed: Any) -> np.ndarray:
        """Return the last validation loss of each seed, NaN where it is missing."""
        found = [self.outcome(method, one, **changed) for one in range(self.size.seeds)]
        return np.array([one.get("validation_loss", np.nan) for one in found], float)

    def outcome(self, method: str, member: int = 0, **changed: Any) -> Mapping[str, Any]:
        """Return what came of a network, empty where it is missing."""
        network = self._network(method, member, changed)
        return {} if network is None else self.outcomes.get(network, {})

    def metric(
        self, name: str, method: str, member: int = 0, **changed: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return steps, values and names of matrices of a metric; empty where it is missing."""
        network = self._network(method, member, changed)
        run = None if network is None else self.runs.get(network)
        if run is None:
            return np.zeros(0), np.zeros(0), np.zeros(0, object)
        log = run.metrics.read(name)
        return log["step"], log["value"], log["module"]

    def by_step(self, name: str, layer: int | None = None) -> dict[int, np.ndarray]:
        """Return a metric of full rank at each step, of all matrices (of a layer) of all seeds."""
        found: dict[int, list[float]] = {}
        for member in range(self.size.seeds):
            for step, value, module in zip(*self.metric(name, "full", member), strict=True):
                if layer is None or int(str(module).split(".")[0]) == layer:
                    found.setdefault(int(step), []).append(float(value))
        return {step: np.array(values) for step, values in sorted(found.items())}

    def tried(self, method: Method) -> dict[LearningRate, float]:
        """Return the last loss at each learning rate that was tried of a method."""
        member = self.size.tuning_member
        return {
            one.rate: float(outcome.get("validation_loss") or np.inf)
            for one, outcome in self.outcomes.items()
            if one == self.size.network(method, one.rate, member)
        }

    @property
    def methods(self) -> list[Method]:
        """The methods of which a network is done."""
        return [one for one in METHODS if one in self.best and np.isfinite(self.losses(one)).any()]

    def _network(
        self, method: Any, member: int, changed: Mapping[str, Any]
    ) -> GaLoreNetwork | None:
        if method not in self.best:
            return None
        fields = {"rate": self.best[method], **changed}
        if fields.get("switch"):
            fields["full_rate"] = self.best["full"]
        return self.size.network(method, member=member, **fields)


def best_rates(run: Run, size: GaloreSize) -> dict[str, LearningRate]:
    """Return the learning rate of each method with the lowest loss, empty where networks miss."""
    known = tuning_losses(run, size)
    losses: dict[str, dict[LearningRate, float]] = {}
    for network in tuning(size, known):
        if network not in known:
            return {}
        losses.setdefault(network.method, {})[network.rate] = known[network]
    best = {method: min(found, key=lambda rate: found[rate]) for method, found in losses.items()}
    return {method: best.get(method, best["galore"]) for method in size.rates}


def tuning_losses(run: Run, size: GaloreSize) -> dict[GaLoreNetwork, float]:
    """Return the last loss of the networks of the tuning that are done; infinite if it was lost."""
    losses: dict[GaLoreNetwork, float] = {}
    while True:
        new = {one.name: one for one in tuning(size, losses) if one not in losses}
        done = groups_done(run, new)
        if not done:
            return losses
        for name, own in done.items():
            loss = own.read_json("outcome")["validation_loss"]
            losses[new[name]] = np.inf if loss is None or np.isnan(loss) else loss


def collect(run: Run, size: GaloreSize) -> GaloreResults:
    """Read the networks that are done from their run folders."""
    best = best_rates(run, size)
    wanted = {"tune": tuning(size, tuning_losses(run, size))}
    for group in GROUPS[1:]:
        wanted[group] = networks_of(group, size, best) if best else []
    every = {network.name: network for networks in wanted.values() for network in networks}
    runs = {every[name]: own for name, own in groups_done(run, every).items()}
    outcomes = {network: own.read_json("outcome") for network, own in runs.items()}
    missing = tuple(
        group
        for group, networks in wanted.items()
        if not best or any(network not in runs for network in networks)
    )
    return GaloreResults(size, best, outcomes, runs, missing)


@dataclass(frozen=True)
class Variant:
    """Networks that differ from GaLore's, or LoRA's, in one setting.

    Attributes:
        label: The setting's value in words.
        value: The setting's value as a number, 0 where it is a word.
        losses: The last validation loss of each seed.
        difference: Paired with the default.
    """

    label: str
    value: float
    losses: np.ndarray
    difference: Paired


def variants(results: GaloreResults, group: str) -> list[Variant]:
    """Return the networks of a group with the default among them, those that are done."""
    size = results.size
    method, field = {
        "ranks": ("galore", "rank"),
        "gaps": ("galore", "gap"),
        "moments": ("galore", "moments"),
        "warm-lora": ("lora", "switch"),
    }[group]
    choices: dict[Any, str] = {
        "ranks": {one: f"rank {one}" for one in sorted({size.rank, *size.ranks})},
        "gaps": {
            one: "never" if one == NEVER else f"gap {one}" for one in sorted({size.gap, *size.gaps})
        },
        "moments": {one: one for one in (KEPT_MOMENTS, *size.moments)},
        "warm-lora": {one: f"step {one}" for one in (0, *size.switches)},
    }[group]
    default, found = results.losses(method), []
    for value, label in choices.items():
        losses = results.losses(method, **{field: value})
        if np.isfinite(losses).any():
            number = 0 if isinstance(value, str) else value
            found.append(Variant(label, number, losses, paired(losses, default)))
    return found if len(found) > 1 else []


@cache
def theory_stable_rank(steps: int = 4000, *, realizable: bool = False) -> np.ndarray:
    """Return the stable rank of a reversible gradient under gradient ascent, (steps + 1,).

    GaLore's G = A − BWC with fixed B and C, whose eigenvalues fall as 1/k, and W = 0 at the start.
    Only the directions with the least curvature are left in the end. On the way there, the rank
    need not fall: it depends on where the first gradient lies.

    Args:
        steps: Steps of gradient ascent.
        realizable: Whether A = BVC for a Gaussian V, as in regression with a true solution V, so
            that the first gradient lies along the largest curvature; else A is Gaussian itself.
    """
    rng, side = np.random.default_rng(0), 16
    turns = [np.linalg.qr(rng.standard_normal((side, side)))[0] for _ in range(2)]
    b, c = ((turn / np.arange(1, side + 1)) @ turn.T for turn in turns)
    drawn = rng.standard_normal((side, side))
    a = b @ drawn @ c if realizable else drawn
    problem = theory.ReversibleGradient(a[None], b[None], c[None])
    path = theory.descend(problem, np.zeros((side, side)), step=1.0, steps=steps, rank=side)
    values = np.linalg.svd(problem.gradient(path.w), compute_uv=False)
    return (values**2).sum(-1) / values[..., 0] ** 2


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
    rows, paragraphs = _rows(results), tuple(_paragraphs(results))
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
        mean, slowest = (float(own.get(key, np.nan)) for key in ("seconds", "slowest"))
        longest = "" if math.isnan(slowest) else f" ({slowest * 1e3:.1f})"
        rows.append(
            {
                "method": METHODS[method],
                "lr": str(results.best[method]),
                "loss": mean_and_error(losses),
                "from full rank": "" if method == "full" else _signed(paired(losses, full)),
                "state, MB": round(own.get("state_bytes", 0) / 1e6, 3),
                "of AdamW's": f"{own.get('state_bytes', 0) / state:.0%}" if state else "",
                "ms a step (longest)": f"{mean * 1e3:.1f}{longest}",
            }
        )
    return rows


SWEEPS = {
    "moments": "what becomes of the moments when the basis turns",
    "ranks": "rank",
    "gaps": "gap",
    "warm-lora": "steps in full rank before LoRA",
}


def _paragraphs(results: GaloreResults) -> Iterable[str]:
    """Return what neither the table nor the figure shows: tuning, errors, and what is lowest."""
    yield from _tuned(results)
    yield from _against_svd(results)
    for group, what in SWEEPS.items():
        if found := variants(results, group):
            yield f"Loss by {what}: {lowest(found)}"
    counts = sorted({results.size.seeds, results.size.variant_seeds or results.size.seeds} - {1})
    if counts and len(results.methods) > 1:
        shares = (f"{2 * stats.t.sf(2, n - 1):.0%} of comparisons of {n} seeds" for n in counts)
        yield (
            "Between equal methods a difference exceeds two standard errors by chance in "
            f"{' and '.join(shares)}."
        )


def _tuned(results: GaloreResults) -> Iterable[str]:
    """Say which learning rates were tried, and how much worse the neighbours of the best are."""
    climb, chosen = results.size.climb, []
    for method in METHODS:
        tried = results.tried(method)
        if len(tried) < 2 or method not in results.best:
            continue
        best = results.best[method]
        words = f"{len(tried)}" if climb else ", ".join(map(str, tried))
        losses = [tried[one] for one in best.neighbours if one in tried]
        if climb and losses:
            low, high = (end / tried[best] - 1 for end in (min(losses), max(losses)))
            words += f" (its neighbours {low:+.1%} to {high:+.1%})"
        chosen.append(f"{METHODS[method]}: {best} of {words}")
    how = "by the first seed's validation loss"
    if climb:
        how = (
            "on a seed that is not judged, by factors of two of either rate until the best was "
            "better than its four neighbours"
        )
    if chosen:
        yield (
            f"Learning rates were tuned {how} (a × b is a for embeddings, norms and output layer "
            f"and a·b for matrices): {'; '.join(chosen)}."
        )


def _against_svd(results: GaloreResults) -> Iterable[str]:
    """Compare with galore-torch's method, each at its own rate and both at GaLore's."""
    galore = results.losses("galore")
    for rates, changed in (
        ("each at its own learning rate", {}),
        ("both at GaLore's", {"rate": results.best.get("galore")}),
    ):
        svd = results.losses("svd", **changed)
        difference = paired(galore, svd)
        words = (
            "Power iteration and staggered refreshes against galore-torch's method (SVD, all at "
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
        if difference.count:
            yield f"{words}."


def lowest(found: Sequence[Variant]) -> str:
    """Say which variant has the lowest loss, and whether that is clear next to the second."""
    first, second = sorted(found, key=lambda one: one.difference.mean)[:2]
    difference = paired(first.losses, second.losses)
    if difference.count < 2:
        return f"{first.label} is lowest, of one seed."
    words = "clear of" if difference.is_clear else "within two standard errors of"
    return f"{first.label} is lowest, {words} {second.label} ({difference})."


def _signed(one: Paired) -> str:
    return f"{one.mean:+.4f}" if one.count == 1 else f"{one.mean:+.4f} ± {one.error:.4f}"


_NUMBERS = ("validation_loss", "steps", "parameters", "state_bytes", "seconds", "slowest")


def tables(results: GaloreResults) -> dict[str, dict[str, list[Any]]]:
    """Return every number of the figure: networks, learning curves and subspaces."""
    networks, curves = [], []
    for network, outcome in results.outcomes.items():
        networks.append(
            {
                "name": network.name,
                "method": network.method,
                "learning_rate": network.rate.rate,
                "matrix_share": network.rate.share,
                "seed": network.member,
                "rank": network.rank,
                "gap": network.gap,
                "moments": network.moments,
                "switch": network.switch,
                **{key: float(outcome[key]) for key in _NUMBERS},
            }
        )
        log = results.runs[network].metrics.read("validation_loss")
        curves += [
            {"name": network.name, "step": int(step), "validation_loss": float(value)}
            for step, value in zip(log["step"], log["value"], strict=True)
        ]
    made = {"networks": networks, "curves": curves, "subspaces": list(_subspaces(results))}
    return {name: columns(rows) for name, rows in made.items() if rows}


def _subspaces(results: GaloreResults) -> Iterable[dict[str, Any]]:
    names = ["gradient_stable_rank", "gradient_captured", "weight_overlap", "weight_stable_rank"]
    for name in (*names, *(f"captured_after_{lag}" for lag in results.size.lags)):
        for member in range(results.size.seeds):
            found = results.metric(name, "full", member)
            for step, value, module in zip(*found, strict=True):
                yield {
                    "measure": name,
                    "seed": member,
                    "step": int(step),
                    "matrix": str(module),
                    "value": float(value),
                }
