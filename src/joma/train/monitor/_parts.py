"""Which parts of a model are looked at: by the map of its architecture, or by its modules."""

from dataclasses import dataclass, field

from torch import Tensor, nn

from joma.errors import JomaError
from joma.models.architectures import (
    Architecture,
    Part,
    Place,
    Weight,
    architecture_of,
    number_of_layers,
    prefix_of,
    weights,
)
from joma.train.monitor._tensors import is_real, layer_in, named_parameters, plain


@dataclass(frozen=True)
class Heads:
    """The weights behind one layer's scores.

    Attributes:
        layer: which.
        module: what a reader knows it by.
        query: makes the queries.
        key: makes the keys.
        heads: of the queries.
        key_heads: of the keys.
    """

    layer: int
    module: str
    query: Weight
    key: Weight
    heads: int
    key_heads: int


@dataclass(frozen=True)
class Matrix:
    """A whole parameter of a layer, as an optimizer sees it.

    Attributes:
        layer: in which, None for none.
        name: of the parameter.
        module: what a reader knows it by.
    """

    layer: int | None
    name: str
    module: str

    def read(self, tensor: Tensor) -> Tensor:
        """Return the matrix in the parameter."""
        return tensor


@dataclass(frozen=True)
class Parts:
    """What there is to look at, and why what is missing is.

    Attributes:
        embedding: the token embedding.
        ranked: weights whose ranks are followed: of every MLP the lower layer.
        heads: queries and keys of every attention.
        matrices: weight matrices of the layers, whose gradients and updates are followed.
        blocks: by layer, the path of the block.
        missing: by metric, why it is not measured.
        downs: by path of an MLP's second linear map, the layer.
    """

    embedding: Weight | None
    ranked: tuple[Weight, ...]
    heads: tuple[Heads, ...]
    matrices: tuple[Matrix, ...]
    blocks: dict[int, str]
    missing: dict[str, str]
    downs: dict[str, int] = field(default_factory=dict)

    @classmethod
    def none(cls) -> "Parts":
        """Return the parts of a model of which nothing is known."""
        return cls(None, (), (), (), {}, {})

    @property
    def lower(self) -> tuple[Weight, ...]:
        """The lower layers of the MLPs."""
        return tuple(weight for weight in self.ranked if weight.role == "mlp_lower")


def module_named(model: nn.Module, path: str) -> nn.Module:
    """The module at a path among such names."""
    for name, module in model.named_modules():
        if plain(name) == path:
            return module
    raise JomaError(f"model must have {path}, which its map names")


def parts_of(model: nn.Module, architecture: Architecture | None) -> Parts:
    """The parts of a model, uncompiled.

    Raises:
        ValueError: the model does not have what the architecture that was given names.
    """
    if architecture is not None:
        return _by_map(model, architecture)
    try:
        return _by_map(model, architecture_of(model))
    except ValueError as error:
        return _by_modules(model, str(error).splitlines()[0])


def _by_map(model: nn.Module, architecture: Architecture) -> Parts:
    named = named_parameters(model)
    names = list(named)
    heads, key_heads = architecture.head_counts(model)
    found = weights(names, architecture, heads=heads)
    by_role: dict[str, dict[int | None, Weight]] = {}
    for weight in found:
        by_role.setdefault(weight.role, {})[weight.layer] = weight
    prefix = prefix_of(names, architecture)
    blocks = {
        layer: prefix + architecture.layer.replace("{layer}", str(layer))
        for layer in range(number_of_layers(names, architecture))
    }
    attention = architecture.attention
    return Parts(
        embedding=by_role["embedding"][None],
        ranked=tuple(by_role["mlp_lower"].values()),
        heads=tuple(
            Heads(
                layer,
                prefix + attention.replace("{layer}", str(layer)) + "[query·key]",
                by_role["query"][layer],
                by_role["key"][layer],
                heads,
                key_heads,
            )
            for layer in blocks
        ),
        matrices=_matrices(named, blocks),
        blocks=blocks,
        missing={},
        downs={
            prefix + architecture.mlp_down.replace("{layer}", str(layer)): layer for layer in blocks
        },
    )


def _by_modules(model: nn.Module, why: str) -> Parts:
    """Without a map: what torch's own transformer layers tell, and matrices by their names."""
    named = named_parameters(model)
    blocks: dict[int, str] = {}
    ranked, heads = [], []
    modules = {plain(name): module for name, module in model.named_modules()}
    for name, module in modules.items():
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            layer = len(blocks)
            blocks[layer] = name
            ranked.append(_weight("mlp_lower", layer, _join(name, "linear1.weight")))
    for name, module in modules.items():
        if isinstance(module, nn.MultiheadAttention):
            inside = [layer for layer, block in blocks.items() if name.startswith(block + ".")]
            layer = inside[0] if inside else len(heads)
            if any(one.layer == layer for one in heads):
                continue  # a decoder's attention to its memory
            heads.append(_heads(layer, name, module))
    embeddings = [
        (module.num_embeddings, name)
        for name, module in modules.items()
        if isinstance(module, nn.Embedding)
    ]
    embedding = max(embeddings)[1] if embeddings else None
    missing = {}
    if not ranked:
        missing["stable_rank of the MLP's lower layers"] = why
    if not heads:
        missing["ranks of Q·K"] = why
    if embedding is None:
        missing["embedding_overlap"] = "the model has no nn.Embedding"
    tables = {f"{name}.weight" for _, name in embeddings}
    if blocks:
        matrices = _matrices(named, blocks)
    else:
        matrices = tuple(
            Matrix(layer_in(name), name, name.removesuffix(".weight"))
            for name, parameter in named.items()
            if is_real(parameter) and parameter.ndim == 2 and name not in tables
        )
    return Parts(
        embedding=None if embedding is None else _weight("embedding", None, f"{embedding}.weight"),
        ranked=tuple(ranked),
        heads=tuple(heads),
        matrices=matrices,
        blocks=blocks,
        missing=missing,
        downs={_join(block, "linear2"): layer for layer, block in blocks.items()},
    )


def _heads(layer: int, name: str, module: nn.MultiheadAttention) -> Heads:
    if module.in_proj_weight is not None:
        query, key = (
            _weight(role, layer, _join(name, "in_proj_weight"), Part(index, of=3))
            for index, role in enumerate(("query", "key"))
        )
    else:
        query = _weight("query", layer, _join(name, "q_proj_weight"))
        key = _weight("key", layer, _join(name, "k_proj_weight"))
    return Heads(layer, f"{name}[query·key]", query, key, module.num_heads, module.num_heads)


def _matrices(named: dict[str, Tensor], blocks: dict[int, str]) -> tuple[Matrix, ...]:
    return tuple(
        Matrix(layer, name, name.removesuffix(".weight"))
        for layer, block in blocks.items()
        for name, parameter in named.items()
        if name.startswith(block + ".") and is_real(parameter) and parameter.ndim == 2
    )


def _weight(role: str, layer: int | None, name: str, part: Part | None = None) -> Weight:
    module = name.removesuffix(".weight")
    return Weight(role, layer, module, name, Place(name, part))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
