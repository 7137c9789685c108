"""Checkpoints for others: a folder for each step in Hugging Face layout, there whole or not."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from joma.common.files import sync_folder
from joma.common.quiet import quietly
from joma.models.checksums import SUMS, checksums_of
from joma.train.language._text import save_tokenizer
from joma.train.processes import Processes, whole

SERIES = "series"
"""The folder of a run in which they are."""

_NUMBER = re.compile(r"os error (\d+)")


def series_folder(run: Path, step: int) -> Path:
    """Where the model of a step is."""
    return run / SERIES / f"step-{step:06d}"


def gathered(model: nn.Module, processes: Processes) -> dict[str, Tensor]:
    """The tensors that a file of the model holds, on the CPU and each once.

    On other processes than the first nothing; all must call it.
    """
    kept: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # tied: whoever reads the file ties it again
            continue
        seen.add(id(tensor))
        complete = whole(tensor)
        if processes.rank == 0:
            kept[name] = complete.cpu().contiguous()
    return kept


def export(folder: Path, model: Any, weights: dict[str, Tensor], tokenizer: Any) -> Path:
    """Writes a model that transformers and `joma probe` read; one that is there is replaced.

    Args:
        folder: to write.
        model: of transformers, which knows what names a file has for its weights; its own are not
            looked at.
        weights: what `gathered` gave.
        tokenizer: its files go with it.

    Raises:
        OSError: what the system has against it; nothing is left of what was begun.
    """
    from safetensors import SafetensorError

    beside = folder.with_name(f".{folder.name}.tmp")
    _remove(beside)
    folder.parent.mkdir(exist_ok=True)  # not the run folder: one that was removed stays so
    beside.mkdir()
    try:
        try:
            with quietly():
                model.save_pretrained(beside, state_dict=weights)
        except SafetensorError as error:
            raise _from_system(error, beside / "model.safetensors") from error
        save_tokenizer(tokenizer, beside)
        (beside / SUMS).write_bytes(checksums_of(beside))
        mode = (beside / "config.json").stat().st_mode
        for path in beside.iterdir():
            path.chmod(mode)  # safetensors lets nobody else read what it writes
            _sync(path)
        sync_folder(beside)
        _replace(beside, folder)
    except BaseException:
        _remove(beside)
        raise
    return folder


def remove_leftovers(run: Path) -> None:
    """Removes what exports that were killed left."""
    for pattern in (".step-*.tmp", ".step-*.old"):
        for path in (run / SERIES).glob(pattern):
            _remove(path)


def remove_after(run: Path, last: int) -> None:
    """Removes the models of later steps, of a training that went back and is to end before them."""
    for path in (run / SERIES).glob("step-*"):
        if path.name[5:].isdecimal() and int(path.name[5:]) > last:
            old = path.with_name(f".{path.name}.old")
            _remove(old)
            os.replace(path, old)  # so that none is ever there in part
            _remove(old)


def _replace(beside: Path, folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    _remove(old)
    if folder.exists():  # of an earlier life of the run, whose later steps are made again
        os.replace(folder, old)
    os.replace(beside, folder)
    sync_folder(folder.parent)
    _remove(old)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _from_system(error: Exception, path: Path) -> OSError:
    """The error of the system that safetensors tells in words."""
    found = _NUMBER.search(str(error))
    if found is None:
        return OSError(None, str(error), str(path))
    number = int(found[1])
    return OSError(number, os.strerror(number), str(path))
