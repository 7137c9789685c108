"""What the networks are read for, from their run folders: losses, paired differences, tables."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from joma.common.paired import Paired, paired
from joma.experiments._frame import columns, groups_done
from joma.experiments.galore.setting import (
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

    def by_step(self, name: str) -> dict[int, np.ndarray]:
        """Return a metric of full rank at each step, of all matrices of all seeds."""
        found: dict[int, list[float]] = {}
        for member in range(self.size.seeds):
            steps, values, _ = self.metric(name, "full", member)
            for step, value in zip(steps, values, strict=True):
                found.setdefault(int(step), []).append(float(value))
        return {step: np.array(values) for step, values in sorted(found.items())}

    def step_time(self, method: str) -> tuple[float, float]:
        """Return mean and longest time of a step in seconds, NaN where it is unknown."""
        timed = self.outcome(method)
        return float(timed.get("seconds", np.nan)), float(timed.get("slowest", np.nan))

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
        fields = dict(changed)
        if fields.get("switch"):
            fields["full_rate"] = self.best["full"]
        rate = fields.pop("rate", self.best[method])
        return self.size.network(method, rate, member, **fields)


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
