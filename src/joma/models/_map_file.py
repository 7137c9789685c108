"""Reading the map of an architecture from a JSON or TOML file."""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from joma.errors import JomaError, printable
from joma.models._architecture import Architecture
from joma.models._weight import Part, Place, Rows

_PLACES = ("embedding", "query", "key", "value", "output", "mlp_lower", "mlp_up")
_OPTIONAL = ("value", "output", "mlp_up")
_PATHS = ("layer", "attention", "mlp_down")
_COUNTS = ("heads", "key_value_heads")
_LARGEST = 2**20


def load_map(path: str | Path) -> Architecture:
    """Return the map in a .json or .toml file, whose entries are the fields of `Architecture`.

    A place is the name of a parameter, or a table with `name`, `transposed` and `part`; a part has
    `index`, `of` and `by_head`, or `start`, `stop` and `of`. `name` and `model_types` may be left
    out, and so may `prefixes` where names are given as the model has them.

    Args:
        path: the file.

    Raises:
        ValueError: in one sentence, what is wrong with the file.
    """
    path = Path(path)
    contents = _contents(path)
    known = {it.name for it in dataclasses.fields(Architecture)}
    for entry in contents:
        if entry not in known:
            raise JomaError(
                f"{path} must have entries among {', '.join(sorted(known))}, got "
                f"{printable(entry, 60)!r}"
            )
    needed = [*_PLACES[:3], "mlp_lower", *_PATHS]
    if missing := [entry for entry in needed if entry not in contents]:
        raise JomaError(f"{path} must have {', '.join(missing)}")
    fields: dict[str, Any] = {"name": path.stem, "model_types": (), "prefixes": ("",)}
    for entry, value in contents.items():
        fields[entry] = _field(entry, value, f"{path}: {entry}")
    try:
        return Architecture(**fields)
    except JomaError as error:
        raise JomaError(f"{path}: {error}") from error


def _contents(path: Path) -> Mapping[str, Any]:
    if path.suffix not in (".json", ".toml"):
        raise JomaError(f"a map must be a .json or .toml file, got {path}")
    try:
        if path.stat().st_size > _LARGEST:
            raise JomaError(
                f"{path} must be a map of a few lines, it has more than {_LARGEST} bytes"
            )
        text = path.read_text(encoding="utf-8")
        contents = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise JomaError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, JomaError):
            raise
        kind = path.suffix[1:].upper()
        raise JomaError(f"{path} must be a {kind} file ({printable(str(error), 100)})") from error
    if not isinstance(contents, Mapping):
        raise JomaError(f"{path} must hold a table of entries, got a {type(contents).__name__}")
    return contents


def _field(entry: str, value: Any, what: str) -> Any:
    if entry in _PLACES:
        return None if value is None and entry in _OPTIONAL else _place(value, what)
    if entry in ("model_types", "prefixes"):
        if not isinstance(value, list) or not all(isinstance(it, str) for it in value):
            raise JomaError(f"{what} must be a list of names, got {printable(str(value), 60)}")
        return tuple(value)
    if entry in _COUNTS:
        whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not whole and not isinstance(value, str) and not (entry != "heads" and value is None):
            raise JomaError(
                f"{what} must be a number or an attribute of the configuration, got "
                f"{printable(str(value), 60)}"
            )
        return value
    return _text(value, what)


def _place(value: Any, what: str) -> Place:
    if isinstance(value, str):
        return Place(value)
    _check_entries(value, ("name", "part", "transposed"), what)
    part = value.get("part")
    return Place(
        _text(value.get("name"), f"{what}.name"),
        None if part is None else _part(part, f"{what}.part"),
        _flag(value.get("transposed", False), f"{what}.transposed"),
    )


def _part(value: Any, what: str) -> Part | Rows:
    names = ("start", "stop", "of") if _has(value, "start") else ("index", "of")
    _check_entries(value, (*names, "by_head") if "index" in names else names, what)
    numbers = []
    for name in names:
        number = value.get(name)
        if not isinstance(number, int) or isinstance(number, bool):
            raise JomaError(f"{what}.{name} must be a whole number, got {number!r}")
        numbers.append(number)
    try:
        if "start" in names:
            return Rows(*numbers)
        return Part(*numbers, by_head=_flag(value.get("by_head", False), f"{what}.by_head"))
    except JomaError as error:
        raise JomaError(f"{what}: {error}") from error


def _has(value: Any, name: str) -> bool:
    return isinstance(value, Mapping) and name in value


def _check_entries(value: Any, names: tuple[str, ...], what: str) -> None:
    if not isinstance(value, Mapping):
        raise JomaError(f"{what} must be a name or a table of {', '.join(names)}, got {value!r}")
    for name in value:
        if name not in names:
            raise JomaError(
                f"{what} must have entries among {', '.join(names)}, got {printable(name, 60)!r}"
            )


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise JomaError(f"{what} must be a name, got {printable(str(value), 60)}")
    return value


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise JomaError(f"{what} must be true or false, got {printable(str(value), 60)}")
    return value
