"""The series of models: a folder for each step in Hugging Face layout, complete or absent."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from joma.common.files import sync_folder
from joma.common.quiet import without_log_lines
from joma.models.checksums import SUMS, checksums_of
from joma.train.language._text import save_tokenizer
from joma.train.processes import whole

SERIES = "series"
"""The folder of a run in which the models are."""

_NUMBER = re.compile(r"os error (\d+)")


def series_folder(run: Path, step: int) -> Path:
    """Return the folder of the model of a step."""
    return run / SERIES / f"step-{step:06d}"


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file of the model by name, each once and whole.

    All processes go through them.
    """
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:  # tied: whoever reads the file ties it again
            seen.add(id(tensor))
            yield name, whole(tensor)


def export(folder: Path, model: Any, weights: dict[str, Tensor], tokenizer: Any) -> Path:
    """Write a model that transformers and `joma probe` read; one that is there is replaced.

    Args:
        folder: Folder to write.
        model: Model of transformers, which knows what names a file has for its weights; its own
            weights are not read.
        weights: What `weights_of` yielded, on the CPU.
        tokenizer: Tokenizer whose files are written, too.

    Raises:
        OSError: The system refuses a write; nothing is left of what was begun.
    """
    from safetensors import SafetensorError

    temporary = folder.with_name(f".{folder.name}.tmp")
    _remove(temporary)
    folder.parent.mkdir(exist_ok=True)  # not the run folder: one that was removed stays so
    temporary.mkdir()
    try:
        try:
            with without_log_lines():
                model.save_pretrained(temporary, state_dict=weights)
        except SafetensorError as error:
            raise _from_system(error, temporary / "model.safetensors") from error
        save_tokenizer(tokenizer, temporary)
        (temporary / SUMS).write_bytes(checksums_of(temporary))
        mode = (temporary / "config.json").stat().st_mode
        for path in temporary.iterdir():
            path.chmod(mode)  # safetensors lets nobody else read what it writes
            sync_folder(path)  # a file
        sync_folder(temporary)
        old = _set_aside(folder)  # of an earlier life of the run, whose later steps are made again
        os.replace(temporary, folder)
        sync_folder(folder.parent)
        _remove(old)
    except BaseException:
        _remove(temporary)
        raise
    return folder


def remove_leftovers(run: Path) -> None:
    """Remove what killed exports left."""
    for pattern in (".step-*.tmp", ".step-*.old"):
        for path in (run / SERIES).glob(pattern):
            _remove(path)


def remove_after(run: Path, last: int) -> None:
    """Remove the models of later steps, of a training that is now to end before them."""
    for path in (run / SERIES).glob("step-*"):
        if path.name[5:].isdecimal() and int(path.name[5:]) > last:
            _remove(_set_aside(path))  # so that none is ever there in part


def _set_aside(folder: Path) -> Path:
    """Give a folder, if it is there, a hidden name; return that."""
    old = folder.with_name(f".{folder.name}.old")
    _remove(old)
    if folder.exists():
        os.replace(folder, old)
    return old


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _from_system(error: Exception, path: Path) -> OSError:
    """Return the error of the system that safetensors reports in words."""
    found = _NUMBER.search(str(error))
    if found is None:
        return OSError(None, str(error), str(path))
    number = int(found[1])
    return OSError(number, os.strerror(number), str(path))
