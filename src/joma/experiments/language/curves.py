"""What was measured of the networks of one depth and learning rate, from step to step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from joma.errors import JomaError
from joma.experiments._frame import groups_done, read_metric
from joma.experiments.language.setting import GROUPS, UNIFORM, LanguageSetting
from joma.runs import Run
from joma.train.findings import Finding, attention_bounce, attention_collapse

Key = tuple[int, float]
"""Depth and learning rate."""

MAX_LOSS_GAP = 0.3
"""Largest healthy gap between the losses of networks on the same words.

Of 30 healthy networks, one exceeded it once, at learning rate 1e-2.
"""


def _nothing() -> np.ndarray:
    return np.zeros((0, 0, 0))


@dataclass(frozen=True, eq=False)
class EntropyCurves:
    """Networks that differ in their seeds alone, while they learn.

    Attributes:
        depth: Number of layers.
        rate: Learning rate.
        steps: The steps of the measurements, as they are counted.
        entropy: Entropy of the attention on one validation window, in nats, (layers, steps, seeds).
        loss: Loss on the validation text, (steps, seeds).
        entropy_mean: Entropy of the attention on all validation windows; empty where not recorded.
        stable_rank: Stable rank of each lower layer; empty where it was not recorded.
        share_apart: Share of the updates at which the training loss of one network is far from
            those of the others, which read the same words (see `share_apart`).
    """

    depth: int
    rate: float
    steps: tuple[int, ...]
    entropy: np.ndarray
    loss: np.ndarray
    entropy_mean: np.ndarray = field(default_factory=_nothing)
    stable_rank: np.ndarray = field(default_factory=_nothing)
    share_apart: float = 0.0

    @property
    def seeds(self) -> int:
        """How many networks."""
        return self.loss.shape[1]

    @property
    def best(self) -> np.ndarray:
        """The lowest validation loss of each network, (seeds,)."""
        return np.fmin.reduce(self.loss, axis=0)

    @property
    def mean(self) -> np.ndarray:
        """Entropy, mean over seeds, (layers, steps)."""
        return self.entropy.mean(-1)

    @property
    def collapsed(self) -> list[int]:
        """In how many networks the attention of each layer has collapsed."""
        return self._count(self._collapse).sum(1).tolist()

    @property
    def collapses(self) -> int:
        """In how many networks the attention of any layer has collapsed."""
        return int(self._count(self._collapse).any(0).sum())

    @property
    def bounced(self) -> list[int]:
        """In how many networks the attention of each layer became sparse and dense again."""
        bounce = partial(attention_bounce, self.steps)
        return self._count(lambda values, layer: bounce(values, layer=layer)).sum(1).tolist()

    def _collapse(self, values: np.ndarray, layer: int) -> Finding | None:
        return attention_collapse(self.steps, values, UNIFORM, layer=layer)

    def _count(self, find: Callable[[np.ndarray, int], Finding | None]) -> np.ndarray:
        """Return where there is such a finding, (layers, seeds)."""
        return np.array(
            [
                [find(values, layer) is not None for values in of.T]
                for layer, of in enumerate(self.entropy)
            ]
        )


def done(run: Run, setting: LanguageSetting, groups: Iterable[str]) -> dict[str, Run]:
    """Return the runs of those groups that are done, by name.

    Raises:
        ValueError: One of them was trained on another text.
    """
    found = groups_done(run, groups)
    for own in found.values():
        if own.config["digests"] != setting.digests:
            raise JomaError(
                f"{own.path} was trained on another text than there is now; put that text back, or "
                "give another folder with --out"
            )
    return found


def collect(run: Run, setting: LanguageSetting, groups: Iterable[str]) -> dict[Key, EntropyCurves]:
    """Return what the metrics of those groups that are done hold."""
    return {
        (curves.depth, curves.rate): curves
        for name, own in done(run, setting, groups).items()
        for curves in _read(own, GROUPS[name], setting)
    }


def share_apart(losses: np.ndarray) -> float:
    """Return the share of updates at which one network's loss is far from the others'.

    It is where it differs by more than `MAX_LOSS_GAP` from the median of those that are finite, or
    is NaN or infinite while another is not. Where none is finite there is nothing to compare with.

    Args:
        losses: Of networks that read the same words, (updates, networks).
    """
    finite = np.isfinite(losses)
    compared = finite.any(1)
    if not compared.any():
        return 0.0
    known = np.where(finite, losses, np.nan)[compared]
    gaps = np.abs(known - np.nanmedian(known, 1, keepdims=True))
    far = (np.nan_to_num(gaps, nan=np.inf) > MAX_LOSS_GAP).any(1)
    return float(far.sum() / len(losses))


def _read(own: Run, depth: int, setting: LanguageSetting) -> Iterable[EntropyCurves]:
    read = partial(read_metric, [own], setting.measure_at, setting.size.seeds)
    names = ("attention_entropy", "attention_entropy_mean", "stable_rank")
    by_layer = zip(*(read(name, depth) for name in names), strict=True)
    trained = read_metric([own], range(setting.measure_at[-1]), setting.size.seeds, "loss")
    for rate, (entropy, mean, rank), loss, losses in zip(
        setting.size.rates(depth), by_layer, read("validation_loss"), trained, strict=True
    ):
        steps, apart = setting.published_steps, share_apart(losses)
        yield EntropyCurves(depth, rate, steps, entropy, loss, mean, rank, apart)
