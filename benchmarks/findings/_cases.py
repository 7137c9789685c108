"""All cases: the sweep, the sick, those worth a note and the healthy."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.findings._case import ARCHITECTURES, KINDS, NOTES, RATES, SEEDS, STEPS, Case

GRID = (1e-3, 3e-3, 1e-2, 3e-2)
"""Learning rates of the sweep with AdamW, each with three seeds."""
SGD_GRID = (0.03, 0.1, 0.3, 1.0)
"""Learning rates of the sweep with SGD, which sets the rates of healthy runs alone; one seed."""
GATED = ("llama", "t5")
WITHOUT_VALIDATION = ("frozen", "nan", "collapse_one", "rank_up", "dead_mlp", "diverging_ascent")
"""Variants of which seed 1 gives the monitor no validation loss."""


@dataclass(frozen=True)
class Best:
    """What the sweep of an architecture found.

    Attributes:
        rate: The learning rate with the lowest mean of the final validation losses.
        loss: That mean.
        spread: The largest of those losses minus the smallest.
        sgd: The best learning rate with SGD.
    """

    rate: float
    loss: float = float("nan")
    spread: float = float("nan")
    sgd: float = 0.1


BEST: dict[str, Best] = {
    "llama": Best(3e-3),
    "neox": Best(3e-3),
    "encoder": Best(3e-3),
    "t5": Best(3e-3),
    "gpt2": Best(3e-3),
}
"""For each architecture the best of the sweep, for runs without one of their own."""


def sweep() -> list[Case]:
    """Return the runs that define the best learning rate of each architecture."""
    found = [
        Case(architecture, "sweep", "sweep", seed=seed, rate=rate, steps=STEPS[architecture])
        for architecture in ARCHITECTURES
        for rate in GRID
        for seed in SEEDS
    ]
    return found + [
        Case(architecture, "sweep", "sweep", rate=rate, optimizer="sgd", steps=STEPS[architecture])
        for architecture in ARCHITECTURES
        for rate in SGD_GRID
    ]


def planted(best: Mapping[str, Best]) -> list[Case]:
    """Return the sick runs and those worth a note: each variant, architecture and seed."""
    found = []
    for variant in KINDS:
        for architecture in ARCHITECTURES:
            if variant == "rank_gate" and architecture not in GATED:
                continue
            for seed in SEEDS:
                case = Case(
                    architecture,
                    variant,
                    "note" if variant in NOTES else "sick",
                    seed=seed,
                    rate=best[architecture].rate * RATES.get(variant, 1.0),
                    steps=STEPS[architecture] * (2 if variant == "overfitting" else 1),
                    validation=not (seed == 1 and variant in WITHOUT_VALIDATION),
                )
                found.append(_in_layer(case))
    return found


def _in_layer(case: Case) -> Case:
    """Return the case with the layer in which its sickness is planted, where it is in one."""
    layered = ("collapse_one", "dead_mlp", "frozen", "not_optimized", "duplicated", "tied")
    if case.variant not in layered and not case.variant.startswith("rank_"):
        return case
    if case.architecture == "t5":  # two layers in each stack
        return replace(case, layer=1, stack="encoder" if case.seed % 2 else "decoder")
    return replace(case, layer=1 + case.seed % 2)


RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "best": ({}, {"layers": 3, "steps": 600, "seed": 1}),
    "third": ({"rate": 1 / 3, "layers": 6, "steps": 300}, {"rate": 1 / 3, "layers": 2}),
    "cautious": ({"rate": 0.1, "steps": 800}, {"rate": 0.1, "layers": 6, "steps": 600}),
    "deep": (
        {"rate": 0.2, "layers": 12, "steps": 300},
        {"rate": 0.1, "layers": 12, "steps": 400, "seed": 6},
    ),
    "medium": ({"rate": 0.3, "layers": 8}, {"rate": 0.2, "layers": 8, "seed": 3}),
    "shallow": (
        {"layers": 2, "steps": 200},
        {"rate": 0.6, "layers": 2, "steps": 1000, "width": 32},
    ),
    "sgd": (
        {"optimizer": "sgd", "rate": 0.8, "steps": 600},
        {"optimizer": "sgd", "rate": 0.6, "layers": 2, "steps": 800},
    ),
    "sgd-warmup": (
        {"optimizer": "sgd", "rate": 0.5, "schedule": "warmup", "layers": 3, "steps": 800},
        {"optimizer": "sgd", "rate": 0.4, "schedule": "cosine", "steps": 900},
    ),
    "warmup": (
        {"schedule": "warmup", "steps": 300},
        {"schedule": "warmup", "rate": 0.5, "layers": 6, "steps": 500},
    ),
    "cosine": (
        {"schedule": "cosine"},
        {"schedule": "cosine", "layers": 3, "steps": 1000, "seed": 4},
    ),
    "accumulation": (
        {"accumulate": 4, "batch": 16, "rate": 0.5, "steps": 200, "layers": 2},
        {"accumulate": 2, "batch": 32, "steps": 300, "layers": 3},
    ),
    "dropout": (
        {"dropout": 0.1, "rate": 0.6, "steps": 500},
        {"dropout": 0.2, "rate": 0.4, "steps": 600, "layers": 3},
    ),
    "decay": ({"decay": 0.1, "rate": 0.7}, {"decay": 0.3, "rate": 0.5, "layers": 6}),
    "bfloat16": (
        {"autocast": True, "rate": 0.5, "steps": 300},
        {"autocast": True, "schedule": "cosine", "layers": 2},
    ),
    "clipped": (
        {"clip": 1.0, "rate": 0.8, "seed": 5},
        {"clip": 0.5, "schedule": "warmup", "layers": 5},
    ),
    "vocabulary": (
        {"vocabulary": 32, "rate": 0.5, "steps": 300},
        {"vocabulary": 160, "rate": 0.5, "steps": 700},
    ),
    "language": (
        {"language": 1, "validation": False, "rate": 0.8},
        {"language": 2, "validation": False, "rate": 0.4, "steps": 500, "layers": 3},
    ),
    "batch": ({"batch": 6, "rate": 0.4, "steps": 600}, {"batch": 48, "steps": 300, "layers": 3}),
    "long": (
        {"rate": 0.4, "layers": 2, "steps": 2000},
        {"rate": 0.3, "layers": 2, "steps": 2500, "schedule": "cosine"},
    ),
    "lora": ({"lora": True, "steps": 500}, {"lora": True, "layers": 2, "schedule": "cosine"}),
}
"""Healthy recipes; for each architecture one run for each half. Rates are shares of the best."""
LONGEST = ("llama", "gpt2")
"""Architectures of which the second long run has 5,000 steps."""


def healthy(best: Mapping[str, Best]) -> list[Case]:
    """Return the healthy runs: two of each recipe for each architecture after each other."""
    found: list[Case] = []
    for recipe, both in RECIPES.items():
        for architecture in ARCHITECTURES:
            for given in both:
                options = {"rate": 1.0, "steps": 400, **given}
                if architecture == "encoder":
                    _slower(recipe, options)
                of = best[architecture]
                options["rate"] *= of.sgd if options.get("optimizer") == "sgd" else of.rate
                if options["steps"] == 2500 and architecture in LONGEST:
                    options["steps"] = 5000
                if architecture == "t5" and options.get("layers", 4) % 2:
                    options["layers"] += 1  # as many in each stack
                found.append(Case(architecture, recipe, "healthy", number=len(found), **options))
    return found


def _slower(recipe: str, options: dict[str, Any]) -> None:
    """Give encoders the time that masked tokens take to be learned, which is longer."""
    if recipe == "cautious":
        options["steps"] *= 4
        return
    options["steps"] = max(options["steps"], 600)
    options["rate"] = max(options["rate"], 0.3)


LARGE: dict[str, Any] = {"width": 384, "vocabulary": 512, "batch": 32}
"""What the larger models have instead; 14 million parameters in 8 layers."""
LARGE_GRID = (3e-4, 1e-3, 3e-3)
NOT_LARGE = ("long", "lora", "vocabulary", "batch")
"""Recipes that are not repeated with larger models."""


def large_sweep() -> list[Case]:
    """Return the runs that define the best learning rate of each larger model."""
    grid = {"adamw": LARGE_GRID, "sgd": SGD_GRID[:3]}
    return [
        Case(
            architecture,
            "sweep",
            "sweep",
            seed=seed,
            rate=rate,
            optimizer=optimizer,
            steps=STEPS[architecture],
            layers=8,
            **LARGE,
        )
        for architecture in ARCHITECTURES
        for optimizer, rates in grid.items()
        for rate in rates
        for seed in SEEDS[: 2 if optimizer == "adamw" else 1]
    ]


def large(best: Mapping[str, Best]) -> list[Case]:
    """Return larger models: one of each sick variant and healthy recipe for each architecture."""
    sick = [one for one in planted(best) if one.seed == 0 and one.state == "sick"]
    well = [one for one in healthy(best)[::2] if one.variant not in NOT_LARGE]
    sick = [replace(one, layers=8, **LARGE) for one in sick]
    return sick + [replace(one, layers=max(one.layers, 8), **LARGE) for one in well]


def small() -> list[Case]:
    """Return a few short runs of every kind, for tests: about 25 in a minute on one core."""
    every: dict[tuple[str, str], list[Case]] = {}
    for case in planted(BEST):
        every.setdefault((case.variant, case.architecture), []).append(case)
    found = []
    for index, variant in enumerate(KINDS):
        there = [name for name in ARCHITECTURES if (variant, name) in every]
        case = every[variant, there[index % len(there)]][index % len(SEEDS)]
        found.append(replace(case, steps=120 if variant == "overfitting" else 60))
    ones = [case for case in healthy(BEST) if case.variant in ("best", "sgd", "cosine")]
    return found + [replace(case, steps=80, layers=min(case.layers, 4)) for case in ones[::6]]
