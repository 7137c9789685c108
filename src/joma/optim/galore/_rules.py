"""AdamW in the subspace of the gradients (Zhao et al., 2024), and any optimizer of torch."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from joma.errors import JomaError
from joma.kernels import galore
from joma.kernels.moments import SMALL, adamw_step, make_moments, read_moments, write_moments
from joma.optim.adamw8bit import AdamW8bit
from joma.optim.galore._optimizer import ProjectedOptimizer
from joma.optim.galore._selection import Parameters
from joma.optim.galore._slot import Slot

_INNER = "inner."
_SIZE_FREE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    AdamW8bit,
)
"""Inner optimizers whose steps, without weight decay, do not depend on where a parameter is."""
_OF_ADAM = {"betas", "eps", "bits", "state_dtype"}
"""Settings of `GaLoreAdamW` that are the inner optimizer's here, if it has them."""
_TURNED = ("momentum_buffer", "exp_avg")
"""Parts of an inner state that are means of gradients, and turn as they do."""


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
    moves_at_once = True

    def _move_at_once(self, slots: Sequence[Slot]) -> None:
        works = []
        for slot in slots:
            if self.record_energy and slot.side is not None:
                self._record_energy(slot)
            slot.count_step()
            gradient = slot.parameter.grad
            assert gradient is not None
            if slot.side is None:
                self._move(slot, gradient)
            else:
                works.append(self._work(slot, gradient))
        galore.step(works)

    def _move(self, slot: Slot, gradient: Tensor) -> None:
        if slot.side is not None:
            galore.move(self._work(slot, gradient), gradient)
            return
        state = self._with_moments(slot, gradient.shape, gradient.device)
        adamw_step(slot.weights, state, gradient, slot.group, self._seed(slot, state))

    def _work(self, slot: Slot, gradient: Tensor) -> galore.Work:
        """Return what a step of a projected matrix needs, given its gradient or the projected."""
        assert slot.side is not None
        weights, basis = slot.weights, slot.basis()
        rank, (rows, columns) = basis.shape[1], weights.shape
        shape = (rank, columns) if slot.side == "left" else (rows, rank)
        state = self._with_moments(slot, shape, weights.device)
        seed = self._seed(slot, state)
        return galore.Work(weights, gradient, basis, slot.side, state, slot.group, seed)

    def _with_moments(
        self, slot: Slot, shape: tuple[int, ...], device: torch.device
    ) -> dict[str, Any]:
        """Return the state of a parameter, which has moments."""
        parameter, group, state = slot.parameter, slot.group, slot.state
        in_full = group["bits"] is None or parameter.numel() < SMALL
        dtype = (group["state_dtype"] or parameter.dtype) if in_full else None
        make_moments(state, shape, device, dtype, slot.place)
        return state

    def _seed(self, slot: Slot, state: dict[str, Any]) -> int:
        """Return what chooses the random numbers of a step's rounding."""
        return (self.seed + int(state.get("step", 0))) * 1_000_003 + slot.number

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
        write_moments(state, (first, second), self._seed(slot, state))


class GaLore(ProjectedOptimizer):
    """Any optimizer in a low-rank subspace of each matrix's gradient.

    Each projected matrix has a stand-in of the shape of its projected gradient. The inner optimizer
    moves the stand-in, and the matrix moves by the same in the subspace:

        GaLore(torch.optim.SGD, model, lr=0.1, rank=64, momentum=0.9)
        GaLore(torch.optim.Adafactor, model, lr=1e-2, rank=64)
        GaLore(joma.optim.AdamW8bit, model, lr=1e-3, rank=64)

    The stand-in of SGD, the Adam family, Adagrad and RMSprop starts each step at zero, and no digit
    of a small step is lost. That of other optimizers starts at the matrix's root mean square, which
    Adafactor's steps are relative to: less than 1e-7 of it is lost in float32. Weight decay is
    decoupled for every inner optimizer.

    Args:
        inner: Class of the inner optimizer.
        parameters: As for `GaLoreAdamW`.
        lr: Learning rate.
        **settings: Settings of `GaLoreAdamW` but for betas, eps, bits and state_dtype, of its
            `moments` not "project"; all others are the inner optimizer's.

    Raises:
        JomaError: Nothing is projected, or a setting is unknown or out of range.
    """

    moment_choices = ("keep", "rotate", "align", "reset")

    def __init__(
        self,
        inner: Callable[..., torch.optim.Optimizer],
        parameters: Parameters,
        lr: float = 1e-3,
        **settings: Any,
    ) -> None:
        theirs = inspect.signature(inner).parameters
        ours = inspect.signature(ProjectedOptimizer).parameters.keys() - _OF_ADAM
        own = {name: settings.pop(name) for name in list(settings) if name in ours}
        for name in settings:
            if name not in theirs:
                raise JomaError(f"{getattr(inner, '__name__', inner)} has no setting {name!r}")
        if "weight_decay" in theirs:
            settings["weight_decay"] = 0.0
        self._make, self._settings = inner, settings
        self._inner: dict[Tensor, tuple[Tensor, torch.optim.Optimizer]] = {}
        super().__init__(parameters, lr, **own)

    def _change(self, slot: Slot, gradient: Tensor) -> Tensor:
        parameter = slot.parameter
        if parameter is not slot.weights:
            raise JomaError(
                "GaLore(inner) takes whole parameters; GaLoreAdamW takes those of FSDP2"
            )
        stand_in, inner = self._stand_in(slot, gradient)
        weights = parameter.float()
        if slot.side is None:
            start = weights.clone()
        elif isinstance(inner, _SIZE_FREE):
            start = torch.zeros_like(stand_in)
        else:
            start = weights.square().mean().sqrt().expand(gradient.shape).clone()
        stand_in.copy_(start)
        stand_in.grad = gradient.float()
        for one in inner.param_groups:
            one["lr"] = slot.group["lr"]
        inner.step()
        stand_in.grad = None
        slot.state.update({_INNER + key: value for key, value in inner.state[stand_in].items()})
        return stand_in.detach() - start

    def _stand_in(self, slot: Slot, gradient: Tensor) -> tuple[Tensor, torch.optim.Optimizer]:
        """Return the stand-in of a parameter and its optimizer, with what the state has of it."""
        if slot.parameter not in self._inner:
            stand_in = torch.nn.Parameter(torch.zeros_like(gradient, dtype=torch.float32))
            inner = self._make([stand_in], lr=slot.group["lr"], **self._settings)
            saved = {
                key.removeprefix(_INNER): value
                for key, value in slot.state.items()
                if key.startswith(_INNER)
            }
            if saved:
                inner.state[stand_in] = saved
            self._inner[slot.parameter] = stand_in, inner
        return self._inner[slot.parameter]

    def _turn(self, slot: Slot, overlap: Tensor) -> None:
        if slot.parameter not in self._inner or slot.group["moments"] in ("keep", "align"):
            return
        if slot.group["moments"] == "reset":
            self._forget_moments(slot)
            return
        stand_in, inner = self._inner[slot.parameter]
        for key in _TURNED:
            mean = inner.state[stand_in].get(key)
            if (
                isinstance(mean, Tensor)
                and mean.shape == stand_in.shape
                and mean.is_floating_point()
            ):
                mean.copy_(overlap @ mean if slot.side == "left" else mean @ overlap.mT)

    def _forget_moments(self, slot: Slot) -> None:
        for key in [key for key in slot.state if key.startswith(_INNER)]:
            del slot.state[key]
        self._inner.pop(slot.parameter, None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Return to a state that `state_dict` gave."""
        super().load_state_dict(state_dict)
        self._inner.clear()
