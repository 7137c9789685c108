"""The networks of the experiment, and how large it is made at each scale."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

Method = Literal["full", "galore", "svd", "power", "residual", "lora"]
METHODS: dict[Method, str] = {
    "full": "full rank, AdamW",
    "galore": "GaLore, power iteration, staggered",
    "svd": "GaLore, galore-torch's method",
    "power": "GaLore, power iteration, all at once",
    "residual": "GaLore with residual scaling",
    "lora": "LoRA",
}
"""What each method is called in tables and figures."""

GROUPS = (
    "tune",
    "seeds",
    "equal-rates",
    "ranks",
    "moments",
    "gaps",
    "warm-lora",
    "recipe",
    "theory",
    "time",
)
READINGS = ("accumulated, clipped", "accumulated", "each micro-batch")
"""Readings of the published 7B recipe: when its parameters move, and whether clipping acts."""

CONTROLS = ("many batches", "fixed batch, AdamW", "fixed batch, descent", "one matrix, descent")
"""Trainings that come closer and closer to what the theory of a reversible gradient assumes.

The usual training, measured with gradients of very many batches; the same batch at every step, then
plain gradient descent as well, then of the last layer's last matrix alone, whose inputs do not
change then.
"""
MANY = 16
"""How many times as many batches the first control averages."""
DESCENT_RATE = 0.1
"""Learning rate of plain gradient descent, the same at every step."""

CLIP = 1.0
"""The largest norm of a gradient in the published 7B recipe."""
SCALE = 0.25
"""GaLore's published factor of the update of projected matrices."""
KEPT_MOMENTS = "keep"
"""What the compared networks do with the moments when the basis turns, as galore-torch does."""

NEVER = 10**9
"""A gap that no training reaches."""
TUNING_MEMBER = 1000
"""Number of the seed that learning rates are tuned on where it must not be one of those judged."""


class LearningRate(NamedTuple):
    """A learning rate, and the share of it with which the matrices of the layers move.

    In GaLore that share is its factor of the update. Embeddings, output layer and norms, which it
    does not project, move with the whole rate. Other methods are given the same choice: the
    difference between the two rates alone can be worth more than the rank.

    Attributes:
        rate: Learning rate.
        share: Share of it for the matrices of the layers.
    """

    rate: float
    share: float = 1.0

    def __str__(self) -> str:
        return f"{self.rate:g}" if self.share == 1 else f"{self.rate:g} × {self.share:g}"


@dataclass(frozen=True)
class GaLoreNetwork:
    """One network to train.

    Attributes:
        method: How it is trained.
        rate: Learning rates of embeddings and of matrices.
        member: Number of its seed; networks with the same one start alike and read the same text.
        rank: Rank of the projection or of LoRA's matrices; 0 for full rank.
        gap: Steps between two choices of the subspace; 0 where there is none.
        moments: What becomes of the moments when the basis turns.
        refresh: When the subspace is chosen again: "gap", or "energy" for less captured energy.
        switch: The step at which full rank gives way to LoRA; 0 for LoRA from the beginning.
        full_rate: Learning rates up to that step, None without one.
        reading: How the 7B recipe is read, for the networks that compare its readings.
        control: How the network is trained to come closer to the theory, one of `CONTROLS`.
        timed: Whether it is trained for a few steps alone on the device, to measure their time.
    """

    method: Method
    rate: LearningRate
    member: int = 0
    rank: int = 0
    gap: int = 0
    moments: str = ""
    refresh: str = "gap"
    switch: int = 0
    full_rate: LearningRate | None = None
    reading: str = ""
    control: str = ""
    timed: bool = False

    @property
    def name(self) -> str:
        """A short name, such as "galore-r64-g200-keep-lr0.01x0.25-seed0"."""
        parts: list[str] = [self.method]
        parts += [f"r{self.rank}"] if self.rank else []
        gap = "never" if self.gap == NEVER else self.gap
        parts += [f"g{gap}-{self.moments}"] if self.gap else []
        parts += [self.refresh] if self.refresh != "gap" else []
        parts += [f"from{self.switch}"] if self.switch else []
        for words in (self.reading, self.control):
            parts += [words.replace(",", "").replace(" ", "-")] if words else []
        parts += ["timed"] if self.timed else []
        rate = str(self.rate).replace(" × ", "x")
        return "-".join([*parts, f"lr{rate}", f"seed{self.member}"])


