"""Wrapping `forward` of one module, by any number of watches that begin and end in any order."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

Around = Callable[..., Any]
"""Takes the function to call, which is `forward` or wraps it, and its arguments."""

_lock = threading.Lock()


_MARK = "joma_wrapper"


class _Wrapper:
    """Our replacement of `forward` of one module; a copy of the module gets its own `forward`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own = vars(module).get("forward")
        self.inner = module.forward
        self.arounds: list[Around] = []
        functools.update_wrapper(self, self.inner)
        setattr(self, _MARK, self)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.inner
        for around in tuple(self.arounds):
            call = functools.partial(around, call)
        return call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _forward_of, (self.module,)


def _forward_of(module: nn.Module) -> Any:
    return MethodType(type(module).forward, module)


@contextmanager
def wrapped_forward(module: nn.Module, around: Around) -> Iterator[None]:
    """Call `around(forward, …)` instead of `forward(…)` of this one module.

    Unlike a hook this leaves the module's fused path alone, and a call that has begun ends as it
    began even where the watch ends meanwhile in another thread.
    """
    with _lock:
        # `functools.wraps` copies the mark to what is wrapped around ours.
        wrapper = getattr(vars(module).get("forward"), _MARK, None) or _Wrapper(module)
        wrapper.arounds.append(around)
    try:
        yield
    finally:
        with _lock:
            wrapper.arounds.remove(around)
            # Where somebody has wrapped our wrapper it stays, and passes everything through.
            if not wrapper.arounds and vars(module).get("forward") is wrapper:
                del module.forward
                if wrapper.own is not None:
                    module.forward = wrapper.own
