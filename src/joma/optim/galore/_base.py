"""What all of GaLore's optimizers share: projection, refresh, accumulation, clipping, state."""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from joma.common.checks import check_one_of, whole_number
from joma.errors import JomaError
from joma.optim import blockwise
from joma.optim.galore import selection, subspace
from joma.optim.galore.processes import placed, row_shard, take_over_synchronisation
from joma.optim.galore.subspace import GradientMatrix, Side
from joma.optim.moments import TypedStateOptimizer, check_betas, local

_PARTIAL = "grad_of_step"
"""Key of the accumulated gradient of the step under way, in the state of a parameter."""
REFRESHES = ("gap", "energy")
NOTHING = 1e-10
"""Energy along a direction, over that along the strongest one, below which it is rounding: products
in float32 have relative errors of about 1e-6, whose square is 1e-12."""
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
    """A matrix whose subspace is to be chosen from its gradient."""

    parameter: Tensor
    group: dict[str, Any]
    gradient: GradientMatrix
    side: Side


class ProjectedOptimizer(TypedStateOptimizer):
    """An optimizer that moves matrices in a subspace of their gradients.

    Subclasses say how a parameter moves: `_move`, and what happens to their state when a basis
    changes: `_turn`.

    Args:
        parameters: As `selection.parameter_groups` describes.
        defaults: All settings of a group by name.
        groups: Settings by regular expression.
        per_layer: Whether parameters move during the backward pass.
        clip_norm: Largest norm of the gradient.
        clip: Of which gradient: "global" or "matrix".
        seed: Chooses the random start of the power iteration.
        verbose: Whether to say how many matrices are projected.

    Attributes:
        record_energy: Whether steps record the share of each gradient's energy in its subspace,
            that of the process's own gradient under DistributedDataParallel.
        record_angles: Whether refreshes record the principal angles to the subspace before.
    """

    moment_choices: Sequence[str] = ("keep",)

    def __init__(
        self,
        parameters: selection.Parameters,
        defaults: dict[str, Any],
        *,
        groups: Sequence[Mapping[str, Any]],
        per_layer: bool,
        clip_norm: float | None,
        clip: Literal["global", "matrix"],
        seed: int,
        verbose: bool,
    ) -> None:
        check_one_of("clip", clip, ("global", "matrix"))
        if clip_norm is not None and not clip_norm > 0:
            raise JomaError(f"clip_norm must be positive, got {clip_norm}")
        self.per_layer, self.clip_norm, self.clip, self.seed = per_layer, clip_norm, clip, seed
        self._group_of_processes = take_over_synchronisation(parameters)
        self._last, self._moved, self._hooks = True, set[Tensor](), list[Any]()
        self._numbers: dict[Tensor, tuple[int, int]] = {}
        self._all_chosen, self._places = False, dict[Tensor, int]()
        self.record_energy = self.record_angles = False
        self._energies: dict[Tensor, tuple[Tensor, Tensor]] = {}
        super().__init__(selection.parameter_groups(parameters, groups, defaults), defaults)
        if verbose and not (dist.is_initialized() and dist.get_rank()):
            print(self.summary(), file=sys.stderr)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; they are projected where the group has a rank."""
        if self.param_groups and "rank" not in param_group:
            param_group = {**param_group, "rank": None}
        if self.param_groups and "param_names" in self.param_groups[0]:
            param_group = {**param_group, "params": self._named(param_group["params"])}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check_group(group, self.moment_choices)
        self._places.clear()
        for parameter in group["params"]:
            self._numbers[parameter] = len(self._numbers), len(self.param_groups) - 1
            if self.per_layer and parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(_weakly(self._arrived))
                self._hooks.append(hook)

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

    def summary(self) -> str:
        """Return one sentence: how many matrices are projected, and how many parameters are not."""
        projected = self.projected
        inside = sum(one.shape[0] * one.shape[1] for one in projected)
        entries = [one for group in self.param_groups for one in group["params"]]
        everything = sum(one.numel() for one in entries)
        ranks = sorted({str(one.rank or "by energy") for one in projected})
        return (
            f"GaLore projects {len(projected)} matrices with {inside / everything:.0%} of the "
            f"{everything:,} parameters (rank {', '.join(ranks)}); "
            f"{len(entries) - len(projected)} parameters are not projected"
        )

    @contextlib.contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Run a backward pass as one of several of an optimizer step.

        With `per_layer` the gradients of all passes are projected and added, and parameters move in
        the last one. Without, gradients add up in `.grad`, and this changes nothing.

        Args:
            last: Whether this is the last backward pass of the step.
        """
        before, self._last = self._last, last
        try:
            yield
        finally:
            self._last = before

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move every parameter that has a gradient; with `per_layer` most have moved already.

        Args:
            closure: Computes the loss and its gradients again.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._group_of_processes is not None and not self.per_layer:
            self._add_missing_gradients()
        self._refresh_together()
        together = self.clip_norm is not None and self.clip == "global"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and self._prepare(parameter, group):
                    continue
                if parameter.grad is not None:
                    self._collect(parameter, group)
                if not together and _PARTIAL in self.state.get(parameter, {}):
                    self._update(parameter, group)
        if together:
            self._update_together()
        self._move_prepared()
        self._moved.clear()
        self._all_chosen = False
        if not self.record_energy:
            self._energies.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and what was accumulated for the step under way."""
        super().zero_grad(set_to_none)
        for state in self.state.values():
            state.pop(_PARTIAL, None)
        self._moved.clear()

    @torch.no_grad()
    def _arrived(self, parameter: Tensor) -> None:
        """Take a gradient as soon as it is there, and drop it."""
        if parameter.grad is None:
            return  # another optimizer took it
        group = self._group(parameter)
        if parameter in self._moved:
            raise JomaError(
                "a second backward pass arrived before step(): with per_layer every pass moves the "
                "parameters; run those of one step in `with optimizer.accumulate(last=...)`"
            )
        if self._last and self._prepare(parameter, group):
            self._move_prepared()
            parameter.grad = None
            self._moved.add(parameter)
            return
        self._collect(parameter, group)
        parameter.grad = None
        if self._last and not (self.clip_norm is not None and self.clip == "global"):
            self._update(parameter, group)
            self._moved.add(parameter)

    def _add_missing_gradients(self) -> None:
        """Set gradients to zero that other processes have: all of them reduce the same ones."""
        parameters = [one for group in self.param_groups for one in group["params"]]
        present = torch.tensor(
            [float(one.grad is not None) for one in parameters], device=parameters[0].device
        )
        dist.all_reduce(present, op=dist.ReduceOp.MAX, group=self._group_of_processes)
        for parameter, somewhere in zip(parameters, present.tolist(), strict=True):
            if somewhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _prepare(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        """Return whether a parameter will be moved by `_move_prepared`, together with others."""
        return False

    def _move_prepared(self) -> None:
        """Move what was prepared."""

    def _collect(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Add a parameter's gradient, projected if it is, to the gradient of the step."""
        if parameter.grad is None:
            return
        if parameter.grad.is_sparse:
            raise JomaError("GaLore needs dense gradients; build embeddings with sparse=False")
        state = self.state[parameter]
        gradient = self._gradient(parameter)
        if not selection.is_projected(parameter, group):
            taken = gradient.mean(gradient.matrix)
        else:
            side = self._side(parameter, group)
            if _PARTIAL not in state:
                self._refresh_if_due(parameter, group, gradient, side)
            taken = gradient.project(self._basis(parameter, group), side)
            if self.record_energy:
                self._record_energy(parameter, group, gradient, side, taken)
        state[_PARTIAL] = state[_PARTIAL] + taken if _PARTIAL in state else taken

    def _record_energy(
        self,
        parameter: Tensor,
        group: dict[str, Any],
        gradient: GradientMatrix,
        side: Side,
        taken: Tensor | None = None,
    ) -> None:
        """Add to the energies of the step: that of a gradient, and that of it in the subspace."""
        if gradient.share == "mean":  # other processes may record nothing: wait for none of them
            gradient, taken = GradientMatrix(gradient.matrix), None
        if taken is None:
            taken = gradient.project(self._basis(parameter, group), side)
        inside = subspace.square_sum(taken)
        if side == "right":
            inside = gradient.sum_of_rows(inside)
        everything = gradient.energy()
        if _PARTIAL in self.state[parameter] and parameter in self._energies:
            before = self._energies[parameter]
            inside, everything = before[0] + inside, before[1] + everything
        self._energies[parameter] = inside, everything

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

    def _update_together(self) -> None:
        """Move all parameters after the norm of the whole gradient is known."""
        waiting = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if _PARTIAL in self.state.get(parameter, {})
        ]
        if not waiting:
            return
        squares = [self._square_sum(parameter, group) for parameter, group in waiting]
        norm = torch.stack([one.to(squares[0].device) for one in squares]).sum().sqrt()
        scale = (self.clip_norm or 1.0) / (norm + 1e-6)
        for parameter, group in waiting:
            gradient = self.state[parameter][_PARTIAL]
            factor = scale.clamp(max=1.0).to(gradient.device, gradient.dtype)
            self.state[parameter][_PARTIAL] = gradient * factor
            self._update(parameter, group, clip=False)

    def _square_sum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return ‖·‖² of the gradient of the step, projected where it is."""
        square = subspace.square_sum(self.state[parameter][_PARTIAL])
        shard = row_shard(parameter)
        replicated = (
            selection.is_projected(parameter, group) and self._side(parameter, group) == "left"
        )
        if shard is not None and not replicated:
            mesh, dimension = shard
            dist.all_reduce(square, group=mesh.get_group(dimension))
        return square

    def _update(self, parameter: Tensor, group: dict[str, Any], *, clip: bool = True) -> None:
        """Move one parameter by the gradient of the step."""
        state = self.state[parameter]
        if clip and self.clip_norm is not None:
            norm = self._square_sum(parameter, group).sqrt()
            state[_PARTIAL] = state[_PARTIAL] * (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        gradient = state.pop(_PARTIAL)
        self._count(state)
        weights = local(parameter)
        kept = 1 - group["lr"] * group["weight_decay"]
        if selection.is_projected(parameter, group):
            # The weights decay after the step, as in the code of the paper.
            side, basis = self._side(parameter, group), self._basis(parameter, group)
            gradient = self._without_rounding(parameter, gradient, side)
            change = self._change(parameter, group, gradient, side)
            left, right = (basis, change) if side == "left" else (change, basis.mT)
            left, right = left.to(weights.dtype), right.to(weights.dtype)
            weights.addmm_(left, right, beta=kept, alpha=kept * group["scale"])
        else:
            self._move_unprojected(parameter, group, gradient)

    def _without_rounding(self, parameter: Tensor, projected: Tensor, side: Side) -> Tensor:
        """Return R with zeros along directions in which it is only a rounding error.

        A gradient of a lower rank than that of the basis leaves such directions. Adam would divide
        the error by itself, and move the weights by it as far as along the others.
        """
        squares = projected.double().square().sum(1 if side == "left" else 0)
        shard = row_shard(parameter)
        if shard is not None and side == "right":
            dist.all_reduce(squares, group=shard[0].get_group(shard[1]))
        kept = (squares > NOTHING * squares.max()).to(projected.dtype)
        return projected * (kept[:, None] if side == "left" else kept)

    def _move_unprojected(self, parameter: Tensor, group: dict[str, Any], gradient: Tensor) -> None:
        """Move a parameter that is not projected."""
        change = self._change(parameter, group, gradient, None)
        kept, weights = 1 - group["lr"] * group["weight_decay"], local(parameter)
        weights.mul_(kept).add_(change.to(weights.dtype))

    @staticmethod
    def _count(state: dict[str, Any]) -> None:
        """Count a step of a parameter, and one since its subspace was chosen."""
        state["step"] = state.get("step", torch.zeros((), dtype=torch.int64)) + 1
        if "age" in state:
            state["age"] = state["age"] + 1

    def _change(
        self, parameter: Tensor, group: dict[str, Any], gradient: Tensor, side: Side | None
    ) -> Tensor:
        """Return by what to move, in the space of the gradient given; without weight decay."""
        raise NotImplementedError

    def _turn(self, parameter: Tensor, group: dict[str, Any], overlap: Tensor, side: Side) -> None:
        """Change the state as the basis turns.

        Args:
            parameter: The parameter.
            group: Its group.
            overlap: P'ᵀP of the new and the old basis, (r, r).
            side: Side of the basis.
        """
        raise NotImplementedError

    def _refresh_together(self) -> None:
        """Choose all subspaces that are due in this step."""
        choices = [
            _Choice(parameter, group, self._gradient(parameter), self._side(parameter, group))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
            and not parameter.grad.is_sparse
            and selection.is_projected(parameter, group)
            and _PARTIAL not in self.state[parameter]
        ]
        self._refresh([one for one in choices if self._is_due(one)])
        self._all_chosen = True

    def _refresh_if_due(
        self, parameter: Tensor, group: dict[str, Any], gradient: GradientMatrix, side: Side
    ) -> None:
        """Choose the subspace from a gradient, if this is the step to do so."""
        choice = _Choice(parameter, group, gradient, side)
        if not self._all_chosen and self._is_due(choice):
            self._refresh([choice])

    def _is_due(self, choice: _Choice) -> bool:
        """Return whether a subspace is to be chosen again; measures what it captures if need be."""
        state, group = self.state[choice.parameter], choice.group
        if "basis" not in state or not int(state["refreshes"]) or "due" in state:
            return True
        gap, age = group["gap"], int(state["age"])
        offset = self._stagger(choice.parameter, gap) if group["stagger"] else 0
        if group["refresh"] == "gap":
            return (int(state["step"]) + offset) % gap == 0
        if age == 1:
            state["reference"] = state["captured"] = self._captured(choice).cpu()
        elif (age + offset) % max(gap // CHECKS, 1) == 0:
            state["captured"] = self._captured(choice).cpu()
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
        """Return the share of ‖G‖² in the subspace."""
        basis, gradient = self._basis(choice.parameter, choice.group), choice.gradient
        inside = subspace.square_sum(gradient.project(basis, choice.side))
        if choice.side == "right":
            inside = gradient.sum_of_rows(inside)
        energy = gradient.energy()
        return torch.where(energy > 0, inside / energy, 0.0)

    def _refresh(self, choices: Sequence[_Choice]) -> None:
        """Choose subspaces from gradients."""
        energies = _numbers([one.gradient.energy() for one in choices])
        waiting: list[tuple[_Choice, subspace.BasisSearch]] = []
        chosen: list[_Choice] = []
        for choice, energy in zip(choices, energies, strict=True):
            search = self._search(choice, energy)
            if search is None:
                continue
            chosen.append(choice)
            if energy == 0:
                self._adopt(choice, search.old, subspace.random_basis(search))
            elif search.exact:
                self._adopt(choice, search.old, subspace.svd_basis(search))
            else:
                waiting.append((choice, search))
        for some in subspace.batches([search for _, search in waiting]):
            bases = subspace.power_bases([waiting[at][1] for at in some])
            for at, basis in zip(some, bases, strict=True):
                self._adopt(waiting[at][0], waiting[at][1].old, basis)
        captured = _numbers([self._captured(one) for one in chosen])
        for choice, share in zip(chosen, captured, strict=True):
            state = self.state[choice.parameter]
            state["captured"] = state["reference"] = torch.tensor(share, dtype=torch.float64)

    def _search(self, choice: _Choice, energy: float) -> subspace.BasisSearch | None:
        """Return how to search for a basis; None where the old one stays for this step."""
        state, group = self.state[choice.parameter], choice.group
        old = self._basis(choice.parameter, group) if "basis" in state else None
        if not 0 < energy < float("inf"):
            if old is not None:
                state["due"] = torch.tensor(1)  # the next gradient that is finite and not 0 decides
                return None
            if energy != 0:
                raise JomaError(
                    f"the first gradient of {self._name(choice.parameter)} is not finite, so that "
                    "no subspace can be chosen"
                )
        refreshes = int(state.get("refreshes", 0))
        if not refreshes and energy > 0:
            old = None  # chosen at random, while gradients were zero
        rank = group["rank"] if old is None else old.shape[1]
        exact = group["projection"] == "svd"
        if isinstance(rank, float):
            rank, exact = subspace.energy_rank(choice.gradient, rank), True
        device = choice.gradient.matrix.device
        random = torch.Generator(device="cpu" if device.type == "meta" else device)
        number = self._numbers[choice.parameter][0]
        random.manual_seed(((self.seed * 1_000_003 + number) * 1_000_003 + refreshes) % 2**63)
        state["refreshes"] = torch.tensor(refreshes + (energy > 0))
        return subspace.BasisSearch(choice.gradient, choice.side, rank, old, random, exact)

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
            overlap = self._overlap(self._basis(parameter, group), old, choice.gradient, side)
            self._turn(parameter, group, overlap, side)
            if self.record_angles:
                state["angles"] = subspace.principal_angles(overlap)
        state.pop("due", None)
        state["age"] = torch.tensor(0)

    def _forget_moments(self, parameter: Tensor) -> None:
        """Drop the moments of a parameter."""
        state = self.state[parameter]
        for key in [one for one in state if one.startswith(("exp_avg", "moment_step", "inner."))]:
            del state[key]

    @staticmethod
    def _overlap(new: Tensor, old: Tensor, gradient: GradientMatrix, side: Side) -> Tensor:
        product = new.float().mT @ old.float()
        return gradient.sum_of_rows(product) if side == "left" else product

    def _basis(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
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

    def _side(self, parameter: Tensor, group: dict[str, Any]) -> Side:
        rows, columns = parameter.shape
        size = parameter.element_size()
        return subspace.choose_side(
            group["side"],
            (rows, columns),
            moment_bytes=2 * (1 if group["bits"] == 8 else size),
            projector_bytes=1 if group["projector_bits"] == 8 else size,
        )

    def _named(self, parameters: Any) -> list[Any]:
        """Return pairs of names and parameters; torch wants names for all or for none."""
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return [
            one if isinstance(one, tuple) else (f"parameter {len(self._numbers) + at}", one)
            for at, one in enumerate(several)
        ]

    def _group(self, parameter: Tensor) -> dict[str, Any]:
        return self.param_groups[self._numbers[parameter][1]]

    def _names(self, group: dict[str, Any]) -> list[str]:
        numbers = [f"parameter {self._numbers[one][0]}" for one in group["params"]]
        return list(group.get("param_names", numbers))

    def _name(self, parameter: Tensor) -> str:
        group = self._group(parameter)
        found = zip(self._names(group), group["params"], strict=True)
        return next(name for name, one in found if one is parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides how the parameters move next.

        Raises:
            JomaError: A step is under way: gradients were accumulated that step() has not used.
        """
        if any(_PARTIAL in state for state in self.state.values()):
            raise JomaError("the state can be saved after step(), not between its backward passes")
        return super().state_dict()

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


def is_accumulating(state: Mapping[str, Any]) -> bool:
    """Return whether a parameter has gradients of a step that is not complete."""
    return _PARTIAL in state


def _numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Return numbers that were computed on devices, which are waited for once."""
    if not tensors:
        return []
    return torch.stack([one.to(tensors[0].device) for one in tensors]).tolist()


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a hook that does not keep the optimizer alive, and does nothing once it is gone."""
    reference = weakref.WeakMethod(method)

    def arrived(parameter: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(parameter)

    return arrived


def _check_group(group: dict[str, Any], moment_choices: Sequence[str]) -> None:
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
