"""Where a model's nodes answer, what is attended to there, and what that is about.

The model reads a text twice: first to find where its nodes answer, then what is attended to there.
The second time only the rows of the contexts that were found are kept, so that memory is for
contexts × window, however many layers and heads there are.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from joma.common.progress import Progress
from joma.errors import JomaError
from joma.models import Loaded, find_weights
from joma.probes.contexts import TopContexts, TopContextsAccumulator
from joma.probes.inputs import run_on_tokens
from joma.probes.tap import AttentionCall, watch_attention

_TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 16384}
_RARE = 1e-3
"""Tokens of this frequency in the text count half as much as the rarest ones."""
_FLAT = 1e-9
"""Directions with less than this share of the largest variance are rounding."""
_PER_DIRECTION = 8
"""Contexts needed for each direction that is whitened."""
_ROUNDS = 25


@dataclass(frozen=True)
class SearchSettings:
    """How contexts are taken, compared and grouped; the same for the model and its controls.

    Attributes:
        contexts: Contexts of each node, its strongest in different windows.
        least: Fewest contexts of a group.
        balance: Least ratio of the mean activations of two groups.
        skip: Positions at the beginning of a window that are no context: they have little to
            attend to.
        sink: Keys at the beginning of a window whose attention is not counted. Many heads rest on
            the first token when they have nothing to say; with it, all contexts seem related.
        repeat: Contexts with the same last tokens, this many, are one context seen again.
        directions: Most directions in which contexts are compared.
        shuffles: How often the contexts of a layer are dealt out at random.
    """

    contexts: int = 16
    least: int = 4
    balance: float = 0.5
    skip: int = 8
    sink: int = 1
    repeat: int = 8
    directions: int = 64
    shuffles: int = 4


@dataclass(frozen=True, eq=False)
class LayerContexts:
    """The strongest contexts of a layer's nodes and what is attended to in them.

    Attributes:
        layer: Layer index.
        nodes: The nodes, (N,); those with too few contexts are left out.
        left_out: How many those are.
        values: Activations, (N, k), strongest first.
        windows: In which window each context is, (N, k).
        positions: Position of its query, (N, k).
        rows: Attention rows of all the contexts there are, (U, T), each once.
        index: Which of them is each node's, (N, k).
    """

    layer: int
    nodes: Tensor
    left_out: int
    values: Tensor
    windows: Tensor
    positions: Tensor
    rows: Tensor
    index: Tensor

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Window and position of every row, (U,) each."""
        windows = torch.empty(len(self.rows), dtype=torch.int64)
        positions = windows.clone()
        windows[self.index.flatten()] = self.windows.flatten()
        positions[self.index.flatten()] = self.positions.flatten()
        return windows, positions


def observe(
    loaded: Loaded,
    windows: Tensor,
    layers: Sequence[int],
    nodes: int | None,
    settings: SearchSettings,
    seed: int,
    progress: Progress,
) -> list[LayerContexts]:
    """Find the contexts of every layer's nodes and what is attended to in them.

    Args:
        loaded: The model.
        windows: (W, T), tokens.
        layers: Layer indices.
        nodes: How many nodes of each layer, drawn at random; all where None.
        settings: How contexts are taken.
        seed: Decides which nodes.
        progress: Called with how many windows of each reading are done.
    """
    length = windows.shape[1]
    device = next(loaded.model.parameters()).device
    answered = torch.arange(length, device=device) >= settings.skip
    strongest: dict[int, TopContextsAccumulator] = {}  # twice as many as are needed

    def keep(layer: int, hidden: Tensor) -> None:
        hidden = hidden.reshape(-1, length, hidden.shape[-1])  # OPT flattens its batch
        if layer not in strongest:
            drawn = None
            if nodes is not None and nodes < hidden.shape[-1]:  # the same of an untrained twin
                generator = torch.Generator().manual_seed(1_000_003 * seed + layer)
                drawn = torch.randperm(hidden.shape[-1], generator=generator)[:nodes].sort().values
            most = 2 * settings.contexts
            strongest[layer] = TopContextsAccumulator(most, nodes=drawn)
        strongest[layer].update(hidden, counted=answered)

    with _watching_hidden(loaded, layers, keep):
        for start, batch in batches(loaded, windows):
            run_on_tokens(loaded.model, batch)
            progress("where nodes answer", start + len(batch), len(windows))
    same = _labels(windows, settings.repeat)
    chosen, left_out = [], []
    for layer in layers:
        top = strongest[layer].compute().each(Tensor.cpu)
        chosen.append(_distinct(replace(top, nodes=top.nodes.cpu()), same, settings.contexts))
        left_out.append(len(top.nodes) - len(chosen[-1].nodes))
    places = [top.windows * length + top.positions for top in chosen]
    wanted = {layer: torch.unique(of) for layer, of in zip(layers, places, strict=True)}
    rows = _attended(loaded, windows, wanted, progress)
    return [
        LayerContexts(
            layer=layer,
            nodes=top.nodes,
            left_out=missing,
            values=top.values,
            windows=top.windows,
            positions=top.positions,
            rows=rows[layer],
            index=torch.searchsorted(wanted[layer], of),
        )
        for layer, top, missing, of in zip(layers, chosen, left_out, places, strict=True)
    ]


