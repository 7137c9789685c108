"""The weights of a model as they lie on disk, read one tensor at a time.

Names, shapes and sizes come from the headers alone, so that a file far larger than the memory can
be measured tensor by tensor. Nothing in a file is ever executed.
"""

import importlib
import math
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma.common import json_files
from joma.common.quiet import reading
from joma.common.sharded import DTENSORS, is_dtensor
from joma.common.text import first_line
from joma.errors import JomaError, printable
from joma.models.hub import WEIGHTS, local_folder

_MOST_AXES = 8
_MOST_TENSORS = 50_000


@dataclass(frozen=True)
class StoredTensor:
    """What is known of a tensor before it is read.

    Args:
        name: The parameter's full name.
        shape: Its shape as stored.
        dtype: Its type as stored.
        file: The file it lies in.
        offset: Where it begins in a safetensors file; None in a PyTorch one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    offset: int | None = None

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


class WeightFiles:
    """The weights of a folder in Hugging Face layout, a hub id or a .safetensors file.

    The files are opened each time they are read and need not be closed.

    Args:
        source: The folder, file or hub id.
        revision: A hub id's branch, tag or commit.

    Raises:
        ValueError: there are no weights, or a file is cut short, damaged, or wants to run code.
    """

    def __init__(self, source: str | Path, *, revision: str | None = None) -> None:
        path = Path(source)
        if path.is_file():
            if path.suffix != ".safetensors":
                raise JomaError(
                    f"{path} must be a .safetensors file or a folder to be read tensor by tensor"
                )
            self.folder, first = path.parent, path.name
        else:
            self.folder, first = local_folder(source, revision), None
        self.source = str(source)
        self._first = first if first is not None else _weights_of(self.folder)
        self.tensors: Mapping[str, StoredTensor] = _tensors(self.folder, self._first)
        """By name, in the order of the files."""

    @property
    def names(self) -> list[str]:
        """The parameters' names."""
        return list(self.tensors)

    @property
    def files(self) -> list[Path]:
        """The files that hold tensors."""
        return list(dict.fromkeys(tensor.file for tensor in self.tensors.values()))

    @property
    def bytes(self) -> int:
        """The size of all tensors as stored."""
        return sum(tensor.bytes for tensor in self.tensors.values())

    def config(self) -> dict[str, Any] | None:
        """Return the config.json next to the weights, None where there is none."""
        return read_config(self.folder) if (self.folder / "config.json").exists() else None

    def read(self, name: str) -> Tensor:
        """Return one tensor, in memory of its own: nothing else of the file stays in memory."""
        if name not in self.tensors:
            raise JomaError(f"name must be one of the {len(self.tensors)} stored, got {name!r}")
        tensor = self.tensors[name]
        if tensor.offset is None:
            return load_pickled(tensor.file)[name].clone()
        # By its offset: the library parses the whole header each time it opens the file, which
        # takes 20 ms where it holds 5,000 tensors.
        data = np.fromfile(tensor.file, np.uint8, tensor.bytes, offset=tensor.offset)
        if len(data) != tensor.bytes:
            raise JomaError(f"{tensor.file} was cut short while it was read")
        if not len(data):
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return torch.from_numpy(data).view(tensor.dtype).reshape(tensor.shape)

    def mapped(self) -> dict[str, Tensor]:
        """Return all tensors, read only, mapped from the files: memory fills as they are used."""
        tensors: dict[str, Tensor] = {}
        for path in self.files:
            if path.suffix == ".safetensors":
                with opened(path) as file:
                    tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            else:
                tensors |= load_pickled(path)
        return {name: tensors[name] for name in self.tensors}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder's config.json."""
    path = folder / "config.json"
    config = json_files.read(path, largest=json_files.LARGEST_JSON)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise JomaError(f"{path} must be a model's configuration with a model_type")
    if config.get("quantization_config") is not None:
        raise JomaError(
            f"{folder} holds quantized weights, which are not read: give the original, or a .gguf"
        )
    return config