@dataclass(frozen=True)
class GaloreSize:
    """How large the networks are made, how long they are trained, and what is compared.

    Attributes:
        corpus: The text.
        width: Width of the residual stream.
        hidden: Width of the MLPs.
        layers: Layers.
        heads: Heads of each layer.
        window: Bytes of each sequence.
        batch: Sequences of each step.
        steps: Training steps.
        seeds: Networks of each kind.
        rates: Learning rates that are tried of each method that is compared; one without any takes
            GaLore's.
        climb: Whether more are tried around the best one, by factors of two, until it is better
            than all of its neighbours; on a seed that is not judged.
        rank: Rank of GaLore and LoRA.
        gap: Steps between two choices of the subspace.
        ranks: Other ranks.
        svd_ranks: Those of them at which galore-torch's method is compared too, with all seeds.
        gaps: Other gaps; `NEVER` keeps the first subspace. With any, refreshes by captured energy
            are compared too.
        moments: Other treatments of the moments when the basis turns.
        moment_gaps: Gaps at which they are compared; the default gap where there are none.
        variant_seeds: Networks of each kind in sweeps, of residual scaling and of LoRA; `seeds`
            where it is 0.
        switches: Steps at which full rank gives way to LoRA.
        micro_batches: Micro-batches of a step of the 7B recipe; 0 where it is left out.
        recipe_steps: Steps of its networks.
        recipe_batch: Sequences of each of its steps; `batch` where it is 0.
        timed_steps: Steps whose time is measured; 0 where the training's own time serves.
        valid_windows: Sequences on which the loss is measured.
        evaluations: How often it is measured in training.
        studied: Steps before which the gradient's rank is measured and weights are kept.
        lags: Steps after which an old basis is tried on a new gradient.
        averaged: Batches over which the gradient is averaged when its rank is measured a second
            time, with less noise; 0 for no second time.
        controls: How many seeds the controls of the theory have.
        processes: Networks that are trained at the same time on a GPU.
    """

    corpus: str
    width: int
    hidden: int
    layers: int
    heads: int
    window: int
    batch: int
    steps: int
    seeds: int
    rates: Mapping[str, tuple[LearningRate, ...]]
    rank: int
    gap: int
    ranks: tuple[int, ...]
    gaps: tuple[int, ...]
    moments: tuple[str, ...]
    switches: tuple[int, ...]
    micro_batches: int
    recipe_steps: int
    timed_steps: int
    valid_windows: int
    evaluations: int
    studied: tuple[int, ...]
    lags: tuple[int, ...]
    climb: bool = False
    svd_ranks: tuple[int, ...] = ()
    moment_gaps: tuple[int, ...] = ()
    variant_seeds: int = 0
    recipe_batch: int = 0
    averaged: int = 0
    controls: int = 0
    processes: int = 1

    def with_options(self, options: Mapping[str, Any]) -> "GaloreSize":
        """Return the same size with the options that were given."""
        steps, corpus = options.get("steps"), options.get("corpus")
        return replace(self, steps=steps or self.steps, corpus=corpus or self.corpus)

    @property
    def tuning_member(self) -> int:
        """The number of the seed that learning rates are tuned on."""
        return TUNING_MEMBER if self.climb else 0

    @property
    def studied_steps(self) -> tuple[int, ...]:
        """The steps of the measurements, the last one at the end of training."""
        return (*(step for step in self.studied if step < self.steps - 1), self.steps - 1)

    @property
    def measured_steps(self) -> tuple[int, ...]:
        """How many steps were made when the validation loss is measured: 0, …, all."""
        count = self.evaluations
        return tuple(sorted({round(self.steps * one / count) for one in range(count + 1)}))

    def network(
        self, method: Method, rate: LearningRate, member: int = 0, **changed: Any
    ) -> GaLoreNetwork:
        """Return a network with this size's rank and gap, as far as the method has them."""
        fields: dict[str, Any] = {}
        if method != "full":
            fields["rank"] = self.rank
        if method in ("galore", "svd", "power", "residual"):
            fields |= {"gap": self.gap, "moments": KEPT_MOMENTS}
        return GaLoreNetwork(method, rate, member, **{**fields, **changed})


