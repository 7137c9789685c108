"""Attention of any module whose queries and keys are outputs of modules that a user names."""

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from joma.common.checks import whole_number
from joma.errors import JomaError
from joma.models.model_weights import Part
from joma.probes.tap._taps import Frame, Tap

_LAYER = "{layer}"


@dataclass(frozen=True)
class AttentionMap:
    """Where queries and keys come from, in a model that writes attention out by hand.

    The outputs of the modules named must be what the scores are products of: (B, T, heads · D),
    (B, heads, T, D), or (T, heads · D). In a model with rotary position embeddings those are not
    the outputs of the query and key projections, which are rotated afterwards; such a model is
    refused unless `rotated` says what is named.

    Args:
        query: path of the module whose output is the queries, "blocks.{layer}.q".
        key: path of the module whose output is the keys; may be the same module.
        heads: how many heads the queries have.
        key_heads: how many the keys have, where fewer share them.
        causal: whether a query sees no later key.
        scale: of the products; 1/√D where None.
        window: a query sees only keys nearer than this.
        softcap: c, where scores are c·tanh(score / c).
        query_part: which part of the output the queries are, where one matrix makes more:
            `Part(0, of=3)` for queries, keys and values in this order.
        key_part: the same for the keys.
        rotated: for a model with rotary position embeddings: True where the modules named return
            queries and keys that are rotated already, False where these layers rotate nothing.
    """

    query: str
    key: str
    heads: int
    key_heads: int | None = None
    causal: bool = True
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    query_part: Part | None = None
    key_part: Part | None = None
    rotated: bool | None = None

    def __post_init__(self) -> None:
        for name in ("query", "key"):
            if getattr(self, name).count(_LAYER) != 1:
                raise JomaError(f"{name} must have {_LAYER} once, got {getattr(self, name)!r}")
        whole_number("heads", self.heads, 1)
        if self.key_heads is not None and self.heads % whole_number("key_heads", self.key_heads, 1):
            raise JomaError(f"key_heads must divide heads = {self.heads}, got {self.key_heads}")
        if self.query == self.key and self.query_part == self.key_part:
            raise JomaError(
                f"query_part and key_part must say which parts of {self.query!r} queries and keys "
                f"are, got {self.query_part} for both"
            )


@contextmanager
def named_attention(model: nn.Module, names: AttentionMap, tap: Tap) -> Iterator[None]:
    """Hand queries and keys of a layer to the tap as soon as both are there."""
    queries, keys = (_modules(model, template) for template in (names.query, names.key))
    if not queries or queries.keys() != keys.keys():
        raise JomaError(
            f"names must find queries and keys of the same layers, got layers {sorted(queries)} at "
            f"{names.query!r} and {sorted(keys)} at {names.key!r}; the model has "
            f"{', '.join(name for name, _ in list(model.named_modules())[1:9])} …"
        )
    sign = _sign_of_rotation(model) if names.rotated is None else None
    if sign is not None:
        raise JomaError(
            f"names must say where rotated queries and keys are: the model rotates them ({sign}) "
            f"after {names.query!r} and {names.key!r} are computed; name modules that return "
            "rotated ones and give rotated=True, or rotated=False if these layers do not rotate"
        )
    options = {it: getattr(names, it) for it in ("scale", "causal", "window", "softcap")}
    halves: dict[tuple[int, int, str], Tensor] = {}

    def arrived(layer: int, role: str, module: nn.Module, args: Any, output: Any) -> None:
        thread = threading.get_ident()
        halves[thread, layer, role] = _heads(names, role, output)
        if all((thread, layer, it) in halves for it in ("query", "key")):
            both = {it: halves.pop((thread, layer, it)) for it in ("query", "key")}
            frame = Frame(names.query.replace(_LAYER, str(layer)), module, args, {})
            tap.hand_over(both | options, None, False, frame, layer)

    with ExitStack() as stack:
        for role, found in (("query", queries), ("key", keys)):
            for layer, module in found.items():
                handle = module.register_forward_hook(partial(arrived, layer, role))
                stack.callback(handle.remove)
        yield
    if halves:
        _, layer, role = next(iter(halves))
        raise JomaError(f"names must find queries and keys, got only the {role} of layer {layer}")


_ROTARY = re.compile(r"[Rr]otary|R[Oo]PE|Rope(?![a-z])|^rope")
_TABLES = ("inv_freq", "freqs_cis", "cos_cached", "sin_cached", "rope_freqs")


def _sign_of_rotation(model: nn.Module) -> str | None:
    """Return what shows that a model has rotary position embeddings, if anything does."""
    for path, module in model.named_modules():
        if _ROTARY.search(type(module).__name__):
            return f"{path or 'it'} is a {type(module).__name__}"
        if getattr(getattr(module, "config", None), "rope_parameters", None):
            return "its configuration has rope_parameters"
    tables = (path for path, _ in model.named_buffers() if path.rpartition(".")[2] in _TABLES)
    return next((f"it has a buffer {path}" for path in tables), None)


def _modules(model: nn.Module, template: str) -> dict[int, nn.Module]:
    pattern = re.compile(re.escape(template).replace(re.escape(_LAYER), r"(\d+)"))
    found = ((pattern.fullmatch(path), module) for path, module in model.named_modules())
    return {int(match[1]): module for match, module in found if match}


def _heads(names: AttentionMap, role: str, output: Any) -> Tensor:
    """Return an output as (B, heads, T, D), cut from the graph."""
    template = getattr(names, role)
    heads = names.heads if role == "query" else names.key_heads or names.heads
    part: Part | None = getattr(names, f"{role}_part")
    if not isinstance(output, Tensor):
        raise JomaError(f"{role} must name a module that returns a tensor, {template!r} does not")
    output = output.detach()
    if part is not None:
        columns = part.rows(output.flatten(0, -2).mT, heads)
        output = columns.mT.unflatten(0, output.shape[:-1])
    if output.ndim == 4 and output.shape[1] == heads:
        return output
    if output.ndim == 2:
        output = output.unsqueeze(0)
    if output.ndim != 3 or output.shape[-1] % heads:
        raise JomaError(
            f"{role} must name a module that returns (B, T, {heads} · D) or (B, {heads}, T, D), "
            f"{template!r} returned {tuple(output.shape)}"
        )
    return output.unflatten(-1, (heads, -1)).transpose(1, 2)
