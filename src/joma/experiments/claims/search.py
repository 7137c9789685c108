"""The domains in which an adversary searches for a case in which a claim fails.

A claim with free parameters has a `Search`: these with their whole range, and a measure of the
claim at one point. Parameters are drawn with the cases in them that formulas break at: ends of
the range, zeros, ties, nearly equal values, one value far above the rest.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from joma.common.types import Array

Generator = np.random.Generator

_AT_AN_END = 0.08
_SPECIAL = 0.15
_TINY = 0.08


class Parameter(Protocol):
    """A free parameter of a claim."""

    def draw(self, generator: Generator) -> Any:
        """Return a value, the special ones more often than their share."""
        ...

    def change(self, value: Any, generator: Generator, size: float) -> Any:
        """Return a value near another; `size` is the typical step as a share of the range."""
        ...


@dataclass(frozen=True)
class Real:
    """A number from a range.

    Attributes:
        low: The smallest value.
        high: The largest.
        log: Whether its logarithm is uniform; needs low > 0.
        special: Values that are tried more often than others, such as 0 and 1.
    """

    low: float
    high: float
    log: bool = False
    special: tuple[float, ...] = ()

    def draw(self, generator: Generator) -> float:
        """Return a value: an end, a special one, a tiny one or any."""
        kind = generator.random()
        if kind < _AT_AN_END:
            distance = 0.0 if generator.random() < 0.5 else 10 ** -generator.uniform(2, 12)
            return self._at(distance if generator.random() < 0.5 else 1 - distance)
        if self.special and kind < _AT_AN_END + _SPECIAL:
            value = self.special[generator.integers(len(self.special))]
            if generator.random() < 0.3:
                value += generator.choice([-1, 1]) * 10 ** -generator.uniform(2, 12)
            return self._clip(value)
        if not self.log and self.low <= 0 <= self.high and kind > 1 - _TINY:
            size = 10 ** -generator.uniform(0, 12)
            return self.low * size if generator.random() < 0.5 else self.high * size
        return self._at(generator.random())

    def change(self, value: float, generator: Generator, size: float) -> float:
        """Return a value near another, now and then far away."""
        if generator.random() < 0.1:
            return self.draw(generator)
        step = size * float(np.clip(generator.standard_cauchy(), -50, 50))
        if generator.random() < 0.3 and value != 0:  # a relative step, for what is near 0
            return self._clip(value * float(np.exp(np.clip(10 * step, -30, 30))))
        return self._at(float(np.clip(self._share(value) + step, 0, 1)))

    def _at(self, share: float) -> float:
        if self.log:
            low, high = np.log(self.low), np.log(self.high)
            return self._clip(float(np.exp(low + share * (high - low))))
        return self._clip(self.low + share * (self.high - self.low))

    def _share(self, value: float) -> float:
        if self.high == self.low:
            return 0.0
        if self.log:
            return float(np.log(value / self.low) / np.log(self.high / self.low))
        return (value - self.low) / (self.high - self.low)

    def _clip(self, value: float) -> float:
        return float(min(max(value, self.low), self.high))


@dataclass(frozen=True)
class Integer:
    """A whole number from `low` to `high`, both included.

    Attributes:
        low: The smallest value.
        high: The largest.
        log: Whether small ones come as often as large ones do by their logarithm; needs low > 0.
    """

    low: int
    high: int
    log: bool = False

    def draw(self, generator: Generator) -> int:
        """Return a value, either end more often."""
        if generator.random() < 0.2:
            return self.low if generator.random() < 0.5 else self.high
        if self.log:
            edges = np.log(self.low), np.log(self.high + 1)
            return min(int(np.exp(generator.uniform(*edges))), self.high)
        return int(generator.integers(self.low, self.high + 1))

    def change(self, value: int, generator: Generator, size: float) -> int:
        """Return a value near another."""
        if generator.random() < 0.2:
            return self.draw(generator)
        reach = max(1, round(size * (value if self.log else self.high - self.low)))
        step = int(generator.integers(1, reach + 1)) * (1 if generator.random() < 0.5 else -1)
        return min(max(value + step, self.low), self.high)


@dataclass(frozen=True, init=False)
class Choice:
    """One of a few options."""

    options: tuple[Any, ...]

    def __init__(self, *options: Any) -> None:
        object.__setattr__(self, "options", options)

    def draw(self, generator: Generator) -> Any:
        """Return any of them."""
        return self.options[generator.integers(len(self.options))]

    def change(self, value: Any, generator: Generator, size: float) -> Any:
        """Return another, now and then."""
        del size
        return self.draw(generator) if generator.random() < 0.5 else value


class Seed(Choice):
    """The seed of random parts that a measure draws, such as a tree."""

    def draw(self, generator: Generator) -> int:
        """Return a seed."""
        return int(generator.integers(2**32))


@dataclass(frozen=True)
class Vector:
    """Numbers, as many as `sizes` says.

    Attributes:
        entries: The range of each.
        sizes: How many there are.
    """

    entries: Real
    sizes: Integer

    def draw(self, generator: Generator) -> Array:
        """Return any numbers, or ones with ties, zeros, near ties, or one large among small."""
        size = self.sizes.draw(generator)
        values = np.array([self.entries.draw(generator) for _ in range(size)])
        kind = generator.random()
        if kind < 0.15:
            few = values[: max(1, min(size, 2))]
            values = generator.choice(few, size)
        elif kind < 0.3 and self.entries.low <= 0 <= self.entries.high:
            values[generator.random(size) < generator.random()] = 0.0
        elif kind < 0.45 and size:
            off = 1 + 10 ** -generator.uniform(0.5, 9) * generator.standard_normal(size)
            values = self._clip(values[0] * off)
        elif kind < 0.55 and size and self.entries.low <= 0 <= self.entries.high:
            small = values * 10 ** -generator.uniform(0.3, 6)
            small[generator.integers(size)] = values[0]
            values = small
        return values

    def change(self, value: Array, generator: Generator, size: float) -> Array:
        """Return numbers of which one or all differ, or with one more or less."""
        changed = value.copy()
        kind, many = generator.random(), len(value)
        if kind < 0.1 and many < self.sizes.high:
            entry = self.entries.draw(generator)
            return np.insert(changed, generator.integers(many + 1), entry)
        if kind < 0.2 and many > max(self.sizes.low, 1):
            return np.delete(changed, generator.integers(many))
        if not many:
            return changed
        at = generator.integers(many)
        if kind < 0.3:
            changed[at] = changed[generator.integers(many)]
        elif kind < 0.45:
            changed = self._clip(changed * np.exp(size * generator.standard_normal()))
        elif kind < 0.55:
            changed = np.array([self.entries.change(it, generator, size / 4) for it in changed])
        else:
            changed[at] = self.entries.change(float(changed[at]), generator, size)
        return changed

    def _clip(self, values: Array) -> Array:
        return np.clip(values, self.entries.low, self.entries.high)


@dataclass(frozen=True)
class Matrix:
    """A matrix.

    Attributes:
        entries: The range of each entry.
        rows: How many rows there are.
        columns: How many columns there are.
    """

    entries: Real
    rows: Integer
    columns: Integer

    def draw(self, generator: Generator) -> Array:
        """Return any matrix, or one with equal, zero, parallel or orthogonal rows."""
        shape = self.rows.draw(generator), self.columns.draw(generator)
        matrix = np.array([self.entries.draw(generator) for _ in range(shape[0] * shape[1])])
        matrix = matrix.reshape(shape)
        kind = generator.random()
        if min(shape) == 0:
            return matrix
        if kind < 0.12:
            matrix = matrix[generator.integers(min(shape[0], 2), size=shape[0])]
        elif kind < 0.24 and self.entries.low <= 0 <= self.entries.high:
            matrix = matrix * (generator.random(shape) < 0.4)
        elif kind < 0.36:
            lengths = np.array([self.entries.draw(generator) for _ in range(shape[0])])
            largest = np.abs(matrix[0]).max() or 1.0
            matrix = lengths[:, None] * matrix[0] / largest
        elif kind < 0.48 and self.entries.low <= 0 <= self.entries.high:
            lengths = np.array([self.entries.draw(generator) for _ in range(shape[0])])
            matrix = np.zeros(shape)
            matrix[np.arange(shape[0]), generator.integers(shape[1], size=shape[0])] = lengths
        return np.clip(matrix, self.entries.low, self.entries.high)

    def change(self, value: Array, generator: Generator, size: float) -> Array:
        """Return a matrix of which an entry or a row differs, or with a row more or less."""
        changed = value.copy()
        kind, (rows, columns) = generator.random(), value.shape
        if min(rows, columns) == 0:
            return self.draw(generator)
        row, column = generator.integers(rows), generator.integers(columns)
        if kind < 0.1 and rows < self.rows.high:
            return np.insert(changed, row, changed[generator.integers(rows)], axis=0)
        if kind < 0.2 and rows > max(self.rows.low, 1):
            return np.delete(changed, row, axis=0)
        if kind < 0.25 and columns < self.columns.high:
            return np.insert(changed, column, changed[:, generator.integers(columns)], axis=1)
        if kind < 0.3 and columns > max(self.columns.low, 1):
            return np.delete(changed, column, axis=1)
        if kind < 0.4:
            changed[row] = changed[generator.integers(rows)]
        elif kind < 0.6:
            changed[row] *= np.exp(5 * size * generator.standard_normal())
        else:
            entry = float(changed[row, column])
            changed[row, column] = self.entries.change(entry, generator, size)
        return np.clip(changed, self.entries.low, self.entries.high)


@dataclass(frozen=True)
class Simplex:
    """Probabilities that sum to 1.

    Attributes:
        sizes: How many there are.
        zeros: Whether some may be 0.
        least: The smallest probability otherwise.
    """

    sizes: Integer
    zeros: bool = False
    least: float = 1e-6

    def draw(self, generator: Generator) -> Array:
        """Return any, equal or very unequal ones."""
        size = self.sizes.draw(generator)
        kind = generator.random()
        if kind < 0.15:
            weights = np.ones(size)
        else:
            weights = generator.gamma(10 ** generator.uniform(-1, 1.5), size=size) + 1e-300
        if self.zeros and size > 1 and generator.random() < 0.2:
            weights[generator.random(size) < 0.4] = 0.0
            weights[generator.integers(size)] = 1.0
        return self._normalised(weights)

    def change(self, value: Array, generator: Generator, size: float) -> Array:
        """Return probabilities of which one differs, or with one more or less."""
        weights, many = value.copy(), len(value)
        kind = generator.random()
        if kind < 0.1 and many < self.sizes.high:
            weights = np.append(weights, generator.random())
        elif kind < 0.2 and many > max(self.sizes.low, 1):
            weights = np.delete(weights, generator.integers(many))
        elif kind < 0.35:
            weights[generator.integers(many)] = weights[generator.integers(many)]
        else:
            step = 10 * size * np.clip(generator.standard_cauchy(), -5, 5)
            weights[generator.integers(many)] *= np.exp(np.clip(step, -50, 50))
        if weights.sum() <= 0:
            return self.draw(generator)
        return self._normalised(weights)

    def _normalised(self, weights: Array) -> Array:
        shares = weights / weights.sum()
        if not self.zeros:
            shares = np.maximum(shares, self.least)
        return shares / shares.sum()
