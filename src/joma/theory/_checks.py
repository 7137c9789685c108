"""Checks of user input: each returns the value as a float64 array or raises a `ValueError`.

The message names the argument, what was given, and what would be right.
"""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError

Scalar = TypeVar("Scalar", bound=np.generic)

Array = NDArray[np.float64]
"""What the theory room computes with."""


def finite(name: str, value: ArrayLike, expected: tuple[int | None, ...] | None = None) -> Array:
    """Return `value` as a float64 array without NaN or infinity, of the shape expected if any."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last of tensors
        raise JomaError(f"{name} must be an array of real numbers, got {value!r:.200}") from error
    _refuse(name, array, ~np.isfinite(array), "be finite")
    return array if expected is None else shape(name, array, expected)


def non_negative(name: str, value: ArrayLike) -> Array:
    """Return `value` as an array of finite numbers ≥ 0."""
    array = finite(name, value)
    return _refuse(name, array, array < 0, "be ≥ 0")


def positive(name: str, value: ArrayLike) -> Array:
    """Return `value` as an array of finite numbers > 0."""
    array = finite(name, value)
    return _refuse(name, array, array <= 0, "be > 0")


def positive_scalar(name: str, value: Any) -> float:
    """Return `value` as one finite number > 0."""
    return float(one(name, positive(name, value)))


def within(name: str, value: ArrayLike, low: float, high: float) -> Array:
    """Return `value` as an array of numbers in [low, high]."""
    array = finite(name, value)
    return _refuse(name, array, (array < low) | (array > high), f"lie in [{low:g}, {high:g}]")


def probabilities(name: str, value: ArrayLike) -> Array:
    """Return `value` as an array of probabilities."""
    return within(name, value, 0.0, 1.0)


def distribution(name: str, value: ArrayLike) -> Array:
    """Return `value` as probabilities that sum to one over the last axis."""
    array = probabilities(name, value)
    if array.ndim == 0:
        raise JomaError(f"{name} must have at least one axis, got the scalar {array}")
    total = array.sum(axis=-1, keepdims=True)
    off = np.abs(total - 1)
    if array.shape[-1] == 0 or np.any(off > 1e-6):
        raise JomaError(
            f"{name} must sum to 1 over its last axis, got {np.ravel(total)[np.argmax(off)]:.9g}"
        )
    return array / total


def integers(name: str, value: ArrayLike, low: int) -> NDArray[np.int64]:
    """Return `value` as an array of whole numbers from low to the largest that int64 holds."""
    array = finite(name, value)
    bad = (array != np.round(array)) | (array < low) | (array >= 2.0**63)
    return _refuse(name, array, bad, f"be whole numbers ≥ {low}").astype(np.int64)


def whole(name: str, value: ArrayLike, low: int) -> int:
    """Return `value` as one whole number from low below 2⁶³."""
    return int(one(name, integers(name, value, low)))


def scalar(name: str, value: ArrayLike) -> float:
    """Return `value` as one finite number."""
    return float(one(name, finite(name, value)))


def times(name: str, value: ArrayLike) -> Array:
    """Return `value` as a time or a one-dimensional array of times, all ≥ 0."""
    array = non_negative(name, value)
    if array.ndim > 1:
        raise JomaError(f"{name} must be a scalar or have one axis, got shape {array.shape}")
    return array


def at_least_1d(name: str, value: ArrayLike) -> Array:
    """Return `value` as a finite array with at least one axis."""
    array = finite(name, value)
    if array.ndim == 0:
        raise JomaError(f"{name} must have at least one axis, got the scalar {float(array)}")
    return array


def not_empty(name: str, array: Array) -> Array:
    """Return `array` if its last axis has at least one entry."""
    if array.shape[-1] == 0:
        raise JomaError(f"{name} must not be empty over its last axis, got shape {array.shape}")
    return array


def shape(name: str, array: Array, expected: tuple[int | None, ...]) -> Array:
    """Return `array` if its shape is `expected`, where None stands for any length."""
    fits = array.ndim == len(expected) and all(
        want is None or want == have for want, have in zip(expected, array.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if n is None else str(n) for n in expected)
        raise JomaError(f"{name} must have shape ({wanted}), got {array.shape}")
    return array


def broadcasts(name: str, value: Array, target: tuple[int, ...]) -> Array:
    """Return `value` broadcast to the shape `target`."""
    try:
        return np.broadcast_to(value, target)
    except ValueError as error:
        raise JomaError(f"{name} of shape {value.shape} does not broadcast to {target}") from error


def norm(vectors: Array) -> Array:
    """Return the Euclidean length over the last axis, without over- or underflow of squares."""
    scale = np.max(np.abs(vectors), axis=-1, keepdims=True, initial=0.0)
    safe = np.where(scale > 0, scale, 1.0)
    return scale[..., 0] * np.linalg.norm(vectors / safe, axis=-1)


def one(name: str, array: NDArray[Scalar]) -> NDArray[Scalar]:
    """Return `array` if it is one number."""
    if array.ndim != 0:
        raise JomaError(f"{name} must be one number, got shape {array.shape}")
    return array


def generator(rng: np.random.Generator | int) -> np.random.Generator:
    """Return a generator as given, or made from a seed; never an unseeded one."""
    if isinstance(rng, np.random.Generator):
        return rng
    return np.random.default_rng(whole("rng", rng, 0))


def frozen(array: NDArray[Scalar]) -> NDArray[Scalar]:
    """Return a copy that cannot be written to, so that what was checked stays as it is."""
    array = array.copy()
    array.flags.writeable = False
    return array


def heights(height: ArrayLike, depth: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return whole numbers 0 ≤ H ≤ L − 1, Theorem 5's condition on the common latent ancestor."""
    height = integers("height", height, 0)
    depth = integers("depth", depth, 1)
    if np.any(height >= depth):
        raise JomaError(
            f"height must be below the depth of the hierarchy, got {height} with depth {depth}"
        )
    return height, depth


def class_arguments(class_probs: ArrayLike, child_off_probs: ArrayLike) -> tuple[Array, Array]:
    """Return p₀ and P[y=0|k] of a latent tree, with the same number of classes (Section 5)."""
    class_probs = distribution("class_probs", class_probs)
    child_off_probs = probabilities("child_off_probs", child_off_probs)
    if child_off_probs.ndim == 0 or child_off_probs.shape[-1] != class_probs.shape[-1]:
        raise JomaError(
            f"child_off_probs must have a last axis of {class_probs.shape[-1]} classes, "
            f"got shape {child_off_probs.shape}"
        )
    return class_probs, child_off_probs


def _refuse(name: str, array: Array, bad: NDArray[np.bool_], wanted: str) -> Array:
    """Return `array`; raise JomaError with the first bad number if there is one."""
    if np.any(bad):
        first = float(array[bad].flat[0]) if array.ndim else float(array)
        raise JomaError(f"{name} must {wanted}, got {first}")
    return array
