"""Names that were replaced: still importable, with a warning that says what to use."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module some of whose names were replaced.

    Args:
        module: The module's `__name__`.
        names: For each old name the new one, which the module has.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = names[name]
        warnings.warn(f"{name} is deprecated, use {new}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), new)

    return get
