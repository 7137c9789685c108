"""What it costs to cut one layer's cache alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from joma.common.paired import Paired, paired
from joma.errors import JomaError
from joma.inference.policies import Full, Policy
from joma.inference.quality.loss import TextLoss, text_loss
from joma.inference.support import text_config


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """How much the loss rises when one layer alone is cut.

    Attributes:
        layers: The layers that were cut.
        nll: Mean loss of each window with that layer cut, (layers, windows).
        full: Mean loss of each window with nothing cut, (windows,).
    """

    layers: tuple[int, ...]
    nll: NDArray[np.float64]
    full: NDArray[np.float64]

    @property
    def costs(self) -> NDArray[np.float64]:
        """Rise of the loss of each layer in nats per token, (layers,)."""
        return (self.nll - self.full).mean(1)

    def cost(self, index: int) -> Paired:
        """Return the rise of one of the layers with its standard error over windows."""
        return paired(self.nll[index], self.full, "windows")


def layer_costs(
    model: nn.Module,
    windows: Tensor,
    policy: Policy,
    *,
    layers: Sequence[int] | None = None,
    chunk: int = 1,
    batch: int = 16,
    first: int = 0,
    full: TextLoss | None = None,
    report: Callable[[int], None] = lambda _: None,
) -> LayerCosts:
    """Return the cost of cutting each layer alone, all others with a full cache.

    Args:
        model: A decoder of transformers in evaluation mode.
        windows: Tokens, (windows, tokens), as of `text_loss`.
        policy: What the layer that is cut keeps.
        layers: The layers to cut; all unless given.
        chunk: Tokens read at once.
        batch: Windows read at the same time.
        first: The first of the predicted tokens that counts in the means.
        full: The loss with nothing cut, where it is known already.
        report: Is called with the number of layers that are done.

    Raises:
        JomaError: There is no such layer, or a cache cannot serve the model.
    """
    count = int(text_config(model).num_hidden_layers)
    chosen = tuple(range(count)) if layers is None else tuple(layers)
    for layer in chosen:
        if not 0 <= layer < count:
            raise JomaError(f"layers must be from 0 to {count - 1}, got {layer}")
    how: dict[str, Any] = {"chunk": chunk, "batch": batch, "first": first}
    full = text_loss(model, windows, Full(), **how) if full is None else full
    found = []
    for done, layer in enumerate(chosen, 1):
        policies = [policy if one == layer else Full() for one in range(count)]
        found.append(text_loss(model, windows, policies, **how).by_window)
        report(done)
    return LayerCosts(chosen, np.array(found).reshape(len(chosen), -1), full.by_window)
