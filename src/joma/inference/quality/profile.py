"""What the probes say of each layer's attention before anything is cut."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from joma.common.checks import whole_number
from joma.errors import JomaError
from joma.inference.quality.loss import check_tokens, last_places
from joma.probes import AttentionAccumulator, AttentionCall, watch_attention


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """Attention of one layer, means over heads and windows.

    Attributes:
        layer: Number of the layer.
        entropy: Entropy of a query's attention in nats.
        effective: Mean of exp(entropy), to how many keys a query attends.
        first: Mass on the first key, 0 to 1.
        held: held[n − 1] is the share of all mass that the n keys with most of it receive, each
            head and window for itself; rises to 1. Its length is that of the windows.
    """

    layer: int
    entropy: float
    effective: float
    first: float
    held: NDArray[np.float64]

    def heavy(self, share: float) -> float:
        """Return the mass on the keys that receive most, as many as a share of the window.

        Args:
            share: Number of keys as a share of the window, 0 to 1.
        """
        if not 0 <= share <= 1:
            raise JomaError(f"share must be from 0 to 1, got {share!r}")
        return float(self.heavy_of(np.array([share]))[0])

    def heavy_of(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return `heavy` of many shares at once."""
        places = np.arange(len(self.held) + 1) / len(self.held)
        return np.interp(shares, places, np.concatenate([[0.0], self.held]))


@torch.no_grad()
def attention_profiles(model: nn.Module, windows: Tensor, *, batch: int = 4) -> list[LayerProfile]:
    """Measure the attention of every layer of the plain model.

    Args:
        model: A decoder of transformers.
        windows: Tokens, (windows, tokens), with the special tokens that the model needs.
        batch: Windows read at the same time.

    Raises:
        JomaError: The windows are no tokens, or the attention of the model cannot be watched.
    """
    check_tokens("windows", windows, 2)
    whole_number("batch", batch, 1)
    means: dict[int, AttentionAccumulator] = {}
    sums: dict[int, Tensor] = {}
    counts: dict[int, int] = {}

    def see(call: AttentionCall) -> None:
        found = call.statistics(first=1, received=True)
        means.setdefault(call.layer, AttentionAccumulator()).update(found)
        assert found.received is not None
        sorted_BHS = found.received.double().sort(-1, descending=True).values
        shares = sorted_BHS.cumsum(-1) / sorted_BHS.sum(-1, keepdim=True)
        sums[call.layer] = sums.get(call.layer, 0.0) + shares.sum((0, 1)).cpu()
        counts[call.layer] = counts.get(call.layer, 0) + shares.shape[0] * shares.shape[1]

    device = next(model.parameters()).device
    for rows in windows.split(batch):
        with watch_attention(model, see):
            # The output layer is not needed: it may take most of the time.
            rows = rows.to(device)
            model(input_ids=rows, use_cache=False, logits_to_keep=last_places(rows, 1))
    profiles = []
    for layer in sorted(means):
        mean = means[layer].compute().layer
        assert mean.first is not None
        held = (sums[layer] / counts[layer]).numpy()
        profiles.append(
            LayerProfile(layer, float(mean.entropy), float(mean.effective), float(mean.first), held)
        )
    return profiles