def _attended(
    loaded: Loaded, windows: Tensor, wanted: dict[int, Tensor], progress: Progress
) -> dict[int, Tensor]:
    """The second reading: attention rows of the places wanted in each layer, (U, T) each."""
    length = windows.shape[1]
    rows = {layer: torch.zeros(len(of), length) for layer, of in wanted.items()}
    start = size = 0

    def see(call: AttentionCall) -> None:
        if call.layer not in wanted:
            return
        own = wanted[call.layer]
        # Places are sorted, so those of a window stand together.
        edges = torch.searchsorted(own, torch.arange(start, start + size + 1) * length).tolist()
        for sequence, (low, high) in enumerate(itertools.pairwise(edges)):
            if low < high:
                positions = (own[low:high] % length).to(call.query.device)
                rows[call.layer][low:high] = _attention_rows(call, sequence, positions).cpu()

    with torch.inference_mode(), watch_attention(loaded.model, see):
        for start, batch in batches(loaded, windows):
            size = len(batch)
            run_on_tokens(loaded.model, batch)
            progress("what they attend to", start + size, len(windows))
    return rows


def _attention_rows(call: AttentionCall, sequence: int, positions: Tensor) -> Tensor:
    """Attention of some queries of one sequence over its keys, the mean over heads, (n, S).

    The mean over heads is what the MLP gets to see of what the position attended to, before the
    heads' own maps: a head that rests on the sink has little to say in it once that is left out.
    """
    if call.scores is not None:
        return call.scores[sequence, :, positions].float().softmax(-1).mean(0)
    query, key = call.query[sequence, :, positions].float(), call.key[sequence].float()
    heads, keys = len(query), key.shape[1]
    key = key.repeat_interleave(heads // len(key), 0)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if call.scale is None else call.scale)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    own = (positions + keys - call.query.shape[2]).unsqueeze(-1)
    places = torch.arange(keys, device=positions.device)
    seen = torch.ones_like(scores[0], dtype=torch.bool)
    if call.causal:
        seen &= places <= own
    if call.window is not None:
        seen &= (places - own).abs() < call.window
    if call.mask is not None:
        whole = (call.query.shape[0], heads, call.query.shape[2], keys)
        mask = call.mask.expand(whole)[sequence, :, positions]
        if mask.dtype == torch.bool:
            seen = seen & mask
        else:
            scores = scores + mask.float()
    scores = scores.masked_fill(~seen, -torch.inf)
    if call.sinks is not None:  # one more outcome, which is no key
        sinks = call.sinks.float()[:, None, None].expand(heads, len(positions), 1)
        scores = torch.cat((scores, sinks), -1)
    # A row that sees no key would be NaN.
    return scores.softmax(-1)[..., :keys].nan_to_num_(0.0).mean(0)


@contextmanager
def _watching_hidden(
    loaded: Loaded, layers: Sequence[int], see: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """While the block runs, `see` gets the hidden activations of the layers' MLPs."""
    paths, handles = hidden_paths(loaded), []
    try:
        for layer in layers:
            module = loaded.model.get_submodule(paths[layer])

            def hook(_: nn.Module, inputs: tuple[Tensor, ...], layer: int = layer) -> None:
                see(layer, inputs[0])

            handles.append(module.register_forward_pre_hook(hook))
        with torch.inference_mode():
            yield
    finally:
        for handle in handles:
            handle.remove()


def hidden_paths(loaded: Loaded) -> list[str]:
    """Return for each layer the path of the module that the MLP's hidden activations go into."""
    found = find_weights(loaded.model)
    paths = [mlp.down_path for mlp in found.mlps if mlp.down_path is not None]
    numbers = [mlp.layer for mlp in found.mlps]
    if not paths or not found.embeddings or numbers != list(range(len(paths))):
        raise JomaError(
            f"{loaded.source} cannot be searched: token embeddings and one MLP in each layer are "
            f"needed, found {len(found.mlps)} MLPs in {len(found.blocks)} layers"
        )
    return paths


def batches(loaded: Loaded, windows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield batches of windows on the model's device, each with the number of its first."""
    device = next(loaded.model.parameters()).device
    size = max(1, _TOKENS_AT_ONCE.get(device.type, 16384) // windows.shape[1])
    for start in range(0, len(windows), size):
        yield start, windows[start : start + size].to(device)


def _labels(windows: Tensor, repeat: int) -> Tensor:
    """A number for the last `repeat` tokens up to every position, (W, T): equal where they are."""
    labels = windows.clone()
    most = int(windows.max()) + 1
    for back in range(1, min(repeat, windows.shape[1])):
        earlier = torch.full_like(windows, most)  # before the beginning
        earlier[:, back:] = windows[:, :-back]
        labels = torch.unique(labels * (most + 1) + earlier, return_inverse=True)[1]
    return labels


def _distinct(top: TopContexts, labels: Tensor, contexts: int) -> TopContexts:
    """The nodes with enough contexts that are different and answered to, and these alone."""
    there = top.values > 0
    same = labels[top.windows.clamp(min=0), top.positions.clamp(min=0)]
    before = torch.ones(same.shape[1], same.shape[1], dtype=torch.bool).tril(-1)
    again = ((same.unsqueeze(-1) == same.unsqueeze(-2)) & there.unsqueeze(-2) & before).any(-1)
    good = there & ~again
    enough = good.sum(-1) >= contexts
    order = (~good[enough]).int().sort(dim=-1, stable=True).indices[:, :contexts]
    top = top.each(lambda column: column[enough].gather(1, order))
    return replace(top, nodes=top.nodes[enough])


def spread(windows: Tensor, count: int) -> Tensor:
    """Return at most `count` of the windows, evenly over the text."""
    if len(windows) <= count:
        return windows
    return windows[torch.arange(count) * len(windows) // count]


def token_vectors(loaded: Loaded, windows: Tensor) -> Tensor:
    """Return a weighted direction of each token's embedding, (V, d).

    Embeddings are centred at their mean over the text first.
    """
    table = find_weights(loaded.model).embeddings[0].of(loaded.model).detach().float().cpu()
    directions = torch.nn.functional.normalize(table - _frequency(windows, len(table)) @ table)
    return directions * rarity(windows, len(table)).unsqueeze(-1)


def rarity(windows: Tensor, vocabulary: int) -> Tensor:
    """Return how much each token counts, (V,): 1 for those not in the text, less the more frequent.

    Frequent tokens count less after Arora, Liang and Ma 2017.
    """
    return _RARE / (_RARE + _frequency(windows, vocabulary))


def _frequency(windows: Tensor, vocabulary: int) -> Tensor:
    counts = torch.bincount(windows.flatten(), minlength=vocabulary).double()
    return (counts / counts.sum()).float()


def describe(
    observed: LayerContexts, windows: Tensor, vectors: Tensor, settings: SearchSettings
) -> Tensor:
    """Return unit vectors of what every row of a layer attends to, (U, r); zero if nothing.

    A context is described by the mean of the embeddings of the tokens attended to, weighted with
    the attention they get. The query's own token is left out, and so is the sink: any node, trained
    or not, answers to a handful of tokens, and what is asked is in which company.

    Then the descriptions are whitened: centred, and scaled to the same spread in their main
    directions. Without that, even attention scores high: means over whole windows differ in a few
    directions only (code or prose, early or late), and along those any contexts fall into groups.

    Args:
        observed: The contexts of a layer.
        windows: (W, T), tokens.
        vectors: Vectors of the tokens; those of the trained model for its controls too, so that all
            are compared in the same words.
        settings: The sink, and the most directions.
    """
    places, positions = observed.places
    rows = counted(observed.rows, positions, settings.sink)
    content = rows.new_zeros(len(rows), vectors.shape[1])
    for window in places.unique().tolist():
        own = places == window
        content[own] = rows[own] @ vectors[windows[window]]
    there = content.abs().amax(-1, keepdim=True) > 0
    units = torch.nn.functional.normalize(content.double(), dim=-1)
    units = torch.where(there, units - units.sum(0) / there.sum().clamp(min=1), 0.0)
    kept = min(settings.directions, content.shape[1], max(2, len(content) // _PER_DIRECTION))
    variances, axes = torch.linalg.eigh(units.mT @ units / len(units))
    variances, axes = variances[-kept:], axes[:, -kept:]
    varied = variances > _FLAT * variances[-1].clamp(min=torch.finfo(torch.float64).tiny)
    scaled = units @ axes[:, varied] / variances[varied].sqrt()
    return torch.nn.functional.normalize(scaled, dim=-1).float()


def counted(rows: Tensor, positions: Tensor, sink: int) -> Tensor:
    """Return attention rows (U, T) without the sink and the query itself, summing to 1 or to 0."""
    rows = rows.clone()
    rows[:, :sink] = 0
    rows.scatter_(1, positions.unsqueeze(1), 0.0)
    total = rows.sum(-1, keepdim=True)
    return torch.where(total > 0, rows / total, 0.0)


def dealt(observed: LayerContexts, windows: Tensor, generator: torch.Generator) -> Tensor:
    """Return the contexts of all nodes dealt out among places of the same query token, (N, k).

    This is the first control: the text, what is attended to in it and how often each context is
    somebody's stay the same; only who answers to what changes. Every place keeps its query token,
    for a node that answers to one token alone has contexts of that token, and these fall into
    groups where the text repeats itself: after "in" come "Changed in" and "New in". As a node's
    own, the contexts it gets are in different windows, unless a token is too rare for that.
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
        own = window_of[index].view(nodes, k)
        same = own.unsqueeze(-1) == own.unsqueeze(-2)
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
    observed: LayerContexts, windows: Tensor, row: int, draws: int, generator: torch.Generator
) -> Tensor:
    """Return what one node could have been dealt, (draws, k): contexts of its own query tokens.

    Each place gets one of the layer's contexts of the same token, in a window the node does not
    have yet where there is one.
    """
    window_of, position_of = observed.places
    tokens = windows[window_of, position_of]
    index = observed.index.flatten()
    places = tokens[observed.index[row]]
    found = torch.empty(draws, len(places), dtype=torch.int64)
    taken = torch.zeros(draws, len(windows), dtype=torch.bool)
    for place in torch.randperm(len(places), generator=generator).tolist():
        pool = index[tokens[index] == places[place]]
        # The largest of random numbers, those of windows that are taken being below all others.
        chances = torch.rand(draws, len(pool), generator=generator)
        chances -= taken[:, window_of[pool]].float()
        chosen = pool[chances.argmax(-1)]
        taken[torch.arange(draws), window_of[chosen]] = True
        found[:, place] = chosen
    return found


def _permuted(values: Tensor, kinds: Tensor, generator: torch.Generator) -> Tensor:
    """Return values (n,) in random order among places of the same kind."""
    places, sources = (
        order[kinds[order].argsort(stable=True)]
        for order in (torch.randperm(len(kinds), generator=generator) for _ in range(2))
    )
    permuted = values.clone()
    permuted[places] = values[sources]
    return permuted
