"""A model reads a text twice: first to find where its nodes answer, then what is attended to there.

The second time only the rows of the contexts that were found are kept, so that memory is for
contexts × window, however many layers and heads there are.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from joma.analysis.superposition._settings import SearchSettings
from joma.common.progress import Progress
from joma.models import Loaded, module_at
from joma.probes.contexts import TopContexts, TopContextsAccumulator
from joma.probes.inputs import run_on_tokens
from joma.probes.tap import AttentionCall, watch_attention

_TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 16384}


@dataclass(frozen=True, eq=False)
class Observed:
    """The strongest contexts of a layer's nodes and what is attended to in them.

    Attributes:
        layer: which.
        nodes: which nodes, (N,); those with too few contexts are left out.
        left_out: how many those are.
        values: activations, (N, k), strongest first.
        windows: in which window each context is, (N, k).
        positions: of its query, (N, k).
        rows: attention rows of all the contexts there are, (U, T), each once.
        index: which of them is each node's, (N, k).
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
) -> list[Observed]:
    """Find the contexts of every layer's nodes and what is attended to in them.

    Args:
        loaded: the model.
        windows: (W, T), tokens.
        layers: which.
        nodes: how many nodes of each layer, drawn at random; all where None.
        settings: how.
        seed: decides which nodes.
        progress: called with how many windows of each reading are done.
    """
    tops = _answers(loaded, windows, layers, nodes, settings, seed, progress)
    same = _labels(windows, settings.repeat)
    chosen = [_distinct(top, same, settings) for top in tops]
    wanted = [torch.unique(top.windows * windows.shape[1] + top.positions) for top in chosen]
    rows = _attended(loaded, windows, layers, wanted, progress)
    return [
        Observed(
            layer=layer,
            nodes=top.nodes,
            left_out=len(every.nodes) - len(top.nodes),
            values=top.values,
            windows=top.windows,
            positions=top.positions,
            rows=of_layer,
            index=torch.searchsorted(places, top.windows * windows.shape[1] + top.positions),
        )
        for layer, every, top, places, of_layer in zip(
            layers, tops, chosen, wanted, rows, strict=True
        )
    ]


def _answers(
    loaded: Loaded,
    windows: Tensor,
    layers: Sequence[int],
    nodes: int | None,
    settings: SearchSettings,
    seed: int,
    progress: Progress,
) -> list[TopContexts]:
    """The first reading."""
    accumulators: dict[int, TopContextsAccumulator] = {}
    counted = torch.arange(windows.shape[1], device=_device(loaded)) >= settings.skip
    size = 0

    def see(layer: int, hidden: Tensor) -> None:
        hidden = hidden.reshape(size, windows.shape[1], -1)  # OPT flattens its batch
        if layer not in accumulators:
            drawn = _drawn(hidden.shape[-1], nodes, seed, layer)
            accumulators[layer] = TopContextsAccumulator(
                settings.candidates, nodes=drawn, one_per_window=True
            )
        accumulators[layer].update(hidden, counted=counted)

    with torch.inference_mode(), _hidden(loaded, layers, see):
        for start, batch in batches(loaded, windows):
            size = len(batch)
            run_on_tokens(loaded.model, batch)
            progress("where nodes answer", start + size, len(windows))
    found = [accumulators[layer].compute().each(Tensor.cpu) for layer in layers]
    return [replace(top, nodes=top.nodes.cpu()) for top in found]


def _attended(
    loaded: Loaded,
    windows: Tensor,
    layers: Sequence[int],
    wanted: Sequence[Tensor],
    progress: Progress,
) -> list[Tensor]:
    """The second reading: attention rows of the places wanted in each layer, (U, T) each."""
    length = windows.shape[1]
    places = dict(zip(layers, wanted, strict=True))
    rows = {layer: torch.zeros(len(of), length) for layer, of in places.items()}
    start = size = 0

    def see(call: AttentionCall) -> None:
        if call.layer not in places:
            return
        own = places[call.layer]
        # Places are sorted, so those of a window stand together.
        edges = torch.searchsorted(own, torch.arange(start, start + size + 1) * length).tolist()
        for sequence, (low, high) in enumerate(itertools.pairwise(edges)):
            if low < high:
                positions = (own[low:high] % length).to(call.query.device)
                rows[call.layer][low:high] = attention_rows(call, sequence, positions).cpu()

    with torch.inference_mode(), watch_attention(loaded.model, see):
        for start, batch in batches(loaded, windows):
            size = len(batch)
            run_on_tokens(loaded.model, batch)
            progress("what they attend to", start + size, len(windows))
    return [rows[layer] for layer in layers]


