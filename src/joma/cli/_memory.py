"""`joma memory`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from joma.cli import _command as cmd
from joma.cli import _render
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.train.memory import MemoryEstimate

PRESETS = ("llama-60m", "llama-130m", "llama-350m", "llama-1b", "llama-7b")
OPTIMIZERS = ("adamw", "adamw-8bit", "sgd", "lora", "galore-adamw")
"""Copies of the names, since the help must not import torch."""
_GIB = 2**30
_bits = cmd.parsed(int, lambda bits: bits in (8, 16, 32), "8, 16 or 32")


@dataclass(frozen=True, kw_only=True)
class Memory(cmd.Command):
    """Print what training a model takes of a GPU's memory, before anything is allocated.

    The model is built without numbers, and a training step is made on it: the parts are what is
    allocated at the peak of the step. --bits, --projector-bits, --side and --per-layer are settings
    of GaLore and change its column alone. With --device cpu it is the memory of the CPU.
    """

    summary = "Print what training a model takes of a GPU's memory."
    example = "memory llama-7b --optimizer galore-adamw --bits 8 --per-layer --checkpointing"

    model: str = cmd.argument(
        "MODEL",
        f"A folder with a config.json, a hub id, or one of {', '.join(PRESETS)}.",
        completion=cmd.completing(PRESETS),
    )
    optimizer: str = cmd.option(
        "NAME",
        f"The optimizer to train with: {', '.join(OPTIMIZERS)}. All are compared.",
        "galore-adamw",
        parser=cmd.one_of(*OPTIMIZERS),
    )
    rank: int | None = cmd.count(
        "Rank of GaLore and LoRA; if not given that of the GaLore paper for its models, and "
        "a quarter of the width for others."
    )
    bits: int | None = cmd.option("B", "8 stores GaLore's moments in eight bits.", parser=_bits)
    projector_bits: int | None = cmd.option(
        "B", "8 stores GaLore's bases in eight bits.", parser=_bits
    )
    side: str = cmd.option(
        "SIDE",
        "Side of GaLore's bases: short, left, right, or smallest for the least memory.",
        "short",
        parser=cmd.one_of("short", "left", "right", "smallest"),
    )
    per_layer: bool = cmd.flag("GaLore moves each parameter in the backward pass.")
    batch: int = cmd.count("Sequences in a forward pass.", 1)
    window: int = cmd.count("Tokens of a sequence.", 2048, least=2)
    checkpointing: bool = cmd.flag("Blocks compute activations again in the backward pass.")
    dtype: str = cmd.option(
        "TYPE",
        "Type of weights and activations: bf16 or fp32.",
        "bf16",
        parser=cmd.one_of("bf16", "fp32"),
    )
    clip: bool = cmd.flag("The norm of the whole gradient is clipped.")
    device: str = cmd.option(
        "DEVICE",
        "Where the training runs: cuda, that is a GPU, or cpu.",
        "cuda",
        parser=cmd.one_of("cuda", "cpu"),
    )
    card: str | None = cmd.option(
        "CARD", "A card such as rtx-4090 or h100-80, or its memory in GiB."
    )
    json: bool = cmd.json_flag()

    def run(self) -> None:
        """Estimate every optimizer and print them side by side."""
        from joma.train import memory

        limit = None if self.card is None else memory.card_memory(self.card)
        rank = memory.default_rank(self.model) if self.rank is None else self.rank
        found = self._estimates(rank)
        chosen = next((one for one in found if one.optimizer == self.optimizer), found[0])
        if self.json:
            asked = {"model": self.model, "rank": rank, "batch": self.batch, "window": self.window}
            _render.as_json(
                {
                    **_record(chosen, found[0], limit),
                    **asked,
                    "device": self.device,
                    "card_gib": limit,
                    "optimizers": {one.optimizer: _record(one, found[0], limit) for one in found},
                }
            )
            return
        _put_table(found, chosen, limit)
        millions = chosen.parameters / 1e6
        projected = max(one.projected for one in found)
        _render.say(
            f"{self.model}: {f'{millions:,.0f}' if millions >= 10 else f'{millions:.2g}'}M "
            f"parameters in {self.dtype}{' on the CPU' if self.device == 'cpu' else ''}, batch "
            f"{self.batch} × {self.window} tokens{', checkpointing' * self.checkpointing}; rank "
            f"{rank}, {projected or 'no'} matrices projected."
        )
        if not projected:
            _render.say(f"GaLore is left out: it projects nothing at rank {rank}.")
        if limit is not None:
            total = chosen.total / _GIB
            does = "fits" if total <= limit else "does not fit"
            _render.say(f"{chosen.optimizer} {does}: {total:.2f} of {limit:g} GiB.")

    def _estimates(self, rank: int) -> "list[MemoryEstimate]":
        """Return what each optimizer takes; GaLore is left out where it projects nothing."""
        from joma.train import memory

        full = 16 if self.dtype == "bf16" else 32
        for name, value in (("bits", self.bits), ("projector-bits", self.projector_bits)):
            if value not in (None, 8, full):
                raise JomaError(
                    f"--{name} must be 8 or {full} with --dtype {self.dtype}, got {value}"
                )
        moments, bases = (8 if bits == 8 else None for bits in (self.bits, self.projector_bits))
        setup = memory.TrainingSetup(
            self.batch,
            self.window,
            self.checkpointing,
            self.dtype,  # type: ignore[arg-type]
            self.clip,
            self.device,  # type: ignore[arg-type]
        )
        projection = memory.ProjectionSettings(rank, self.side, moments, bases, self.per_layer)  # type: ignore[arg-type]
        try:
            return memory.estimate_memory(self.model, setup, projection, OPTIMIZERS)
        except JomaError:
            if "optimizer" not in self.given or self.optimizer == "galore-adamw":
                raise
            others = [name for name in OPTIMIZERS if name != "galore-adamw"]
            return memory.estimate_memory(self.model, setup, projection, others)


def _state_reduction(one: "MemoryEstimate", adamw: "MemoryEstimate") -> float:
    """Return by which share states and bases are smaller than the states of AdamW."""
    return 1 - (one.parts["states"] + one.parts["projectors"]) / adamw.parts["states"]


def _record(one: "MemoryEstimate", adamw: "MemoryEstimate", limit: float | None) -> dict[str, Any]:
    return {
        "total_gib": one.total / _GIB,
        "parts": {name: size / _GIB for name, size in one.parts.items()},
        "optimizer": one.optimizer,
        "peak_in": one.phase,
        "peaks_gib": {name: size / _GIB for name, size in one.peaks.items()},
        "parameters": one.parameters,
        "projected": one.projected,
        "states_less_than_adamw": _state_reduction(one, adamw),
        "fits": None if limit is None else one.total <= limit * _GIB,
    }


def _put_table(
    found: "Sequence[MemoryEstimate]", chosen: "MemoryEstimate", limit: float | None
) -> None:
    rows = [(part, *(f"{one.parts[part] / _GIB:.2f}" for one in found)) for part in chosen.parts]
    rows.append(("total", *(f"{one.total / _GIB:.2f}" for one in found)))
    rows.append(("peak in", *(one.phase for one in found)))
    reductions = (f"{_state_reduction(one, found[0]):.1%}" for one in found)
    rows.append(("states below AdamW's", *reductions))
    if limit is not None:
        fits = ("yes" if one.total <= limit * _GIB else "no" for one in found)
        rows.append((f"fits {limit:g} GiB", *fits))
    names = [f"{one.optimizer}{' *' if one is chosen else ''}" for one in found]
    _render.put(_render.table(("GiB at the peak", *names), rows))
