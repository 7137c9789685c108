"""Adam over a stack of networks, each member with its own learning rate and weight decay."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.kernels.choice import has_kernels
from joma.optim.stacked import Stacked, per_member


class StackedAdam(Stacked):
    """Adam (Kingma and Ba, 2015) with coupled (L2) weight decay, for parameters (E, ...).

    Member e moves exactly as under `torch.optim.Adam(lr=learning_rates[e],
    weight_decay=weight_decays[e])`: every operation is elementwise. The step counter lives on the
    parameters' device; where kernels run (NVIDIA GPUs with Triton) a step can be captured in a CUDA
    graph, and each parameter takes one pass over its memory: 16 bytes read and 12 written for each
    number. With master weights the same pass writes the bfloat16 parameters, and nothing is cast
    elsewhere.

    Args:
        parameters: Names and parameters with the member axis first, as `named_parameters()` gives
            them.
        learning_rates: One learning rate per member, or one for all.
        weight_decays: One for each member, or one for all; λ in gradient + λ·parameter.
        betas: Decay of the first and of the second moment.
        epsilon: Added to the root of the second moment.
        clip: Largest norm of a member's whole gradient; a longer one is scaled down, as by
            `torch.nn.utils.clip_grad_norm_`.
    """

    has_bfloat16 = True

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        learning_rates: float | Sequence[float],
        weight_decays: float | Sequence[float] = 0.0,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        clip: float | None = None,
    ) -> None:
        super().__init__(parameters)
        for name, beta in zip(("first", "second"), betas, strict=True):
            if not 0 <= beta < 1:
                raise JomaError(f"the {name} of betas must lie in [0, 1), got {beta}")
        if not epsilon > 0:
            raise JomaError(f"epsilon must be positive, got {epsilon}")
        if clip is not None and not clip > 0:
            raise JomaError(f"clip must be positive, got {clip}")
        self.betas, self.epsilon, self.clip = betas, epsilon, clip
        self.learning_rates = per_member(
            "learning_rates", learning_rates, self.members, self.device
        )
        self.weight_decays = per_member("weight_decays", weight_decays, self.members, self.device)
        self.first_moments = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second_moments = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self._known_table: Any = None
        self.capturable = has_kernels(self.device)

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        self.steps += 1
        if self._on_gpu and not torch.cuda.is_current_stream_capturing():
            self.captured()
        one, two = (1 - beta ** self.steps.double() for beta in self.betas)
        rates = self.learning_rates / one  # in float64
        scales_E = self._scales()
        self._step_rows(scales_E)
        if self._on_gpu:
            settings = rates, self.weight_decays, two, scales_E.float(), self.betas, self.epsilon
            self._table().step(*settings, self._is_even())
            return
        for name, master in Stacked.master_weights(self).items():
            if self.parameters[name].grad is not None:
                self._move(name, master, rates, two, scales_E)

    def norms(self) -> Tensor:
        """Return the norm of each member's whole gradient, (E,) in float64."""
        squares = self._square_sums_of_rows()
        if self._on_gpu:
            squares.append(self._table().square_sums(self._is_even()).double())
        else:
            gradients = (p.grad for p in self.parameters.values() if p.grad is not None)
            whole = (g.float() if g.dtype == torch.bfloat16 else g for g in gradients)
            squares += [gradient.flatten(1).square().sum(1).double() for gradient in whole]
        return torch.stack(squares).sum(0).sqrt()

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile what `step` needs on the GPU without moving anything."""
        table, even = self._table(), self._is_even()
        table.take([None] * len(table.parts))
        ones = torch.ones_like(self.learning_rates)
        table.square_sums(even)
        table.step(ones, ones, ones[0], ones.float(), self.betas, self.epsilon, even)

    def captured(self) -> None:
        """Note where the gradients of a captured step lie, once it is captured."""
        self._table().take(self._gradients())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the step counter and both moments."""
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

    def to_bfloat16_with_master_weights(self, names: Iterable[str]) -> None:
        """Let parameters compute in bfloat16, and keep float32 copies that the optimizer moves."""
        super().to_bfloat16_with_master_weights(names)
        self._known_table = None

    def _step_rows(self, scales_E: Tensor) -> None:
        """Move tables that are read row by row; here there are none."""

    def _square_sums_of_rows(self) -> list[Tensor]:
        """Return ‖g‖² of each such table, (E,) in float64."""
        return []

    @property
    def _moved(self) -> list[str]:
        """Names of the parameters that are moved whole."""
        return list(self.parameters)

    def _gradients(self) -> list[Tensor | None]:
        """Return the gradients of the parameters that are moved whole."""
        found = (self.parameters[name].grad for name in self._moved)
        return [None if gradient is None else _dense(gradient) for gradient in found]

    def _is_even(self) -> bool:
        return self._table().is_even(self._gradients())

    def _table(self) -> Any:
        """Return where parameters and moments lie on the GPU."""
        if self._known_table is None:
            from joma.optim._adam_kernel import AdamParameter, Table

            masters = Stacked.master_weights(self)
            self._known_table = Table(
                [
                    AdamParameter(
                        masters[name],
                        self.parameters[name].data if name in self._masters else None,
                        self.first_moments[name],
                        self.second_moments[name],
                    )
                    for name in self._moved
                ]
            )
        return self._known_table

    @property
    def _on_gpu(self) -> bool:
        return self.steps.is_cuda and has_kernels(self.steps.device)

    def _scales(self) -> Tensor:
        """Return what each member's gradient is multiplied with, (E,)."""
        if self.clip is None:
            return torch.ones_like(self.learning_rates)
        return (self.clip / (self.norms() + 1e-6)).clamp(max=1.0)

    def _move(self, name: str, p: Tensor, rates: Tensor, two: Tensor, scales_E: Tensor) -> None:
        gradient = self.parameters[name].grad
        assert gradient is not None
        m, v = self.first_moments[name], self.second_moments[name]
        each = (-1, *[1] * (p.ndim - 1))
        grad = gradient.to(p.dtype)
        if self.clip is not None:
            grad = grad * scales_E.to(p.dtype).view(each)
        grad = grad + self.weight_decays.to(p.dtype).view(each) * p
        m.lerp_(grad, 1 - self.betas[0])
        v.mul_(self.betas[1]).addcmul_(grad, grad, value=1 - self.betas[1])
        denominator = (v.sqrt() / two.sqrt().to(p.dtype)).add_(self.epsilon)
        p.sub_(rates.to(p.dtype).view(each) * m / denominator)
        if name in self._masters:
            self.parameters[name].data.copy_(p)


def _dense(gradient: Tensor) -> Tensor:
    """Return the gradient, whose parts must be contiguous and in float32 or bfloat16."""
    if not gradient[0].is_contiguous() or gradient.dtype not in (torch.float32, torch.bfloat16):
        raise JomaError(
            f"gradients must be contiguous in float32 or bfloat16, got {gradient.dtype}"
        )
    return gradient


OPTIMIZERS = {"stacked_adam": StackedAdam}
