"""Maps of architectures: where the embedding, queries, keys and MLPs of a family of models live.

`find_weights` recognises most models by their names and shapes. For others one `Architecture` is
all there is to know: parameter names and module paths relative to the base model, with "{layer}"
where the number of the block stands. `register` adds a map and `load_map` reads one from a file.
"""

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from joma.common.files import read_file
from joma.errors import JomaError, printable
from joma.models.model_weights import (
    AttentionPart,
    BlockPart,
    Found,
    Mlp,
    Part,
    Place,
    Rows,
    Weight,
)

ROLES = ("embedding", "query", "key", "value", "output", "mlp_lower", "mlp_up", "mlp_down")
"""What a weight may be. In a gated MLP `mlp_lower` is the gate, `mlp_up` its partner."""

Config: TypeAlias = Mapping[str, Any] | Any
"""A Hugging Face configuration object, or the contents of a config.json."""

LAYER = "{layer}"
_LARGEST_FILE = 2**20
_MOST_LINES = 60
_IN_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


class UnknownArchitectureError(JomaError):
    """No map for an architecture; the message has lines: the parameters, and a map to fill in."""

    verbatim = True


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
        inside = {role: place.name for role, place in self.places().items() if role != "embedding"}
        inside |= {"layer": self.layer, "attention": self.attention, "mlp_down": self.mlp_down}
        for argument, path in inside.items():
            if path.count(LAYER) != 1:
                raise JomaError(f"{argument} must have {LAYER} once, got {path!r}")

    def places(self) -> dict[str, Place]:
        """Return the places of the roles it has, in the order of `ROLES`."""
        # `mlp_down` is given as a module, and stored as the MLP's first matrix is.
        down = Place(f"{self.mlp_down}.weight", transposed=self.mlp_lower.transposed)
        found = {role: down if role == "mlp_down" else getattr(self, role) for role in ROLES}
        return {role: place for role, place in found.items() if place is not None}

    def head_counts(self, model_or_config: nn.Module | Config) -> tuple[int, int]:
        """Return how many heads the queries and the keys have."""
        heads, own = _number(self.heads, model_or_config), self.key_value_heads
        if own is None or (isinstance(own, str) and config_entry(model_or_config, own) is None):
            return heads, heads
        return heads, _number(own, model_or_config)


_registered: list[Architecture] = []


def register(architecture: Architecture) -> None:
    """Add a map; for a `model_type` that has one already, the newer is used."""
    _registered.append(architecture)


def registered_for(model_or_config: nn.Module | Config) -> Architecture | None:
    """Return the map that `register` added for this kind of model, None where none was."""
    model_type = _model_type(model_or_config)
    return next((it for it in reversed(_registered) if model_type in it.model_types), None)


def config_entry(config: nn.Module | Config, attribute: str) -> Any:
    """Return an entry of a configuration, or of a model's; None where there is none."""
    if isinstance(config, nn.Module):
        config = getattr(config, "config", None)
    if isinstance(config, Mapping):
        return config.get(attribute)
    return getattr(config, attribute, None)


def _model_type(model_or_config: nn.Module | Config) -> str:
    model_type = config_entry(model_or_config, "model_type")
    return model_type if isinstance(model_type, str) else type(model_or_config).__name__


def _number(attribute: str | int, model_or_config: nn.Module | Config) -> int:
    number = attribute if isinstance(attribute, int) else config_entry(model_or_config, attribute)
    if not isinstance(number, int) or number < 1:
        raise JomaError(f"the configuration's {attribute} must be a number of heads, got {number}")
    return number


