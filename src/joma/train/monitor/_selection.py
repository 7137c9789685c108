"""Which parts of a model are measured."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from joma.models import AttentionPart, Found, Mlp, Weight, find_weights

MOST_EXPERTS = 8
"""Experts of one mixture that are measured, spread evenly over all of them."""


class MonitoredMatrix(NamedTuple):
    """A whole parameter as an optimizer sees it, or one expert's part of it.

    Attributes:
        layer: Layer index, or None for what is in no layer.
        name: Name of the parameter.
        module: What a reader knows it by.
        expert: Index along the first axis of a parameter that holds experts, otherwise None.
    """

    layer: int | None
    name: str
    module: str
    expert: int | None = None


@dataclass(frozen=True)
class Selection:
    """What there is to measure, and why what is missing is.

    Attributes:
        embedding: The token embedding, or None.
        ranked: Weights whose ranks are followed: values, outputs and all matrices of the MLPs.
        heads: Every attention whose queries and keys are known, its module with "[query·key]".
        matrices: Parameters in the layers whose gradients and updates are followed.
        blocks: By layer, the path of the first block of that number.
        stacks: The paths of the lists that hold blocks, such as a decoder's and an encoder's.
        missing: By role or module, why it is not measured.
        downs: By path of an MLP's second linear map, the layer.
    """

    embedding: Weight | None = None
    ranked: tuple[Weight, ...] = ()
    heads: tuple[AttentionPart, ...] = ()
    matrices: tuple[MonitoredMatrix, ...] = ()
    blocks: dict[int, str] = field(default_factory=dict)
    stacks: frozenset[str] = frozenset()
    missing: dict[str, str] = field(default_factory=dict)
    downs: dict[str, int | None] = field(default_factory=dict)


def selection_of(model: nn.Module) -> Selection:
    """Return the parts of a model that is not compiled; of weights, those that are real tensors."""
    found = find_weights(model)
    real = {
        name for name, tensor in model.named_parameters(remove_duplicate=False) if is_real(tensor)
    }
    experts = _measured_experts(found)
    mlps = [mlp for mlp in found.mlps if mlp.expert is None or mlp.module in experts]
    weights = [weight for it in found.attentions for weight in (it.value, it.output) if weight]
    weights += [weight for mlp in mlps for weight in mlp.weights]
    heads = [
        replace(it, module=f"{it.module}[query·key]")
        for it in found.attentions
        if it.has_scores and all(real.issuperset(weight.names) for weight in it.weights[:2])
    ]
    blocks: dict[int, str] = {}
    for block in found.blocks:
        if block.layer is not None:
            blocks.setdefault(block.layer, block.module)
    missing = dict(found.missing)
    if not heads:
        missing["query·key"] = found.missing.get("query", "no attention has both, by head")
    embeddings = [weight for weight in found.embeddings if real.issuperset(weight.names)]
    return Selection(
        embedding=embeddings[0] if embeddings else None,
        ranked=tuple(weight for weight in weights if real.issuperset(weight.names)),
        heads=tuple(heads),
        matrices=_matrices(model, found, experts),
        blocks=blocks,
        stacks=frozenset(block.module.rpartition(".")[0] for block in found.blocks),
        missing=missing,
        downs={plain(mlp.down_path): mlp.layer for mlp in mlps if mlp.down_path is not None},
    )


def _measured_experts(found: Found) -> set[str]:
    """Return the modules of the experts that are measured."""
    mixtures: dict[tuple[int | None, str], list[Mlp]] = defaultdict(list)
    for mlp in found.mlps:
        if mlp.expert is not None:
            mixture = mlp.module.removesuffix(f"[{mlp.expert}]").removesuffix(f".{mlp.expert}")
            mixtures[mlp.layer, mixture].append(mlp)
    return {experts[at].module for experts in mixtures.values() for at in _spread(len(experts))}


def _spread(count: int) -> Sequence[int]:
    """Return the indices of at most `MOST_EXPERTS` of so many experts, evenly spread."""
    if count <= MOST_EXPERTS:
        return range(count)
    return [round(at * (count - 1) / (MOST_EXPERTS - 1)) for at in range(MOST_EXPERTS)]


def _matrices(model: nn.Module, found: Found, experts: set[str]) -> tuple[MonitoredMatrix, ...]:
    """Return the matrices of the blocks, or of the whole model where no block is known."""
    tables = {name for weight in found.embeddings for name in weight.names}
    of_block = {block.module: block.layer for block in found.blocks}
    of_experts = {
        name: mlp.module in experts
        for mlp in found.mlps
        if mlp.expert is not None
        for weight in mlp.weights
        for name in weight.names
    }
    matrices: list[MonitoredMatrix] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not is_real(parameter) or name in tables:
            continue
        path = module = plain(name).removesuffix(".weight")
        while path and path not in of_block:
            path = path.rpartition(".")[0]
        if of_block and not path:
            continue
        layer = of_block[path] if of_block else layer_in(plain(name))
        if parameter.ndim == 2 and of_experts.get(name, True):
            matrices.append(MonitoredMatrix(layer, name, module))
        elif parameter.ndim == 3 and name in of_experts:
            matrices += [
                MonitoredMatrix(layer, name, f"{module}[{at}]", at)
                for at in _spread(len(parameter))
            ]
    return tuple(matrices)


def tied_layers(model: nn.Module) -> list[tuple[str, int, int]]:
    """Return layers that are the same as an earlier one of their list: path, index, earlier index.

    The same module, or modules that share most of their matrices. A block that a model runs several
    times but lists once (ALBERT) is none.
    """
    found = []
    for path, listed in model.named_modules():
        if not isinstance(listed, nn.ModuleList):
            continue
        layers = [
            {id(it) for it in layer.parameters() if it.ndim > 1 and is_real(it)} for layer in listed
        ]
        for index, matrices in enumerate(layers):
            for earlier, others in enumerate(layers[:index]):
                if len(matrices & others) > 0.5 * len(matrices):
                    found.append((f"{plain(path)}.{index}", index, earlier))
                    break
    return found


_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def plain(path: str) -> str:
    """Return a path without wrappers that checkpoint, compile or shard."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def layer_in(name: str) -> int | None:
    """Return the first number in a name, which is the layer in most models."""
    numbers = _NUMBER.findall(name)
    return int(numbers[0]) if numbers else None


def is_real(tensor: Tensor) -> bool:
    """Return whether a tensor holds floating-point numbers: no meta, lazy or complex one does."""
    return (
        not is_lazy(tensor)
        and tensor.device.type != "meta"
        and tensor.is_floating_point()
        and tensor.element_size() > 1  # eight bits have no arithmetic
        and tensor.layout == torch.strided
    )
