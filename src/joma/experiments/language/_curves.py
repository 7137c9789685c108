"""What was measured of the networks of one depth and learning rate, from step to step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from joma.errors import JomaError
from joma.experiments._trained import groups_done, read_metric
from joma.experiments.language._groups import GROUPS, UNIFORM, LanguageSetting
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
class Curves:
    """Networks that differ in their seeds alone, while they learn.

    Attributes:
        depth: Number of layers.
        rate: Learning rate.
        steps: The steps of the measurements, as they are counted.
        entropy: Entropy of the attention on one validation window, in nats, (layers, steps, seeds).
        loss: Loss on the validation text, (steps, seeds).
        entropy_mean: Entropy of the attention on all validation windows; empty where not recorded.
        stable_rank: Stable rank of each lower layer; empty where it was not recorded.
        apart: Share of the updates at which the training loss of one network is apart from those
            of the others, which read the same words (`share_apart`).
    """

    depth: int
    rate: float
    steps: tuple[int, ...]
    entropy: np.ndarray
    loss: np.ndarray
    entropy_mean: np.ndarray = field(default_factory=_nothing)
    stable_rank: np.ndarray = field(default_factory=_nothing)
    apart: float = 0.0

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

    def lowest(self, layer: int) -> tuple[float, int]:
        """Return the lowest of a layer's mean entropy, and its step."""
        at = int(np.argmin(self.mean[layer]))
        return float(self.mean[layer][at]), self.steps[at]

    @property
    def collapsed(self) -> list[int]:
        """In how many networks the attention of each layer has collapsed."""
        return self._count(lambda values, layer: collapse(self.steps, values, layer))

    @property
    def collapses(self) -> int:
        """In how many networks the attention of any layer has collapsed."""
        return sum(
            any(collapse(self.steps, of, layer) for layer, of in enumerate(network))
            for network in self.entropy.transpose(2, 0, 1)
        )

    @property
    def bounced(self) -> list[int]:
        """In how many networks the attention of each layer became sparse and dense again."""
        return self._count(lambda values, layer: attention_bounce(self.steps, values, layer=layer))

    def bounced_at(self, least: float) -> list[int]:
        """Return `bounced` with another threshold, in nats of fall and of rise."""
        return self._count(
            lambda values, layer: attention_bounce(self.steps, values, least=least, layer=layer)
        )

    @property
    def rank_at_end(self) -> np.ndarray:
        """Last stable rank over the lowest, (layers, seeds); 1 where it ends at its lowest.

        NaN where either is not a positive number.
        """
        last, lowest = self.stable_rank[:, -1], np.fmin.reduce(self.stable_rank, axis=1)
        known = np.isfinite(last) & (lowest > 0)
        return np.where(known, last, np.nan) / np.where(known, lowest, 1.0)

    def _count(self, find: Callable[[np.ndarray, int], Finding | None]) -> list[int]:
        return [
            sum(find(values, layer) is not None for values in of.T)
            for layer, of in enumerate(self.entropy)
        ]


def collapse(steps: tuple[int, ...], values: np.ndarray, layer: int) -> Finding | None:
    """Return the finding of `joma.train.findings` if the attention of a layer has collapsed."""
    return attention_collapse(steps, values, UNIFORM, layer=layer)


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


def collect(run: Run, setting: LanguageSetting, groups: Iterable[str]) -> dict[Key, Curves]:
    """Return what the metrics of those groups that are done hold."""
    return {
        (curves.depth, curves.rate): curves
        for name, own in done(run, setting, groups).items()
        for curves in _read(own, GROUPS[name], setting)
    }


def share_apart(losses: np.ndarray) -> float:
    """Return the share of updates at which one network's loss is apart from the others'.

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
    apart = (np.nan_to_num(gaps, nan=np.inf) > MAX_LOSS_GAP).any(1)
    return float(apart.sum() / len(losses))


def _read(own: Run, depth: int, setting: LanguageSetting) -> Iterable[Curves]:
    read = partial(read_metric, [own], setting.measure_at, setting.size.seeds)
    names = ("attention_entropy", "attention_entropy_mean", "stable_rank")
    by_layer = zip(*(read(name, depth) for name in names), strict=True)
    trained = read_metric([own], range(setting.measure_at[-1]), setting.size.seeds, "loss")
    for rate, (entropy, mean, rank), loss, losses in zip(
        setting.size.rates(depth), by_layer, read("validation_loss"), trained, strict=True
    ):
        apart = share_apart(losses)
        yield Curves(depth, rate, setting.published_steps, entropy, loss, mean, rank, apart)