def found_by_map(
    shapes: Mapping[str, Any], architecture: Architecture, source: nn.Module | Config
) -> Found:
    """Return what a hand-written map names.

    Args:
        shapes: the model's parameters, or their shapes, by full name.
        architecture: the map.
        source: the model or its configuration, for the numbers of heads; None where neither is
            there.

    Raises:
        JomaError: something the map names is not there.
    """
    heads, key_heads = architecture.head_counts(source) if source is not None else (None, None)
    prefix = _prefix_of(shapes, architecture)
    places = architecture.places()
    if heads is None and any(
        isinstance(it.part, Part) and it.part.by_head for it in places.values()
    ):
        raise JomaError(
            f"the number of heads is not known: {architecture.name} stores queries and keys in one "
            "matrix, head by head"
        )

    def weight(role: str, layer: int | None = None) -> Weight | None:
        if role not in places:
            return None
        place = places[role]
        name = prefix + place.name.replace(LAYER, str(layer))
        if name not in shapes:
            raise JomaError(
                f"the map of {architecture.name} has the {role} at {name}, which the model does "
                f"not have; its names are like {_some(shapes)}"
            )
        module = name.removesuffix(".weight") + ("" if place.part is None else f"[{role}]")
        return Weight(role, layer, module, name, place, heads)

    attentions, mlps, blocks = [], [], []
    for layer in _layers(shapes, prefix, architecture):
        block, attention, down = (
            prefix + path.replace(LAYER, str(layer))
            for path in (architecture.layer, architecture.attention, architecture.mlp_down)
        )
        found = {role: weight(role, layer) for role in ROLES if role != "embedding"}
        of_mlp: dict[str, Any] = {
            role.removeprefix("mlp_"): found.pop(role) for role in ROLES if role.startswith("mlp_")
        }
        of_attention: dict[str, Any] = {**found, "heads": heads, "key_heads": key_heads}
        attentions.append(AttentionPart(attention, layer, **of_attention))
        mlps.append(Mlp(down.rpartition(".")[0], layer, **of_mlp, down_path=down))
        blocks.append(BlockPart(block, layer))
    embedding = weight("embedding")
    assert embedding is not None, "a map has an embedding"
    why = f"the map of {architecture.name} does not name it"
    missing = {role: why for role in ("value", "output") if role not in places}
    return Found((embedding,), tuple(attentions), tuple(mlps), tuple(blocks), missing)


def _prefix_of(names: Iterable[str], architecture: Architecture) -> str:
    """Return what stands before the base model's names in these names."""
    patterns = [_numbered(place.name) for place in architecture.places().values()]
    for prefix in architecture.prefixes:
        inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if any(re.fullmatch(pattern, name) for pattern in patterns for name in inside):
            return prefix
    raise JomaError(
        f"no parameter is named as the map of {architecture.name} has it, such as "
        f"{architecture.prefixes[-1]}{architecture.mlp_lower.name}; names are like {_some(names)}"
    )


def _layers(names: Iterable[str], prefix: str, architecture: Architecture) -> range:
    start = re.compile(re.escape(prefix) + _numbered(architecture.layer) + r"\.")
    layers = {int(match[1]) for name in names if (match := start.match(name))}
    missing = sorted(set(range(max(layers, default=0) + 1)) - layers)
    if missing:
        raise JomaError(
            f"the model has blocks {sorted(layers)} but none numbered {missing[0]}: "
            "a part of the checkpoint is missing"
        )
    return range(len(layers))


def _numbered(template: str) -> str:
    return re.escape(template).replace(re.escape(LAYER), "([0-9]+)")


def _some(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:3]) or "nothing (there are none)"


_EXAMPLE = """\
    from joma.models import Architecture, Part, Place, register
    register(Architecture(
        name="MODEL_TYPE", model_types=("MODEL_TYPE",), prefixes=("", "model."),
        embedding=Place("embed_tokens.weight"),
        query=Place("layers.{layer}.self_attn.qkv.weight", Part(0, of=3)),  # one fused matrix
        key=Place("layers.{layer}.self_attn.qkv.weight", Part(1, of=3)),
        mlp_lower=Place("layers.{layer}.mlp.up.weight"),
        layer="layers.{layer}", attention="layers.{layer}.self_attn",
        mlp_down="layers.{layer}.mlp.down", heads="num_attention_heads",
    ))"""


