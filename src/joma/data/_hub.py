"""Datasets of the Hugging Face hub, written as a folder of text files once."""

import importlib
import re
from pathlib import Path
from typing import Any

from joma.common import json_files
from joma.common.files import replacing
from joma.errors import JomaError

_SPLITS = {"train": "train", "validation": "valid", "test": "test"}
_MANIFEST = "manifest.json"
_ROWS = 1000


def downloaded(source: str, folder: Path) -> Path:
    """The folder of a dataset, downloaded where it is not there yet.

    Args:
        source: "hub:NAME" or "hub:NAME:CONFIG".
        folder: has a folder for each dataset.

    Raises:
        ValueError: the dataset cannot be had, or has no text.
    """
    if not re.fullmatch(r"hub:[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source):
        raise JomaError(
            f"corpus must be 'hub:NAME' or 'hub:NAME:CONFIG', such as "
            f"hub:Salesforce/wikitext:wikitext-103-v1, got {source!r}"
        )
    _, name, *config = source.split(":")
    own = folder / source.replace("/", "+").replace(":", "@")
    # The manifest is written last: where a download was cut short, there is none.
    if not (own / _MANIFEST).is_file():
        written = _write(_load(source, name, config), own, source)
        json_files.write(own / _MANIFEST, {"source": source, "splits": written})
    return own


def _load(source: str, name: str, config: list[str]) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise JomaError(f"corpus {source} needs datasets: pip install datasets") from error
    try:
        return datasets.load_dataset(name, *config)
    except Exception as error:  # no network, no such name, no such config: each in its own way
        told = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise JomaError(f"corpus {source} cannot be had from the hub ({told})") from error


def _write(dataset: Any, folder: Path, source: str) -> list[str]:
    """Writes the splits that are known, one line or more a row, and says which."""
    found = [split for split in _SPLITS if split in dataset]
    if not found:
        raise JomaError(
            f"corpus {source} must have a split train, validation or test, it has "
            f"{', '.join(dataset) or 'none'}"
        )
    for split in found:
        if "text" not in dataset[split].column_names:
            raise JomaError(
                f"corpus {source} must have a column text, it has "
                f"{', '.join(dataset[split].column_names)}"
            )
    for split in found:
        with replacing(folder / f"{_SPLITS[split]}.txt") as file:
            for rows in dataset[split].iter(batch_size=_ROWS):
                # A row may end its line itself, as WikiText's do.
                file.write("".join(row.removesuffix("\n") + "\n" for row in rows["text"]).encode())
    return [_SPLITS[split] for split in found]
