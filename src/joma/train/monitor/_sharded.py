"""Forward passes over sharded weights that may fail in one process of several."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class Gathers:
    """Keeps processes together while a model whose weights are sharded runs.

    Every module that `fully_shard` was applied to gathers its weights before it runs, together with
    all other processes. Where the forward pass fails in one process, this process goes on with what
    entered the module that failed, and makes the gathers that are left, or the others would wait
    for it. The error is raised at the end.
    """

    def __init__(self) -> None:
        self._order: list[FSDPModule] = []

    @contextmanager
    def completed(self, model: nn.Module) -> Iterator[None]:
        """Complete the gathers of a forward pass in the block before an error is raised."""
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if not sharded:
            yield
            return
        expected = self._order or sharded
        made: list[FSDPModule] = []
        errors: list[Exception] = []
        for module in sharded:
            assert isinstance(module, nn.Module), "FSDPModule is mixed into one"
            module.forward = _deferring(module, module.forward, made, errors)
        try:
            yield
        except Exception as error:
            errors.append(error)
        finally:
            for module in sharded:
                vars(module).pop("forward", None)
        if not errors:
            self._order = made
            return
        for module in expected[len(made) :]:
            module.unshard()
            module.reshard()
        raise errors[0]


def _deferring(
    module: FSDPModule,
    forward: Callable[..., Any],
    made: list[FSDPModule],
    errors: list[Exception],
) -> Callable[..., Any]:
    """Return a forward that keeps an error for later and returns its first tensor instead."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        made.append(module)
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            errors.append(error)
            given = (*args, *kwargs.values())
            return next((value for value in given if isinstance(value, Tensor)), None)

    return run
