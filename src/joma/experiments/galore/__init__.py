"""GaLore on a small Llama: loss, memory and time next to full rank and LoRA, and why it works.

Here live the networks and their sizes and, next to them, the model, its text, the optimizer of each
method and what is measured of gradients and weights (`training`), what the run folders hold and
say (`results`) and the picture (`figure`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from joma.experiments._experiment import Experiment, Option, Scale, corpus_option

Method = Literal["full", "galore", "svd", "lora"]
METHODS: dict[Method, str] = {
    "full": "full rank, AdamW",
    "galore": "GaLore, power iteration, staggered",
    "svd": "GaLore, galore-torch's method",
    "lora": "LoRA",
}
"""What each method is called in tables and figures."""

GROUPS = ("tune", "seeds", "equal-rates", "ranks", "moments", "gaps", "warm-lora")

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

    @property
    def neighbours(self) -> tuple["LearningRate", ...]:
        """The rates next to it on the grid: twice and half of either of its two rates.

        The rate of the matrices stays where that of embeddings, norms and output layer changes.
        """
        whole, share = self
        return (
            LearningRate(2 * whole, share / 2),
            LearningRate(whole / 2, 2 * share),
            LearningRate(whole, 2 * share),
            LearningRate(whole, share / 2),
        )


_FULL_RATE = LearningRate(2e-2, SCALE / 4)
_LOW_RANK_RATE = LearningRate(2e-2, SCALE)
_TINY_RATE = LearningRate(1e-2, SCALE)


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
        switch: The step at which full rank gives way to LoRA; 0 for LoRA from the beginning.
        full_rate: Learning rates up to that step, None without one.
    """

    method: Method
    rate: LearningRate
    member: int = 0
    rank: int = 0
    gap: int = 0
    moments: str = ""
    switch: int = 0
    full_rate: LearningRate | None = None

    @property
    def name(self) -> str:
        """A short name, such as "galore-r64-g200-keep-lr0.01x0.25-seed0"."""
        parts: list[str] = [self.method]
        parts += [f"r{self.rank}"] if self.rank else []
        gap = "never" if self.gap == NEVER else self.gap
        parts += [f"g{gap}-{self.moments}"] if self.gap else []
        parts += [f"from{self.switch}"] if self.switch else []
        rate = str(self.rate).replace(" × ", "x")
        return "-".join([*parts, f"lr{rate}", f"seed{self.member}"])


@dataclass(frozen=True)
class GaloreSize:
    """How large the networks are made, how long they are trained, and what is compared.

    The defaults are those of the full scale.

    Attributes:
        corpus: The text.
        width: Width of the residual stream.
        hidden: Width of the MLPs.
        layers: Layers.
        heads: Heads of each layer.
        window: Bytes of each sequence.
        batch: Sequences of each step.
        steps: Training steps.
        valid_windows: Sequences on which the loss is measured.
        evaluations: How often it is measured in training.
        studied: Steps before which the gradient's rank is measured and weights are kept.
        lags: Steps after which an old basis is tried on a new gradient.
        seeds: Networks of each kind.
        rates: Learning rates that are tried of each method that is compared; one without any takes
            GaLore's.
        rank: Rank of GaLore and LoRA.
        gap: Steps between two choices of the subspace.
        climb: Whether more rates are tried around the best one, by factors of two, until it is
            better than all of its neighbours; on a seed that is not judged.
        ranks: Other ranks.
        gaps: Other gaps; `NEVER` keeps the first subspace.
        moments: Other treatments of the moments when the basis turns.
        switches: Steps at which full rank gives way to LoRA.
        variant_seeds: Networks of each kind in sweeps and of LoRA; `seeds` where it is 0.
    """

    corpus: str = "wikitext-2"
    width: int = 256
    hidden: int = 688
    layers: int = 6
    heads: int = 4
    window: int = 256
    batch: int = 64
    steps: int = 2000
    valid_windows: int = 512
    evaluations: int = 20
    studied: tuple[int, ...] = (0, 10, 50, 100, 200, 500, 1000, 1500)
    lags: tuple[int, ...] = (1, 10, 50, 200)
    seeds: int = 3
    rates: Mapping[str, tuple[LearningRate, ...]] = field(
        default_factory=lambda: {
            "full": (_FULL_RATE,),
            **dict.fromkeys(("galore", "svd", "lora"), (_LOW_RANK_RATE,)),
        }
    )
    rank: int = 64
    gap: int = 200
    climb: bool = True
    ranks: tuple[int, ...] = (8, 16, 32, 128)
    gaps: tuple[int, ...] = (20, 50, 500, NEVER)
    moments: tuple[str, ...] = ("project", "rotate", "align", "reset")
    switches: tuple[int, ...] = (100, 300, 1000)
    variant_seeds: int = 0

    def with_options(self, options: Mapping[str, Any]) -> "GaloreSize":
        """Return the same size with the options that were given."""
        given = {name: options.get(name) for name in ("steps", "corpus")}
        return replace(self, **{name: value for name, value in given.items() if value})

    @property
    def training(self) -> dict[str, Any]:
        """What decides what becomes of a network, the size apart from which networks there are."""
        names = "corpus width hidden layers heads window batch steps valid_windows evaluations"
        return {name: getattr(self, name) for name in (*names.split(), "studied", "lags")}

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
        if method in ("galore", "svd"):
            fields |= {"gap": self.gap, "moments": KEPT_MOMENTS}
        return GaLoreNetwork(method, rate, member, **{**fields, **changed})


