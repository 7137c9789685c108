"""`joma memory`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import _show
from joma.cli._options import Json, one_of, option, whole
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.train.memory import MemoryEstimate

NAME = "memory"
PRESETS = ("llama-60m", "llama-130m", "llama-350m", "llama-1b", "llama-7b")
OPTIMIZERS = ("adamw", "adamw-8bit", "sgd", "lora", "galore-adamw")
"""Copies of the names, since the help must not import torch."""
_GIB = 2**30
_CHOSEN = "galore-adamw"


def _presets(incomplete: str) -> list[str]:
    return [name for name in PRESETS if name.startswith(incomplete)]


def _eight(given: str | int) -> int:
    if str(given) not in ("8", "16", "32"):
        raise typer.BadParameter(f"it must be 8, 16 or 32, not {given!r}.")
    return int(given)


def memory(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"A folder with a config.json, a hub id, or one of {', '.join(PRESETS)}.",
            autocompletion=_presets,
        ),
    ],
    optimizer: Annotated[
        str | None,
        option(
            "--optimizer",
            "NAME",
            f"The optimizer to train with: {', '.join(OPTIMIZERS)}. All are compared.",
            parser=one_of(*OPTIMIZERS),
        ),
    ] = None,
    rank: Annotated[
        int | None,
        option(
            "--rank",
            "R",
            "Rank of GaLore and LoRA; if not given that of the GaLore paper for its models, and "
            "a quarter of the width for others.",
            parser=whole(1),
        ),
    ] = None,
    bits: Annotated[
        int | None,
        option("--bits", "B", "8 stores GaLore's moments in eight bits.", parser=_eight),
    ] = None,
    projector_bits: Annotated[
        int | None,
        option("--projector-bits", "B", "8 stores GaLore's bases in eight bits.", parser=_eight),
    ] = None,
    side: Annotated[
        str,
        option(
            "--side",
            "SIDE",
            "Side of GaLore's bases: short, left, right, or smallest for the least memory.",
            parser=one_of("short", "left", "right", "smallest"),
        ),
    ] = "short",
    per_layer: Annotated[
        bool,
        typer.Option("--per-layer", help="GaLore moves each parameter in the backward pass."),
    ] = False,
    batch: Annotated[
        int, option("--batch", "N", "Sequences in a forward pass.", parser=whole(1))
    ] = 1,
    window: Annotated[
        int, option("--window", "N", "Tokens of a sequence.", parser=whole(2))
    ] = 2048,
    checkpointing: Annotated[
        bool,
        typer.Option(
            "--checkpointing", help="Blocks compute activations again in the backward pass."
        ),
    ] = False,
    dtype: Annotated[
        str,
        option(
            "--dtype",
            "TYPE",
            "Type of weights and activations: bf16 or fp32.",
            parser=one_of("bf16", "fp32"),
        ),
    ] = "bf16",
    clip: Annotated[
        bool, typer.Option("--clip", help="The norm of the whole gradient is clipped.")
    ] = False,
    device: Annotated[
        str,
        option(
            "--device",
            "DEVICE",
            "Where the training runs: cuda, that is a GPU, or cpu.",
            parser=one_of("cuda", "cpu"),
        ),
    ] = "cuda",
    card: Annotated[
        str | None,
        option("--card", "CARD", "A card such as rtx-4090 or h100-80, or its memory in GiB."),
    ] = None,
    json: Json = False,
) -> None:
    """Print what training a model takes of a GPU's memory, before anything is allocated.

    The model is built without numbers, and a training step is made on it: the parts are what is
    allocated at the peak of the step. --bits, --projector-bits, --side and --per-layer are settings
    of GaLore and change its column alone. With --device cpu it is the memory of the CPU.
    """
    from joma.train.memory import (
        ProjectionSettings,
        TrainingSetup,
        card_memory,
        default_rank,
        estimate_memory,
    )

    limit = None if card is None else card_memory(card)
    setup = TrainingSetup(batch, window, checkpointing, dtype, clip, device)  # type: ignore[arg-type]
    full = 16 if dtype == "bf16" else 32
    for name, value in (("bits", bits), ("projector-bits", projector_bits)):
        if value not in (None, 8, full):
            raise JomaError(f"--{name} must be 8 or {full} with --dtype {dtype}, got {value}")
    projection = ProjectionSettings(
        default_rank(model) if rank is None else rank,
        side,  # type: ignore[arg-type]
        8 if bits == 8 else None,
        8 if projector_bits == 8 else None,
        per_layer,
    )
    try:
        found = estimate_memory(model, setup, projection, OPTIMIZERS)
    except JomaError:
        if optimizer in (None, _CHOSEN):
            raise
        others = [name for name in OPTIMIZERS if name != _CHOSEN]
        found = estimate_memory(model, setup, projection, others)  # GaLore projects nothing
    chosen = next(one for one in found if one.optimizer == (optimizer or _CHOSEN))
    adamw = found[0]
    if json:
        more = {"model": model, "rank": projection.rank, "batch": batch, "window": window}
        more["device"] = device
        _show.as_json(
            {**_record(chosen, adamw, limit), **more, "card_gib": limit}
            | {"optimizers": {one.optimizer: _record(one, adamw, limit) for one in found}}
        )
        return
    _print(found, chosen, limit)
    millions = adamw.parameters / 1e6
    size = f"{millions:,.0f}M" if millions >= 10 else f"{millions:.2g}M"
    projected = max(one.projected for one in found)
    _show.say(
        f"{_show.printable(model)}: {size} parameters in {dtype}"
        f"{' on the CPU' if device == 'cpu' else ''}, batch {batch} × {window} tokens"
        f"{', checkpointing' if checkpointing else ''}; rank {projection.rank}, "
        f"{projected or 'no'} matrices projected."
    )
    if not projected:
        _show.say(f"GaLore is left out: it projects nothing at rank {projection.rank}.")
    if limit is not None:
        _show.say(_fit(chosen, limit))


def _state_reduction(one: "MemoryEstimate", adamw: "MemoryEstimate") -> float:
    """Return by which share states and bases are smaller than the states of AdamW."""
    states = one.parts["states"] + one.parts["projectors"]
    return 1 - states / adamw.parts["states"]


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


def _print(found: "list[MemoryEstimate]", chosen: "MemoryEstimate", limit: float | None) -> None:
    names = [f"{one.optimizer}{' *' if one is chosen else ''}" for one in found]
    table = _show.table("GiB at the peak", *names, justify="right")
    for part in chosen.parts:
        table.add_row(part, *(f"{one.parts[part] / _GIB:.2f}" for one in found))
    table.add_row("total", *(f"{one.total / _GIB:.2f}" for one in found))
    table.add_row("peak in", *(one.phase for one in found))
    adamw = found[0]
    table.add_row("states below AdamW's", *(f"{_state_reduction(one, adamw):.1%}" for one in found))
    if limit is not None:
        fits = ["yes" if one.total <= limit * _GIB else "no" for one in found]
        table.add_row(f"fits {limit:g} GiB", *fits)
    _show.put(table)


def _fit(chosen: "MemoryEstimate", limit: float) -> str:
    total = chosen.total / _GIB
    if total <= limit:
        return f"{chosen.optimizer} fits: {total:.2f} of {limit:g} GiB."
    return f"{chosen.optimizer} does not fit: {total:.2f} GiB are needed, {limit:g} are there."
