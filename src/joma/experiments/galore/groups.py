"""Which networks each group trains: those that decide the learning rates, and all others."""

from collections.abc import Mapping
from typing import Any

from joma.experiments.galore.setting import (
    CONTROLS,
    KEPT_MOMENTS,
    METHODS,
    READINGS,
    GaLoreNetwork,
    GaloreSize,
    LearningRate,
    Method,
)

_JUDGED: tuple[Method, ...] = ("full", "galore", "svd")
"""The methods whose differences are judged; others are trained with as many seeds as variants."""


def neighbours(rate: LearningRate) -> tuple[LearningRate, ...]:
    """Return the rates next to one on the grid: twice and half of either of its two rates.

    The rate of the matrices stays where that of embeddings, norms and output layer changes.
    """
    whole, share = rate
    return (
        LearningRate(2 * whole, share / 2),
        LearningRate(whole / 2, 2 * share),
        LearningRate(whole, 2 * share),
        LearningRate(whole, share / 2),
    )


def tried_rates(
    size: GaloreSize, method: Method, losses: Mapping[GaLoreNetwork, float]
) -> list[LearningRate]:
    """Return the rates of a method to try, as far as the losses that are known decide them.

    At first those of the size. Where it climbs, then those around the best, again and again. Once
    nothing is added, the best is better than every neighbour, hence not at the edge of the grid.
    """
    rates = list(size.rates[method])
    while rates and size.climb:
        tried = {one: size.network(method, one, size.tuning_member) for one in rates}
        if any(network not in losses for network in tried.values()):
            break
        best = min(tried, key=lambda one: losses[tried[one]])
        new = [one for one in neighbours(best) if one not in tried]
        if not new:
            break
        rates += new
    return rates


def tuning(size: GaloreSize, losses: Mapping[GaLoreNetwork, float]) -> list[GaLoreNetwork]:
    """Return the networks that decide the learning rates, all of one seed.

    Args:
        size: Size of the experiment.
        losses: The last loss of the networks that are trained.
    """
    return [
        size.network(method, rate, size.tuning_member)
        for method in METHODS
        if method in size.rates
        for rate in tried_rates(size, method, losses)
    ]


def networks_of(
    group: str, size: GaloreSize, best: Mapping[str, LearningRate]
) -> list[GaLoreNetwork]:
    """Return the networks of a group.

    Args:
        group: One of `GROUPS`, but not "tune", whose networks follow from each other's losses.
        size: Size of the experiment.
        best: The learning rate of each method that is compared.
    """
    every, members = range(size.seeds), range(size.variant_seeds or size.seeds)
    rate = best["galore"]
    if group == "seeds":
        return [
            size.network(method, best[method], member)
            for member in every
            for method in METHODS
            if method in best and (method in _JUDGED or member in members)
        ]
    if group == "ranks":
        return [
            size.network(method, best[method], member, rank=one)
            for one in size.ranks
            for member in (every if one in size.svd_ranks else members)
            for method in (("galore", "svd") if one in size.svd_ranks else ("galore",))
        ]
    if group == "theory":
        return [
            size.network("full", best["full"], member, control=one)
            for member in range(size.controls)
            for one in CONTROLS
        ]
    if group == "equal-rates":
        # For what the difference from galore-torch's method comes from: also with aligned bases.
        plain = [size.network("svd", rate, member) for member in every]
        aligned = [size.network("svd", rate, member, moments="align") for member in members]
        return [*plain, *aligned] if "power" in best else []
    if group == "moments":
        changes: list[dict[str, Any]] = [
            {"moments": one, "gap": gap}
            for gap in size.moment_gaps or (size.gap,)
            for one in (*((KEPT_MOMENTS,) if size.moments else ()), *size.moments)
        ]
    elif group == "gaps":
        changes = [{"gap": one} for one in size.gaps]
        changes += [{"refresh": "energy"}] if size.gaps else []
    elif group == "recipe":
        changes = [{"reading": one} for one in READINGS] if size.micro_batches else []
    elif group == "time":
        if not size.timed_steps:
            return []
        return [size.network(one, best[one], timed=True) for one in METHODS if one in best]
    else:
        assert group == "warm-lora"
        return [
            size.network("lora", best["lora"], member, switch=switch, full_rate=best["full"])
            for member in members
            for switch in size.switches
        ]
    return [size.network("galore", rate, one, **change) for one in members for change in changes]