def tuning(size: GaloreSize, losses: Mapping[GaLoreNetwork, float]) -> list[GaLoreNetwork]:
    """Return the networks that decide the learning rates, all of one seed.

    At first those of the size. Where it climbs, then those around the best, again and again. Once
    nothing is added, the best is better than every neighbour, hence not at the edge of the grid.

    Args:
        size: Size of the experiment.
        losses: The last loss of the networks that are trained.
    """
    wanted = []
    for method in METHODS:
        tried = {
            rate: size.network(method, rate, size.tuning_member)
            for rate in size.rates.get(method, ())
        }
        while tried and size.climb and all(network in losses for network in tried.values()):
            best = min(tried, key=lambda rate: losses[tried[rate]])
            new = [rate for rate in best.neighbours if rate not in tried]
            if not new:
                break
            tried |= {rate: size.network(method, rate, size.tuning_member) for rate in new}
        wanted += tried.values()
    return wanted


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
        compared: Iterable[Method] = (method for method in METHODS if method in best)
        return [
            size.network(method, best[method], member)
            for method in compared
            for member in (members if method == "lora" else every)
        ]
    if group == "equal-rates":  # galore-torch's method at GaLore's learning rate
        return [size.network("svd", rate, member) for member in every] if "svd" in best else []
    if group == "warm-lora":
        return [
            size.network("lora", best["lora"], member, switch=switch, full_rate=best["full"])
            for member in members
            for switch in size.switches
        ]
    field, values = {
        "ranks": ("rank", size.ranks),
        "moments": ("moments", size.moments),
        "gaps": ("gap", size.gaps),
    }[group]
    return [size.network("galore", rate, one, **{field: v}) for one in members for v in values]


_FULL = GaloreSize()
_MEDIUM = GaloreSize(
    width=128,
    hidden=344,
    layers=2,
    window=64,
    batch=8,
    steps=600,
    valid_windows=256,
    evaluations=6,
    studied=(0, 10, 50, 100, 200, 400),
    lags=(1, 10, 50),
    seeds=6,
    rates={"full": (_FULL_RATE,), "galore": (_LOW_RANK_RATE,), "svd": (_LOW_RANK_RATE,)},
    rank=32,
    gap=50,
    ranks=(16,),
    gaps=(),
    moments=("project", "rotate", "reset"),
    switches=(),
    variant_seeds=3,
)
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
        valid_windows=4,
        evaluations=2,
        studied=(0, 2, 3),
        lags=(1, 2),
        seeds=2,
        rates={
            "full": (LearningRate(3e-3), _TINY_RATE),
            "galore": (_TINY_RATE,),
            "svd": (),
            "lora": (_TINY_RATE,),
        },
        rank=8,
        gap=3,
        climb=False,
        ranks=(4,),
        gaps=(2,),
        switches=(3,),
    ),
    "small": replace(
        _MEDIUM,
        corpus="embedded",
        layers=4,
        window=128,
        batch=16,
        steps=240,
        valid_windows=64,
        evaluations=8,
        studied=(0, 10, 50, 100, 150),
        seeds=1,
        rates={
            "full": (_FULL_RATE,),
            "galore": (_LOW_RANK_RATE,),
            "lora": (LearningRate(4e-2, 0.1),),
        },
        climb=False,
        ranks=(),
        moments=(),
        variant_seeds=0,
    ),
    "medium": _MEDIUM,
    "full": _FULL,
}


EXPERIMENT = Experiment(
    name="galore",
    title="GaLore: loss, memory and time of a small Llama, and the subspaces of its gradients",
    published=(
        "GaLore at a quarter to a third of full rank reaches perplexity 34.88, 25.36, 18.95 and "
        "15.64 on C4 with LLaMA 60M to 1B, full rank 34.06, 25.08, 18.80 and 15.56; consecutive "
        "gradients are similar, so that the projection need not change at every step."
    ),
    run="joma.experiments.galore.figure:reproduce",
    scales={
        "tiny": Scale(seconds=15, device="2 CPU cores", memory="1 GB"),
        "small": Scale(seconds=150, device="2 CPU cores", memory="1 GB"),
        "medium": Scale(seconds=1800, device="one CPU core, estimated", memory="1 GB"),
        "full": Scale(seconds=5000, device="one H200, estimated", memory="10 GB of GPU memory"),
    },
    default_scale="small",
    options=(
        Option("steps", None, "training steps of each network", int),
        corpus_option(
            {
                "tiny": "embedded",
                "small": "embedded",
                "medium": "wikitext-2",
                "full": "wikitext-2",
            }
        ),
    ),
    groups=GROUPS,
    resumable=True,
    needs="joma.experiments.galore.figure:check_needs",
)
