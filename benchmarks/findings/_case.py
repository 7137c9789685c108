"""What is known of a training before it is run."""

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["llama", "neox", "encoder", "t5", "gpt2"]
State = Literal["healthy", "sick", "note", "sweep"]
ARCHITECTURES: tuple[Architecture, ...] = ("llama", "neox", "encoder", "t5", "gpt2")
SEEDS = (0, 1, 2)
STEPS = {"llama": 400, "neox": 400, "encoder": 600, "t5": 400, "gpt2": 400}
"""Steps of the sweep and of what is compared with it; masked tokens are learned more slowly."""

KINDS: dict[str, frozenset[str]] = {
    "collapse_one": frozenset({"attention_collapse"}),
    "collapse_all": frozenset({"attention_collapse"}),
    "rate_3": frozenset({"learning_rate_too_high", "diverged_loss"}),
    "rate_10": frozenset({"learning_rate_too_high", "diverged_loss"}),
    "rate_100": frozenset({"learning_rate_too_high", "diverged_loss", "not_finite"}),
    "rate_low": frozenset({"learning_rate_too_low"}),
    "nan": frozenset({"not_finite"}),
    "diverging_ascent": frozenset({"diverged_loss"}),
    "diverging_rate": frozenset({"diverged_loss", "learning_rate_too_high", "not_finite"}),
    "dead_mlp": frozenset({"dead_mlp"}),
    "frozen": frozenset({"frozen_layer"}),
    "not_optimized": frozenset({"not_optimized", "frozen_layer"}),
    "duplicated": frozenset({"tied_layer"}),
    "tied": frozenset({"tied_layer"}),
    "rank_gate": frozenset({"rank_collapse"}),
    "rank_up": frozenset({"rank_collapse"}),
    "rank_down": frozenset({"rank_collapse"}),
    "rank_v": frozenset({"rank_collapse"}),
    "rank_o": frozenset({"rank_collapse"}),
    "bad_init": frozenset({"bad_initialisation"}),
    "overfitting": frozenset({"overfitting"}),
    "label_noise": frozenset({"label_noise"}),
    "bounce": frozenset({"attention_bounce"}),
    "spike": frozenset({"loss_spike"}),
}
"""For each variant, the kinds of findings that count as having found it.

The first 22 are sick, the last two are worth a note.
"""
NOTES = ("bounce", "spike")
RATES = {"rate_3": 3.0, "rate_10": 10.0, "rate_100": 100.0, "rate_low": 0.01}
"""Factors on the best learning rate; such a run is sick only where it ends worse."""


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        architecture: Which model.
        variant: What was done to it: a key of `KINDS`, or the recipe of a healthy run.
        state: What is known of it.
        seed: Seed of the weights and of the batches.
        number: Index among the healthy runs; 0 for others.
        layers: How many; of T5, those of encoder and decoder together.
        steps: Optimizer steps.
        rate: Peak learning rate.
        optimizer: "adamw" or "sgd" (with momentum).
        schedule: "constant", "warmup" or "cosine" (with warm-up).
        width: Size of the residual stream.
        vocabulary: Tokens of the language.
        language: Seed of the language.
        batch: Sequences of an optimizer step.
        accumulate: Backward passes of an optimizer step.
        dropout: Probability.
        decay: Weight decay.
        clip: Largest norm of the gradient, or None.
        autocast: Whether forward passes run in bfloat16.
        lora: Whether adapters are trained on a model that was trained before.
        validation: Whether the monitor is given validation losses.
        layer: Layer in which the sickness was planted, or None.
        stack: "encoder" or "decoder": where the layer is in an encoder–decoder.
    """

    architecture: Architecture
    variant: str
    state: State
    seed: int = 0
    number: int = 0
    layers: int = 4
    steps: int = 400
    rate: float = 1e-3
    optimizer: str = "adamw"
    schedule: str = "constant"
    width: int = 48
    vocabulary: int = 64
    language: int = 0
    batch: int = 12
    accumulate: int = 1
    dropout: float = 0.0
    decay: float = 0.01
    clip: float | None = None
    autocast: bool = False
    lora: bool = False
    validation: bool = True
    layer: int | None = None
    stack: str = ""

    @property
    def name(self) -> str:
        """Return the name of the case, which is that of its file."""
        if self.state == "healthy":
            return f"healthy-{self.number:03d}-{self.architecture}-{self.variant}"
        if self.state == "sweep":
            return f"sweep-{self.architecture}-{self.optimizer}-{self.rate:g}-{self.seed}"
        return f"{self.state}-{self.architecture}-{self.variant}-{self.seed}"

    @property
    def kinds(self) -> frozenset[str]:
        """Return the kinds of findings that count as having found what was planted."""
        return frozenset() if self.state in ("healthy", "sweep") else KINDS[self.variant]
