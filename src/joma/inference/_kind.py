"""What a model's layer is, as far as its cache is concerned."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerKind:
    """What a model's layer is, as far as its cache is concerned.

    Attributes:
        index: Number of the layer.
        window: Keys are seen at a smaller distance; None without a sliding window.
        frequencies: Angle per position of each pair of rotated components, (R/2,); None where keys
            are not rotated, or not in a way that is known.
        is_turned: Whether keys are rotated by their position at all.
    """

    index: int
    window: int | None = None
    frequencies: Tensor | None = None
    is_turned: bool = True