def how_to_map(model_or_config: nn.Module | Config, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return a model's parameters and how to write its map, for the message of an error.

    Args:
        model_or_config: the model, or its configuration.
        shapes: the shapes of its parameters by name; of all blocks the first is shown.
    """
    first: dict[str, str] = {}
    for name, shape in shapes.items():
        if not name.endswith("bias"):
            first.setdefault(_IN_NUMBERS.sub(LAYER, name), str(tuple(shape)))
    lines = [f"  {name} {shape}" for name, shape in first.items()]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"  … and {len(lines) - _MOST_LINES} more"]
    model_type = _model_type(model_or_config)
    return "\n".join(
        [
            f"{model_type} has the parameters",
            *lines,
            "Write its map from these names in Python, before the model is used, or in a file for "
            "joma probe --map:",
            _EXAMPLE.replace("MODEL_TYPE", model_type),
        ]
    )


def load_map(path: str | Path) -> Architecture:
    """Return the map in a .json or .toml file, whose entries are the fields of `Architecture`.

    A place is the name of a parameter, or a table with `name`, `transposed` and `part`; a part has
    `index`, `of` and `by_head`, or `start`, `stop` and `of`. `name` and `model_types` may be left
    out, and so may `prefixes` where names are given as the model has them.

    Args:
        path: The file.

    Raises:
        JomaError: In one sentence, what is wrong with the file.
    """
    path = Path(path)
    if path.suffix not in (".json", ".toml"):
        raise JomaError(f"a map must be a .json or .toml file, got {path}")
    try:
        text = read_file(path, largest=_LARGEST_FILE).decode()
        contents = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise JomaError(f"{path} cannot be read ({error.strerror})") from error
    except JomaError:
        raise
    except (ValueError, RecursionError) as error:
        kind = path.suffix[1:].upper()
        raise JomaError(f"{path} must be a {kind} file ({printable(str(error), 100)})") from error
    if not isinstance(contents, Mapping):
        raise JomaError(f"{path} must hold a table of entries, got a {type(contents).__name__}")
    left_out = {"name": path.stem, "model_types": [], "prefixes": [""]}
    return _from_table(Architecture, {**left_out, **contents}, str(path))


def _from_table(kind: type, table: Any, what: str) -> Any:
    """Return an `Architecture`, `Place`, `Part` or `Rows` made from a table of its fields."""
    fields = {it.name: it for it in dataclasses.fields(kind)}
    names = ", ".join(sorted(fields) if kind is Place else fields)
    if not isinstance(table, Mapping):
        raise JomaError(f"{what} must be a name or a table of {names}, got {table!r}")
    for name in table:
        if name not in fields:
            raise JomaError(f"{what} must have entries among {names}, got {printable(name, 60)!r}")
    needed = [name for name, it in fields.items() if it.default is dataclasses.MISSING]
    if missing := [name for name in needed if name not in table]:
        raise JomaError(f"{what} must have {', '.join(missing)}")
    here = f"{what}: " if kind is Architecture else f"{what}."
    values = {
        name: _field(fields[name], value, here + name)
        for name, value in table.items()
        if value is not None or fields[name].default is not None
    }
    try:
        return kind(**values)
    except JomaError as error:
        raise JomaError(f"{what}: {error}") from error


def _field(field: dataclasses.Field[Any], value: Any, what: str) -> Any:
    expected: Any = field.type
    if field.name == "part":
        of_rows = isinstance(value, Mapping) and "start" in value
        return _from_table(Rows if of_rows else Part, value, what)
    if expected in (Place, Place | None):
        return Place(value) if isinstance(value, str) else _from_table(Place, value, what)
    if expected == tuple[str, ...]:
        good = isinstance(value, list) and all(isinstance(it, str) for it in value)
        value, described = tuple(value) if good else value, "a list of names"
    elif expected is bool:
        good, described = isinstance(value, bool), "true or false"
    elif expected is int:
        good, described = type(value) is int, "a whole number"
    elif expected is str:
        good, described = isinstance(value, str) and value != "", "a name"
    else:
        good = isinstance(value, str) or (type(value) is int and value > 0)
        described = "a number or an attribute of the configuration"
    if not good:
        raise JomaError(f"{what} must be {described}, got {printable(str(value), 60)}")
    return value
