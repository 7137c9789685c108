"""The subspaces of an optimizer's matrices: where they are stored, when and how they are chosen."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from joma.common.sharded import local
from joma.errors import JomaError
from joma.optim import blockwise
from joma.optim.galore import selection, subspace
from joma.optim.galore.processes import placed, row_shard
from joma.optim.galore.subspace import GradientMatrix, Side
from joma.optim.moments import TypedStateOptimizer

PARTIAL = "grad_of_step"
"""Key of the accumulated gradient of the step under way, in the state of a parameter."""
NOTHING = 1e-10
"""Energy along a direction, over that along the strongest one, below which it is rounding: products
in float32 have relative errors of about 1e-6, whose square is 1e-12."""
MOST_ENERGY = 1e72
"""‖G‖² from which on products of G may overflow in float32: its subspace cannot be computed."""
TOGETHER = 8
"""Matrices that choose their subspaces in one step: each alone would leave a GPU mostly waiting."""
CHECKS, FALLEN, LONGEST = 10, 0.9, 10
"""With refresh="energy": how often in a gap the captured energy is measured, below which share of
what it was after the last choice the subspace is chosen again, and after how many gaps anyway."""


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


@dataclass(frozen=True)
class _Choice:
    """A matrix whose subspace is to be chosen from its gradient, and the gradient's ‖G‖²."""

    parameter: Tensor
    group: dict[str, Any]
    gradient: GradientMatrix
    side: Side
    energy: float = 0.0


