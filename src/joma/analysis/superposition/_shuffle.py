"""The first control: a layer's contexts dealt out at random among its nodes.

The text, what is attended to in it and how often each context is somebody's stay the same; only who
answers to what changes. Every place keeps its query token, for a node that answers to one token
alone, whatever its company, has contexts of that token, and these fall into groups where the text
repeats itself: after "in" come "Changed in" and "New in". That is the text's doing, not the node's.
"""

import torch
from torch import Tensor

from joma.analysis.superposition._observe import Observed

_ROUNDS = 25


def dealt(observed: Observed, windows: Tensor, generator: torch.Generator) -> Tensor:
    """Contexts of all nodes dealt out among places of the same query token, (N, k).

    As a node's own, those it gets are in different windows, unless a token is so rare that this
    cannot be. A node keeps its activations.

    Args:
        observed: the nodes of a layer and their contexts.
        windows: (W, T), tokens.
        generator: of the random numbers.
    """
    nodes, k = observed.index.shape
    window_of, position_of = observed.places
    index = observed.index.flatten()
    tokens = windows[window_of[index], position_of[index]]
    index = _permuted(index, tokens, generator)
    order = tokens.argsort(stable=True)
    ordered = tokens[order]
    before = torch.ones(k, k, dtype=torch.bool).tril(-1)
    for _ in range(_ROUNDS):
        dealt_windows = window_of[index].view(nodes, k)
        same = dealt_windows.unsqueeze(-1) == dealt_windows.unsqueeze(-2)
        clashing = (same & before).any(-1).flatten().nonzero().squeeze(-1)
        if not len(clashing):
            break
        # What clashes changes places with as many others of its token, all among themselves.
        low = torch.searchsorted(ordered, tokens[clashing])
        high = torch.searchsorted(ordered, tokens[clashing], right=True)
        chance = torch.rand(len(clashing), generator=generator, dtype=torch.float64)
        others = order[low + (chance * (high - low)).long()]
        pool = torch.cat([clashing, others]).unique()
        index[pool] = _permuted(index[pool], tokens[pool], generator)
    return index.view(nodes, k)


def dealt_to(
    observed: Observed, windows: Tensor, row: int, draws: int, generator: torch.Generator
) -> Tensor:
    """What one node could have been dealt, (draws, k): contexts of its own query tokens.

    Each place gets one of the layer's contexts of the same token, in a window the node does not
    have yet where there is one.
    """
    window_of, position_of = observed.places
    tokens = windows[window_of, position_of]
    index = observed.index.flatten()
    places = tokens[observed.index[row]]
    dealt = torch.empty(draws, len(places), dtype=torch.int64)
    taken = torch.zeros(draws, len(windows), dtype=torch.bool)
    for place in torch.randperm(len(places), generator=generator).tolist():
        pool = index[tokens[index] == places[place]]
        # The largest of random numbers, those of windows that are taken being below all others.
        chances = torch.rand(draws, len(pool), generator=generator)
        chances -= taken[:, window_of[pool]].float()
        chosen = pool[chances.argmax(-1)]
        taken[torch.arange(draws), window_of[chosen]] = True
        dealt[:, place] = chosen
    return dealt


def _permuted(values: Tensor, kinds: Tensor, generator: torch.Generator) -> Tensor:
    """Values (n,) in random order among places of the same kind."""
    places, sources = (
        order[kinds[order].argsort(stable=True)]
        for order in (torch.randperm(len(kinds), generator=generator) for _ in range(2))
    )
    permuted = values.clone()
    permuted[places] = values[sources]
    return permuted
