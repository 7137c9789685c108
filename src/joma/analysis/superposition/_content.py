"""What a context is about: the tokens its query attends to, as a direction.

A context is described by the mean of the embeddings of the tokens attended to, weighted with the
attention they get; frequent tokens count less (Arora, Liang and Ma 2017). The query's own token is
left out: any node, trained or not, answers to a handful of tokens, and what is asked is in which
company. So is the sink.

Then the descriptions of a layer's contexts are whitened: centred, and scaled to the same spread in
their main directions. Without that, even attention scores high: means over whole windows differ in
a few directions only (code or prose, early or late), and along those any contexts fall into groups.
With it, contexts dealt at random score alike whatever the attention is like, and scores of
different models can be compared.
"""

import torch
from torch import Tensor

from joma.analysis.superposition._observe import Observed
from joma.analysis.superposition._settings import Settings
from joma.models import Loaded, weights

RARE = 1e-3
"""Tokens of this frequency in the text count half as much as the rarest ones."""

_FLAT = 1e-9
"""Directions with less than this share of the largest variance are rounding."""

_PER_DIRECTION = 8
"""Contexts needed for each direction that is whitened."""


def token_vectors(loaded: Loaded, windows: Tensor) -> Tensor:
    """A vector for each token of the vocabulary, (V, d): its embedding's direction, weighted.

    Embeddings are centred at their mean over the text first.
    """
    names = [name for name, _ in loaded.model.named_parameters(remove_duplicate=False)]
    place = weights(names, loaded.known_architecture, ["embedding"])[0]
    table = place.read(loaded.model.get_parameter(place.name)).detach().float().cpu()
    directions = torch.nn.functional.normalize(table - _frequency(windows, len(table)) @ table)
    return directions * rarity(windows, len(table)).unsqueeze(-1)


def rarity(windows: Tensor, vocabulary: int) -> Tensor:
    """How much each token counts, (V,): 1 for those not in the text, less the more frequent."""
    return RARE / (RARE + _frequency(windows, vocabulary))


def _frequency(windows: Tensor, vocabulary: int) -> Tensor:
    counts = torch.bincount(windows.flatten(), minlength=vocabulary).double()
    return (counts / counts.sum()).float()


def describe(observed: Observed, windows: Tensor, vectors: Tensor, settings: Settings) -> Tensor:
    """Unit vectors of what every row of a layer attends to, (U, r); zero where there is nothing.

    Args:
        observed: of the layer.
        windows: (W, T), tokens.
        vectors: of the tokens; those of the trained model for its controls too, so that all are
            compared in the same words.
        settings: how.
    """
    places, positions = observed.places
    rows = counted(observed.rows, positions, settings.sink)
    content = rows.new_zeros(len(rows), vectors.shape[1])
    order = places.argsort(stable=True)
    sizes = torch.bincount(places, minlength=len(windows)).tolist()
    for window, part in enumerate(order.split(sizes)):
        if len(part):
            content[part] = rows[part] @ vectors[windows[window]]
    return _whitened(content, settings.directions)


def counted(rows: Tensor, positions: Tensor, sink: int) -> Tensor:
    """Attention rows (U, T) without the sink and the query itself, summing to 1 or to 0."""
    rows = rows.clone()
    rows[:, :sink] = 0
    rows.scatter_(1, positions.unsqueeze(1), 0.0)
    total = rows.sum(-1, keepdim=True)
    return torch.where(total > 0, rows / total, 0.0)


def _whitened(content: Tensor, directions: int) -> Tensor:
    there = content.abs().amax(-1, keepdim=True) > 0
    units = torch.nn.functional.normalize(content.double(), dim=-1)
    units = torch.where(there, units - units.sum(0) / there.sum().clamp(min=1), 0.0)
    kept = min(directions, content.shape[1], max(2, len(content) // _PER_DIRECTION))
    variances, axes = torch.linalg.eigh(units.mT @ units / len(units))
    variances, axes = variances[-kept:], axes[:, -kept:]
    spread = variances > _FLAT * variances[-1].clamp(min=torch.finfo(torch.float64).tiny)
    scaled = units @ axes[:, spread] / variances[spread].sqrt()
    return torch.nn.functional.normalize(scaled, dim=-1).float()
