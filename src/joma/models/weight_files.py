"""The weights of a model as they lie on disk, read one tensor at a time.

Names, shapes and sizes come from the headers alone, so that a file far larger than the memory can
be measured tensor by tensor. Nothing in a file is ever executed.
"""

import json
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma.errors import JomaError
from joma.models._hub import WEIGHTS, local_folder
from joma.models._quiet import first_line

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
_MOST_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True)
class StoredTensor:
    """What is known of a tensor before it is read.

    Args:
        name: the parameter's full name.
        shape: its shape as stored.
        dtype: its type as stored.
        file: the file it lies in.
        offset: where it begins in a safetensors file; None in a PyTorch one.
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

    The files are opened for each look at them and need not be closed.

    Args:
        source: the folder, file or hub id.
        revision: a hub id's branch, tag or commit.

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
        """The config.json beside the weights, None where there is none."""
        return read_config(self.folder) if (self.folder / "config.json").exists() else None

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own: nothing else of the file stays in memory."""
        if name not in self.tensors:
            raise JomaError(f"name must be one of the {len(self.tensors)} stored, got {name!r}")
        tensor = self.tensors[name]
        if tensor.offset is None:
            return load_pickled(tensor.file)[name].clone()
        data = bytearray(tensor.bytes)
        with open(tensor.file, "rb", buffering=0) as file:
            file.seek(tensor.offset)
            if _fill(file, data) != len(data):
                raise JomaError(f"{tensor.file} was cut short while it was read")
        if not data:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return torch.frombuffer(data, dtype=tensor.dtype).reshape(tensor.shape)

    def mapped(self) -> dict[str, Tensor]:
        """All tensors, backed by the files so that memory fills as they are touched; read only."""
        tensors: dict[str, Tensor] = {}
        for path in self.files:
            if path.suffix == ".safetensors":
                from safetensors import safe_open

                with safe_open(path, framework="pt") as file:
                    tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            else:
                tensors |= load_pickled(path)
        return {name: tensors[name] for name in self.tensors}


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of a folder's config.json."""
    path = folder / "config.json"
    config = _json(path)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise JomaError(f"{path} must be a model's configuration with a model_type")
    if config.get("quantization_config") is not None:
        raise JomaError(
            f"{folder} holds quantized weights, which are not read: give the original, or a .gguf"
        )
    return config


def load_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a PyTorch checkpoint, by an unpickler that knows tensors and nothing else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols, before it refuses
            loaded = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        raise JomaError(
            f"{path} asks for {asked[1] if asked else 'more than tensors'} when it is opened, "
            "which could run code and is refused; ask for the weights as safetensors"
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
                f"{path} must hold tensors by name, but {name!r} is a {type(value).__name__}"
            )
    return loaded


def _weights_of(folder: Path) -> str:
    for name in WEIGHTS:
        if (folder / name).is_file():
            return name
    raise JomaError(f"{folder} has no weights: none of {', '.join(WEIGHTS)} is in it")


def _tensors(folder: Path, first: str) -> dict[str, StoredTensor]:
    if not first.endswith(".index.json"):
        return _in_file(folder / first)
    index = folder / first
    where = _json(index)
    where = where.get("weight_map") if isinstance(where, dict) else None
    if not isinstance(where, dict) or not all(_plain(name) for name in where.values()):
        raise JomaError(f"{index} must tell for each weight which file beside it holds it")
    shards = {name: _in_file(folder / name) for name in dict.fromkeys(where.values())}
    for weight, name in where.items():
        if weight not in shards[name]:
            raise JomaError(f"{index} has {weight} in {name}, which does not hold it")
    return {weight: shards[name][weight] for weight, name in where.items()}


def _in_file(path: Path) -> dict[str, StoredTensor]:
    if not path.is_file():
        raise JomaError(f"{path} is missing: the model's index names it as one of its parts")
    if path.suffix == ".safetensors":
        return _safetensors_header(path)
    return {
        name: StoredTensor(name, tuple(tensor.shape), tensor.dtype, path)
        for name, tensor in load_pickled(path).items()
    }


def _safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """The header of a safetensors file, believed only as far as the file's size bears it out."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise JomaError(f"{path} is cut short or not a safetensors file: it has {size} bytes")
        if length > _MOST_HEADER:
            raise JomaError(f"{path} is not a safetensors file: its header has {length} bytes")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = [
            (_stored(name, entry, path, 8 + length), *entry["data_offsets"])
            for name, entry in header.items()
        ]
        tensors.sort(key=lambda item: (item[1], item[2]))
        end = 0
        for tensor, begin, stop in tensors:
            if begin != end or stop - begin != tensor.bytes:
                raise JomaError(f"the place of {tensor.name} does not fit its shape")
            end = stop
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise JomaError(f"{path} is not a sound safetensors file ({first_line(error)})") from error
    if 8 + length + end != size:
        raise JomaError(
            f"{path} is {'cut short' if size < 8 + length + end else 'damaged'}: it should have "
            f"{8 + length + end} bytes and has {size}"
        )
    return {tensor.name: tensor for tensor, _, _ in tensors}


def _stored(name: str, entry: Mapping[str, Any], path: Path, data: int) -> StoredTensor:
    shape = tuple(entry["shape"])
    if not all(isinstance(extent, int) and extent >= 0 for extent in shape):
        raise JomaError(f"the shape of {name} is {shape}")
    if entry["dtype"] not in _DTYPES:
        raise JomaError(f"{name} has the unknown type {entry['dtype']}")
    begin = entry["data_offsets"][0]
    return StoredTensor(name, shape, _DTYPES[entry["dtype"]], path, data + begin)


def _fill(file: Any, data: bytearray) -> int:
    view, done = memoryview(data), 0
    while done < len(data) and (count := file.readinto(view[done:])):
        done += count
    return done


def _plain(name: object) -> bool:
    """Whether a file named in an index lies beside the index."""
    return isinstance(name, str) and Path(name).name == name


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise JomaError(f"{path} must be a JSON file ({first_line(error)})") from error
