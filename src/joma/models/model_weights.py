"""One weight of a model: where it is stored, and how its (out, in) matrix is made from that."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from joma.errors import JomaError

Parameters = Mapping[str, Tensor] | Callable[[str], Tensor]
"""The stored parameters by their full names: a dictionary, or a function that reads one."""


@dataclass(frozen=True)
class Part:
    """One of `of` equal parts of the output rows of a fused matrix.

    Args:
        index: which part, from 0.
        of: how many parts there are.
        by_head: the parts alternate within every head (GPT-NeoX) instead of following each other.
    """

    index: int
    of: int
    by_head: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise JomaError(f"a Part needs 0 <= index < of, got index {self.index} of {self.of}")

    def rows(self, matrix: Tensor, heads: int | None) -> Tensor:
        """Return the part of an (out, in) matrix; a view unless it goes by head."""
        groups = self.of
        if self.by_head:
            assert heads is not None, "`weights` asks for the number of heads"
            groups *= heads
        out = len(matrix)
        if out % groups:
            raise JomaError(
                f"a fused matrix of {self.of} parts"
                + (f" by {heads} heads" if self.by_head else "")
                + f" needs a number of rows divisible by {groups}, got {out}"
            )
        size = out // groups
        return Rows(self.index * size, (self.index + 1) * size, self.of * size).rows(matrix)


@dataclass(frozen=True)
class Rows:
    """Some rows of a fused matrix: of every group of `of` rows, those from `start` to `stop`.

    One group is a matrix whose parts follow each other; as many groups as there are heads of the
    keys, one whose parts alternate.

    Args:
        start: the first row of a group.
        stop: the row after the last.
        of: how many rows a group has.
    """

    start: int
    stop: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.of:
            raise JomaError(
                f"Rows needs 0 <= start < stop <= of, got {self.start}, {self.stop}, {self.of}"
            )

    @classmethod
    def following(cls, *sizes: int) -> list["Rows"]:
        """Return the parts of a matrix whose every group consists of parts of these sizes."""
        ends = list(accumulate(sizes))
        return [cls(end - size, end, ends[-1]) for size, end in zip(sizes, ends, strict=True)]

    def rows(self, matrix: Tensor, heads: int | None = None) -> Tensor:
        """Return the rows of an (out, in) matrix; a view where there is one group."""
        out, inputs = matrix.shape
        if out % self.of:
            raise JomaError(f"the number of rows must be divisible by {self.of}, got {out}")
        if out == self.of:
            return matrix[self.start : self.stop]
        grouped = matrix.reshape(-1, self.of, inputs)[:, self.start : self.stop]
        return grouped.reshape(-1, inputs)


@dataclass(frozen=True)
class Place:
    """Where one weight lives.

    Args:
        name: the parameter's name relative to the base model, "h.{layer}.attn.c_attn.weight".
        part: which part of it, where several matrices are stored as one.
        transposed: stored as (in, out), as GPT-2's Conv1D does; `Weight.read` returns (out, in).
    """

    name: str
    part: Part | Rows | None = None
    transposed: bool = False


@dataclass(frozen=True)
class LowRank:
    """A low-rank update of a weight, as LoRA trains it: scaling · up @ down.

    Args:
        down: the name of A, (rank, in).
        up: the name of B, (out, rank).
        scaling: what the product is multiplied with.
        transposed: the names hold Aᵀ and Bᵀ, as they do for embeddings.
    """

    down: str
    up: str
    scaling: float
    transposed: bool = False

    def of(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the update, (out, in)."""
        down, up = _exact(read(self.down)), _exact(read(self.up))
        product = down.T @ up.T if self.transposed else up @ down
        return self.scaling * product


