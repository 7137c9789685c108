"""Which parts of a model are measured, and its tensors by name as they are at the moment."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from joma.errors import JomaError
from joma.models import Architecture, AttentionPart, Found, Mlp, Weight, find_weights
from joma.train.processes import whole

MOST_EXPERTS = 8
"""Experts of one mixture that are measured, spread evenly over all of them."""


@dataclass(frozen=True)
class MonitoredMatrix:
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

    @property
    def key(self) -> str:
        """What distinguishes it from other matrices."""
        return self.name if self.expert is None else f"{self.name}[{self.expert}]"

    def read(self, tensor: Tensor) -> Tensor:
        """Return the matrix in the parameter."""
        return tensor if self.expert is None else tensor[self.expert]


@dataclass(frozen=True)
class Parts:
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

    embedding: Weight | None
    ranked: tuple[Weight, ...]
    heads: tuple[AttentionPart, ...]
    matrices: tuple[MonitoredMatrix, ...]
    blocks: dict[int, str]
    stacks: frozenset[str]
    missing: dict[str, str]
    downs: dict[str, int | None] = field(default_factory=dict)

    @classmethod
    def none(cls) -> "Parts":
        """Return the parts of a model of which nothing is known."""
        return cls(None, (), (), (), {}, frozenset(), {})

    @property
    def lower(self) -> tuple[Weight, ...]:
        """The lower layers of the MLPs."""
        return tuple(weight for weight in self.ranked if weight.role == "mlp_lower")


def module_named(model: nn.Module, path: str) -> nn.Module:
    """Return the module at a path without wrappers."""
    for name, module in model.named_modules():
        if plain(name) == path:
            return module
    raise JomaError(f"model must have {path}, which its map names")


def parts_of(
    model: nn.Module,
    architecture: Architecture | None,
) -> Parts:
    """Return the parts of a model.

    Args:
        model: The model, uncompiled.
        architecture: Where its parts are; None to find out.

    Raises:
        JomaError: The model does not have what the architecture that was given names.
    """
    found = find_weights(model, architecture=architecture)
    experts = _measured_experts(found)
    mlps = [mlp for mlp in found.mlps if mlp.expert is None or mlp.module in experts]
    ranked = [
        weight
        for attention in found.attentions
        for weight in (attention.value, attention.output)
        if weight is not None
    ]
    ranked += [weight for mlp in mlps for weight in mlp.weights]
    heads = tuple(
        replace(it, module=f"{it.module}[query·key]") for it in found.attentions if it.has_scores
    )
    blocks: dict[int, str] = {}
    for block in found.blocks:
        if block.layer is not None:
            blocks.setdefault(block.layer, block.module)
    missing = dict(found.missing)
    if not heads:
        missing["query·key"] = found.missing.get("query", "no attention has both, by head")
    return Parts(
        embedding=found.embeddings[0] if found.embeddings else None,
        ranked=tuple(sorted(ranked, key=lambda it: -1 if it.layer is None else it.layer)),
        heads=heads,
        matrices=_matrices(model, found),
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
    return {experts[at].module for experts in mixtures.values() for at in spread(len(experts))}


def spread(count: int) -> Sequence[int]:
    """Return the indices of at most `MOST_EXPERTS` of so many experts, evenly spread."""
    if count <= MOST_EXPERTS:
        return range(count)
    return [round(at * (count - 1) / (MOST_EXPERTS - 1)) for at in range(MOST_EXPERTS)]


def _matrices(model: nn.Module, found: Found) -> tuple[MonitoredMatrix, ...]:
    """Return the matrices of the blocks, or of the whole model where no block is known."""
    tables = {name for weight in found.embeddings for name in weight.names}
    of_block = {block.module: block.layer for block in found.blocks}
    measured = _measured_experts(found)
    of_experts = {
        name: mlp.module in measured
        for mlp in found.mlps
        if mlp.expert is not None
        for weight in mlp.weights
        for name in weight.names
    }
    matrices: list[MonitoredMatrix] = []
    for name, parameter in named_parameters(model).items():
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
                MonitoredMatrix(layer, name, f"{module}[{at}]", at) for at in spread(len(parameter))
            ]
    return tuple(matrices)


_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def plain(path: str) -> str:
    """Return a path without wrappers that checkpoint, compile or shard."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters by name; tied ones appear under each of their names."""
    return dict(model.named_parameters(remove_duplicate=False))


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


class Tensors:
    """A model's weights by name at one measurement.

    Args:
        model: The model, uncompiled.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = named_parameters(model)
        self._model = model
        self._modules = {plain(name): module for name, module in model.named_modules()}
        self._gathered: dict[str, Tensor] = {}

    @property
    def signature(self) -> tuple[object, ...]:
        """What changes when parameters are added, removed, replaced or given a shape."""
        return tuple(
            (name, None if is_lazy(parameter) else tuple(parameter.shape))
            for name, parameter in self.parameters.items()
        )

    def get(self, name: str) -> Tensor | None:
        """Return a parameter cut from the graph, None where the model has no such real tensor."""
        tensor = self.parameters.get(name)
        return tensor.detach() if tensor is not None and is_real(tensor) else None

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of a parameter, None where it has none that can be measured."""
        parameter = self.parameters.get(name)
        gradient = None if parameter is None or is_lazy(parameter) else parameter.grad
        return gradient.detach() if gradient is not None and is_real(gradient) else None

    def present(self, matrices: Iterable[MonitoredMatrix]) -> list[tuple[MonitoredMatrix, Tensor]]:
        """Return the matrices that are there and can be measured, each with its numbers."""
        found = ((matrix, self.get(matrix.name)) for matrix in matrices)
        return [(matrix, matrix.read(it)) for matrix, it in found if it is not None]

    def has(self, weight: Weight) -> bool:
        """Return whether all parameters of a weight are there and can be measured."""
        return all(self.get(name) is not None for name in weight.names)

    def shape(self, weight: Weight) -> torch.Size:
        """Return the shape of the first parameter of a weight."""
        return self.parameters[weight.names[0]].shape

    def gather(self, weights: Iterable[Weight]) -> None:
        """Gather what weights are made of, if sharded; all processes call this, or none.

        What was gathered before is forgotten.
        """
        names = dict.fromkeys(name for weight in weights for name in weight.names)
        # A fused or stacked parameter is gathered once for all weights in it.
        self._gathered = {
            name: self._gathered[name] if name in self._gathered else whole(self.parameters[name])
            for name in names
        }

    def matrix(self, weight: Weight) -> Tensor:
        """Return the (out, in) matrix that the model computes with; `gather` comes first."""
        if weight.path is not None:
            return weight.of(self._model).detach()
        return weight.matrix(self._gathered)

    def module(self, path: str) -> nn.Module | None:
        """Return the module at a path without wrappers, None where there is none."""
        return self._modules.get(path)
