"""What decides a search apart from the model and the text."""

from dataclasses import dataclass

from joma.common.checks import whole_number
from joma.errors import JomaError


@dataclass(frozen=True)
class SearchSettings:
    """How contexts are taken, compared and grouped; the same for the model and its controls.

    Attributes:
        contexts: contexts of each node, its strongest in different windows.
        least: fewest contexts of a group.
        balance: least ratio of the mean activations of two groups.
        skip: positions at the beginning of a window that are no context: they have little to
            attend to.
        sink: keys at the beginning of a window whose attention is not counted. Many heads rest on
            the first token when they have nothing to say; with it, all contexts seem related.
        repeat: contexts with the same last tokens, this many, are one context seen again.
        directions: most directions in which contexts are compared.
        shuffles: how often the contexts of a layer are dealt out at random.
    """

    contexts: int = 16
    least: int = 4
    balance: float = 0.5
    skip: int = 8
    sink: int = 1
    repeat: int = 8
    directions: int = 64
    shuffles: int = 4

    def __post_init__(self) -> None:
        for name in ("contexts", "least", "repeat", "directions", "shuffles"):
            least = 2 if name in ("contexts", "least", "directions") else 1
            whole_number(name, getattr(self, name), least)
        for name in ("skip", "sink"):
            whole_number(name, getattr(self, name), 0)
        if self.contexts < 2 * self.least:
            raise JomaError(
                f"contexts must be at least {2 * self.least} for two groups of least = "
                f"{self.least}, got {self.contexts}"
            )
        if not 0 < self.balance <= 1:
            raise JomaError(f"balance must be above 0 up to 1, got {self.balance!r}")

    @property
    def candidates(self) -> int:
        """Contexts kept of each node, of which those that are seen again are then left out."""
        return 2 * self.contexts

    @property
    def shortest(self) -> int:
        """Fewest tokens of a window: one context, and something to attend to besides the sink."""
        return max(self.skip, self.sink + 1) + 1