@dataclass(frozen=True)
class Weight:
    """One weight of one model.

    Args:
        role: one of `ROLES`.
        layer: the number of the block it is in, None for the embedding. Blocks of several towers
            may have the same number; `module` tells them apart.
        module: its unique key, which a reader knows it by: "transformer.h.0.attn.c_attn[query]".
        name: the full name of the stored parameter, as `named_parameters` has it.
        place: how it is stored.
        heads: how many heads share a matrix whose parts go by head.
        expert: which expert of a mixture it belongs to; None outside of a mixture.
        updates: the low-rank updates that are added to it (LoRA).
        path: the module that holds it, where its matrix is computed from several parameters
            (weight normalisation, pruning, a parametrization); None where `name` holds it.
        stored: the full names of those parameters.
    """

    role: str
    layer: int | None
    module: str
    name: str
    place: Place
    heads: int | None = None
    expert: int | None = None
    updates: tuple[LowRank, ...] = ()
    path: str | None = None
    stored: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The full names of all parameters its matrix is made of."""
        own = self.stored if self.path is not None else (self.name,)
        return own + tuple(name for it in self.updates for name in (it.down, it.up))

    def read(self, tensor: Tensor) -> Tensor:
        """Return the (out, in) matrix in the tensor stored under `name`, without updates."""
        return self._part(self._oriented(tensor))

    def matrix(self, parameters: Parameters) -> Tensor:
        """Return the (out, in) matrix the model computes with, LoRA's updates added.

        Args:
            parameters: a dictionary of the model's parameters, or a function that reads one.

        Raises:
            ValueError: it is computed from parameters in a way only its module knows: use `of`.
        """
        if self.path is not None:
            raise JomaError(
                f"{self.module} is computed from {', '.join(self.stored)}: read it with "
                "Weight.of(model)"
            )
        read = parameters.__getitem__ if isinstance(parameters, Mapping) else parameters
        return self._whole(read(self.name), read)

    def of(self, model: nn.Module) -> Tensor:
        """Return the (out, in) matrix the model computes with, also where it is parametrized.

        Args:
            model: the model it was found in.
        """
        own = model.get_parameter(self.name) if self.path is None else _computed(model, self.path)
        return self._whole(own, model.get_parameter)

    def _whole(self, tensor: Tensor, read: Callable[[str], Tensor]) -> Tensor:
        matrix = self._oriented(tensor)
        for update in self.updates:
            change = update.of(read)
            matrix = _exact(matrix) + change.to(matrix.device)
        return self._part(matrix)

    def _oriented(self, tensor: Tensor) -> Tensor:
        if self.expert is not None and tensor.ndim == 3:
            tensor = tensor[self.expert]
        elif tensor.ndim > 2 and math.prod(tensor.shape[2:]) == 1:
            tensor = tensor.flatten(1)  # a convolution of width one
        if tensor.ndim != 2:
            raise JomaError(f"{self.name} must be a matrix, got shape {tuple(tensor.shape)}")
        return tensor.T if self.place.transposed else tensor

    def _part(self, matrix: Tensor) -> Tensor:
        part = self.place.part
        return matrix if part is None else part.rows(matrix, self.heads)


def _exact(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 or float64: a sum of 16-bit numbers would lose a small update."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _computed(model: nn.Module, path: str) -> Tensor:
    """Return what a module computes its weight to be now, not when it ran last."""
    module: Any = model.get_submodule(path)
    for hook in module._forward_pre_hooks.values():
        if getattr(hook, "_tensor_name", getattr(hook, "name", None)) != "weight":
            continue
        if hasattr(hook, "apply_mask"):  # torch's pruning
            return hook.apply_mask(module)
        if isinstance(hook, SpectralNorm):
            return hook.compute_weight(module, do_power_iteration=False)
        if hasattr(hook, "compute_weight"):  # the older weight normalisation
            return hook.compute_weight(module)
    parts = [part for part in module.parametrizations.modules() if part.training]
    try:
        for part in parts:  # spectral normalisation moves its estimate in training mode
            part.training = False
        return module.weight
    finally:
        for part in parts:
            part.training = True


@dataclass(frozen=True)
class AttentionPart:
    """One module that computes attention, and the weights it does so with.

    Args:
        module: its path.
        layer: the number of its block.
        query: makes the queries.
        key: makes the keys; None where the layer uses another layer's.
        value: makes the values.
        output: is applied to what was gathered.
        heads: how many heads the queries have; None where that is not known.
        key_heads: how many the keys have.
        latent: whether queries and keys are made from compressed vectors (MLA), so that the
            product of `query` and `key` is not that of the scores.
    """

    module: str
    layer: int | None
    query: Weight | None = None
    key: Weight | None = None
    value: Weight | None = None
    output: Weight | None = None
    heads: int | None = None
    key_heads: int | None = None
    latent: bool = False

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Those it has, in the order query, key, value, output."""
        every = (self.query, self.key, self.value, self.output)
        return tuple(weight for weight in every if weight is not None)

    @property
    def has_scores(self) -> bool:
        """Whether the matrix WqᵀWk of every head can be made from `query` and `key`."""
        both = self.query is not None and self.key is not None
        return both and bool(self.heads) and bool(self.key_heads) and not self.latent


@dataclass(frozen=True)
class Mlp:
    """One MLP, or one expert of a mixture.

    Args:
        module: its path; for experts stored as one parameter, "…experts[3]".
        layer: the number of its block.
        lower: the first matrix; in a gated MLP the gate.
        up: the gate's partner.
        down: the second matrix.
        expert: its number within a mixture.
        down_path: the module whose input is the hidden activations; None where there is no such
            module (experts stored as one parameter).
    """

    module: str
    layer: int | None
    lower: Weight | None = None
    up: Weight | None = None
    down: Weight | None = None
    expert: int | None = None
    down_path: str | None = None

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Those it has, in the order lower, up, down."""
        return tuple(it for it in (self.lower, self.up, self.down) if it is not None)


@dataclass(frozen=True)
class BlockPart:
    """One block of a tower; its output is the residual stream.

    Args:
        module: its path.
        layer: its number.
    """

    module: str
    layer: int | None


@dataclass(frozen=True)
class Found:
    """What was found in a model.

    Args:
        embeddings: the token embeddings; several where towers have their own.
        attentions: in the order of the model's modules.
        mlps: the same, experts one by one.
        blocks: the same.
        missing: why something is not among them: by role ("query") where the model has none that
            was recognised, by module path where one cannot be measured.
    """

    embeddings: tuple[Weight, ...] = ()
    attentions: tuple[AttentionPart, ...] = ()
    mlps: tuple[Mlp, ...] = ()
    blocks: tuple[BlockPart, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All weights: the embeddings first, then attention and MLPs block by block."""
        inside = [*self.attentions, *self.mlps]
        place = {block.module: at for at, block in enumerate(self.blocks)}

        def block_of(part: AttentionPart | Mlp) -> int:
            path = part.module
            while path:
                if path in place:
                    return place[path]
                path = path.rpartition(".")[0]
            return -1

        inside.sort(key=block_of)  # stable: attention before the MLP
        return self.embeddings + tuple(weight for part in inside for weight in part.weights)

    def of_roles(self, roles: Iterable[str]) -> Iterator[Weight]:
        """Return the weights of some roles, in the same order."""
        wanted = set(roles)
        return (weight for weight in self.weights if weight.role in wanted)
