"""The matrices of a model that sparse inference replaces: those of its MLPs and of its heads."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.models import AttentionPart, Mlp, find_weights

_NOT_BETWEEN = (nn.Dropout, nn.Identity)


@dataclass(frozen=True, eq=False)
class SparseLayer:
    """One block: its MLP down(act(lower x) · up x), or down(act(lower x)), and its heads.

    Attributes:
        layer: The number of the block.
        block: The block; its first input is the residual stream.
        lower: The MLP's first matrix, the gate of a gated one.
        up: The gate's partner, None without a gate.
        down: The matrix that leads back to the residual stream.
        activation: The activation function, element by element.
        output: The output projection of attention; None where heads cannot be told apart.
        heads: How many heads its input consists of.
    """

    layer: int
    block: nn.Module
    lower: nn.Module
    up: nn.Module | None
    down: nn.Module
    activation: nn.Module
    output: nn.Module | None
    heads: int

    @property
    def width(self) -> int:
        """Width d of the residual stream."""
        return rows_of(self.lower).shape[1]

    @property
    def neurons(self) -> int:
        """Neurons N of the MLP."""
        return rows_of(self.lower).shape[0]

    @property
    def dtype(self) -> str:
        """The type the MLP computes in, "float32"."""
        return str(rows_of(self.lower).dtype).removeprefix("torch.")

    @property
    def inputs(self) -> tuple[nn.Module, ...]:
        """The matrices that read the MLP's input: the gate and its partner, or the lower one."""
        return (self.lower,) if self.up is None else (self.lower, self.up)

    def neuron_scale(self) -> Tensor:
        """Return ‖column i of the down-projection‖ of every neuron, (N,), in float32."""
        return torch.linalg.vector_norm(columns_of(self.down).float(), dim=1)

    def head_gram(self) -> Tensor:
        """Return WᵀW of the output projection of every head, (heads, size, size), in float32."""
        assert self.output is not None
        columns = columns_of(self.output).float().unflatten(0, (self.heads, -1))
        return columns @ columns.mT

    def head_scores(self, gathered: Tensor, gram: Tensor) -> Tensor:
        """Return the length of what each head adds to the residual stream, (..., heads).

        Args:
            gathered: The input of the output projection, (..., heads · size).
            gram: What `head_gram` returned.
        """
        by_head = gathered.float().unflatten(-1, (self.heads, -1))
        squares = torch.einsum("...hs,hst,...ht->...h", by_head, gram, by_head)
        return squares.clamp(min=0).sqrt()


def rows_of(matrix: nn.Module) -> Tensor:
    """Return the (out, in) matrix of a linear module; a view where it is stored as (in, out)."""
    weight: Tensor = matrix.weight  # type: ignore[assignment]
    return weight if isinstance(matrix, nn.Linear) else weight.T


def columns_of(matrix: nn.Module) -> Tensor:
    """Return the (in, out) matrix of a linear module; a view where it is stored as (out, in)."""
    return rows_of(matrix).T


def sparse_layers(model: nn.Module) -> list[SparseLayer]:
    """Return the blocks of a decoder, each with the matrices of its MLP and heads.

    Raises:
        JomaError: Its MLPs are not ones whose neurons can be left out one by one.
    """
    found = find_weights(model)
    blocks = {block.layer: model.get_submodule(block.module) for block in found.blocks}
    attentions = {attention.layer: attention for attention in found.attentions}
    if any(mlp.expert is not None for mlp in found.mlps):
        raise _refused(model, "its MLPs are mixtures of experts, which are sparse already")
    mlps = {mlp.layer: mlp for mlp in found.mlps if mlp.layer is not None}
    numbers = list(range(len(found.blocks)))
    if not numbers or sorted(blocks) != numbers or not len(mlps) == len(found.mlps) == len(blocks):
        raise _refused(model, "one MLP in each of its blocks was not found")
    return [_layer(model, number, blocks[number], mlps[number], attentions) for number in numbers]


