"""Adam over a stack of networks, each member with its own learning rate and weight decay."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.optim._adam_settings import Settings, per_member
from joma.optim.lazy_rows import LazyRows


class StackedAdam:
    """Adam (Kingma and Ba, 2015) with coupled (L2) weight decay, for parameters (E, ...).

    Member e moves exactly as under `torch.optim.Adam(lr=learning_rates[e],
    weight_decay=weight_decays[e])`: every operation is elementwise. The step counter lives on the
    parameters' device, so that a step can be captured in a CUDA graph. On the GPU each parameter
    takes one pass over its memory: 16 bytes read and 12 written for each number.

    Parameters may compute in bfloat16 (`halve`): the optimizer then keeps and moves the float32
    originals and writes the rounded ones in the same pass, and nothing is cast elsewhere.

    Args:
        parameters: names and parameters, the member axis first, as `named_parameters()` gives them.
        learning_rates: one for each member, or one for all.
        weight_decays: one for each member, or one for all; λ in gradient + λ·parameter.
        betas: decay of the first and of the second moment.
        epsilon: added to the root of the second moment.
        clip: the greatest norm of a member's whole gradient; a longer one is scaled down, as by
            `torch.nn.utils.clip_grad_norm_`.
        lazy: names of tables (E, V, D) of which a step sees a few rows, without weight decay: they
            are read through `rows`, and are as they should be after `settle`.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        learning_rates: float | Sequence[float],
        weight_decays: float | Sequence[float] = 0.0,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        clip: float | None = None,
        lazy: Iterable[str] = (),
    ) -> None:
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        if not self.parameters:
            raise JomaError("parameters must hold at least one that wants a gradient, got none")
        first = next(iter(self.parameters.values()))
        members = first.shape[0]
        if any(p.shape[0] != members or not p.is_contiguous() for p in self.parameters.values()):
            raise JomaError(f"parameters must all be contiguous and have {members} members")
        for name, beta in zip(("first", "second"), betas, strict=True):
            if not 0 <= beta < 1:
                raise JomaError(f"the {name} of betas must lie in [0, 1), got {beta}")
        if not epsilon > 0:
            raise JomaError(f"epsilon must be positive, got {epsilon}")
        if clip is not None and not clip > 0:
            raise JomaError(f"clip must be positive, got {clip}")
        self.betas, self.epsilon, self.clip = betas, epsilon, clip
        self.learning_rates = per_member("learning_rates", learning_rates, members, first.device)
        self.weight_decays = per_member("weight_decays", weight_decays, members, first.device)
        self.steps = torch.zeros((), dtype=torch.int64, device=first.device)
        self.first_moments = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second_moments = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        adam = Settings(betas, epsilon, self.learning_rates)
        self.rows = {
            name: LazyRows(
                self.parameters[name].data,
                self.first_moments[name],
                self.second_moments[name],
                adam,
            )
            for name in lazy
        }
        """Tables of which a step sees a few rows, by name."""
        if self.rows and bool(self.weight_decays.any()):
            raise JomaError("weight_decays must be 0 where there are lazy tables")
        self._known_table: Any = None
        self._halved: dict[str, Tensor] = {}  # the float32 originals of parameters in bfloat16

    @torch.no_grad()
    def step(self) -> None:
        """Moves every parameter that has a gradient."""
        self.steps += 1
        if self._on_gpu and not torch.cuda.is_current_stream_capturing():
            self.captured()
        one, two = (1 - beta ** self.steps.double() for beta in self.betas)
        rates = self.learning_rates / one  # in float64
        scales_E = self._scales()
        for name, lazy in self.rows.items():
            lazy.step(self.steps, scales_E)
            assert self.parameters[name].grad is None, f"{name} is read through its rows"
        if self._on_gpu:
            settings = rates, self.weight_decays, two, scales_E.float(), self.betas, self.epsilon
            self._table().step(*settings, self._is_even())
            return
        for name, original in self._originals().items():
            if self.parameters[name].grad is not None:
                self._move(name, original, rates, two, scales_E)

    @torch.no_grad()
    def restart(self) -> None:
        """Forgets moments and steps, as a new optimizer would."""
        self.settle()
        self.steps.zero_()
        for lazy in self.rows.values():
            lazy.restart()
        for moments in (self.first_moments, self.second_moments):
            for moment in moments.values():
                moment.zero_()

    def norms(self) -> Tensor:
        """The norm of each member's whole gradient, (E,) in float64."""
        squares = [lazy.square_sums().double() for lazy in self.rows.values()]
        if self._on_gpu:
            squares.append(self._table().square_sums(self._is_even()).double())
        else:
            gradients = (p.grad for p in self.parameters.values() if p.grad is not None)
            squares += [grad.flatten(1).square().sum(1).double() for grad in gradients]
        return torch.stack(squares).sum(0).sqrt()

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compiles what `step` needs on the GPU without moving anything.

        To be called before a capture, with gradients that lie as they will in it.
        """
        table, even = self._table(), self._is_even()
        table.take([None] * len(table.parts))
        ones = torch.ones_like(self.learning_rates)
        table.square_sums(even)
        table.step(ones, ones, ones[0], ones.float(), self.betas, self.epsilon, even)

    def captured(self) -> None:
        """Notes where the gradients of a captured step lie, once it is captured."""
        self._table().take(self._gradients())

    def _gradients(self) -> list[Tensor | None]:
        """Of the parameters that are moved whole."""
        found = (self.parameters[name].grad for name in self._moved)
        return [None if gradient is None else _dense(gradient) for gradient in found]

    def _is_even(self) -> bool:
        return self._table().is_even(self._gradients())

    def _table(self) -> Any:
        """Where parameters and moments lie on the GPU."""
        if self._known_table is None:
            from joma.optim._adam_kernel import Part, Table

            originals = self._originals()
            self._known_table = Table(
                [
                    Part(
                        originals[name],
                        self.parameters[name].data if name in self._halved else None,
                        self.first_moments[name],
                        self.second_moments[name],
                    )
                    for name in self._moved
                ]
            )
        return self._known_table

    @property
    def _moved(self) -> list[str]:
        """Names of the parameters that are moved whole."""
        return [name for name in self.parameters if name not in self.rows]

    @property
    def _on_gpu(self) -> bool:
        return self.steps.is_cuda

    def zero_grad(self) -> None:
        """Forgets the gradients; the next backward pass brings its own memory."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def halve(self, names: Iterable[str]) -> None:
        """Makes parameters bfloat16, as the networks compute with them, and keeps the originals."""
        for name in names:
            if name in self._halved:
                continue
            parameter = self.parameters[name]
            self._halved[name] = parameter.data
            parameter.data = parameter.data.bfloat16()
        self._known_table = None

    def settle(self) -> None:
        """Makes the steps that rows of lazy tables have missed."""
        for lazy in self.rows.values():
            lazy.settle(self.steps)

    def originals(self) -> dict[str, Tensor]:
        """The parameters, by name, in the precision in which they are moved."""
        self.settle()
        return self._originals()

    def _originals(self) -> dict[str, Tensor]:
        return {name: self._halved.get(name, p.data) for name, p in self.parameters.items()}

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Puts the originals into the place of what was halved, for the block."""
        self.settle()
        rounded = {name: self.parameters[name].data for name in self._halved}
        try:
            for name, original in self._halved.items():
                self.parameters[name].data = original
            yield
        finally:
            for name, half in rounded.items():
                self.parameters[name].data = half

    def refresh(self) -> None:
        """Rounds the originals anew, after they were written to, settled."""
        for lazy in self.rows.values():
            lazy.made.copy_(self.steps.expand_as(lazy.made))
        for name, original in self._halved.items():
            self.parameters[name].data.copy_(original)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside the originals: the step counter and both moments."""
        return {
            "steps": self.steps,
            **{f"first.{name}": moment for name, moment in self.first_moments.items()},
            **{f"second.{name}": moment for name, moment in self.second_moments.items()},
        }

    def settings(self) -> dict[str, Any]:
        """Return what decides how the state continues, for a checkpoint to be recognised by."""
        return {
            "learning_rates": self.learning_rates.tolist(),
            "weight_decays": self.weight_decays.tolist(),
            "betas": list(self.betas),
            "epsilon": self.epsilon,
            "clip": self.clip,
        }

    def _scales(self) -> Tensor:
        """What each member's gradient is multiplied with, (E,)."""
        if self.clip is None:
            for lazy in self.rows.values():
                lazy.square_sums()  # adds up the gradients of equal rows, too
            return torch.ones_like(self.learning_rates)
        return (self.clip / (self.norms() + 1e-6)).clamp(max=1.0)

    def _move(self, name: str, p: Tensor, rates: Tensor, two: Tensor, scales_E: Tensor) -> None:
        m, v = self.first_moments[name], self.second_moments[name]
        each = (-1, *[1] * (p.ndim - 1))
        grad = self._gradient(name).to(p.dtype)
        if self.clip is not None:
            grad = grad * scales_E.to(p.dtype).view(each)
        grad = grad + self.weight_decays.to(p.dtype).view(each) * p
        m.lerp_(grad, 1 - self.betas[0])
        v.mul_(self.betas[1]).addcmul_(grad, grad, value=1 - self.betas[1])
        denominator = (v.sqrt() / two.sqrt().to(p.dtype)).add_(self.epsilon)
        p.sub_(rates.to(p.dtype).view(each) * m / denominator)
        if name in self._halved:
            self.parameters[name].data.copy_(p)

    def _gradient(self, name: str) -> Tensor:
        gradient = self.parameters[name].grad
        assert gradient is not None
        return gradient


def _dense(gradient: Tensor) -> Tensor:
    """The gradient, whose parts must be contiguous and in float32 or bfloat16."""
    if not gradient[0].is_contiguous() or gradient.dtype not in (torch.float32, torch.bfloat16):
        raise JomaError(
            f"gradients must be contiguous in float32 or bfloat16, got {gradient.dtype}"
        )
    return gradient
