"""The weights of a model as they lie on disk, read one tensor at a time.

Names, shapes and sizes come from the headers alone, so that a file far larger than the memory can
be measured tensor by tensor. Nothing in a file is ever executed.
"""

import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma.common import json_files
from joma.common.quiet import reading
from joma.common.text import first_line
from joma.errors import JomaError, printable
from joma.models.hub import WEIGHTS, local_folder

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
_MOST_AXES = 8
_MOST_TENSORS = 50_000
_COMPLEX = {"C64": torch.complex64, "C128": torch.complex128}


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

                with (
                    reading(lambda said, path=path: f"{path} cannot be read ({said})"),
                    safe_open(path, framework="pt") as file,
                ):
                    tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            else:
                tensors |= load_pickled(path)
        return {name: tensors[name] for name in self.tensors}


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of a folder's config.json."""
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
    """The tensors of a PyTorch checkpoint, by an unpickler that knows tensors and nothing else."""
    _check_uncompressed(path)
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
                f"{path} must hold tensors by name, but {printable(repr(name), 100)} is a "
                f"{type(value).__name__}"
            )
        _check_plain(value, name, path)
    return loaded


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
        raise JomaError(f"{index} must tell for each weight which file beside it holds it")
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


def _safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """The header of a safetensors file, which the library compares with the size of the file."""
    from safetensors import safe_open

    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise JomaError(f"{path} is cut short or not a safetensors file: it has {size} bytes")
    if length > _MOST_HEADER:
        raise JomaError(f"{path} is not a safetensors file: its header has {length} bytes")
    tensors: dict[str, StoredTensor] = {}
    offset = 8 + length
    with (
        reading(lambda said: _unsound(path, said)),
        safe_open(path, framework="np") as file,
    ):
        names = file.offset_keys()
        if len(names) > _MOST_TENSORS:
            raise JomaError(f"{path} holds {len(names)} tensors, more than {_MOST_TENSORS}")
        for name in names:  # in the order in which they fill the file without gaps
            part = file.get_slice(name)
            shape, kind = tuple(part.get_shape()), part.get_dtype()
            if kind not in _DTYPES | _COMPLEX:
                raise JomaError(f"{path} holds {printable(name, 100)} in the unknown type {kind}")
            if len(shape) > _MOST_AXES:
                raise JomaError(
                    f"{path} holds {printable(name, 100)} of shape {_shape(shape)}, which has more "
                    f"than {_MOST_AXES} axes"
                )
            tensors[name] = StoredTensor(name, shape, (_DTYPES | _COMPLEX)[kind], path, offset)
            offset += tensors[name].bytes
    if offset != size:
        raise JomaError(f"{path} is damaged: it should have {offset} bytes and has {size}")
    return tensors


def _unsound(path: Path, said: str) -> str:
    if "not fully covered" in said:
        return f"{path} is cut short or damaged: its tensors need another size than it has"
    return f"{path} is not a sound safetensors file ({said})"


def _shape(shape: Sequence[int]) -> str:
    return printable(str(tuple(shape)), 80)


def _fill(file: Any, data: bytearray) -> int:
    view, done = memoryview(data), 0
    while done < len(data) and (count := file.readinto(view[done:])):
        done += count
    return done


def _plain(name: object) -> bool:
    """Whether a file named in an index lies beside the index."""
    return isinstance(name, str) and Path(name).name == name and name.isprintable()
