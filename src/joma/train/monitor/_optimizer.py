"""What a monitor reads of optimizers: rates, settings, and which parameters they hold."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from joma.errors import JomaError

_MOST_WRAPPERS = 8


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of trainers, whose attribute `optimizer` it is."""
    for _ in range(_MOST_WRAPPERS):
        inner = getattr(optimizer, "optimizer", None)
        if not hasattr(inner, "param_groups"):
            break
        optimizer = inner
    return optimizer


class WatchedOptimizers:
    """Reads the parameter groups of one optimizer or several, which it keeps weakly.

    `read` comes first, at every measurement: groups are added and rates change while a training
    runs.

    Args:
        optimizer: The optimizer, a sequence of them, or None. Anything that has the `param_groups`
            of `torch.optim.Optimizer` will do.

    Attributes:
        learning_rate: The largest of all groups, None where it is not known.
        weight_decay: The largest of all groups, None where it is not known.
        projects: Whether one of them projects gradients to subspaces (GaLore).

    Raises:
        JomaError: It is no optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        several = [] if optimizer is None else several
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
        self._optimizers = [_weakly(unwrapped_optimizer(one)) for one in several]
        self.projects = any(hasattr(one, "subspaces") for one in self._living())
        self.learning_rate: float | None = None
        self.weight_decay: float | None = None
        self._held: frozenset[int] | None = None

    def read(self, model: nn.Module) -> None:
        """Read the groups of the optimizers that are still there.

        Args:
            model: The model; where none of its parameters is in a group (some wrappers optimize
                flattened copies of them), nothing is known of which are.
        """
        groups = [group for one in self._living() for group in one.param_groups]
        self.learning_rate, self.weight_decay = (
            max((float(it[name]) for it in groups if it.get(name) is not None), default=None)
            for name in ("lr", "weight_decay")
        )
        held = frozenset(id(parameter) for group in groups for parameter in group["params"])
        known = any(id(parameter) in held for parameter in model.parameters())
        self._held = held if known else None

    def holds(self, parameter: Tensor) -> bool | None:
        """Return whether an optimizer holds the parameter; None where that is not known."""
        return None if self._held is None else id(parameter) in self._held

    def settings(self) -> dict[str, Any] | None:
        """Return class and options of the optimizer, as JSON can hold them; None without one.

        Several are numbered. An option that groups of parameters do not share has a value for each
        group. The learning rate is the one that schedules start from.
        """
        each = [_settings(one) for one in self._living()]
        if len(each) == 1:
            return each[0]
        return {str(number): one for number, one in enumerate(each)} or None

    def record(self, *, energy: bool, angles: bool = True) -> None:
        """Let optimizers that project gradients record what `subspaces` yields.

        Args:
            energy: Whether the next step records the energy of gradients in their subspaces.
            angles: Whether subspaces record by how much they turn.
        """
        for one in self._living():
            if hasattr(one, "subspaces"):
                one.record_energy, one.record_angles = energy, angles

    def subspaces(self) -> Iterator[tuple[Tensor, Any]]:
        """Yield the parameters whose gradients are projected, each with what is known of that."""
        for one in self._living():
            if hasattr(one, "subspaces"):
                yield from one.subspaces()

    def _living(self) -> list[Any]:
        return [one for one in (known() for known in self._optimizers) if one is not None]


def _settings(optimizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"name": type(optimizer).__name__}
    groups = [group for group in optimizer.param_groups if group["params"]]
    for name in dict.fromkeys(name for group in groups for name in group):
        if name in ("params", "initial_lr", "param_names"):
            continue
        each = [group.get(name) for group in groups]
        if name == "lr":
            each = [group.get("initial_lr", group.get("lr")) for group in groups]
        values = [_option(value) for value in each]
        if any(value is not None for value in values):
            found[name] = values[0] if all(it == values[0] for it in values) else values
    return found


def _option(value: Any) -> Any:
    """Return the option of an optimizer in a type that JSON has, None for any other."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, list | tuple):
        return [_option(item) for item in value]
    return value if isinstance(value, str | bool | int | float) else None


def _weakly(optimizer: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(optimizer)
    except TypeError:  # of a class with slots
        return lambda: optimizer
