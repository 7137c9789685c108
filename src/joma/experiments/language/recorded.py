"""Recorded curves of the same networks, and how far ours are from them."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from joma.errors import JomaError
from joma.experiments.language.curves import EntropyCurves, Key
from joma.experiments.language.setting import named

ENTROPY, LOSS = "wikitext2_entropy.csv", "wikitext2_val_loss.csv"
_COLUMNS = {
    ENTROPY: ("layers", "lr", "seed", "step", "layer", "attention_entropy"),
    LOSS: ("layers", "lr", "seed", "step", "val_loss"),
}

BAND = 0.1
"""Nats by which a curve may leave the range of the recorded seeds and count as inside."""

_FEWEST = 3
"""Steps in common that a comparison needs."""

_Place = tuple[int, float, int, int, int]
"""Layers, learning rate, seed, step and layer; layer 0 for what is of the whole network."""


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
    mean, expected = ours_KS.mean(-1), recorded_KS.mean(-1)
    seeds = recorded_KS.shape[1]
    left_out, within = [], []
    for seed in range(seeds if seeds > 1 else 0):
        others = np.delete(recorded_KS, seed, 1)
        left_out.append(pearson(recorded_KS[:, seed], others.mean(-1)))
        within.append(_share_inside(recorded_KS[:, seed], others))
    both = min(ours_KS.shape[1], seeds)
    return Pair(
        depth=own.depth,
        rate=own.rate,
        layer=layer,
        measurements=len(mean),
        pearson=pearson(mean, expected),
        left_out=float(np.mean(left_out)) if left_out else float("nan"),
        begins=float(np.abs(ours_KS[0, :both] - recorded_KS[0, :both]).max()),
        inside=_share_inside(mean, recorded_KS),
        left_out_inside=float(np.mean(within)) if within else float("nan"),
        lowest=float(mean.min()),
        recorded_lowest=float(expected.min()),
        end=float(mean[-1]),
        recorded_end=float(expected[-1]),
    )


def _share_inside(curve_K: np.ndarray, others_KS: np.ndarray) -> float:
    """Return the share of the steps at which a curve lies in the range of others, ± `BAND`."""
    low, high = others_KS.min(-1) - BAND, others_KS.max(-1) + BAND
    return float(np.mean((low <= curve_K) & (curve_K <= high)))


def read(folder: Path) -> dict[Key, EntropyCurves]:
    """Read a folder with recorded curves.

    Raises:
        ValueError: A file is missing or is not such a record, with what is wrong and where.
    """
    entropies, losses = (_values(folder / name) for name in (ENTROPY, LOSS))
    found = {}
    for key in dict.fromkeys(place[:2] for place in entropies):
        depth = key[0]
        own = [place for place in entropies if place[:2] == key]
        seeds = sorted({seed for _, _, seed, _, _ in own})
        steps = sorted({step for _, _, _, step, _ in own})
        places = np.ndindex(depth, len(steps), len(seeds))
        try:
            entropy = [entropies[*key, seeds[n], steps[at], layer] for layer, at, n in places]
            loss = [losses[*key, seed, step, 0] for step in steps for seed in seeds]
        except KeyError as error:
            _, _, seed, step, layer = error.args[0]
            raise JomaError(
                f"reference {folder} must have every layer, step and seed of a network; of {depth} "
                f"layers at lr {named(key[1])}, seed {seed} has no step {step} in layer {layer}"
            ) from None
        shape = (len(steps), len(seeds))
        found[key] = EntropyCurves(
            *key,
            tuple(steps),
            np.reshape(entropy, (depth, *shape)),
            np.reshape(loss, shape),
        )
    return found


def _values(path: Path) -> dict[_Place, float]:
    """Return the numbers of a file by what they are of."""
    columns = _COLUMNS[path.name]
    try:
        with open(path, encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
    except OSError as error:
        raise JomaError(f"reference {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise JomaError(f"reference {path} must be a text of comma-separated values") from error
    if tuple(header) != columns:
        got = ",".join(header) or "nothing"
        raise JomaError(f"reference {path} must begin with {','.join(columns)}, got {got}")
    found: dict[_Place, float] = {}
    for number, row in enumerate(rows, start=2):
        try:
            layers, rate, seed, step, *layer, value = row
            at = int(layer[0]) if len(columns) == 6 else 0
            found[int(layers), float(rate), int(seed), int(step), at] = float(value)
            if len(row) != len(columns) or not np.isfinite(float(value)):
                raise ValueError
        except (ValueError, IndexError):
            raise JomaError(
                f"reference {path} must have finite numbers for {', '.join(columns)} in every "
                f"line, got {','.join(row)!r} in line {number}"
            ) from None
    return found
