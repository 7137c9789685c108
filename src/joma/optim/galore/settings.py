"""Settings of a parameter group: which values they take, and which ones cannot change later."""

from collections.abc import Mapping, Sequence
from typing import Any

from joma.common.checks import check_one_of, whole_number
from joma.errors import JomaError
from joma.optim.galore import subspace
from joma.optim.moments import check_betas

REFRESHES = ("gap", "energy")
_SHAPE_THE_STATE = ("rank", "side", "bits", "projector_bits", "state_dtype")


def check_group(group: Mapping[str, Any], moment_choices: Sequence[str]) -> None:
    """Raise JomaError for a setting of a group that is out of range."""
    check_one_of("moments", group["moments"], moment_choices)
    if "betas" in group:
        check_betas(group["betas"])
    rank = group["rank"]
    if isinstance(rank, float):
        if not 0 < rank < 1:
            raise JomaError(f"rank must be whole, or a share of energy below 1, got {rank}")
    elif rank is not None:
        whole_number("rank", rank, 1)
    whole_number("gap", group["gap"], 1)
    check_one_of("side", group["side"], subspace.SIDES)
    check_one_of("projection", group["projection"], subspace.PROJECTIONS)
    check_one_of("refresh", group["refresh"], REFRESHES)
    for name in ("bits", "projector_bits"):
        if group[name] not in (None, 8):
            raise JomaError(f"{name} must be None or 8, got {group[name]!r}")
    for name in ("lr", "scale", "weight_decay"):
        if not group[name] >= 0:
            raise JomaError(f"{name} must be a number from 0 on, got {group[name]!r}")


def fixed_settings(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the settings of a group that shape its state."""
    return tuple(group[name] for name in _SHAPE_THE_STATE)


def check_unchanged(group: Mapping[str, Any], before: tuple[Any, ...]) -> None:
    """Raise JomaError for a group whose settings no longer fit its state.

    Args:
        group: The group.
        before: What `fixed_settings` returned when its state was shaped.
    """
    now = fixed_settings(group)
    if now == before:
        return
    for name, old, new in zip(_SHAPE_THE_STATE, before, now, strict=True):
        if old != new:
            raise JomaError(
                f"{name} of a parameter group was {old} when its optimizer was made and is now "
                f"{new}; build a new optimizer to change it"
            )
