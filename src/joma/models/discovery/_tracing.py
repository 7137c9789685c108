"""One forward pass, watched: which matrix made the queries and keys that attention was given.

Queries and keys are seen as the operands of the products inside an attention module: those of
`scaled_dot_product_attention`, of `matmul` and its kin. At the first position rotary embeddings
turn nothing, so that what attention is given there is what the projection made, up to a scale and
a normalisation.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from joma.models.architectures import Architecture, config_entry, found_by_map, registered_for
from joma.models.discovery._attentions import FoundAttention, layouts, read_as
from joma.models.discovery._finder import Finder
from joma.models.discovery._projections import Projection
from joma.models.parts import Found, Rows

_SEEN = 0.7
"""Mean cosine of what was made and what was seen from which on they are the same vectors; a
normalisation with trained weights turns them a little. Unrelated vectors have about 0."""
_CLEARLY = 0.2
"""By how much the best way to read a fused matrix must surpass the next."""
_MOST_PRODUCTS = 8
_TOKENS = 7
_PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")

_PRODUCTS = {
    torch.matmul,
    torch.bmm,
    torch.baddbmm,
    torch.einsum,
    Tensor.matmul,
    Tensor.bmm,
    Tensor.baddbmm,
    Tensor.__matmul__,
    functional.scaled_dot_product_attention,
}


@dataclass
class _Frame:
    """What one attention module computed: outputs of its projections, operands of its products."""

    made: dict[str, Tensor] = field(default_factory=dict)
    products: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def _leave_out_fused(attention: FoundAttention) -> None:
    """Leave out a fused matrix if no known layout of it made the queries and keys seen."""
    fused, _ = attention.parts["query"]
    attention.notes[fused.path] = "how queries, keys and values share its rows was not recognised"
    for role in [role for role, (it, _) in attention.parts.items() if it.name == fused.name]:
        del attention.parts[role]


def find_weights(
    model: nn.Module,
    *,
    architecture: Architecture | None = None,
    run: Callable[[], object] | None = None,
) -> Found:
    """Return the weights, attentions, MLPs and blocks of a model, and what is missing.

    Works on Hugging Face models (with or without a head, wrapped by peft, checkpointed), on
    torch's own transformer layers, and on other modules that name their projections in a usual
    way. Parameters on the meta device are found as well. Wrappers of the whole model
    (DistributedDataParallel, torch.compile) are to be taken off first.

    Args:
        model: any module.
        architecture: a map to go by instead. One that was registered for this kind of model
            (`joma.models.register`) is used as if it was given.
        run: runs the model once, such as `lambda: model(tokens)`. What attention is given then
            decides how a fused matrix is read, and `Attention.checked` says where queries and
            keys were seen. `joma.models.dummy_forward` makes one for Hugging Face models. Where
            it fails, names and shapes decide as they do without it.

    Raises:
        ValueError: the model does not have what the map that was given names.
    """
    if architecture is None:
        architecture = registered_for(model)
    if architecture is not None:
        return found_by_map(model, architecture)
    if run is None:
        return Finder(model).found()
    trace = Tracing(model)
    with contextlib.suppress(Exception), trace:
        run()
    return trace.found()


class Tracing:
    """Watch a forward pass and find which weights made the queries and keys seen in it.

        trace = Tracing(model)
        with trace:
            model(tokens)
        found = trace.found()

    Everything is undone at the end, and the model computes what it always computes.

    Args:
        model: Any module, not compiled.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._finder = model, Finder(model)
        self._open: list[tuple[str, _Frame]] = []
        self._scores: dict[str, dict[str, float]] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> "Tracing":
        watch = self._undo.enter_context
        for attention in self._finder.attentions:
            module = self._model.get_submodule(attention.path)
            watch(module.register_forward_pre_hook(partial(self._begin, attention)))
            watch(module.register_forward_hook(partial(self._end, attention), always_call=True))
            for holder in {it.holder for it, _ in attention.parts.values() if it.holder}:
                projection = self._model.get_submodule(holder)
                watch(projection.register_forward_hook(partial(self._keep, holder)))
        watch(_Products(self._see_product))
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()
        self._open.clear()

    def found(self) -> Found:
        """Return what was found, fused matrices read as the forward pass showed."""
        for attention in self._finder.attentions:
            self._decide(attention)
        return self._finder.found()

    def _decide(self, attention: FoundAttention) -> None:
        """Read the fused matrix of an attention as it was seen, and note whether it was seen."""
        scores = self._scores.get(attention.path)
        if not scores:
            return
        ranked = sorted(scores, key=lambda name: -scores[name])
        best = scores[ranked[0]]
        unclear = len(ranked) > 1 and best - scores[ranked[1]] < _CLEARLY
        if best < _SEEN or unclear:
            if attention.ways:
                _leave_out_fused(attention)
            return
        for way in attention.ways:
            if way.name == ranked[0]:
                whole, _ = attention.parts["query"]
                read_as(attention, way, whole)
        attention.checked = True

    def _begin(self, attention: FoundAttention, module: nn.Module, inputs: Any) -> None:
        self._open.append((attention.path, _Frame()))

    def _keep(self, holder: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._open and isinstance(output, Tensor):
            self._open[-1][1].made.setdefault(holder, output.detach())

    def _see_product(self, left: Tensor, right: Tensor) -> None:
        if self._open and len(self._open[-1][1].products) < _MOST_PRODUCTS:
            self._open[-1][1].products.append((left.detach(), right.detach()))

    def _end(self, attention: FoundAttention, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._open or self._open[-1][0] != attention.path:
            return
        _, frame = self._open.pop()
        if attention.path not in self._scores and frame.products:
            _count_heads(attention, frame)
            with torch.no_grad():
                self._scores[attention.path] = dict(_judged(attention, frame))


def _count_heads(attention: FoundAttention, frame: _Frame) -> None:
    """Take the number of heads of a fused matrix from what was seen, where nothing says it."""
    whole, rows = attention.parts.get("query", (None, None))
    if attention.heads is not None or whole is None or rows is None or not attention.ways:
        return
    for queries, _ in frame.products:
        if queries.ndim == 4:
            ways = layouts(whole.out, queries.shape[1], queries.shape[-1])
            attention.ways = ways or attention.ways
            return


def _judged(attention: FoundAttention, frame: _Frame) -> Iterator[tuple[str, float]]:
    """Return how well each way to read the matrices explains what was seen, from 0 to 1."""
    ways = {way.name: (way.rows, way.heads, way.key_heads) for way in attention.ways}
    if not ways:
        rows = {role: part[1] for role, part in attention.parts.items()}
        ways = {"": (rows, attention.heads, attention.key_heads)}
    for name, (rows, heads, key_heads) in ways.items():
        made = []
        for role, number in (("query", heads), ("key", key_heads)):
            if role not in attention.parts or (role == "key" and attention.latent):
                continue
            vectors = _first_vectors(attention.parts[role][0], rows.get(role), number, frame)
            if vectors is None:
                return
            made.append(vectors)
        if made:
            yield name, max(_explained(made, product) for product in frame.products)


def _first_vectors(
    projection: Projection, rows: Rows | None, heads: int | None, frame: _Frame
) -> Tensor | None:
    """Return what a projection made at the first position of the first sequence, (heads, width)."""
    output = frame.made.get(projection.holder)
    if output is None or output.shape[-1] != projection.out or not heads:
        return None
    first = output.reshape(-1, projection.out)[:1].T
    if rows is not None:
        first = rows.rows(first)
    if first.shape[0] % heads:
        return None
    return _on_host(first.reshape(heads, -1))


def _explained(made: list[Tensor], product: tuple[Tensor, Tensor]) -> float:
    """Return the smallest cosine among queries and keys with the operands of one product."""
    found = [0.0 for _ in made]
    for at, (vectors, operand) in enumerate(zip(made, product, strict=False)):
        width = vectors.shape[-1]
        for seen in _first_seen(operand, width):
            found[at] = max(found[at], _cosine(vectors, _on_host(seen)))
    return min(found)


def _first_seen(operand: Tensor, width: int) -> Iterator[Tensor]:
    """Yield vectors of all heads at the first position, for each layout of an operand."""
    for laid in (operand, operand.mT if operand.ndim > 1 else operand):
        if laid.ndim < 3 or laid.shape[-1] != width:
            continue
        if laid.ndim == 3:
            yield laid[:, 0]  # (batch and heads, positions, width)
            yield laid[0]
        else:
            first = laid.reshape(-1, *laid.shape[-3:])[0]
            yield first[:, 0]  # (heads, positions, width)
            yield first[0]


def _on_host(vectors: Tensor) -> Tensor:
    """Return few numbers where kernels for them need not be loaded first."""
    return vectors.detach().cpu().double()


def _cosine(vectors: Tensor, seen: Tensor) -> float:
    """Return the mean cosine over heads; keys that several queries share may be repeated."""
    heads, there = len(vectors), len(seen)
    if there < heads:
        return 0.0
    every = [seen[:heads]]
    if there % heads == 0:
        every.append(seen[:: there // heads])
    best = 0.0
    for one in every:
        cosine = functional.cosine_similarity(vectors, one, dim=-1).mean().item()
        # Deepseek and others reorder the numbers of a head; which there are stays.
        a, b = vectors.sort(-1).values, one.sort(-1).values
        scale = a.abs().amax(-1, keepdim=True) / b.abs().amax(-1, keepdim=True).clamp(min=1e-300)
        same = bool((a - b * scale).abs().amax() <= 1e-4 * a.abs().amax())
        best = max(best, 1.0 if same else cosine)
    return best


class _Products(TorchFunctionMode):
    """Tells of the operands of every product of stacks of matrices."""

    def __init__(self, see: Callable[[Tensor, Tensor], None]) -> None:
        self._see = see

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            tensors = [it for it in (*args, *kwargs.values()) if isinstance(it, Tensor)]
            if func is torch.einsum and len(args) > 1 and isinstance(args[1], list | tuple):
                tensors = [it for it in args[1] if isinstance(it, Tensor)]
            if func in (torch.baddbmm, Tensor.baddbmm):
                tensors = tensors[1:]
            if len(tensors) > 1 and tensors[0].ndim > 2 and tensors[1].ndim > 2:
                self._see(tensors[0], tensors[1])
        return func(*args, **kwargs)


def dummy_forward(model: nn.Module, *, numbers: bool = True) -> Callable[[], object] | None:
    """Return a function that runs a Hugging Face model on a small input; None without one.

    The model runs in evaluation mode without gradients and is left as it was, the global random
    numbers too. The input has seven tokens, one image or one sound, as the model takes them.

    Args:
        model: the model; for one that is not of transformers None is returned.
        numbers: False to run a model on the meta device as well, which computes shapes alone.
    """
    config = getattr(model, "config", None)
    first = next(model.parameters(), None)
    if config is None or first is None or _entry(config, "model_type") is None:
        return None
    if first.is_meta and numbers:
        return None
    inputs = _inputs(model, config, first)
    if not inputs:
        return None

    def run() -> object:
        with torch.no_grad(), _as_it_was(model):
            return model(**inputs)

    return run


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode; restore every part and the random numbers at the end."""
    training = [module for module in model.modules() if module.training]
    devices = list({it.device.index for it in model.parameters() if it.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            model.eval()
            yield
        finally:
            for module in training:
                module.training = True


def _inputs(model: nn.Module, config: Any, like: Tensor) -> dict[str, Any]:
    get_base: Any = getattr(model, "get_base_model", None)  # peft passes any argument on
    taken = inspect.signature((model if get_base is None else get_base()).forward).parameters
    inputs: dict[str, Any] = {}

    def noise(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return drawn.to(like.device, like.dtype)

    if vocabulary := _entry(config, "vocab_size"):
        low = min(5, vocabulary - 1)  # most special tokens are before
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(low, vocabulary, (1, _TOKENS), generator=generator).to(like.device)
        inputs = {name: tokens for name in ("input_ids", "decoder_input_ids") if name in taken}
    if "pixel_values" in taken and (size := _entry(config, "image_size")):
        height, width = size if isinstance(size, list | tuple) else (size, size)
        inputs["pixel_values"] = noise(1, _entry(config, "num_channels") or 3, height, width)
    if "input_features" in taken and (bins := _entry(config, "num_mel_bins")):
        length = 2 * (_entry(config, "max_source_positions") or 64)
        inputs["input_features"] = noise(1, bins, length)
    if "input_values" in taken:
        inputs["input_values"] = noise(1, 4000)
    if inputs and "use_cache" in taken:
        inputs["use_cache"] = False
    return inputs


def _entry(config: Any, name: str) -> Any:
    """Return an entry of a configuration, or of one of its parts."""
    inside = (config_entry(config, part) for part in _PARTS)
    parts = (it for it in inside if it is not None and not isinstance(it, str))
    entries = (config_entry(it, name) for it in (config, *parts))
    return next((it for it in entries if it is not None), None)
