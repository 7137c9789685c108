"""Trainings known by name, and how a configuration is read from a file."""

import copy
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from joma.errors import JomaError
from joma.train.language._config import Config

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "model": {
            "type": "gpt_neox",
            "hidden_size": 48,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
        "data": {"corpus": "embedded", "tokenizer": "bytes", "window": 64, "batch": 16},
        "optimizer": {"learning_rate": 5e-3, "warmup": 10, "schedule": "cosine", "final": 0.1},
        "training": {"steps": 300},
        "checkpoints": {"schedule": "pythia"},
        "validation": {"every": 100, "windows": 64},
        "monitor": {"every": 20, "budget": 0.0},
    },
    "small": {
        "model": {
            "type": "gpt_neox",
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
        },
        "data": {
            "corpus": "embedded",
            "tokenizer": "bpe",
            "vocabulary": 2048,
            "window": 128,
            "batch": 16,
        },
        "optimizer": {"learning_rate": 2e-3, "warmup": 50, "schedule": "cosine", "final": 0.1},
        "training": {"steps": 1500},
        "checkpoints": {"schedule": "pythia"},
        "validation": {"every": 100, "windows": 64},
        "monitor": {"every": 50},
    },
    # The blocks of Pythia-31M, on its schedule of checkpoints.
    "neox-wikitext2": {
        "model": {
            "type": "gpt_neox",
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "max_position_embeddings": 256,
        },
        "data": {
            "corpus": "wikitext-2",
            "tokenizer": "basic_english",
            "window": 256,
            "batch": 32,
        },
        "optimizer": {"learning_rate": 1e-3, "warmup": 200, "schedule": "cosine", "final": 0.1},
        "training": {"steps": 10_000, "precision": "bfloat16"},
        "checkpoints": {"schedule": "pythia"},
        "validation": {"every": 500, "windows": 256},
        "monitor": {"every": 100},
    },
}
"""What `joma train NAME` trains: the sections of a configuration, as a TOML file has them.

"tiny" takes seconds and "small" minutes on two cores; "neox-wikitext2" is for a GPU.
"""


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
