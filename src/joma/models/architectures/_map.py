"""The map of an architecture: where the weights and modules of one family of transformers are.

`load_map` reads one from a file.
"""

import dataclasses
import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from joma.common.files import read_file
from joma.errors import JomaError, printable
from joma.models.model_weights import Part, Place, Rows

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
        """Return the places of the given roles, in their order, without roles it does not have."""
        found = [(role, self._place(role)) for role in roles]
        return [(role, place) for role, place in found if place is not None]

    def _place(self, role: str) -> Place | None:
        if role not in ROLES:
            raise JomaError(f"roles must be among {', '.join(ROLES)}, got {role!r}")
        if role == "mlp_down":  # given as a module, stored as the MLP's first matrix is
            return Place(f"{self.mlp_down}.weight", transposed=self.mlp_lower.transposed)
        return getattr(self, role)

    def head_counts(self, model_or_config: nn.Module | Config) -> tuple[int, int]:
        """Return how many heads the queries and the keys have."""
        heads, own = _number(self.heads, model_or_config), self.key_value_heads
        if own is None or (isinstance(own, str) and config_entry(model_or_config, own) is None):
            return heads, heads
        return heads, _number(own, model_or_config)


def config_entry(config: nn.Module | Config, attribute: str) -> Any:
    """Return an entry of a configuration, or of a model's; None where there is none."""
    if isinstance(config, nn.Module):
        config = getattr(config, "config", None)
    if isinstance(config, Mapping):
        return config.get(attribute)
    return getattr(config, attribute, None)


def _number(attribute: str | int, model_or_config: nn.Module | Config) -> int:
    number = attribute if isinstance(attribute, int) else config_entry(model_or_config, attribute)
    if not isinstance(number, int) or number < 1:
        raise JomaError(f"the configuration's {attribute} must be a number of heads, got {number}")
    return number


_PLACES = ("embedding", "query", "key", "value", "output", "mlp_lower", "mlp_up")
_OPTIONAL = ("value", "output", "mlp_up", "key_value_heads")
_LARGEST = 2**20


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
    return _architecture({"name": path.stem, "model_types": [], **_contents(path)}, str(path))


def known_maps() -> tuple[Architecture, ...]:
    """Return the maps that come with the package."""
    maps = _contents(Path(__file__).with_name("known.toml"))
    return tuple(_architecture({"name": name, **entries}, name) for name, entries in maps.items())


def _architecture(entries: Mapping[str, Any], what: str) -> Architecture:
    fields = dataclasses.fields(Architecture)
    _check_entries(entries, [it.name for it in fields], what)
    entries = {"prefixes": [""], **entries}
    needed = [it.name for it in fields if it.default is dataclasses.MISSING]
    if missing := [name for name in needed if name not in entries]:
        raise JomaError(f"{what} must have {', '.join(missing)}")
    made: dict[str, Any] = {
        name: _field(name, value, f"{what}: {name}") for name, value in entries.items()
    }
    try:
        return Architecture(**made)
    except JomaError as error:
        raise JomaError(f"{what}: {error}") from error


def _contents(path: Path) -> Mapping[str, Any]:
    if path.suffix not in (".json", ".toml"):
        raise JomaError(f"a map must be a .json or .toml file, got {path}")
    try:
        text = read_file(path, largest=_LARGEST).decode()
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
    return contents


def _field(entry: str, value: Any, what: str) -> Any:
    if value is None and entry in _OPTIONAL:
        return None
    if entry in _PLACES:
        return _place(value, what)
    if entry in ("model_types", "prefixes"):
        good = isinstance(value, list) and all(isinstance(it, str) for it in value)
        return tuple(_checked(good, "a list of names", value, what))
    if entry in ("heads", "key_value_heads"):
        good = isinstance(value, str) or (type(value) is int and value > 0)
        return _checked(good, "a number or an attribute of the configuration", value, what)
    return _name(value, what)


def _place(value: Any, what: str) -> Place:
    if isinstance(value, str):
        return Place(value)
    _check_entries(value, ("name", "part", "transposed"), what)
    transposed, part = value.get("transposed", False), value.get("part")
    _checked(isinstance(transposed, bool), "true or false", transposed, f"{what}.transposed")
    made = None if part is None else _part(part, f"{what}.part")
    return Place(_name(value.get("name"), f"{what}.name"), made, transposed)


def _part(value: Any, what: str) -> Part | Rows:
    kind, names = Part, ("index", "of", "by_head")
    if isinstance(value, Mapping) and "start" in value:
        kind, names = Rows, ("start", "stop", "of")
    _check_entries(value, names, what)
    for name in names:
        if name == "by_head":
            good = isinstance(value.get(name, False), bool)
            _checked(good, "true or false", value.get(name), f"{what}.{name}")
        else:
            good = type(value.get(name)) is int
            _checked(good, "a whole number", value.get(name), f"{what}.{name}")
    try:
        return kind(**value)
    except JomaError as error:
        raise JomaError(f"{what}: {error}") from error


def _check_entries(value: Any, names: Collection[str], what: str) -> None:
    if not isinstance(value, Mapping):
        raise JomaError(f"{what} must be a name or a table of {', '.join(names)}, got {value!r}")
    for name in value:
        if name not in names:
            raise JomaError(
                f"{what} must have entries among {', '.join(names)}, got {printable(name, 60)!r}"
            )


def _name(value: Any, what: str) -> str:
    return _checked(isinstance(value, str) and value != "", "a name", value, what)


def _checked(good: bool, described: str, value: Any, what: str) -> Any:
    if not good:
        raise JomaError(f"{what} must be {described}, got {printable(str(value), 60)}")
    return value
