"""What a map of an architecture is made of: parts, places, the map itself, a weight found by it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from joma.errors import JomaError

ROLES = ("embedding", "query", "key", "mlp_lower", "mlp_up")
"""The weights a map may name. In a gated MLP `mlp_lower` is the gate, `mlp_up` its partner."""

Config: TypeAlias = Mapping[str, Any] | Any
"""A Hugging Face configuration object, or the contents of a config.json."""

LAYER = "{layer}"


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
        """The part of an (out, in) matrix; a view unless it goes by head."""
        groups = self.of
        if self.by_head:
            assert heads is not None, "`weights` asks for the number of heads"
            groups *= heads
        out, inputs = matrix.shape
        if out % groups:
            raise JomaError(
                f"a fused matrix of {self.of} parts"
                + (f" by {heads} heads" if self.by_head else "")
                + f" needs a number of rows divisible by {groups}, got {out}"
            )
        size = out // groups
        if not self.by_head:
            return matrix[self.index * size : (self.index + 1) * size]
        return matrix.reshape(-1, self.of, size, inputs)[:, self.index].reshape(-1, inputs)


@dataclass(frozen=True)
class Place:
    """Where one weight lives.

    Args:
        name: the parameter's name relative to the base model, "h.{layer}.attn.c_attn.weight".
        part: which part of it, where several matrices are stored as one.
        transposed: stored as (in, out), as GPT-2's Conv1D does; `Weight.read` hands out (out, in).
    """

    name: str
    part: Part | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Architecture:
    """Where to find what in one family of transformers; every path is relative to the base model.

    Args:
        name: the family's name.
        model_types: the `model_type` of the configurations it is for; for a module without a
            configuration, the name of its class.
        prefixes: what may stand before the base model's names: "" where it is the whole model,
            "transformer." where it carries a head.
        embedding: the token embedding, (vocabulary, width).
        query: the matrix that makes the queries, of block {layer}.
        key: the matrix that makes the keys.
        mlp_lower: the MLP's first matrix; in a gated MLP the one before the activation.
        mlp_up: in a gated MLP the matrix whose output the activation is multiplied with.
        layer: path of a block; its output is the residual stream.
        attention: path of the module that computes attention.
        mlp_down: path of the MLP's second matrix; its input is the MLP's hidden activations.
        heads: the configuration's attribute with the number of heads, or that number.
        key_value_heads: the same for the heads of the keys where they may be fewer.
    """

    name: str
    model_types: tuple[str, ...]
    prefixes: tuple[str, ...]
    embedding: Place
    query: Place
    key: Place
    mlp_lower: Place
    layer: str
    attention: str
    mlp_down: str
    mlp_up: Place | None = None
    heads: str | int = "num_attention_heads"
    key_value_heads: str | int | None = None

    def __post_init__(self) -> None:
        if not self.prefixes:
            raise JomaError('prefixes must name at least one, "" for none, got ()')
        if LAYER in self.embedding.name:
            raise JomaError(f"embedding must not have {LAYER}, got {self.embedding.name!r}")
        inside = {role: place.name for role, place in self.places() if role != "embedding"}
        inside |= {"layer": self.layer, "attention": self.attention, "mlp_down": self.mlp_down}
        for argument, path in inside.items():
            if path.count(LAYER) != 1:
                raise JomaError(f"{argument} must have {LAYER} once, got {path!r}")

    def places(self, roles: Iterable[str] = ROLES) -> list[tuple[str, Place]]:
        """The places of the given roles, in the order given; roles it does not have left out."""
        found = [(role, getattr(self, _known_role(role))) for role in roles]
        return [(role, place) for role, place in found if place is not None]

    def head_counts(self, model_or_config: nn.Module | Config) -> tuple[int, int]:
        """How many heads the queries and the keys have."""
        config = config_of(model_or_config)
        heads = _number(self.heads, config)
        if self.key_value_heads is None or (
            isinstance(self.key_value_heads, str) and get(config, self.key_value_heads) is None
        ):
            return heads, heads
        return heads, _number(self.key_value_heads, config)


@dataclass(frozen=True)
class Weight:
    """One weight of one model.

    Args:
        role: one of `ROLES`.
        layer: the block it is in, None for the embedding.
        module: what a reader knows it by: "transformer.h.0.attn.c_attn[query]".
        name: the full name of the stored parameter.
        place: how it is stored.
        heads: how many heads share a matrix whose parts go by head.
    """

    role: str
    layer: int | None
    module: str
    name: str
    place: Place
    heads: int | None = None

    def read(self, tensor: Tensor) -> Tensor:
        """The (out, in) matrix of this weight, from the tensor stored under `name`."""
        if tensor.ndim != 2:
            raise JomaError(f"{self.name} must be a matrix, got shape {tuple(tensor.shape)}")
        matrix = tensor.T if self.place.transposed else tensor
        part = self.place.part
        return matrix if part is None else part.rows(matrix, self.heads)


def config_of(model_or_config: nn.Module | Config) -> Config:
    """A model's configuration, None where it has none; a configuration as it is."""
    if isinstance(model_or_config, nn.Module):
        return getattr(model_or_config, "config", None)
    return model_or_config


def get(config: Config, attribute: str) -> Any:
    """An entry of a configuration, None where it has none."""
    if isinstance(config, Mapping):
        return config.get(attribute)
    return getattr(config, attribute, None)


def _number(attribute: str | int, config: Config) -> int:
    number = attribute if isinstance(attribute, int) else get(config, attribute)
    if not isinstance(number, int) or number < 1:
        raise JomaError(f"the configuration's {attribute} must be a number of heads, got {number}")
    return number


def _known_role(role: str) -> str:
    if role not in ROLES:
        raise JomaError(f"roles must be among {', '.join(ROLES)}, got {role!r}")
    return role
