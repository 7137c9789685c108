"""What a map of an architecture is made of: parts, places, the map itself."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from joma.errors import JomaError
from joma.models._weight import Part, Place, Rows, Weight

__all__ = [
    "LAYER",
    "ROLES",
    "Architecture",
    "Config",
    "Part",
    "Place",
    "Rows",
    "Weight",
    "config_of",
    "get",
]

ROLES = ("embedding", "query", "key", "value", "output", "mlp_lower", "mlp_up", "mlp_down")
"""What a weight may be. In a gated MLP `mlp_lower` is the gate, `mlp_up` its partner."""

Config: TypeAlias = Mapping[str, Any] | Any
"""A Hugging Face configuration object, or the contents of a config.json."""

LAYER = "{layer}"


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
        value: the matrix that makes the values; not measured where None.
        output: the matrix applied to what attention gathered; not measured where None.
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
    value: Place | None = None
    output: Place | None = None
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
        found = [(role, self._place(_known_role(role))) for role in roles]
        return [(role, place) for role, place in found if place is not None]

    def _place(self, role: str) -> Place | None:
        if role == "mlp_down":  # given as a module, stored as the MLP's first matrix is
            return Place(f"{self.mlp_down}.weight", transposed=self.mlp_lower.transposed)
        return getattr(self, role)

    def head_counts(self, model_or_config: nn.Module | Config) -> tuple[int, int]:
        """How many heads the queries and the keys have."""
        config = config_of(model_or_config)
        heads = _number(self.heads, config)
        if self.key_value_heads is None or (
            isinstance(self.key_value_heads, str) and get(config, self.key_value_heads) is None
        ):
            return heads, heads
        return heads, _number(self.key_value_heads, config)


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
