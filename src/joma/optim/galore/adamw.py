"""AdamW in the subspace of the gradients (Zhao et al., 2024)."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from joma.common.sharded import local
from joma.kernels.choice import has_kernels
from joma.optim.galore import layout, selection
from joma.optim.galore._base import ProjectedOptimizer, is_accumulating
from joma.optim.galore.processes import placed
from joma.optim.galore.subspace import GradientMatrix, Side
from joma.optim.moments import (
    SMALL,
    adam_change,
    adamw_step,
    make_moments,
    read_moments,
    store_moments,
)

MOMENTS = ("keep", "rotate", "project", "align", "reset")


class GaLoreAdamW(ProjectedOptimizer):
    """AdamW whose moments live in a low-rank subspace of each matrix's gradient.

    With the projected gradient R = PᵀG or GP a matrix W moves by Adam in the space of R,

        W ← (1 − ηλ) (W − η · scale · P m̂ / (√v̂ + ε)),

    where P holds the leading singular directions of a recent gradient. Other parameters
    (embeddings, output layers, biases, gains of norms) move as under `torch.optim.AdamW`.

    Args:
        parameters: A model: its linear layers are projected, without the output layer and tied
            weights. Or parameters, with names or without, or parameter groups as torch has them: if
            some have a "rank", those are projected, else all matrices but embeddings, the output
            layer and tied weights, as far as names or a model in memory tell them.
        lr: Learning rate η.
        rank: Rank r, or a share of the gradient's energy ‖G‖² as a number below 1, from which each
            matrix's rank follows at its first gradient. A matrix whose shorter side is not longer
            than the rank is not projected.
        gap: Steps between two choices of the subspace.
        refresh: "gap" chooses it every `gap` steps. "energy" measures the share of ‖G‖² that it
            captures ten times in a gap and chooses it again once that has fallen to 90% of what it
            was after the last choice, and after ten gaps at the latest: often early in a training
            and rarely late.
        scale: Factor of the update of projected matrices, α in the paper.
        projection: "power" is one block power iteration from the old basis, "svd" the singular
            value decomposition.
        side: "short", "left", "right", or "smallest" for the least memory.
        betas: Decay of the first and of the second moment.
        eps: ε.
        weight_decay: λ.
        moments: What becomes of the moments when the basis turns by Q = P'ᵀP: "keep" leaves them,
            "project" takes m to Qm, "rotate" also v to (Q∘Q)v, "align" keeps them and turns the new
            basis as close to the old one as it gets, "reset" sets them to zero.
        bits: 8 stores moments in eight bits, those of the other large parameters too.
        projector_bits: 8 stores bases in eight bits.
        state_dtype: Type of moments and bases that are not in eight bits; that of the parameter
            unless given.
        stagger: Whether matrices choose their subspaces at different steps.
        per_layer: Whether each parameter moves as soon as its gradient is there, and the gradient
            is dropped. `step` remains to be called. See `accumulate` for several backward passes.
        clip_norm: Largest norm of the gradient, projected where it is. "global" with `per_layer`
            keeps the projected gradients until `step`.
        clip: "global" for the norm of all gradients together, "matrix" for each by itself.
        groups: Settings by regular expression, as in `[{"match": "mlp", "rank": 256}]`; the first
            that matches a parameter's name decides.
        seed: Chooses the random numbers.
        verbose: Whether to say on standard error how many matrices are projected.

    Raises:
        JomaError: Nothing is projected, or a setting is out of range.
    """

    moment_choices = MOMENTS

    def __init__(
        self,
        parameters: selection.Parameters,
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
        defaults = {
            "lr": lr,
            "rank": rank,
            "gap": gap,
            "refresh": refresh,
            "scale": scale,
            "projection": projection,
            "side": side,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "moments": moments,
            "bits": bits,
            "projector_bits": projector_bits,
            "state_dtype": state_dtype,
            "stagger": stagger,
        }
        self._prepared: list[Any] = []
        self._workspace: dict[Any, Any] = {}
        super().__init__(
            parameters,
            defaults,
            groups=groups,
            per_layer=per_layer,
            clip_norm=clip_norm,
            clip=clip,
            seed=seed,
            verbose=verbose,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepared, self._workspace = [], {}

    def _prepare(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        """Take a matrix whose step the kernels of the GPU make: projection to weights in one go."""
        gradient, state = parameter.grad, self.state[parameter]
        if (
            gradient is None
            or not has_kernels(gradient.device)
            or self.clip_norm is not None
            or self._group_of_processes is not None
            or not (gradient.is_contiguous() and parameter.is_contiguous())
            or not (gradient.dtype == parameter.dtype == torch.bfloat16)
            or parameter is not local(parameter)
            or is_accumulating(state)
            or group["projector_bits"] is not None
            or group["state_dtype"] not in (None, torch.bfloat16)
            or not selection.is_projected(parameter, group)
        ):
            return False
        side, basis = self._side(parameter, group), state["basis"]
        (rows, columns), rank = parameter.shape, basis.shape[1]
        is_aligned = gradient.data_ptr() % 16 == 0 or columns % layout.ALIGNED
        if (
            basis.dtype != torch.bfloat16
            or not basis.is_contiguous()
            or rank % layout.ALIGNED
            or not is_aligned
            or parameter.numel() >= layout.MOST_NUMBERS
            or int(state.get("null_directions", 0))
        ):
            return False
        from joma.optim.galore import _step_kernels as kernels

        like = gradient[:1, :1].expand((rank, columns) if side == "left" else (rows, rank))
        make_moments(state, like, self._storage(parameter, group)["dtype"])
        if state["exp_avg"].dtype not in (torch.bfloat16, torch.uint8):
            return False  # loaded from a state in float32
        if self.record_energy:
            self._record_energy(parameter, GradientMatrix(gradient), side)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = kernels.aligned_rows(state[key])
        self._count(state)
        state["moment_step"] = state["moment_step"] + 1
        steps, (one, two) = int(state["moment_step"]), group["betas"]
        scales = None
        if "exp_avg_scale" in state:
            scales = state["exp_avg_scale"], state["exp_avg_sq_scale"]
        numbers = (
            -group["lr"] / (1 - one**steps),
            1 / (1 - two**steps) ** 0.5,
            group["eps"],
            1 - group["lr"] * group["weight_decay"],
            one,
            two,
            group["scale"],
            *kernels.seed_numbers(self._storage(parameter, group)["seed"]),
        )
        moments = state["exp_avg"], state["exp_avg_sq"]
        self._prepared.append(
            kernels.Work(parameter, gradient, basis, *moments, scales, side, numbers)
        )
        return True

    def _check_step(self) -> None:
        super()._check_step()
        self._prepared.clear()  # of a step that an error ended

    def _move_prepared(self) -> None:
        if not self._prepared:
            return
        from joma.optim.galore import _step_kernels as kernels

        prepared, self._prepared = self._prepared, []
        kinds: dict[Any, list[Any]] = {}
        for work in prepared:
            kinds.setdefault((work.first.dtype, work.weights.device), []).append(work)
        for same in kinds.values():
            kernels.step(same, self._workspace)

    def _change(
        self, parameter: Tensor, group: dict[str, Any], gradient: Tensor, side: Side | None
    ) -> Tensor:
        storage = self._storage(parameter, group)
        return adam_change(self.state[parameter], gradient, group, **storage)

    def _move_unprojected(self, parameter: Tensor, group: dict[str, Any], gradient: Tensor) -> None:
        storage = self._storage(parameter, group)
        adamw_step(local(parameter), gradient, self.state[parameter], group, **storage)

    def _storage(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return how the moments are stored, as arguments of `store_moments`."""
        in_full = group["bits"] is None or parameter.numel() < SMALL
        step = int(self.state[parameter].get("step", 0))
        number = self._numbers[parameter][0]
        replicated = (
            selection.is_projected(parameter, group) and self._side(parameter, group) == "left"
        )
        return {
            "dtype": (group["state_dtype"] or parameter.dtype) if in_full else None,
            "seed": (self.seed + step) * 1_000_003 + number,
            "place": lambda part: placed(part, None if replicated else parameter),
        }

    def _turn(self, parameter: Tensor, group: dict[str, Any], overlap: Tensor, side: Side) -> None:
        kind, state = group["moments"], self.state[parameter]
        if kind in ("keep", "align") or "exp_avg" not in state:
            return
        first, second = read_moments(state)
        if kind == "reset":
            state["moment_step"] = torch.zeros((), dtype=torch.int64)
            first, second = torch.zeros_like(first), torch.zeros_like(second)
        else:
            first = overlap @ first if side == "left" else first @ overlap.mT
            if kind == "rotate":
                squares = overlap.square()
                second = squares @ second if side == "left" else second @ squares.mT
            second = torch.maximum(second, first.square())  # or the update would be without bound
        store_moments(state, (first, second), **self._storage(parameter, group))
