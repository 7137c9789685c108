"""Catching the inputs of a model's next call, without a hook that a copy would carry along."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

Caught = Callable[[tuple[Any, ...], dict[str, Any]], None]
_CALL = "_compiled_call_impl"
"""What `nn.Module.__call__` calls in place of `_call_impl`, where it is set."""


class FirstCall:
    """Reports the calls of a module until it is removed.

    It takes the place of the module's `_compiled_call_impl`, which is what PyTorch calls for a
    module compiled in place. Pickling, saving and deep-copying a module turn it into None, so that
    the copy has no trace of it. Code compiled around the module does not contain it either.

    Args:
        module: The module whose calls are reported. It is not kept alive.
        caught: Takes the positional and the named arguments of a call.
    """

    _torchdynamo_disable = True

    def __init__(self, module: nn.Module, caught: Caught) -> None:
        self._module = weakref.ref(module)
        self._caught = caught
        self._before = module.__dict__.get(_CALL)
        module.__dict__[_CALL] = self  # not setattr, which torch.compile's wrapper hands on

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._caught(args, kwargs)
        if self._before is not None:
            return self._before(*args, **kwargs)
        module = self._module()
        assert module is not None, "it is being called"
        return module._call_impl(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @property
    def is_uncompiled(self) -> bool:
        """Whether what it calls is the module as it was written: `watch_attention` asks."""
        return self._before is None

    @property
    def in_place(self) -> bool:
        """Whether the module still calls it: compiling the module in place replaces it."""
        module = self._module()
        return module is not None and module.__dict__.get(_CALL) is self

    def remove(self) -> None:
        """Put back what was there before, unless it was replaced meanwhile."""
        module = self._module()
        if module is None or not self.in_place:
            return
        if self._before is None:
            del module.__dict__[_CALL]
        else:
            module.__dict__[_CALL] = self._before
