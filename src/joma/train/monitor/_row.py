"""One number of a look."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One number as the metrics log has it.

    Attributes:
        name: of what was measured.
        value: it.
        module: of what.
        layer: in which layer.
        head: of which head.
        bound: on the error.
    """

    name: str
    value: float
    module: str | None = None
    layer: int | None = None
    head: int | None = None
    bound: float | None = None

    @property
    def key(self) -> str:
        """A name for loggers that know one word for a series: stable_rank/layer0/mlp.fc1."""
        words = [self.name]
        if self.layer is not None:
            words.append(f"layer{self.layer}")
        if self.head is not None:
            words.append(f"head{self.head}")
        if self.module and not self.name.startswith("attention"):
            words.append(self.module)
        return "/".join(words)
