"""One number of a measurement."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One number as the metrics log has it.

    Attributes:
        name: What was measured, "stable_rank".
        value: The number.
        module: Path of the module, or the key of an attention call; None for the whole model.
        layer: Layer index, or None for what is in no layer.
        head: Head index, or None for the mean over heads or what has no heads.
        bound: Bound on the error of the value, or None where there is none.
        kind: Kind of attention, "self" or "decoder cross"; "" for what is not attention.
    """

    name: str
    value: float
    module: str | None = None
    layer: int | None = None
    head: int | None = None
    bound: float | None = None
    kind: str = ""

    @property
    def key(self) -> str:
        """A name for loggers that know one word for a series.

        "stable_rank/layer0/mlp.fc1"; for attention, whose heads are many, the layer stands for the
        module where the model has one attention per layer: "attention_entropy/layer0/head1".
        """
        words = [self.name]
        if self.layer is not None:
            words.append(f"layer{self.layer}")
        if self.kind not in ("", "self"):
            words.append(self.kind.replace(" ", "_"))
        if self.kind and self.module and "#" in self.module:
            words.append("pass" + self.module.rpartition("#")[2])
        if self.head is not None:
            words.append(f"head{self.head}")
        if self.module and not self.name.startswith("attention"):
            words.append(self.module)
        return "/".join(words)
