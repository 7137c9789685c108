"""Trainings known by name, and how a configuration is read from a file."""

import copy
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from joma.errors import JomaError
from joma.train.language._config import Config

_FOLDER = Path(__file__).parent / "presets"

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    name: tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    for name in ("tiny", "small", "neox-wikitext2")
}
"""What `joma train NAME` trains: the sections of each configuration in `presets/`."""


def read_config(source: str | Path, changes: Iterable[str] = ()) -> Config:
    """The configuration of a preset or of a TOML file.

    Args:
        source: the name of a preset, or the path of a file.
        changes: "section.entry=value" each, with the value as TOML has it; a bare word is text.

    Raises:
        ValueError: there is none of that name, or it is wrong.
    """
    sections = copy.deepcopy(PRESETS[str(source)]) if source in PRESETS else _read(Path(source))
    for change in changes:
        _change(sections, change)
    return Config.of(sections)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise JomaError(
            f"there is no configuration {str(path)!r}: it must be a TOML file or one of "
            f"{', '.join(PRESETS)}"
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JomaError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # of TOML, or of its encoding
        raise JomaError(f"{path} is not a TOML file: {error}") from error


def _change(sections: dict[str, Any], change: str) -> None:
    place, equals, value = change.partition("=")
    section, dot, entry = place.strip().partition(".")
    if not (equals and dot and section and entry):
        raise JomaError(
            f"a change must be section.entry=value, such as training.steps=100, got {change!r}"
        )
    there = sections.setdefault(section, {})
    if not isinstance(there, Mapping):
        raise JomaError(f"{section} must be a section, [{section}], got {there!r}")
    sections[section] = {**there, entry: _value(value.strip())}


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text