def _layer(
    model: nn.Module,
    number: int,
    block: nn.Module,
    mlp: Mlp,
    attentions: dict[int | None, AttentionPart],
) -> SparseLayer:
    if mlp.lower is None or mlp.down is None:
        raise _refused(model, f"the matrices of {mlp.module} were not found")
    for weight in mlp.weights:
        if weight.place.part is not None:
            raise _refused(model, f"{weight.module} is a part of a fused matrix")
        if weight.updates or weight.path is not None:
            raise _refused(model, f"{weight.module} is computed from several parameters")
    holder = model.get_submodule(mlp.module)
    made = SparseLayer(
        number,
        block,
        _matrix(model, mlp.lower.name),
        None if mlp.up is None else _matrix(model, mlp.up.name),
        _matrix(model, mlp.down.name),
        _activation(model, holder, mlp),
        *_heads(attentions.get(number), model),
    )
    _check_formula(model, holder, made)
    return made


def _matrix(model: nn.Module, name: str) -> nn.Module:
    module = model.get_submodule(name.removesuffix(".weight"))
    # Subclasses, as quantised ones, compute something else than a product with their weight.
    if type(module) is not nn.Linear and type(module).__name__ != "Conv1D":
        raise _refused(model, f"{name} is the weight of a {type(module).__name__}")
    if not isinstance(module.weight, Tensor) or not module.weight.is_floating_point():
        raise _refused(model, f"{name} is not stored as floating-point numbers")
    return module


def _activation(model: nn.Module, holder: nn.Module, mlp: Mlp) -> nn.Module:
    plain = [
        child
        for child in holder.children()
        if not isinstance(child, _NOT_BETWEEN) and not any(True for _ in child.parameters())
    ]
    if len(plain) != 1:
        raise _refused(model, f"the activation function of {mlp.module} was not found")
    return plain[0]


def _heads(attention: AttentionPart | None, model: nn.Module) -> tuple[nn.Module | None, int]:
    """Return the output projection and the number of heads; None where heads are not known."""
    if attention is None or attention.output is None or not attention.heads or attention.latent:
        return None, 0
    weight = attention.output
    if weight.place.part is not None or weight.updates or weight.path is not None:
        return None, 0
    output = _matrix(model, weight.name)
    splits = rows_of(output).shape[1] % attention.heads == 0
    return (output, attention.heads) if splits else (None, 0)


@torch.no_grad()
def _check_formula(model: nn.Module, holder: nn.Module, layer: SparseLayer) -> None:
    """Compare an MLP that is a module of its own with its formula on two random tokens."""
    if holder is layer.block:  # OPT's blocks hold the matrices themselves
        own = {id(it) for part in (*layer.inputs, layer.down) for it in part.parameters()}
        for name, parameter in holder.named_parameters():
            mixes = id(parameter) not in own and parameter.shape == (layer.neurons,)
            if mixes and layer.neurons != layer.width:
                raise _refused(model, f"its MLPs have {name}, which mixes their neurons")
        return
    weight = rows_of(layer.lower)
    watched = any(it._forward_hooks or it._forward_pre_hooks for it in holder.modules())
    if weight.is_meta or watched:  # hooks would see tokens that are of no text
        return
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, layer.width, generator=generator).to(weight.device, weight.dtype)
    hidden = layer.activation(layer.lower(tokens))
    if layer.up is not None:
        hidden = hidden * layer.up(tokens)
    was = holder.training
    try:
        seen = holder.eval()(tokens)
    except Exception:  # it wants more than its input
        seen = None
    finally:
        holder.train(was)
    expected = layer.down(hidden)
    close = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 0.1
    if not isinstance(seen, Tensor) or (seen - expected).norm() > close * expected.norm():
        raise _refused(model, "its MLPs compute something else than down(act(gate x) · up x)")


def _refused(model: nn.Module, why: str) -> JomaError:
    return JomaError(f"sparse inference does not support {type(model).__name__}: {why}")