def load_pickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a PyTorch checkpoint; the unpickler knows tensors and nothing else."""
    _check_uncompressed(path)
    try:
        loaded = _unpickled(path)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        raise JomaError(
            f"{path} asks for {asked[1] if asked else 'more than tensors'} when it is opened, "
            "which could run code and is refused; ask for the weights as safetensors"
        ) from error
    except ImportError as error:
        raise JomaError(
            f"{path} holds sharded tensors (DTensor), which this build of torch cannot read"
        ) from error
    except Exception as error:  # whatever a damaged file makes the unpickler stumble over
        raise JomaError(
            f"{path} is damaged, cut short or not a PyTorch checkpoint ({first_line(error)})"
        ) from error
    if not isinstance(loaded, dict) or not loaded:
        raise JomaError(f"{path} must hold tensors by name, got a {type(loaded).__name__}")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise JomaError(
                f"{path} must hold tensors by name, but {printable(repr(name), 100)} is a "
                f"{type(value).__name__}"
            )
        loaded[name] = value = _whole(value, name, path)
        _check_plain(value, name, path)
    return loaded


def _unpickled(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about pickle protocols, before it refuses
        try:
            return torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
        except pickle.UnpicklingError as error:
            if DTENSORS not in str(error) or DTENSORS in sys.modules:
                raise
    importlib.import_module(DTENSORS)  # what it defines is then among what is read
    return _unpickled(path)


def _whole(tensor: Tensor, name: str, path: Path) -> Tensor:
    """Return a tensor that a process saved as its part, if that is all of it."""
    if not is_dtensor(tensor):
        return tensor
    try:
        own = tensor.to_local()
        whole = own.shape == tensor.shape and not any(it.is_partial() for it in tensor.placements)
    except Exception:  # whatever a damaged one stumbles over
        own, whole = tensor, False
    if not whole:
        raise JomaError(
            f"{path} holds of {printable(name, 100)} the part that one process had (a DTensor); "
            "save whole tensors, as get_model_state_dict does with full_state_dict=True"
        )
    return own


def _check_uncompressed(path: Path) -> None:
    """Raise JomaError for an archive that grows when it is read; PyTorch writes none."""
    with reading(lambda said: f"{path} is damaged, cut short or not a PyTorch checkpoint ({said})"):
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            inside = sum(entry.file_size for entry in archive.infolist())
    if inside > path.stat().st_size:
        raise JomaError(f"{path} is not a PyTorch checkpoint: it unpacks to {inside} bytes")


def _check_plain(tensor: Tensor, name: str, path: Path) -> None:
    """Raise JomaError for a tensor that holds its numbers in another way than one by one."""
    what = f"{path} holds {printable(name, 100)} as a"
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise JomaError(f"{what} sparse or quantized tensor, which is not read")
    if tensor.device.type != "cpu":
        raise JomaError(f"{what} tensor without numbers (device {tensor.device})")
    if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise JomaError(f"{what} tensor of shape {_shape(tensor.shape)} over fewer numbers")


def _weights_of(folder: Path) -> str:
    for name in WEIGHTS:
        if (folder / name).is_file():
            return name
    raise JomaError(f"{folder} has no weights: none of {', '.join(WEIGHTS)} is in it")


def _tensors(folder: Path, first: str) -> dict[str, StoredTensor]:
    if not first.endswith(".index.json"):
        return _in_file(folder / first)
    index = folder / first
    where = json_files.read(index, largest=json_files.LARGEST_INDEX)
    where = where.get("weight_map") if isinstance(where, dict) else None
    if not isinstance(where, dict) or not all(_plain(name) for name in where.values()):
        raise JomaError(f"{index} must say for each weight which file next to it holds it")
    shards = {name: _in_file(folder / name) for name in dict.fromkeys(where.values())}
    for weight, name in where.items():
        if weight not in shards[name]:
            raise JomaError(
                f"{index} has {printable(weight, 100)} in {name}, which does not hold it"
            )
    return {weight: shards[name][weight] for weight, name in where.items()}


def _in_file(path: Path) -> dict[str, StoredTensor]:
    if not path.is_file():
        raise JomaError(f"{path} is missing: the model's index names it as one of its parts")
    if path.suffix == ".safetensors":
        found = _safetensors_header(path)
    else:
        found = {
            name: StoredTensor(name, tuple(tensor.shape), tensor.dtype, path)
            for name, tensor in load_pickled(path).items()
        }
    for tensor in found.values():
        if tensor.dtype.is_complex:
            raise JomaError(
                f"{path} holds complex numbers in {printable(tensor.name, 100)}: weights must be "
                "real"
            )
    return found


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file, whose header the library compares with the size of the file."""
    from safetensors import safe_open

    with (
        reading(lambda said: f"{path} is cut short, damaged or not a safetensors file ({said})"),
        safe_open(path, framework="pt") as file,
    ):
        yield file


def _safetensors_header(path: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    with opened(path) as file:
        names = file.offset_keys()
        if len(names) > _MOST_TENSORS:
            raise JomaError(f"{path} holds {len(names)} tensors, more than {_MOST_TENSORS}")
        for name in names:
            shape = file.get_slice(name).get_shape()
            if len(shape) > _MOST_AXES:
                raise JomaError(
                    f"{path} holds {printable(name, 100)} of shape {_shape(shape)}, which has more "
                    f"than {_MOST_AXES} axes"
                )
            tensor = file.get_tensor(name)  # a view of the mapped file: nothing is read
            found[name] = StoredTensor(name, tuple(tensor.shape), tensor.dtype, path)
    # The library has made sure that tensors fill the file to its end, in this order.
    sizes = [tensor.bytes for tensor in found.values()]
    starts = accumulate(sizes, initial=path.stat().st_size - sum(sizes))
    return {
        name: replace(tensor, offset=start)
        for (name, tensor), start in zip(found.items(), starts, strict=False)
    }


def _shape(shape: Sequence[int]) -> str:
    return printable(str(tuple(shape)), 80)


def _plain(name: object) -> bool:
    """Return whether a file named in an index lies next to the index."""
    return isinstance(name, str) and Path(name).name == name and name.isprintable()
