"""What GaLore decides about a parameter once, and where its state lies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from joma.common.checks import check_one_of, whole_number
from joma.common.sharded import is_dtensor, local
from joma.errors import JomaError
from joma.kernels.eight_bits import EightBits, encode
from joma.kernels.galore import NOTHING, Side, direction_energies
from joma.kernels.moments import check_betas
from joma.optim.galore.subspace import GradientMatrix, choose_side, square_sum

PARTIAL = "grad_of_step"
"""Key of the accumulated gradient of the step under way, in the state of a parameter."""
CHECKS, FALLEN, LONGEST = 10, 0.9, 10
"""With refresh="energy": how often in a gap the captured energy is measured, below which share of
what it was after the last choice the subspace is chosen again, and after how many gaps anyway."""
MOST_ENERGY = 1e72
"""‖G‖² from which on products of G may overflow in float32: its subspace cannot be computed."""
_CHOICES = {
    "side": ("short", "left", "right", "smallest"),
    "projection": ("power", "svd"),
    "refresh": ("gap", "energy"),
}


@dataclass(frozen=True)
class ProjectedMatrix:
    """A matrix that is projected.

    Attributes:
        name: Its name, or its number among the parameters.
        shape: (m, n).
        side: Where the basis stands: "left" for R = PᵀG, "right" for R = GP.
        rank: The rank, or None where it is a share of energy that no gradient was seen for.
        captured: Share of ‖G‖² in the subspace when it was measured last, or None before.
        refreshes: How often the subspace was chosen.
        energy: Share of ‖G‖² in the subspace, of the gradients of the last step; None without
            `record_energy`.
        angles: The largest and the mean principal angle between the last two subspaces, in degrees;
            None before the second, or without `record_angles`.
    """

    name: str
    shape: tuple[int, int]
    side: Side
    rank: int | None
    captured: float | None
    refreshes: int
    energy: float | None = None
    angles: tuple[float, float] | None = None


@dataclass(eq=False)
class Slot:
    """A parameter of an optimizer, and what is decided about it when the optimizer is made.

    Attributes:
        parameter: The parameter.
        name: Its name, or its number among the parameters.
        number: Its number among the parameters.
        group: Its parameter group.
        states: The states of the optimizer's parameters.
        side: Side of its basis; None where it is not projected.
        mean_over: The processes whose gradients are averaged, if this optimizer does that.
        turn: Which of how many sets of matrices it belongs to, that choose at different steps.
    """

    parameter: Tensor
    name: str
    number: int
    group: dict[str, Any]
    states: Mapping[Tensor, dict[str, Any]]
    side: Side | None
    mean_over: Any = None
    turn: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        self.shard = _row_shard(self.parameter)

    @property
    def state(self) -> dict[str, Any]:
        """State of the parameter, which exists from the first use on."""
        return self.states[self.parameter]

    @property
    def weights(self) -> Tensor:
        """This process's part of the parameter."""
        return local(self.parameter)

    @property
    def is_replicated(self) -> bool:
        """Whether every process has the same whole gradient of a step."""
        return self.shard is None or self.side == "left"

    def gradient(self) -> GradientMatrix:
        """Return the gradient, of which this process may have a part."""
        gradient = self.parameter.grad
        assert gradient is not None
        if self.shard is not None:
            return GradientMatrix(local(gradient), "rows", *self.shard)
        if self.mean_over is not None:
            return GradientMatrix(gradient, "mean", self.mean_over)
        return GradientMatrix(gradient)

    def place(self, part: Tensor) -> Tensor:
        """Return a part of the gradient's size as the state keeps it: sharded like the gradient."""
        return part if self.is_replicated else as_rows_of(self.parameter, part)

    def basis(self) -> Tensor:
        """Return this process's part of the basis."""
        state = self.state
        basis = local(state["basis"])
        if "basis_scale" not in state:
            return basis
        return EightBits(basis, local(state["basis_scale"])).decode("linear")

    def store_basis(self, basis: Tensor) -> None:
        """Put this process's part of a basis into the state."""
        basis = basis.contiguous()  # as a file gives it back: products round by the layout
        if self.group["projector_bits"] == 8:
            found = encode(basis, "linear")
            parts = {"basis": found.codes, "basis_scale": found.scales}
        else:
            parts = {"basis": basis.to(self.group["state_dtype"] or self.parameter.dtype)}
        self.state.pop("basis_scale", None)
        for key, part in parts.items():
            sharded = self.side == "left" and self.shard is not None
            self.state[key] = as_rows_of(self.parameter, part) if sharded else part

    def captured(self, gradient: GradientMatrix) -> Tensor:
        """Return the share of ‖G‖² in the subspace, and along how many directions there is none."""
        assert self.side is not None
        projected = gradient.project(self.basis(), self.side)
        inside, along = square_sum(projected), direction_energies(projected, self.side)
        if self.side == "right":
            inside, along = gradient.sum_of_rows(inside), gradient.sum_of_rows(along)
        energy = gradient.energy()
        share = torch.where(energy > 0, inside / energy, 0.0)
        return torch.stack((share, (along <= NOTHING * along.max()).sum()))

    def is_due(self) -> bool:
        """Return whether the subspace is to be chosen; measures what it captures if need be.

        That of a parameter whose gradients are being accumulated was chosen by the first of them.
        """
        state, group = self.state, self.group
        if self.side is None or PARTIAL in state:
            return False
        if "basis" not in state or not int(state["refreshes"]) or int(state.get("due", 0)):
            return True
        gap, age = group["gap"], int(state["age"])
        offset = self.turn[0] * gap // self.turn[1] if group["stagger"] else 0
        if group["refresh"] == "gap":
            return (int(state["step"]) + offset) % gap == 0
        if age == 1:
            state["captured"] = self.captured(self.gradient())[0].cpu()
            if state["captured"] > 0:  # a gradient of zero is no reference
                state["reference"] = state["captured"]
        elif (age + offset) % max(gap // CHECKS, 1) == 0:
            state["captured"] = self.captured(self.gradient())[0].cpu()
            return not state["captured"] >= FALLEN * state["reference"] or age >= LONGEST * gap
        return False

    def count_step(self) -> None:
        """Count a step of the parameter, and one since its subspace was chosen."""
        state = self.state
        state["step"] = state.get("step", torch.zeros((), dtype=torch.int64)) + 1
        if "age" in state:
            state["age"] = state["age"] + 1

    def loaded(self, key: str, value: Any) -> Any:
        """Return a loaded value of the state, sharded as it was where it was saved whole."""
        of_rows = "basis" if self.side == "left" else "exp_avg"
        if self.shard is None or not key.startswith(of_rows) or value is not local(value):
            return value
        _, first, _ = self.shard
        return as_rows_of(self.parameter, value[first:][: len(local(self.parameter))])

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise JomaError for a loaded state of another rank, side or choice of matrices."""
        if not state:
            return
        if ("basis" in state) != (self.side is not None):
            kind = "projected" if "basis" in state else "not projected"
            raise JomaError(f"the state has {self.name} {kind}; the optimizer differs")
        if self.side is None:
            return
        length, rank = state["basis"].shape
        own, wanted = self.parameter.shape[self.side == "right"], self.group["rank"]
        if length != own or (not isinstance(wanted, float) and rank != wanted):
            raise JomaError(
                f"the state has a basis of {length} × {rank} for {self.name}, the "
                f"optimizer one of {own} × {wanted} ({self.side})"
            )


def is_projected(parameter: Tensor, rank: int | float | None) -> bool:
    """Return whether a parameter is projected: a matrix with sides longer than the rank."""
    if rank is None or parameter.ndim != 2:
        return False
    return min(parameter.shape) > (1 if isinstance(rank, float) else rank)


def check_group(group: Mapping[str, Any], moment_choices: Sequence[str]) -> None:
    """Raise JomaError for a setting of a group that is out of range."""
    check_one_of("moments", group["moments"], moment_choices)
    check_betas(group["betas"])
    rank = group["rank"]
    if isinstance(rank, float):
        if not 0 < rank < 1:
            raise JomaError(f"rank must be whole, or a share of energy below 1, got {rank}")
    elif rank is not None:
        whole_number("rank", rank, 1)
    whole_number("gap", group["gap"], 1)
    for name, allowed in _CHOICES.items():
        check_one_of(name, group[name], allowed)
    for name in ("bits", "projector_bits"):
        if group[name] not in (None, 8):
            raise JomaError(f"{name} must be None or 8, got {group[name]!r}")
    for name in ("lr", "scale", "weight_decay"):
        if not group[name] >= 0:
            raise JomaError(f"{name} must be a number from 0 on, got {group[name]!r}")


def side_of(parameter: Tensor, group: Mapping[str, Any]) -> Side | None:
    """Return on which side a parameter is projected; None where it is not."""
    if not is_projected(parameter, group["rank"]):
        return None
    size = parameter.element_size()
    return choose_side(
        group["side"],
        (parameter.shape[0], parameter.shape[1]),
        moment_bytes=2 * (1 if group["bits"] == 8 else size),
        projector_bytes=1 if group["projector_bits"] == 8 else size,
    )


def _row_shard(parameter: Tensor) -> tuple[Any, int, int] | None:
    """Return the processes that share a DTensor's rows, the first of its own rows, and all of them.

    Raises:
        JomaError: It is sharded otherwise.
    """
    if not is_dtensor(parameter):
        return None
    from torch.distributed.tensor import Replicate, Shard

    found = None
    for dimension, placement in enumerate(parameter.placements):
        if placement == Shard(0) and found is None:
            mesh, rows = parameter.device_mesh, parameter.shape[0]
            chunk = -(-rows // mesh.size(dimension))
            first = min(chunk * mesh.get_local_rank(dimension), rows)
            found = mesh.get_group(dimension), first, rows
        elif not isinstance(placement, Replicate):
            raise JomaError(
                f"GaLore takes parameters that are distributed along their rows, as FSDP2 does; "
                f"one is placed as {parameter.placements}"
            )
    return found


def as_rows_of(parameter: Tensor, part: Tensor) -> Tensor:
    """Return a part as a tensor that is distributed as the rows of a parameter are."""
    if not is_dtensor(parameter):
        return part
    from torch.distributed.tensor import DTensor

    shape = torch.Size((parameter.shape[0], *part.shape[1:]))
    return DTensor.from_local(
        part.contiguous(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
