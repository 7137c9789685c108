"""What was measured of the networks of one depth and learning rate, and recorded curves of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from joma.errors import JomaError
from joma.experiments._frame import groups_done, read_metric
from joma.experiments.language import GROUPS, UNIFORM, LanguageSetting, named
from joma.runs import Run
from joma.train.findings import Finding, attention_bounce, attention_collapse

Key = tuple[int, float]
"""Depth and learning rate."""

MAX_LOSS_GAP = 0.3
"""Largest healthy gap between the losses of networks on the same words.

Of 30 healthy networks, one exceeded it once, at learning rate 1e-2.
"""


_not_recorded = partial(np.zeros, (0, 0, 0))


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
    entropy_mean: np.ndarray = field(default_factory=_not_recorded)
    stable_rank: np.ndarray = field(default_factory=_not_recorded)
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
        return self._collapse().sum(1).tolist()

    @property
    def collapses(self) -> int:
        """In how many networks the attention of any layer has collapsed."""
        return int(self._collapse().any(0).sum())

    @property
    def bounced(self) -> list[int]:
        """In how many networks the attention of each layer became sparse and dense again."""
        return self._found(lambda values: attention_bounce(self.steps, values)).sum(1).tolist()

    def _collapse(self) -> np.ndarray:
        return self._found(lambda values: attention_collapse(self.steps, values, UNIFORM))

    def _found(self, find: Callable[[np.ndarray], Finding | None]) -> np.ndarray:
        """Return where there is such a finding, (layers, seeds)."""
        return np.array([[find(own) is not None for own in of.T] for of in self.entropy])


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


ENTROPY_FILE, LOSS_FILE = "wikitext2_entropy.csv", "wikitext2_val_loss.csv"
_COLUMNS = {
    ENTROPY_FILE: ("layers", "lr", "seed", "step", "layer", "attention_entropy"),
    LOSS_FILE: ("layers", "lr", "seed", "step", "val_loss"),
}

BAND = 0.1
"""Nats by which a curve may leave the range of the recorded seeds and count as inside."""

_FEWEST = 3
"""Steps in common that a comparison needs."""


@dataclass(frozen=True)
class Pair:
    """One layer of ours next to the recorded one; means over seeds.

    Attributes:
        depth: Depth of the networks.
        rate: Their learning rate.
        layer: Index of the layer.
        measurements: How many steps both have.
        pearson: Correlation of the two curves.
        left_out: The same for each recorded seed against the mean of the others, their mean: how
            alike two honest runs can be. NaN with one seed.
        begins: The most by which a network of ours differs from the recorded one of the same
            number at the first step in common.
        inside: Share of the steps at which ours lies in the range of the recorded seeds, ± `BAND`.
        left_out_inside: Share of the steps at which one recorded seed lies in the range of the
            others, ± `BAND`, mean over seeds. NaN with one seed.
        lowest: Lowest entropy of ours.
        recorded_lowest: That of the recorded.
        end: Last entropy of ours.
        recorded_end: That of the recorded.
    """

    depth: int
    rate: float
    layer: int
    measurements: int
    pearson: float
    left_out: float
    begins: float
    inside: float
    left_out_inside: float
    lowest: float
    recorded_lowest: float
    end: float
    recorded_end: float


def compare(ours: Mapping[Key, EntropyCurves], recorded: Mapping[Key, EntropyCurves]) -> list[Pair]:
    """Return every layer of ours that was recorded too, at three steps in common or more."""
    pairs = []
    for key in ours.keys() & recorded.keys():
        own, other = ours[key], recorded[key]
        steps = sorted(set(own.steps) & set(other.steps))
        if len(steps) < _FEWEST:
            continue
        here, there = ([curves.steps.index(step) for step in steps] for curves in (own, other))
        for layer in range(own.depth):
            pairs.append(_pair(own, layer, own.entropy[layer, here], other.entropy[layer, there]))
    return sorted(pairs, key=lambda pair: (pair.depth, pair.rate, pair.layer))


def pearson(one: np.ndarray, two: np.ndarray) -> float:
    """Return the correlation of two series; NaN where one of them does not move."""
    one, two = one - one.mean(), two - two.mean()
    size = np.linalg.norm(one) * np.linalg.norm(two)
    return float(one @ two / size) if size > 0 else float("nan")


def _pair(own: EntropyCurves, layer: int, ours_KS: np.ndarray, recorded_KS: np.ndarray) -> Pair:
    mean, expected, seeds = ours_KS.mean(-1), recorded_KS.mean(-1), recorded_KS.shape[1]
    apart = [(recorded_KS[:, seed], np.delete(recorded_KS, seed, 1)) for seed in range(seeds)]
    if seeds == 1:
        apart = []
    both = min(ours_KS.shape[1], seeds)
    return Pair(
        depth=own.depth,
        rate=own.rate,
        layer=layer,
        measurements=len(mean),
        pearson=pearson(mean, expected),
        left_out=_mean([pearson(one, others.mean(-1)) for one, others in apart]),
        begins=float(np.abs(ours_KS[0, :both] - recorded_KS[0, :both]).max()),
        inside=_share_inside(mean, recorded_KS),
        left_out_inside=_mean([_share_inside(*one) for one in apart]),
        lowest=float(mean.min()),
        recorded_lowest=float(expected.min()),
        end=float(mean[-1]),
        recorded_end=float(expected[-1]),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _share_inside(curve_K: np.ndarray, others_KS: np.ndarray) -> float:
    """Return the share of the steps at which a curve lies in the range of others, ± `BAND`."""
    low, high = others_KS.min(-1) - BAND, others_KS.max(-1) + BAND
    return float(np.mean((low <= curve_K) & (curve_K <= high)))


def read_recorded(folder: Path) -> dict[Key, EntropyCurves]:
    """Read a folder with recorded curves.

    Raises:
        JomaError: A file is missing or is not such a record, with what is wrong and where.
    """
    entropies, losses = (_rows(folder / name) for name in (ENTROPY_FILE, LOSS_FILE))
    found = {}
    for depth, rate in dict.fromkeys(map(tuple, entropies[:, :2].tolist())):
        (layers, steps, seeds), entropy = _grid(entropies, (depth, rate), (4, 3, 2))
        axes, loss = _grid(losses, (depth, rate), (3, 2))
        whole = np.array_equal(layers, np.arange(depth)) and all(
            map(np.array_equal, axes, (steps, seeds))
        )
        if not whole or np.isnan(entropy).any() or np.isnan(loss).any():
            raise JomaError(
                f"reference {folder} must have every layer, step and seed of a network; some are "
                f"missing of {depth:g} layers at lr {named(rate)}"
            )
        key = (int(depth), rate)
        found[key] = EntropyCurves(*key, tuple(steps.astype(int).tolist()), entropy, loss)
    return found


def _grid(
    rows: np.ndarray, key: tuple[float, ...], axes: Sequence[int]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the labels along columns of some networks, and the last column's values by them."""
    own = rows[(rows[:, :2] == key).all(1)]
    found = [np.unique(own[:, column], return_inverse=True) for column in axes]
    values = np.full([len(labels) for labels, _ in found], np.nan)
    values[tuple(places for _, places in found)] = own[:, -1]
    return [labels for labels, _ in found], values


def _rows(path: Path) -> np.ndarray:
    """Return the numbers of a file, (rows, columns)."""
    columns = _COLUMNS[path.name]
    try:
        header, *lines = path.read_text("utf-8").splitlines() or [""]
    except OSError as error:
        raise JomaError(f"reference {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JomaError(f"reference {path} must be a text of comma-separated values") from error
    if header != ",".join(columns):
        got = header or "nothing"
        raise JomaError(f"reference {path} must begin with {','.join(columns)}, got {got}")
    found = []
    for number, line in enumerate(lines, start=2):
        try:
            found.append([float(value) for value in line.split(",")])
        except ValueError:
            found.append([])
        if len(found[-1]) != len(columns) or not np.isfinite(found[-1]).all():
            raise JomaError(
                f"reference {path} must have finite numbers for {', '.join(columns)} in every "
                f"line, got {line!r} in line {number}"
            )
    return np.reshape(found, (-1, len(columns)))
