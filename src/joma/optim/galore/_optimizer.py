"""What GaLore's optimizers share: subspaces, accumulation, clipping, steps, copies, states."""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from joma.common.checks import check_one_of
from joma.errors import JomaError
from joma.kernels.galore import lift, without_rounding
from joma.optim.galore import subspace
from joma.optim.galore._selection import Parameters, parameter_groups
from joma.optim.galore._slot import (
    MOST_ENERGY,
    PARTIAL,
    ProjectedMatrix,
    Slot,
    check_group,
    side_of,
)
from joma.optim.state import TypedStateOptimizer

TOGETHER = 8
"""Matrices that choose their subspaces in one step: each alone would leave a GPU mostly waiting."""


class ProjectedOptimizer(TypedStateOptimizer):
    """An optimizer that moves matrices in a subspace of their gradients.

    Subclasses say how a parameter moves by its gradient, projected where it is: `_change` or
    `_move`; and what becomes of their state when a basis changes: `_turn`.

    Its arguments are those of `GaLoreAdamW`.

    Attributes:
        record_energy: Whether steps record the share of each gradient's energy in its subspace,
            that of the process's own gradient under DistributedDataParallel.
        record_angles: Whether refreshes record the principal angles to the subspace before.
    """

    moment_choices: Sequence[str] = ("keep",)
    moves_at_once: bool = False
    """Whether `_move_at_once` takes parameters that move by their gradient as it is."""

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        *,
        rank: int | float | None = None,
        gap: int = 200,
        refresh: Literal["gap", "energy"] = "gap",
        scale: float = 1.0,
        projection: Literal["power", "svd"] = "power",
        side: Literal["short", "left", "right", "smallest"] = "short",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        moments: Literal["keep", "rotate", "project", "align", "reset"] = "keep",
        bits: Literal[8] | None = None,
        projector_bits: Literal[8] | None = None,
        state_dtype: torch.dtype | None = None,
        stagger: bool = True,
        per_layer: bool = False,
        clip_norm: float | None = None,
        clip: Literal["global", "matrix"] = "global",
        groups: Sequence[Mapping[str, Any]] = (),
        seed: int = 0,
        verbose: bool = True,
    ) -> None:
        check_one_of("clip", clip, ("global", "matrix"))
        if clip_norm is not None and not clip_norm > 0:
            raise JomaError(f"clip_norm must be positive, got {clip_norm}")
        choice = {"rank": rank, "gap": gap, "refresh": refresh, "projection": projection}
        storage = {"side": side, "bits": bits, "projector_bits": projector_bits}
        adam = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "scale": scale}
        more = {"moments": moments, "state_dtype": state_dtype, "stagger": stagger}
        defaults = choice | storage | adam | more
        self.per_layer, self.clip_norm, self.clip, self.seed = per_layer, clip_norm, clip, seed
        self.record_energy = self.record_angles = False
        self._mean_over: Any = None
        if isinstance(parameters, nn.parallel.DistributedDataParallel):
            # It would reduce whole gradients, after the hooks of this optimizer have seen them.
            parameters.require_backward_grad_sync = False
            self._mean_over = parameters.process_group
        self._last = True  # of the backward passes of a step
        self._slots: dict[Tensor, Slot] = {}
        self._moved: set[Tensor] = set()
        self._hooks: dict[Tensor, Any] = {}
        self._energies: dict[Tensor, tuple[Tensor, Tensor]] = {}
        super().__init__(parameter_groups(parameters, groups, defaults), defaults)
        self._decide()
        connected = dist.is_available() and dist.is_initialized()
        if verbose and not (connected and dist.get_rank()):
            print(self.summary(), file=sys.stderr)

    def _decide(self) -> None:
        """Decide about each parameter what its groups say, and ask for its gradient if need be."""
        self._slots = {}
        for group in self.param_groups:
            first = len(self._slots)
            numbers = [f"parameter {first + at}" for at in range(len(group["params"]))]
            names = group.get("param_names", numbers)
            for name, parameter in zip(names, group["params"], strict=True):
                number, side = len(self._slots), side_of(parameter, group)
                made = Slot(parameter, name, number, group, self.state, side, self._mean_over)
                self._slots[parameter] = made
                if self.per_layer and parameter.requires_grad and parameter not in self._hooks:
                    hook = parameter.register_post_accumulate_grad_hook(_weakly(self._arrived))
                    self._hooks[parameter] = hook
        matrices = [slot for slot in self._slots.values() if slot.side is not None]
        for place, slot in enumerate(matrices):
            slot.turn = place // TOGETHER, -(-len(matrices) // TOGETHER)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; they are projected where the group has a rank."""
        if self._slots and "rank" not in param_group:
            param_group = {**param_group, "rank": None}
        check_group({**self.defaults, **param_group}, self.moment_choices)
        super().add_param_group(param_group)
        if self._slots:
            self._decide()

    @property
    def projected(self) -> list[ProjectedMatrix]:
        """The matrices that are projected, with side and rank."""
        return [one for _, one in self.subspaces()]

    def subspaces(self) -> Iterator[tuple[Tensor, ProjectedMatrix]]:
        """Yield the parameters that are projected, each with what `projected` says of it."""
        for parameter, slot in self._slots.items():
            if slot.side is None:
                continue
            state, rank = self.state.get(parameter, {}), slot.group["rank"]
            rank = None if isinstance(rank, float) else rank
            captured = energy = angles = None
            if "basis" in state:
                rank, captured = state["basis"].shape[1], float(state["captured"])
            if "angles" in state:
                angles = tuple(state["angles"].tolist())
            if parameter in self._energies:
                inside, everything = self._energies[parameter]
                energy = float(inside / everything)
            shape, refreshes = (parameter.shape[0], parameter.shape[1]), state.get("refreshes", 0)
            found = rank, captured, int(refreshes), energy, angles
            yield parameter, ProjectedMatrix(slot.name, shape, slot.side, *found)

    def summary(self) -> str:
        """Return one sentence: how many matrices are projected, and how many parameters are not."""
        projected = self.projected
        inside = sum(one.shape[0] * one.shape[1] for one in projected)
        everything = sum(one.numel() for one in self._slots)
        ranks = sorted({str(one.rank or "by energy") for one in projected})
        return (
            f"GaLore projects {len(projected)} matrices with {inside / everything:.0%} of the "
            f"{everything:,} parameters (rank {', '.join(ranks)}); "
            f"{len(self._slots) - len(projected)} parameters are not projected"
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
        if self._mean_over is not None and not self.per_layer:
            self._add_missing_gradients()
        slots = [slot for slot in self._slots.values() if slot.parameter.grad is not None]
        for slot in slots:
            _check_dense(slot)
        self._refresh([slot for slot in slots if slot.is_due()])
        self._move_at_once([slot for slot in slots if self._needs_no_other(slot)])
        for slot in slots:
            if not self._needs_no_other(slot):
                self._collect(slot)
        self._finish_all()
        self._moved.clear()
        if not self.record_energy:
            self._energies.clear()
        return loss

    @torch.no_grad()
    def _arrived(self, parameter: Tensor) -> None:
        """Take a gradient as soon as it is there, and drop it."""
        if parameter.grad is None:
            return  # another optimizer took it
        if parameter in self._moved:
            raise JomaError(
                "a second backward pass arrived before step(): with per_layer every pass moves the "
                "parameters; run those of one step in `with optimizer.accumulate(last=...)`"
            )
        slot = self._slots[parameter]
        _check_dense(slot)
        if slot.is_due():
            self._refresh([slot])
        if self._last and self._needs_no_other(slot):
            self._move_at_once([slot])
        else:
            self._collect(slot)
        parameter.grad = None
        if self._last and not self._waits:
            if PARTIAL in slot.state:
                self._finish(slot)
            self._moved.add(parameter)

    @property
    def _waits(self) -> bool:
        """Whether parameters move when the norm of the whole gradient is known."""
        return self.clip_norm is not None and self.clip == "global"

    def _needs_no_other(self, slot: Slot) -> bool:
        """Return whether a parameter moves by its gradient as it is, and by no other."""
        return (
            self.moves_at_once
            and self.clip_norm is None
            and self._mean_over is None
            and slot.shard is None
            and PARTIAL not in self.state[slot.parameter]
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and what was accumulated for the step under way."""
        super().zero_grad(set_to_none)
        for state in self.state.values():
            state.pop(PARTIAL, None)
        self._moved.clear()

    def _add_missing_gradients(self) -> None:
        """Set gradients to zero that other processes have: all of them reduce the same ones."""
        parameters = list(self._slots)
        present = torch.tensor(
            [float(one.grad is not None) for one in parameters], device=parameters[0].device
        )
        dist.all_reduce(present, op=dist.ReduceOp.MAX, group=self._mean_over)
        for parameter, somewhere in zip(parameters, present.tolist(), strict=True):
            if somewhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _collect(self, slot: Slot) -> None:
        """Add a parameter's gradient, projected if it is, to the gradient of the step."""
        state, gradient = slot.state, slot.gradient()
        if slot.side is None:
            taken = gradient.mean(gradient.matrix)
        else:
            if self.record_energy:
                self._record_energy(slot)
            taken = gradient.project(slot.basis(), slot.side)
        state[PARTIAL] = state[PARTIAL] + taken if PARTIAL in state else taken

    def _record_energy(self, slot: Slot) -> None:
        """Add to the energies of the step: that of a gradient, and that of it in the subspace."""
        gradient = slot.gradient()
        assert slot.side is not None
        if gradient.share == "mean":  # other processes may record nothing: wait for none of them
            gradient = subspace.GradientMatrix(gradient.matrix)
        inside = subspace.square_sum(gradient.project(slot.basis(), slot.side))
        if slot.side == "right":
            inside = gradient.sum_of_rows(inside)
        everything = gradient.energy()
        if PARTIAL in slot.state and slot.parameter in self._energies:
            before = self._energies[slot.parameter]
            inside, everything = before[0] + inside, before[1] + everything
        self._energies[slot.parameter] = inside, everything

    def _finish_all(self) -> None:
        """Move all parameters whose gradients were collected, by the norm of all if need be."""
        collected = [
            slot for slot in self._slots.values() if PARTIAL in self.state.get(slot.parameter, {})
        ]
        norm = None
        if self._waits and collected:
            squares = [self._square_sum(slot) for slot in collected]
            norm = torch.stack([one.to(squares[0].device) for one in squares]).sum().sqrt()
        for slot in collected:
            self._finish(slot, norm)

    def _square_sum(self, slot: Slot) -> Tensor:
        """Return ‖·‖² of the gradient of the step, projected where it is."""
        square = subspace.square_sum(slot.state[PARTIAL])
        if not slot.is_replicated:
            assert slot.shard is not None
            dist.all_reduce(square, group=slot.shard[0])
        return square

    def _finish(self, slot: Slot, norm: Tensor | None = None) -> None:
        """Move a parameter by the gradient of the step, clipped by its own norm or that of all."""
        if self.clip_norm is not None:
            norm = self._square_sum(slot).sqrt() if norm is None else norm
            factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
            gradient = slot.state[PARTIAL]
            slot.state[PARTIAL] = gradient * factor.to(gradient.device, gradient.dtype)
        gradient = slot.state.pop(PARTIAL)
        slot.count_step()
        if slot.side is not None:
            shard = slot.shard[0] if slot.shard is not None and slot.side == "right" else None
            gradient = without_rounding(gradient, slot.side, shard)
        self._move(slot, gradient)

    def _move(self, slot: Slot, gradient: Tensor) -> None:
        """Move a parameter by the gradient of the step, which is projected where it is."""
        weights, group = slot.weights, slot.group
        change = self._change(slot, gradient)
        kept = 1 - group["lr"] * group["weight_decay"]
        if slot.side is None:
            weights.mul_(kept).add_(change.to(weights.dtype))
        else:
            lift(weights, slot.basis(), change, slot.side, kept, group["scale"])

    def _change(self, slot: Slot, gradient: Tensor) -> Tensor:
        """Return by what to move, in the space of the gradient given; without weight decay."""
        raise NotImplementedError

    def _move_at_once(self, slots: Sequence[Slot]) -> None:
        """Move parameters by their gradients as they are."""

    def _turn(self, slot: Slot, overlap: Tensor) -> None:
        """Change the state as the basis turns.

        Args:
            slot: The parameter.
            overlap: P'ᵀP of the new and the old basis, (r, r).
        """
        raise NotImplementedError

    def _forget_moments(self, slot: Slot) -> None:
        """Drop the moments of a parameter whose rank changes."""
        for key in [one for one in slot.state if one.startswith(("exp_avg", "moment_step"))]:
            del slot.state[key]

    def _refresh(self, slots: Sequence[Slot]) -> None:
        """Choose the subspaces of matrices from their gradients."""
        energies = _numbers([slot.gradient().energy() for slot in slots])
        for slot, energy in zip(slots, energies, strict=True):  # before any state changes
            if "basis" not in slot.state and not 0 <= energy < MOST_ENERGY:
                raise JomaError(
                    f"the first gradient of {slot.name} is not finite or has a norm "
                    "above 1e36, so that no subspace can be chosen"
                )
        chosen = []
        for slot, energy in zip(slots, energies, strict=True):
            if "basis" in slot.state and not 0 < energy < MOST_ENERGY:
                slot.state["due"] = torch.tensor(1)  # the next gradient decides that is finite
            else:
                self._choose(slot, is_zero=energy == 0)
                chosen.append(slot)
        captured = _numbers([slot.captured(slot.gradient()) for slot in chosen])
        for slot, (share, without) in zip(chosen, captured, strict=True):
            slot.state["captured"] = torch.tensor(share, dtype=torch.float64)
            slot.state["reference"] = slot.state["captured"]
            slot.state["null_directions"] = torch.tensor(int(without))

    def _choose(self, slot: Slot, *, is_zero: bool) -> None:
        """Choose a subspace from a gradient, and turn the moments from the old one, if any."""
        state, group, gradient = slot.state, slot.group, slot.gradient()
        assert slot.side is not None
        refreshes = int(state.get("refreshes", 0))
        # One that was chosen while gradients were zero is no basis to start from.
        old = slot.basis() if "basis" in state and refreshes else None
        rank = group["rank"] if old is None else old.shape[1]
        kind = "svd" if group["projection"] == "svd" or isinstance(rank, float) else "power"
        if isinstance(rank, float):
            rank = subspace.energy_rank(gradient, rank)
        random = torch.Generator(device=gradient.matrix.device)
        random.manual_seed(((self.seed * 1_000_003 + slot.number) * 1_000_003 + refreshes) % 2**63)
        kind = "random" if is_zero else kind
        basis = subspace.find_basis(gradient, slot.side, rank, old, random, kind)

        def overlap(new: Tensor, old: Tensor) -> Tensor:
            product = new.float().mT @ old.float()
            return gradient.sum_of_rows(product) if slot.side == "left" else product

        if "basis" in state and state["basis"].shape[1] != rank:
            self._forget_moments(slot)
        if group["moments"] == "align" and old is not None:
            basis = basis @ subspace.nearest_rotation(overlap(basis, old))
        slot.store_basis(basis)
        if old is not None:
            turned = overlap(slot.basis(), old)
            self._turn(slot, turned)
            if self.record_angles:
                state["angles"] = subspace.principal_angles(turned)
        state["refreshes"], state["age"] = torch.tensor(refreshes + (not is_zero)), torch.tensor(0)
        for key in ("captured", "reference"):
            state.setdefault(key, torch.zeros((), dtype=torch.float64))
        state["due"] = torch.tensor(0)  # there at all times: checkpoints know the keys before

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides how the parameters move next.

        Raises:
            JomaError: A step is under way: gradients were accumulated that step() has not used.
        """
        if any(PARTIAL in state for state in self.state.values()):
            raise JomaError("the state can be saved after step(), not between its backward passes")
        return super().state_dict()

    def _loaded(self, parameter: Tensor, key: str, value: Any) -> Any:
        return self._slots[parameter].loaded(key, value)

    def _check_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        self._slots[parameter].check(state)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies: hooks and states of other optimizers would stay those of this one.

        Raises:
            JomaError: Always.
        """
        raise JomaError(
            "an optimizer of GaLore cannot be copied or pickled; build one for the copy of the "
            "model and load state_dict() into it"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._decide()


def _check_dense(slot: Slot) -> None:
    gradient = slot.parameter.grad
    if gradient is not None and gradient.is_sparse:
        raise JomaError("GaLore needs dense gradients; build embeddings with sparse=False")


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a hook that does not keep the optimizer alive, and does nothing once it is gone."""
    reference = weakref.WeakMethod(method)

    def arrived(parameter: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(parameter)

    return arrived


def _numbers(tensors: Sequence[Tensor]) -> list[Any]:
    """Return numbers that were computed on devices, which are waited for once."""
    if not tensors:
        return []
    return torch.stack([one.to(tensors[0].device) for one in tensors]).tolist()
