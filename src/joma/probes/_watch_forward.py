"""Wrapping `forward` of one module, by any number of watches that begin and end in any order."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Around = Callable[..., Any]
"""Takes the function to call, which is `forward` or wraps it, and its arguments."""

_lock = threading.Lock()


class _Wrapper:
    """Our replacement of `forward` of one module."""

    def __init__(self, module: nn.Module) -> None:
        self.own = vars(module).get("forward")
        self.inner = module.forward
        self.arounds: list[Around] = []

        @functools.wraps(self.inner)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            call = self.inner
            for around in tuple(self.arounds):
                call = functools.partial(around, call)
            return call(*args, **kwargs)

        self.replacement = replacement
        setattr(replacement, _MARK, self)
        module.forward = replacement


_MARK = "joma_wrapper"


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
            if not wrapper.arounds and vars(module).get("forward") is wrapper.replacement:
                del module.forward
                if wrapper.own is not None:
                    module.forward = wrapper.own