SIZES = {
    "tiny": GaloreSize(
        "embedded",
        width=32,
        hidden=48,
        layers=2,
        heads=2,
        window=24,
        batch=4,
        steps=6,
        seeds=2,
        rates={
            "full": (LearningRate(3e-3), LearningRate(1e-2, SCALE)),
            "galore": (LearningRate(1e-2, SCALE),),
            "svd": (),
            "power": (),
            "residual": (LearningRate(1e-2, SCALE),),
            "lora": (LearningRate(1e-2, SCALE),),
        },
        rank=8,
        gap=3,
        ranks=(4,),
        gaps=(2,),
        moments=("project", "rotate", "align", "reset"),
        switches=(3,),
        micro_batches=2,
        recipe_steps=3,
        timed_steps=2,
        valid_windows=4,
        evaluations=2,
        studied=(0, 2, 3),
        lags=(1, 2),
        averaged=2,
        controls=2,
    ),
    "small": GaloreSize(
        "embedded",
        width=128,
        hidden=344,
        layers=4,
        heads=4,
        window=128,
        batch=16,
        steps=240,
        seeds=1,
        rates={
            "full": (LearningRate(2e-2, SCALE / 4),),
            "galore": (LearningRate(2e-2, SCALE),),
            "lora": (LearningRate(4e-2, 0.1),),
        },
        rank=32,
        gap=50,
        ranks=(),
        gaps=(),
        moments=(),
        switches=(),
        micro_batches=0,
        recipe_steps=0,
        timed_steps=0,
        valid_windows=64,
        evaluations=8,
        studied=(0, 10, 50, 100, 150),
        lags=(1, 10, 50),
    ),
    "medium": GaloreSize(
        "wikitext-2",
        width=128,
        hidden=344,
        layers=2,
        heads=4,
        window=64,
        batch=8,
        steps=600,
        seeds=6,
        rates={
            "full": (LearningRate(2e-2, SCALE / 4),),
            "galore": (LearningRate(2e-2, SCALE),),
            "svd": (LearningRate(2e-2, SCALE),),
            "power": (),
            "residual": (),
        },
        rank=32,
        gap=50,
        ranks=(16,),
        gaps=(),
        moments=("project", "rotate", "reset"),
        switches=(),
        micro_batches=8,
        recipe_steps=100,
        timed_steps=0,
        valid_windows=256,
        evaluations=6,
        studied=(0, 10, 50, 100, 200, 400),
        lags=(1, 10, 50),
        climb=True,
        svd_ranks=(16,),
        moment_gaps=(10, 50),
        variant_seeds=3,
        recipe_batch=32,
        averaged=16,
        controls=1,
    ),
    "full": GaloreSize(
        "wikitext-2",
        width=256,
        hidden=688,
        layers=6,
        heads=4,
        window=256,
        batch=64,
        steps=2000,
        seeds=3,
        rates={
            "full": (LearningRate(2e-2, SCALE / 4),),
            "galore": (LearningRate(2e-2, SCALE),),
            "svd": (LearningRate(2e-2, SCALE),),
            "power": (),
            "residual": (LearningRate(2e-2, SCALE),),
            "lora": (LearningRate(2e-2, SCALE),),
        },
        rank=64,
        gap=200,
        ranks=(8, 16, 32, 128),
        gaps=(20, 50, 500, NEVER),
        moments=("project", "rotate", "align", "reset"),
        switches=(100, 300, 1000),
        micro_batches=32,
        recipe_steps=120,
        timed_steps=200,
        valid_windows=512,
        evaluations=20,
        studied=(0, 10, 50, 100, 200, 500, 1000, 1500),
        lags=(1, 10, 50, 200),
        climb=True,
        averaged=16,
        controls=3,
        processes=6,
    ),
}
