"""AdamW with moments in eight bits, on any device."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from joma.common.sharded import local
from joma.errors import JomaError
from joma.kernels.moments import SMALL, adamw_step, check_betas, make_moments
from joma.optim.state import TypedStateOptimizer


class AdamW8bit(TypedStateOptimizer):
    """AdamW (Loshchilov and Hutter, 2019) whose moments take one byte each.

    Parameters with fewer than 4,096 numbers keep theirs in full. `joma.kernels.eight_bits` says how
    moments are rounded.

    Args:
        parameters: Parameters, with names or without, or parameter groups, as torch has them.
        lr: Learning rate.
        betas: Decay of the first and of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay λ.
        seed: Chooses the random numbers of the rounding.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        check_betas(betas)
        self.seed = seed
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise JomaError(
                        "AdamW8bit needs dense gradients; build embeddings with sparse=False"
                    )
                if parameter is not local(parameter):
                    raise JomaError(
                        "AdamW8bit takes whole parameters; GaLoreAdamW takes those of FSDP2"
                    )
                state = self.state[parameter]
                dtype = None if parameter.numel() >= SMALL else torch.float32
                make_moments(state, parameter.shape, parameter.device, dtype)
                seed = (self.seed + int(state["moment_step"])) * 1_000_003 + number
                adamw_step(parameter, state, parameter.grad, group, seed)
        return loss


OPTIMIZERS = {"adamw-8bit": AdamW8bit}
