"""AdamW in the subspace of the gradients (Zhao et al., 2024)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from joma.common.sharded import local
from joma.kernels import galore
from joma.kernels.moments import SMALL, adamw_step, make_moments, read_moments, write_moments
from joma.optim.galore._optimizer import ProjectedOptimizer
from joma.optim.galore._slot import Slot


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

    moment_choices = ("keep", "rotate", "project", "align", "reset")
    moves_together = True

    def _move_together(self, slots: Sequence[Slot]) -> None:
        works = []
        for slot in slots:
            self._record_energy(slot)
            slot.count_step()
            assert slot.parameter.grad is not None
            works.append(self._work(slot, slot.parameter.grad))
        galore.step(works)

    def _move(self, slot: Slot, gradient: Tensor) -> None:
        if slot.side is None:
            self._make_moments(slot, gradient.shape)
            adamw_step(local(slot.parameter), slot.state, gradient, slot.group, self._seed(slot))
        else:
            galore.move(self._work(slot, gradient), gradient)

    def _work(self, slot: Slot, gradient: Tensor) -> galore.Work:
        """Return what a step of a projected matrix needs, given its gradient or the projected."""
        assert slot.side is not None
        weights, basis = local(slot.parameter), slot.basis()
        rank, (rows, columns) = basis.shape[1], weights.shape
        self._make_moments(slot, (rank, columns) if slot.side == "left" else (rows, rank))
        seed = self._seed(slot)
        return galore.Work(weights, gradient, basis, slot.side, slot.state, slot.group, seed)

    def _make_moments(self, slot: Slot, shape: tuple[int, ...]) -> None:
        parameter, group = slot.parameter, slot.group
        in_full = group["bits"] is None or parameter.numel() < SMALL
        dtype = (group["state_dtype"] or parameter.dtype) if in_full else None
        make_moments(slot.state, shape, local(parameter).device, dtype, slot.place)

    def _seed(self, slot: Slot) -> int:
        """Return what chooses the random numbers of a step's rounding."""
        return (self.seed + int(slot.state.get("step", 0))) * 1_000_003 + slot.number

    def _turn(self, slot: Slot, overlap: Tensor) -> None:
        kind, state = slot.group["moments"], slot.state
        if kind in ("keep", "align") or "exp_avg" not in state:
            return
        first, second = read_moments(state)
        if kind == "reset":
            state["moment_step"] = torch.zeros((), dtype=torch.int64)
            first, second = torch.zeros_like(first), torch.zeros_like(second)
        else:
            left = slot.side == "left"
            first = overlap @ first if left else first @ overlap.mT
            if kind == "rotate":
                squares = overlap.square()
                second = squares @ second if left else second @ squares.mT
            second = torch.maximum(second, first.square())  # or the update would be without bound
        write_moments(state, (first, second), self._seed(slot))
