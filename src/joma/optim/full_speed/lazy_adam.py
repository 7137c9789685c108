"""`StackedAdam` with tables of which a step reads a few rows, without touching the others.

An embedding has a gradient at the words of a batch alone, but Adam moves every row at every step:
with gradient 0 its moments decay, and what is left of the first still moves it. That is a
recurrence without input, so it can be made up for when the row is next read, step by step in
registers, at no traffic. Rows then are as if every step had been made, up to rounding: once an
update without a gradient is below 10⁻¹¹ of the first one (`replayed_steps`), the rest is left out.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.kernels.choice import has_kernels
from joma.optim.adam import StackedAdam

LEFT_OUT = 1e-11
"""Share of a row's first update without a gradient from which on further updates are left out."""

LEAST_REPLAYED = 256
"""Missed steps that are always made one by one."""

LEAST_CORRECTED = 40_000
"""Steps for which Adam's corrections of its moments are always computed."""

_LARGEST_BETA = 1 - 1e-5
"""Beyond, the corrections of one table would take more than 100 MB."""


def replayed_steps(betas: tuple[float, float]) -> int:
    """Return how many missed steps are made one by one; afterwards moments decay and rows stay.

    Without a gradient, Adam's updates m̂/√v̂ shrink by β₁/√β₂ from step to step. Where β₁ ≥ √β₂
    they do not shrink, and no step is left out.

    Args:
        betas: Decay of the first and of the second moment.
    """
    one, two = betas
    if one == 0:
        return LEAST_REPLAYED
    if one**2 >= two:
        return 2**62
    shrinking = math.log(one) - math.log(two) / 2
    return max(LEAST_REPLAYED, math.ceil(math.log(LEFT_OUT) / shrinking))


def corrected_steps(betas: tuple[float, float]) -> int:
    """Return after how many steps Adam's corrections of its moments are 1 in float64.

    Args:
        betas: Decay of the first and of the second moment.
    """
    slowest = max(betas)
    return max(LEAST_CORRECTED, math.ceil(-40 / math.log(slowest)) if slowest > 0 else 0)


class RowSettings(NamedTuple):
    """Settings of Adam that rows need.

    Attributes:
        betas: Decay of the first and of the second moment.
        epsilon: Added to the root of the second moment.
        learning_rates: One for each member, (E,).
    """

    betas: tuple[float, float]
    epsilon: float
    learning_rates: Tensor


class LazyRows:
    """A table (E, V, D) that Adam moves row by row, as rows are needed.

    A step is: `fetch` the rows of the batch, use them, `give` their gradient, `step`.

    Args:
        table: The parameter, in float32 or float64.
        first: First moment, of the same shape.
        second: Second moment.
        settings: Settings of Adam.
    """

    def __init__(self, table: Tensor, first: Tensor, second: Tensor, settings: RowSettings) -> None:
        if max(settings.betas) > _LARGEST_BETA:
            raise JomaError(
                f"betas must be at most {_LARGEST_BETA} where there are lazy tables, got "
                f"{settings.betas}"
            )
        self.table, self.first, self.second, self.settings = table, first, second, settings
        self.replayed = replayed_steps(settings.betas)
        self.made = torch.zeros(table.shape[1], dtype=torch.int64, device=table.device)
        """Steps that each row has made."""
        steps = torch.arange(
            corrected_steps(settings.betas), dtype=torch.float64, device=table.device
        )
        one, two = (1 - beta**steps for beta in settings.betas)
        self.corrections = torch.stack([1 / one, two.rsqrt()]).to(table.dtype)
        """Of the first moment, and of the root of the second, (2, steps)."""
        self._uses_kernels = has_kernels(table.device)
        self._words: Tensor | None = None
        self._fetched: Tensor | None = None
        self._summed: Tensor | None = None

    @torch.no_grad()
    def fetch(self, tokens: Tensor, steps: Tensor) -> Tensor:
        """Rows of the table, (E, *tokens.shape, D), after all steps so far; they want a gradient.

        Args:
            tokens: which, the same for all members.
            steps: how many were made, without axes.
        """
        # Equal words stand side by side; the first of each stands for all.
        self._words, self._order = tokens.flatten().sort()
        self._settle(self._words, steps)
        rows = self.table[:, tokens.flatten()].unflatten(1, tokens.shape)
        self._fetched = rows.requires_grad_()
        return self._fetched

    @torch.no_grad()
    def square_sums(self) -> Tensor:
        """‖g‖² of each member, (E,), for the gradient that came back to what was fetched."""
        assert self._fetched is not None
        assert self._words is not None
        assert self._fetched.grad is not None, "nothing came back to the rows"
        gradient = self._fetched.grad.flatten(1, -2)[:, self._order]
        if self._uses_kernels:
            from joma.optim.full_speed import _rows_kernel

            self._summed, squares_EN = _rows_kernel.summed(gradient, self._words)
            return squares_EN.sum(1)
        new = torch.ones_like(self._words, dtype=torch.bool)
        new[1:] = self._words[1:] != self._words[:-1]
        which = new.cumsum(0) - 1
        total = gradient.new_zeros(len(gradient), int(which[-1]) + 1, gradient.shape[-1])
        self._summed = total.index_add_(1, which, gradient)
        self._words = self._words[new]
        return self._summed.square().sum((1, 2))

    @torch.no_grad()
    def step(self, steps: Tensor, scales_E: Tensor) -> None:
        """Moves the rows that were fetched.

        Args:
            steps: this one's number, from 1 on.
            scales_E: what the gradient is multiplied with.
        """
        assert self._summed is not None
        assert self._words is not None
        if self._uses_kernels:
            from joma.optim.full_speed import _rows_kernel

            _rows_kernel.moved(self, self._words, self._summed, steps, scales_E)
            return
        rows, (one, two) = self._words, self.settings.betas
        gradient = self._summed * scales_E.to(self._summed.dtype)[:, None, None]
        m = self.first[:, rows].lerp(gradient, 1 - one)
        v = self.second[:, rows] * two + gradient.square() * (1 - two)
        self._write(rows, self.table[:, rows] - self._way(m, v, steps), m, v)
        self.made[rows] = steps

    @torch.no_grad()
    def settle(self, steps: Tensor) -> None:
        """Brings all rows up to the steps made so far."""
        self._settle(torch.arange(len(self.made), device=self.made.device), steps)

    def _settle(self, rows: Tensor, steps: Tensor) -> None:
        if self._uses_kernels:
            from joma.optim.full_speed import _rows_kernel

            _rows_kernel.settled(self, rows, steps)
            return
        rows = rows.unique()
        p, m, v = (x[:, rows] for x in (self.table, self.first, self.second))
        made = self.made[rows]
        one, two = self.settings.betas
        for _ in range(min(int((steps - made).amax()), self.replayed)):
            late = (made < steps)[:, None]
            m, v = torch.where(late, m * one, m), torch.where(late, v * two, v)
            made = made + late[:, 0]
            p = torch.where(late, p - self._way(m, v, made.clamp(min=1)[:, None]), p)
        left = (steps - made).clamp(min=0).to(m.dtype)[:, None]
        self._write(rows, p, m * one**left, v * two**left)
        self.made[rows] = torch.maximum(steps, self.made[rows])

    def _way(self, m: Tensor, v: Tensor, steps: Tensor) -> Tensor:
        """How far Adam goes at a step with these moments."""
        one, two = self.corrections[:, steps.clamp(max=self.corrections.shape[1] - 1)]
        rates = self.settings.learning_rates.to(m.dtype)[:, None, None]
        return rates * one * m / (v.sqrt() * two + self.settings.epsilon)

    def _write(self, rows: Tensor, p: Tensor, m: Tensor, v: Tensor) -> None:
        self.table[:, rows], self.first[:, rows], self.second[:, rows] = p, m, v