class SubspaceOptimizer(TypedStateOptimizer):
    """An optimizer that keeps a subspace for each projected matrix in its state.

    It chooses subspaces and does not move parameters. Subclasses set `seed`, `record_angles` and
    `_group_of_processes`, number the parameters in `_numbers`, and say in `_turn` what becomes of
    their state when a basis changes.
    """

    seed: int
    record_angles: bool
    _group_of_processes: Any
    _numbers: dict[Tensor, tuple[int, int]]
    """Of each parameter: its number, and that of its group."""
    _places: dict[Tensor, int]
    """Numbers of the projected matrices among themselves; empty until they are needed."""
    _energies: dict[Tensor, tuple[Tensor, Tensor]]
    """Of each matrix: energy in the subspace, and in all, of the gradients of the last step."""

    @property
    def projected(self) -> list[ProjectedMatrix]:
        """The matrices that are projected, with side and rank."""
        return [one for _, one in self.subspaces()]

    def subspaces(self) -> Iterator[tuple[Tensor, ProjectedMatrix]]:
        """Yield the parameters that are projected, each with what `projected` says of it."""
        for group in self.param_groups:
            for name, parameter in zip(self._names(group), group["params"], strict=True):
                if not selection.is_projected(parameter, group):
                    continue
                state = self.state.get(parameter, {})
                rank = None if isinstance(group["rank"], float) else group["rank"]
                captured = energy = angles = None
                if "basis" in state:
                    rank, captured = state["basis"].shape[1], float(state["captured"])
                if "angles" in state:
                    angles = tuple(state["angles"].tolist())
                if parameter in self._energies:
                    inside, everything = self._energies[parameter]
                    energy = float(inside / everything)
                yield (
                    parameter,
                    ProjectedMatrix(
                        name,
                        (parameter.shape[0], parameter.shape[1]),
                        self._side(parameter, group),
                        rank,
                        captured,
                        int(state.get("refreshes", 0)),
                        energy,
                        angles,
                    ),
                )

    def _turn(self, parameter: Tensor, group: dict[str, Any], overlap: Tensor, side: Side) -> None:
        """Change the state as the basis turns.

        Args:
            parameter: The parameter.
            group: Its group.
            overlap: P'ᵀP of the new and the old basis, (r, r).
            side: Side of the basis.
        """
        raise NotImplementedError

    def _refresh_due(self, parameters: Iterable[Tensor]) -> None:
        """Choose together the subspaces that are due in this step, of parameters with a gradient.

        That of a parameter whose gradients are being accumulated was chosen by the first of them.
        """
        choices: list[_Choice] = []
        for parameter in parameters:
            group = self._group(parameter)
            if (
                parameter.grad is not None
                and not parameter.grad.is_sparse
                and selection.is_projected(parameter, group)
                and PARTIAL not in self.state[parameter]
            ):
                side = self._side(parameter, group)
                choices.append(_Choice(parameter, group, self._gradient(parameter), side))
        self._refresh([one for one in choices if self._is_due(one)])

    def _is_due(self, choice: _Choice) -> bool:
        """Return whether a subspace is to be chosen again; measures what it captures if need be."""
        state, group = self.state[choice.parameter], choice.group
        if "basis" not in state or not int(state["refreshes"]) or int(state.get("due", 0)):
            return True
        gap, age = group["gap"], int(state["age"])
        offset = self._stagger(choice.parameter, gap) if group["stagger"] else 0
        if group["refresh"] == "gap":
            return (int(state["step"]) + offset) % gap == 0
        if age == 1:
            state["captured"] = self._captured(choice)[0].cpu()
            if state["captured"] > 0:  # a gradient of zero is no reference
                state["reference"] = state["captured"]
        elif (age + offset) % max(gap // CHECKS, 1) == 0:
            state["captured"] = self._captured(choice)[0].cpu()
            return not state["captured"] >= FALLEN * state["reference"] or age >= LONGEST * gap
        return False

    def _stagger(self, parameter: Tensor, gap: int) -> int:
        """Return by how many steps a matrix chooses its subspace before the end of a gap."""
        if not self._places:
            for group in self.param_groups:
                for one in group["params"]:
                    if selection.is_projected(one, group):
                        self._places[one] = len(self._places)
        parts = -(-len(self._places) // TOGETHER)
        return self._places[parameter] // TOGETHER * gap // parts

    def _captured(self, choice: _Choice) -> Tensor:
        """Return the share of ‖G‖² in the subspace, and along how many directions there is none."""
        basis, gradient = self._basis(choice.parameter), choice.gradient
        projected = gradient.project(basis, choice.side)
        inside = subspace.square_sum(projected)
        along = subspace.direction_energies(projected, choice.side)
        if choice.side == "right":
            inside, along = gradient.sum_of_rows(inside), gradient.sum_of_rows(along)
        energy = gradient.energy()
        share = torch.where(energy > 0, inside / energy, 0.0)
        return torch.stack((share, (along <= NOTHING * along.max()).sum()))

    def _refresh(self, choices: Sequence[_Choice]) -> None:
        """Choose subspaces from gradients."""
        energies = _numbers([one.gradient.energy() for one in choices])
        choices = [
            replace(one, energy=energy) for one, energy in zip(choices, energies, strict=True)
        ]
        for choice in choices:  # before any state changes
            self._check_first(choice)
        waiting: list[tuple[_Choice, subspace.BasisSearch]] = []
        chosen: list[_Choice] = []
        for choice in choices:
            search = self._search(choice)
            if search is None:
                continue
            chosen.append(choice)
            if choice.energy == 0:
                self._adopt(choice, self._old_basis(choice), subspace.random_basis(search))
            elif search.exact:
                self._adopt(choice, self._old_basis(choice), subspace.svd_basis(search))
            else:
                waiting.append((choice, search))
        for some in subspace.batches([search for _, search in waiting]):
            self._iterate([waiting[at] for at in some])
        captured = _numbers([self._captured(one) for one in chosen])
        for choice, (share, without) in zip(chosen, captured, strict=True):
            state = self.state[choice.parameter]
            state["captured"] = state["reference"] = torch.tensor(share, dtype=torch.float64)
            state["null_directions"] = torch.tensor(int(without))

    def _iterate(self, waiting: Sequence[tuple[_Choice, subspace.BasisSearch]]) -> None:
        """Choose subspaces together, by power iteration from the old bases.

        Old bases, decoded where they are in eight bits, are held for these matrices alone.
        """
        searches = [replace(search, old=self._old_basis(choice)) for choice, search in waiting]
        bases = subspace.power_bases(searches)
        for (choice, _), search, basis in zip(waiting, searches, bases, strict=True):
            self._adopt(choice, search.old, basis)

    def _check_first(self, choice: _Choice) -> None:
        """Raise JomaError for a first gradient that is not finite."""
        is_first = "basis" not in self.state[choice.parameter]
        if is_first and not 0 <= choice.energy < MOST_ENERGY:
            raise JomaError(
                f"the first gradient of {self._name(choice.parameter)} is not finite or has a norm "
                "above 1e36, so that no subspace can be chosen"
            )

    def _search(self, choice: _Choice) -> subspace.BasisSearch | None:
        """Return how to search for a basis; None where the old one stays for this step.

        The old basis is not part of the answer yet.
        """
        state, group = self.state[choice.parameter], choice.group
        if "basis" in state and not 0 < choice.energy < MOST_ENERGY:
            state["due"] = torch.tensor(1)  # the next gradient that is finite and not 0 decides
            return None
        refreshes = int(state.get("refreshes", 0))
        rank = state["basis"].shape[1] if self._has_old_basis(choice) else group["rank"]
        exact = group["projection"] == "svd"
        if isinstance(rank, float):
            rank, exact = subspace.energy_rank(choice.gradient, rank), True
        device = choice.gradient.matrix.device
        random = torch.Generator(device="cpu" if device.type == "meta" else device)
        number = self._numbers[choice.parameter][0]
        random.manual_seed(((self.seed * 1_000_003 + number) * 1_000_003 + refreshes) % 2**63)
        return subspace.BasisSearch(choice.gradient, choice.side, rank, None, random, exact)

    def _has_old_basis(self, choice: _Choice) -> bool:
        """Return whether there is a basis, other than one chosen while gradients were zero."""
        state = self.state[choice.parameter]
        return "basis" in state and (choice.energy == 0 or int(state.get("refreshes", 0)) > 0)

    def _old_basis(self, choice: _Choice) -> Tensor | None:
        """Return the basis that the search starts from, if any."""
        return self._basis(choice.parameter) if self._has_old_basis(choice) else None

    def _adopt(self, choice: _Choice, old: Tensor | None, basis: Tensor) -> None:
        """Take a new basis, and turn the moments from the old one, if any, to it."""
        parameter, group, side = choice.parameter, choice.group, choice.side
        state = self.state[parameter]
        if "basis" in state and state["basis"].shape[1] != basis.shape[1]:
            self._forget_moments(parameter)
        if group["moments"] == "align" and old is not None:
            overlap = self._overlap(basis, old, choice.gradient, side)
            basis = basis @ subspace.nearest_rotation(overlap)
        self._store_basis(parameter, group, basis, side)
        if old is not None:
            overlap = self._overlap(self._basis(parameter), old, choice.gradient, side)
            self._turn(parameter, group, overlap, side)
            if self.record_angles:
                state["angles"] = subspace.principal_angles(overlap)
        refreshes = int(state.get("refreshes", 0)) + (choice.energy > 0)
        state["refreshes"], state["age"] = torch.tensor(refreshes), torch.tensor(0)
        for key in ("captured", "reference"):
            state.setdefault(key, torch.zeros((), dtype=torch.float64))
        state["due"] = torch.tensor(0)  # there at all times: checkpoints know the keys before

    def _forget_moments(self, parameter: Tensor) -> None:
        """Drop the moments of a parameter."""
        state = self.state[parameter]
        for key in [one for one in state if one.startswith(("exp_avg", "moment_step", "inner."))]:
            del state[key]

    @staticmethod
    def _overlap(new: Tensor, old: Tensor, gradient: GradientMatrix, side: Side) -> Tensor:
        product = new.float().mT @ old.float()
        return gradient.sum_of_rows(product) if side == "left" else product

    def _gradient(self, parameter: Tensor) -> GradientMatrix:
        grad = parameter.grad
        assert grad is not None
        shard = row_shard(parameter)
        if shard is not None:
            mesh, dimension = shard
            group = mesh.get_group(dimension)
            chunk = -(-parameter.shape[0] // mesh.size(dimension))
            first = min(chunk * mesh.get_local_rank(dimension), parameter.shape[0])
            return GradientMatrix(local(grad), "rows", group, first, parameter.shape[0])
        if self._group_of_processes is not None:
            return GradientMatrix(grad, "mean", self._group_of_processes)
        return GradientMatrix(grad)

    def _basis(self, parameter: Tensor) -> Tensor:
        """Return this process's part of the basis."""
        state = self.state[parameter]
        basis = local(state["basis"])
        if "basis_scale" not in state:
            return basis
        return blockwise.Blocks(basis, local(state["basis_scale"])).decode("linear")

    def _store_basis(
        self, parameter: Tensor, group: dict[str, Any], basis: Tensor, side: Side
    ) -> None:
        state = self.state[parameter]
        basis = basis.contiguous()  # as a file gives it back: products round by the layout
        rows = parameter if side == "left" else None
        if group["projector_bits"] == 8:
            blocks = blockwise.encode(basis, "linear")
            state["basis"] = placed(blocks.codes, rows)
            state["basis_scale"] = placed(blocks.scales, rows)
        else:
            kind = group["state_dtype"] or parameter.dtype
            state["basis"] = placed(basis.to(kind), rows)

    def _side(self, parameter: Tensor, group: Mapping[str, Any]) -> Side:
        rows, columns = parameter.shape
        size = parameter.element_size()
        return subspace.choose_side(
            group["side"],
            (rows, columns),
            moment_bytes=2 * (1 if group["bits"] == 8 else size),
            projector_bytes=1 if group["projector_bits"] == 8 else size,
        )

    def _loaded(self, parameter: Tensor, key: str, value: Any) -> Any:
        """Return a loaded value, distributed as the parameter is where it was saved whole."""
        shard = row_shard(parameter)
        if shard is None or not isinstance(value, Tensor) or value is not local(value):
            return value
        group = self._group(parameter)
        left = selection.is_projected(parameter, group) and self._side(parameter, group) == "left"
        of_rows = key.startswith("basis") if left else key.startswith("exp_avg")
        if not of_rows:
            return value
        mesh, dimension = shard
        chunk = -(-parameter.shape[0] // mesh.size(dimension))
        own = value[chunk * mesh.get_local_rank(dimension) :][:chunk]
        return placed(own, parameter)

    def _check_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        if not state:
            return
        group = self._group(parameter)
        if ("basis" in state) != selection.is_projected(parameter, group):
            kind = "projected" if "basis" in state else "not projected"
            raise JomaError(f"the state has {self._name(parameter)} {kind}; the optimizer differs")
        if "basis" not in state:
            return
        side = self._side(parameter, group)
        length, rank = state["basis"].shape
        wanted = length if isinstance(group["rank"], float) else group["rank"]
        if length != parameter.shape[side == "right"] or (
            not isinstance(group["rank"], float) and rank != wanted
        ):
            raise JomaError(
                f"the state has a basis of {length} × {rank} for {self._name(parameter)}, the "
                f"optimizer one of {parameter.shape[side == 'right']} × {wanted} ({side})"
            )

    def _group(self, parameter: Tensor) -> dict[str, Any]:
        return self.param_groups[self._numbers[parameter][1]]

    def _names(self, group: dict[str, Any]) -> list[str]:
        numbers = [f"parameter {self._numbers[one][0]}" for one in group["params"]]
        return list(group.get("param_names", numbers))

    def _name(self, parameter: Tensor) -> str:
        group = self._group(parameter)
        found = zip(self._names(group), group["params"], strict=True)
        return next(name for name, one in found if one is parameter)


def _numbers(tensors: Sequence[Tensor]) -> list[Any]:
    """Return numbers that were computed on devices, which are waited for once."""
    if not tensors:
        return []
    return torch.stack([one.to(tensors[0].device) for one in tensors]).tolist()
