"""Recorded curves of the same networks, and how far ours are from them."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.experiments.language._curves import Curves, Key
from joma.experiments.language._groups import named

ENTROPY, LOSS = "wikitext2_entropy.csv", "wikitext2_val_loss.csv"
_COLUMNS = {
    ENTROPY: ("layers", "lr", "seed", "step", "layer", "attention_entropy"),
    LOSS: ("layers", "lr", "seed", "step", "val_loss"),
}

BAND = 0.1
"""Nats by which a curve may leave the range of the recorded seeds and count as inside."""

_FEWEST = 3
"""Steps in common that a comparison needs."""

Place = tuple[int, float, int, int, int]
"""Layers, learning rate, seed, step and layer; layer 0 for what is of the whole network."""


@dataclass(frozen=True)
class Pair:
    """One layer of ours next to the recorded one; means over seeds.

    Attributes:
        depth: of the networks.
        rate: their learning rate.
        layer: which.
        measurements: How many steps both have.
        pearson: correlation of the two curves.
        left_out: the same for each recorded seed against the mean of the others, their mean: how
            alike two honest runs can be. NaN with one seed.
        begins: the most by which a network of ours differs from the recorded one of the same
            number at the first step in common.
        inside: share of the steps at which ours lies in the range of the recorded seeds, ± `BAND`.
        left_out_inside: share of the steps at which one recorded seed lies in the range of the
            others, ± `BAND`, mean over seeds. NaN with one seed.
        lowest: of ours.
        recorded_lowest: of the recorded.
        end: of ours.
        recorded_end: of the recorded.
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


def read(folder: Path) -> dict[Key, Curves]:
    """Read a folder with recorded curves.

    Raises:
        ValueError: a file is missing or is not such a record, with what is wrong and where.
    """
    entropies, losses = (_values(folder / name) for name in (ENTROPY, LOSS))
    places: dict[Key, list[Place]] = {}
    for place in entropies:
        places.setdefault(place[:2], []).append(place)
    return {key: _curves(folder, own, entropies, losses) for key, own in places.items()}


def compare(ours: Mapping[Key, Curves], recorded: Mapping[Key, Curves]) -> list[Pair]:
    """Return every layer of ours that was recorded too, at three steps in common or more."""
    pairs = []
    for key, own in ours.items():
        other = recorded.get(key)
        if other is None:
            continue
        steps = sorted(set(own.steps) & set(other.steps))
        if len(steps) < _FEWEST:
            continue
        here, there = ([curves.steps.index(step) for step in steps] for curves in (own, other))
        for layer in range(own.depth):
            pairs.append(_pair(own, layer, own.entropy[layer, here], other.entropy[layer, there]))
    return pairs


def table(pairs: Sequence[Pair]) -> dict[str, list[Any]]:
    """Return a table with a row for each pair."""
    rows = [asdict(pair) for pair in pairs]
    return {name: [row[name] for row in rows] for name in rows[0]}


def pearson(one: np.ndarray, two: np.ndarray) -> float:
    """Return the correlation of two series; NaN where one of them does not move."""
    one, two = one - one.mean(), two - two.mean()
    size = np.linalg.norm(one) * np.linalg.norm(two)
    return float(one @ two / size) if size > 0 else float("nan")


def _pair(own: Curves, layer: int, ours_KS: np.ndarray, recorded_KS: np.ndarray) -> Pair:
    mean, expected = ours_KS.mean(-1), recorded_KS.mean(-1)
    seeds = range(recorded_KS.shape[1])
    both = min(ours_KS.shape[1], len(seeds))
    left_out = [
        pearson(recorded_KS[:, seed], np.delete(recorded_KS, seed, 1).mean(-1))
        for seed in (seeds if len(seeds) > 1 else ())
    ]
    within = [
        _share_inside(recorded_KS[:, seed], np.delete(recorded_KS, seed, 1))
        for seed in (seeds if len(seeds) > 1 else ())
    ]
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


def _values(path: Path) -> dict[Place, float]:
    """Return the numbers of a file by what they are of."""
    columns = _COLUMNS[path.name]
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except OSError as error:
        raise JomaError(f"reference {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise JomaError(f"reference {path} must be a text of comma-separated values") from error
    if not rows or tuple(rows[0]) != columns:
        got = ",".join(rows[0]) if rows else "nothing"
        raise JomaError(f"reference {path} must begin with {','.join(columns)}, got {got}")
    found: dict[Place, float] = {}
    for number, row in enumerate(rows[1:], start=2):
        try:
            if len(row) != len(columns):
                raise JomaError
            layers, rate, seed, step, *layer, value = row
            at = int(layer[0]) if layer else 0
            place = (int(layers), float(rate), int(seed), int(step), at)
            measured = float(value)
        except ValueError:
            raise JomaError(
                f"reference {path} must have numbers for {', '.join(columns)} in every line, got "
                f"{','.join(row)!r} in line {number}"
            ) from None
        if place in found:
            raise JomaError(f"reference {path} has line {number} a second time: {','.join(row)}")
        if not (np.isfinite(measured) and 0 <= place[4] < place[0] and place[3] >= 0):
            raise JomaError(
                f"reference {path} must have finite numbers of layers there are, got "
                f"{','.join(row)!r} in line {number}"
            )
        found[place] = measured
    return found


def _curves(
    folder: Path,
    places: Sequence[Place],
    entropies: Mapping[Place, float],
    losses: Mapping[Place, float],
) -> Curves:
    """Return the curves of one depth and learning rate, whose places these are."""
    depth, rate = places[0][:2]
    seeds = sorted({place[2] for place in places})
    steps = sorted({place[3] for place in places})

    def read(values: Mapping[Place, float], file: str, layers: int) -> np.ndarray:
        try:
            return np.array(
                [
                    [[values[depth, rate, seed, step, layer] for seed in seeds] for step in steps]
                    for layer in range(layers)
                ]
            )
        except KeyError as error:
            _, _, seed, step, layer = error.args[0]
            raise JomaError(
                f"reference {folder / file} must have every layer, step and seed of a network; of "
                f"{depth} layers at lr {named(rate)}, seed {seed} has no step {step}"
                + (f" in layer {layer}" if file == ENTROPY else "")
            ) from None

    return Curves(
        depth, rate, tuple(steps), read(entropies, ENTROPY, depth), read(losses, LOSS, 1)[0]
    )
