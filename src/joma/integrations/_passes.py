"""The backward passes of a step, for optimizers that move parameters during them."""

import contextlib
import warnings
from collections.abc import Iterable
from typing import Any

from joma.common.sharded import is_dtensor
from joma.errors import JomaError


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of trainers."""
    while not hasattr(optimizer, "accumulate") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


class BackwardPasses:
    """Marks the backward passes of each step for optimizers with `per_layer`; others need it not.

    Args:
        optimizers: The optimizers of a trainer, wrapped or not.
        clip: The largest norm of the gradient that the trainer would clip to; None or 0 for none.
        setting: What that is called in the trainer.
        scaled: Whether the trainer scales gradients, as it does in float16.
        processes: How many processes train together.

    Raises:
        JomaError: The trainer scales or averages gradients after the optimizer has used them.
    """

    def __init__(
        self,
        optimizers: Iterable[Any],
        *,
        clip: float | None,
        setting: str,
        scaled: bool,
        processes: int,
    ) -> None:
        self._optimizers = [
            one for one in map(unwrapped, optimizers) if getattr(one, "per_layer", False)
        ]
        self._open = contextlib.ExitStack()
        for one in self._optimizers:
            if scaled:
                raise JomaError(
                    "per_layer needs gradients that are not scaled; train in bfloat16 or float32 "
                    "instead of float16"
                )
            parameters = [it for group in one.param_groups for it in group["params"]]
            if processes > 1 and not all(is_dtensor(it) for it in parameters):
                raise JomaError(
                    "per_layer needs FSDP2 where a trainer runs several processes: their "
                    "DistributedDataParallel averages gradients after the optimizer has used them"
                )
            if clip and one.clip_norm is None:
                one.clip_norm = float(clip)
                warnings.warn(
                    f"{setting} = {clip} is applied as clip_norm of the optimizer, to the norm of "
                    "the projected gradients: per_layer leaves no others to clip",
                    stacklevel=3,
                )

    @property
    def are_marked(self) -> bool:
        """Whether there is an optimizer that passes are marked for."""
        return bool(self._optimizers)

    def begin(self, *, last: bool) -> None:
        """Begin a pass.

        Args:
            last: Whether it is the last one of its step.
        """
        self.end()
        for one in self._optimizers:
            self._open.enter_context(one.accumulate(last=last))

    def end(self) -> None:
        """End the pass that was begun last, if it has not ended."""
        self._open.close()
