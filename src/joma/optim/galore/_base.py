"""What all of GaLore's optimizers share: accumulation, clipping, steps, copies, loaded states."""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from joma.common.checks import check_one_of
from joma.common.sharded import local
from joma.errors import JomaError
from joma.optim.galore import selection, settings, subspace
from joma.optim.galore._subspaces import NOTHING, PARTIAL, SubspaceOptimizer
from joma.optim.galore.processes import row_shard, take_over_synchronisation
from joma.optim.galore.subspace import GradientMatrix, Side

_COPIED = (
    "per_layer",
    "clip_norm",
    "clip",
    "seed",
    "record_energy",
    "record_angles",
    "_last",
    "_moved",
    "_numbers",
    "_fixed",
    "_energies",
)
"""Attributes that a copy of an optimizer shares with it, next to those of torch's optimizers."""


class ProjectedOptimizer(SubspaceOptimizer):
    """An optimizer that moves matrices in a subspace of their gradients.

    Subclasses say by how much a parameter moves: `_change`, and what becomes of their state when a
    basis changes: `_turn`.

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
        self._fixed: list[tuple[Any, ...]] = []
        self._places: dict[Tensor, int] = {}
        self.record_energy = self.record_angles = False
        self._energies: dict[Tensor, tuple[Tensor, Tensor]] = {}
        super().__init__(selection.parameter_groups(parameters, groups, defaults), defaults)
        connected = dist.is_available() and dist.is_initialized()
        if verbose and not (connected and dist.get_rank()):
            print(self.summary(), file=sys.stderr)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; they are projected where the group has a rank."""
        if self.param_groups and "rank" not in param_group:
            param_group = {**param_group, "rank": None}
        if self.param_groups and "param_names" in self.param_groups[0]:
            param_group = {**param_group, "params": self._named(param_group["params"])}
        settings.check_group({**self.defaults, **param_group}, self.moment_choices)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._fixed.append(settings.fixed_settings(group))
        self._places.clear()
        for parameter in group["params"]:
            self._numbers[parameter] = len(self._numbers), len(self.param_groups) - 1
            self._add_hook(parameter)

    def _add_hook(self, parameter: Tensor) -> None:
        """Ask for a parameter's gradient as soon as it is there, if parameters move then."""
        if self.per_layer and parameter.requires_grad:
            hook = parameter.register_post_accumulate_grad_hook(_weakly(self._arrived))
            self._hooks.append(hook)

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
        self._check_step()
        self._refresh_due([one for group in self.param_groups for one in group["params"]])
        together = self.clip_norm is not None and self.clip == "global"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and self._prepare(parameter, group):
                    continue
                if parameter.grad is not None:
                    self._collect(parameter, group)
                if not together and PARTIAL in self.state.get(parameter, {}):
                    self._update(parameter, group)
        if together:
            self._update_together()
        self._move_prepared()
        self._moved.clear()
        if not self.record_energy:
            self._energies.clear()
        return loss

    def _check_step(self) -> None:
        """Raise JomaError for what a step cannot use, before it changes anything."""
        for group, before in zip(self.param_groups, self._fixed, strict=True):
            settings.check_unchanged(group, before)
            for parameter in group["params"]:
                _check_dense(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and what was accumulated for the step under way."""
        super().zero_grad(set_to_none)
        for state in self.state.values():
            state.pop(PARTIAL, None)
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
        settings.check_unchanged(group, self._fixed[self._numbers[parameter][1]])
        _check_dense(parameter)
        self._refresh_due([parameter])
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
        state = self.state[parameter]
        gradient = self._gradient(parameter)
        if not selection.is_projected(parameter, group):
            taken = gradient.mean(gradient.matrix)
        else:
            side = self._side(parameter, group)
            taken = gradient.project(self._basis(parameter), side)
            if self.record_energy:
                self._record_energy(parameter, gradient, side, taken)
        state[PARTIAL] = state[PARTIAL] + taken if PARTIAL in state else taken

    def _record_energy(
        self,
        parameter: Tensor,
        gradient: GradientMatrix,
        side: Side,
        taken: Tensor | None = None,
    ) -> None:
        """Add to the energies of the step: that of a gradient, and that of it in the subspace."""
        if gradient.share == "mean":  # other processes may record nothing: wait for none of them
            gradient, taken = GradientMatrix(gradient.matrix), None
        if taken is None:
            taken = gradient.project(self._basis(parameter), side)
        inside = subspace.square_sum(taken)
        if side == "right":
            inside = gradient.sum_of_rows(inside)
        everything = gradient.energy()
        if PARTIAL in self.state[parameter] and parameter in self._energies:
            before = self._energies[parameter]
            inside, everything = before[0] + inside, before[1] + everything
        self._energies[parameter] = inside, everything

    def _update_together(self) -> None:
        """Move all parameters after the norm of the whole gradient is known."""
        waiting = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if PARTIAL in self.state.get(parameter, {})
        ]
        if not waiting:
            return
        squares = [self._square_sum(parameter, group) for parameter, group in waiting]
        norm = torch.stack([one.to(squares[0].device) for one in squares]).sum().sqrt()
        scale = (self.clip_norm or 1.0) / (norm + 1e-6)
        for parameter, group in waiting:
            gradient = self.state[parameter][PARTIAL]
            factor = scale.clamp(max=1.0).to(gradient.device, gradient.dtype)
            self.state[parameter][PARTIAL] = gradient * factor
            self._update(parameter, group, clip=False)

    def _square_sum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return ‖·‖² of the gradient of the step, projected where it is."""
        square = subspace.square_sum(self.state[parameter][PARTIAL])
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
            state[PARTIAL] = state[PARTIAL] * (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        gradient = state.pop(PARTIAL)
        self._count(state)
        weights = local(parameter)
        kept = 1 - group["lr"] * group["weight_decay"]
        if selection.is_projected(parameter, group):
            # The weights decay after the step, as in the code of the paper.
            side, basis = self._side(parameter, group), self._basis(parameter)
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
        squares = subspace.direction_energies(projected, side)
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

    def _named(self, parameters: Any) -> list[Any]:
        """Return pairs of names and parameters; torch wants names for all or for none."""
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return [
            one if isinstance(one, tuple) else (f"parameter {len(self._numbers) + at}", one)
            for at, one in enumerate(several)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides how the parameters move next.

        Raises:
            JomaError: A step is under way: gradients were accumulated that step() has not used.
        """
        if any(PARTIAL in state for state in self.state.values()):
            raise JomaError("the state can be saved after step(), not between its backward passes")
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Return to a state that `state_dict` gave; its settings replace those of the groups."""
        super().load_state_dict(state_dict)
        self._fixed = [settings.fixed_settings(group) for group in self.param_groups]

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of the optimizer needs, for `copy.deepcopy` and `pickle`.

        Raises:
            JomaError: The optimizer reduces the gradients of a DistributedDataParallel.
        """
        if self._group_of_processes is not None:
            raise JomaError(
                "an optimizer of a DistributedDataParallel cannot be copied or pickled; build one "
                "for the copy of the model and load state_dict() into it"
            )
        return {**super().__getstate__(), **{key: getattr(self, key) for key in _COPIED}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_numbers" not in state:
            return  # called by load_state_dict
        self._group_of_processes, self._places, self._hooks = None, {}, []
        for parameter in self._numbers:
            self._add_hook(parameter)


def is_accumulating(state: Mapping[str, Any]) -> bool:
    """Return whether a parameter has gradients of a step that is not complete."""
    return PARTIAL in state


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a hook that does not keep the optimizer alive, and does nothing once it is gone."""
    reference = weakref.WeakMethod(method)

    def arrived(parameter: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(parameter)

    return arrived


def _check_dense(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise JomaError("GaLore needs dense gradients; build embeddings with sparse=False")