def attention_rows(call: AttentionCall, sequence: int, positions: Tensor) -> Tensor:
    """Attention of some queries of one sequence over its keys, the mean over heads, (n, S).

    The mean over heads is what the MLP gets to see of what the position attended to, before the
    heads' own maps: a head that rests on the sink has little to say in it once that is left out.

    Args:
        call: the queries and keys of a layer.
        sequence: which sequence of the batch.
        positions: of the queries, (n,).
    """
    if call.scores is not None:
        return call.scores[sequence, :, positions].float().softmax(-1).mean(0)
    query = call.query[sequence, :, positions].float()
    key = call.key[sequence].float()
    heads, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    key = key.repeat_interleave(heads // key.shape[0], 0)
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = query @ key.mT * scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    seen = _seen(call, sequence, positions, keys)
    if call.mask is not None:
        whole = (call.query.shape[0], heads, call.query.shape[2], keys)
        mask = call.mask.expand(whole)[sequence, :, positions]
        if mask.dtype == torch.bool:
            seen = seen & mask
        else:
            scores = scores + mask.float()
    scores = scores.masked_fill(~seen, -torch.inf)
    # A row that sees no key would be NaN.
    if call.sinks is not None:  # one more outcome, which is no key
        sinks = call.sinks.float()[:, None, None].expand(heads, queries, 1)
        scores = torch.cat((scores, sinks), -1)
    rows = scores.softmax(-1)[..., :keys].nan_to_num_(0.0).mean(0)
    assert rows.shape == (queries, keys)
    return rows


def _seen(call: AttentionCall, sequence: int, positions: Tensor, keys: int) -> Tensor:
    """Which keys each query may see, (n, S)."""
    own = (positions + keys - call.query.shape[2]).unsqueeze(-1)
    places = torch.arange(keys, device=positions.device)
    seen = torch.ones(len(positions), keys, dtype=torch.bool, device=positions.device)
    if call.causal:
        seen &= places <= own
    if call.window is not None:
        seen &= (places - own).abs() < call.window
    if call.padding is not None:
        seen &= call.padding[sequence]
    return seen


@contextmanager
def _hidden(
    loaded: Loaded, layers: Sequence[int], see: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """While the block runs, `see` gets the hidden activations of the layers' MLPs."""
    path, handles = loaded.known_architecture.mlp_down, []
    try:
        for layer in layers:
            module = module_at(loaded.model, path, layer, architecture=loaded.known_architecture)

            def hook(_: nn.Module, inputs: tuple[Tensor, ...], layer: int = layer) -> None:
                see(layer, inputs[0])

            handles.append(module.register_forward_pre_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


def batches(loaded: Loaded, windows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Batches of windows on the model's device, each with the number of its first."""
    device = _device(loaded)
    size = max(1, _TOKENS_AT_ONCE.get(device.type, 16384) // windows.shape[1])
    for start in range(0, len(windows), size):
        yield start, windows[start : start + size].to(device)


def _device(loaded: Loaded) -> torch.device:
    return next(loaded.model.parameters()).device


def _drawn(hidden: int, nodes: int | None, seed: int, layer: int) -> Tensor | None:
    """Which nodes of a layer; the same of a model and of its untrained twin."""
    if nodes is None or nodes >= hidden:
        return None
    generator = torch.Generator().manual_seed(1_000_003 * seed + layer)
    return torch.randperm(hidden, generator=generator)[:nodes].sort().values


def _labels(windows: Tensor, repeat: int) -> Tensor:
    """A number for the last `repeat` tokens up to every position, (W, T): equal where they are."""
    labels = windows.clone()
    most = int(windows.max()) + 1
    for back in range(1, repeat):
        earlier = torch.full_like(windows, most)  # before the beginning
        earlier[:, back:] = windows[:, :-back] if back < windows.shape[1] else earlier[:, back:]
        labels = torch.unique(labels * (most + 1) + earlier, return_inverse=True)[1]
    return labels


def _distinct(top: TopContexts, labels: Tensor, settings: SearchSettings) -> TopContexts:
    """The nodes with enough contexts that are different and answered to, and these alone."""
    there = top.values > 0
    same = labels[top.windows.clamp(min=0), top.positions.clamp(min=0)]
    before = torch.ones(same.shape[1], same.shape[1], dtype=torch.bool).tril(-1)
    again = ((same.unsqueeze(-1) == same.unsqueeze(-2)) & there.unsqueeze(-2) & before).any(-1)
    good = there & ~again
    enough = good.sum(-1) >= settings.contexts
    order = (~good[enough]).int().sort(dim=-1, stable=True).indices[:, : settings.contexts]
    top = top.each(lambda column: column[enough].gather(1, order))
    return replace(top, nodes=top.nodes[enough])


def spread(windows: Tensor, count: int | None) -> Tensor:
    """At most `count` of the windows, evenly over the text; all where None or there are fewer."""
    if count is None or len(windows) <= count:
        return windows
    return windows[torch.arange(count) * len(windows) // count]