class LazyAdam(StackedAdam):
    """`StackedAdam`, for which tables (E, V, D) without weight decay are moved row by row.

    Such a table is read through `rows`; its parameter is up to date after `settle`.

    Args:
        parameters: As of `StackedAdam`.
        learning_rates: As of `StackedAdam`.
        lazy: Names of the tables.
        **settings: The other arguments of `StackedAdam`.

    Attributes:
        rows: The tables by name.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        learning_rates: float | Sequence[float],
        *,
        lazy: Iterable[str] = (),
        **settings: Any,
    ) -> None:
        super().__init__(parameters, learning_rates, **settings)
        adam = RowSettings(self.betas, self.epsilon, self.learning_rates)
        self.rows = {
            name: LazyRows(
                self.parameters[name].data,
                self.first_moments[name],
                self.second_moments[name],
                adam,
            )
            for name in lazy
        }
        if self.rows and bool(self.weight_decays.any()):
            raise JomaError("weight_decays must be 0 where there are lazy tables")

    def settle(self) -> None:
        """Make the steps that rows of the tables have missed."""
        for lazy in self.rows.values():
            lazy.settle(self.steps)

    def restart(self) -> None:
        """Forget the state, as a new optimizer would."""
        self.settle()
        super().restart()
        for lazy in self.rows.values():
            lazy.made.zero_()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy a state into the tensors there are; to be called after parameters were written."""
        super().load_state_dict(state_dict)
        for lazy in self.rows.values():
            lazy.made.copy_(self.steps.expand_as(lazy.made))

    def master_weights(self) -> dict[str, Tensor]:
        """Return the parameters by name, in the precision in which they are moved."""
        self.settle()
        return super().master_weights()

    @contextlib.contextmanager
    def using_master_weights(self) -> Iterator[None]:
        """Let the networks compute with the master weights during the block."""
        self.settle()
        with super().using_master_weights():
            yield

    @property
    def _moved(self) -> list[str]:
        return [name for name in self.parameters if name not in self.rows]

    def _step_rows(self, scales_E: Tensor) -> None:
        for name, lazy in self.rows.items():
            lazy.step(self.steps, scales_E)
            assert self.parameters[name].grad is None, f"{name} is read through its rows"

    def _square_sums_of_rows(self) -> list[Tensor]:
        return [lazy.square_sums().double() for lazy in self.rows.values()]

    def _scales(self) -> Tensor:
        if self.clip is None:
            with torch.no_grad():
                self._square_sums_of_rows()  # adds up the gradients of equal rows, too
        return super()._scales()
