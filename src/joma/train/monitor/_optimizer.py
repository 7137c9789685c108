"""What the optimizer of a training says: learning rate, weight decay, which weights it moves."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from joma.errors import JomaError


class OptimizerView:
    """Reads the parameter groups of one optimizer or several, which it keeps weakly.

    `read` comes first, at every measurement: groups are added and rates change while a training
    runs. Everything is None where no optimizer was given, where it is gone, or where it holds none
    of the model's parameters (some wrappers optimize flattened copies of them).

    Args:
        optimizer: The optimizer, a sequence of them, or None. Anything that has the `param_groups`
            of `torch.optim.Optimizer` will do.

    Attributes:
        learning_rate: The largest of all groups that hold parameters.
        weight_decay: The largest of all groups that hold parameters.

    Raises:
        JomaError: It has no parameter groups.
    """

    def __init__(self, optimizer: Any = None) -> None:
        self._optimizers = [_weakly(one) for one in _several(optimizer)]
        self.learning_rate: float | None = None
        self.weight_decay: float | None = None
        self._optimized: frozenset[int] | None = None

    def read(self, model: nn.Module) -> None:
        """Read the parameter groups as they are now.

        Args:
            model: The model, whose parameters `optimized` will be asked for.
        """
        optimizers = [one for one in (known() for known in self._optimizers) if one is not None]
        groups = [group for one in optimizers for group in one.param_groups if group["params"]]
        self.learning_rate = _largest(groups, "lr")
        self.weight_decay = _largest(groups, "weight_decay")
        ids = frozenset(id(parameter) for group in groups for parameter in group["params"])
        knows = any(id(parameter) in ids for parameter in model.parameters())
        self._optimized = ids if knows else None

    def optimized(self, parameter: Tensor) -> bool | None:
        """Return whether an optimizer holds the parameter; None where that is not known.

        Args:
            parameter: A parameter of the model, the object itself.
        """
        return None if self._optimized is None else id(parameter) in self._optimized


def _several(optimizer: Any) -> list[Any]:
    """Return the optimizers that were given, checked."""
    if optimizer is None:
        return []
    several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    for one in several:
        groups = getattr(one, "param_groups", None)
        if (
            isinstance(one, type)
            or not isinstance(groups, Iterable)
            or not all(isinstance(group, Mapping) and "params" in group for group in groups)
        ):
            raise JomaError(
                "optimizer must be a torch.optim.Optimizer, a list of them or None, got "
                f"{one!r:.60}"
            )
    return list(several)


def _weakly(optimizer: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(optimizer)
    except TypeError:  # of a class with slots
        return lambda: optimizer


def _largest(groups: Iterable[Mapping[str, Any]], name: str) -> float | None:
    values = [float(group[name]) for group in groups if group.get(name) is not None]
    return max(values, default=None)
