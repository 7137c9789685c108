"""All optimizers by name: torch's own, and those that the modules of `joma.optim` list.

A module that adds optimizers has a constant `OPTIMIZERS`, from names to classes or functions. They
are called with the parameters and the learning rate (`lr` or `learning_rates`); their other
parameters are the settings that a configuration may give.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from joma.common.checks import check_known
from joma.errors import JomaError
from joma.optim.stacked import Stacked
from joma.optim.state import Optimizer

Factory = Callable[..., Optimizer]

_RATES = ("lr", "learning_rate", "learning_rates")
_UNFIT = ("Optimizer", "LBFGS", "SparseAdam")
"""Classes of torch.optim that are no optimizer, need a closure, or need sparse gradients."""

_registered: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Add an optimizer from outside the package under a name.

    Args:
        name: Its name in a configuration.
        factory: Class or function, called with the parameters and the learning rate.
    """
    _registered[name] = factory


def factories(*, stacked: bool = False) -> dict[str, Factory]:
    """Return all optimizers by name.

    Args:
        stacked: Whether to include those for ensembles, whose parameters have a member axis.
    """
    found: dict[str, Factory] = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name not in _UNFIT
    }
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not module.name.startswith("_"):
            there = importlib.import_module(f"{__package__}.{module.name}")
            found |= getattr(there, "OPTIMIZERS", {})
    found |= _registered
    return {
        name: factory
        for name, factory in sorted(found.items())
        if stacked or not (inspect.isclass(factory) and issubclass(factory, Stacked))
    }


def defaults(name: str, *, stacked: bool = False) -> dict[str, Any]:
    """Return the settings of an optimizer with their defaults, without the learning rate.

    Raises:
        JomaError: There is no such optimizer; the message lists those there are.
    """
    known = factories(stacked=stacked)
    check_known("optimizer", [name], known)
    _, *rest = inspect.signature(known[name]).parameters.values()
    return {
        one.name: None if one.default is one.empty else one.default
        for one in rest
        if one.name not in _RATES and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    }


def check_settings(name: str, settings: Iterable[str], *, stacked: bool = False) -> None:
    """Raise JomaError for a setting that the optimizer does not have, or for an unknown name."""
    known = defaults(name, stacked=stacked)
    for setting in settings:
        if setting not in known:
            raise JomaError(
                f"optimizer {name} has no setting {setting!r}; it has {', '.join(known) or 'none'}"
            )


def make(name: str, parameters: Iterable[Any], learning_rate: Any, **settings: Any) -> Optimizer:
    """Return an optimizer.

    Args:
        name: Its name; one for ensembles, such as "stacked_adam", needs stacked parameters.
        parameters: What `named_parameters()` gives, or parameter groups as torch has them.
        learning_rate: Learning rate; for ensembles one number or one for each member.
        **settings: The settings that its signature has.

    Raises:
        JomaError: There is no such optimizer or setting, or it refuses a value.
    """
    check_settings(name, settings, stacked=True)
    factory = factories(stacked=True)[name]
    rate = next((one for one in _RATES if one in inspect.signature(factory).parameters), "lr")
    try:
        return factory(parameters, **{rate: learning_rate}, **settings)
    except JomaError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        raise JomaError(f"optimizer {name} cannot be used with its settings ({error})") from error
