"""`StackedAdam` with tables of which a step reads a few rows."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.optim.adam import StackedAdam
from joma.optim.full_speed.lazy_rows import LazyRows, RowSettings


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
