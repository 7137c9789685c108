"""GGUF files, the format of llama.cpp: a check of the header, and the dequantised weights.

The readers of `gguf` and transformers trust what a file says of itself: lengths of arrays, numbers
of layers. So the header is read here first, which allocates nothing but names.
"""

import functools
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from joma.common.quiet import quietly, reading
from joma.errors import JomaError, how_to_install, printable
from joma.models._size_checks import check_config, check_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


Scalar = int | float | bool | str

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES, _MOST_TENSORS, _MOST_AXES = 65_536, 500_000, 4
_LONGEST_ARRAY, _MOST_ELEMENTS = 1 << 20, 3 << 20
"""Elements of one array and of all; the readers make an object of each."""

_LONGEST_NAME = 65_536
_MOST_LAYERS, _LONGEST_CONTEXT, _WIDEST = 2048, 1 << 30, 1 << 24


@dataclass(frozen=True)
class GgufContents:
    """What a GGUF file says of itself.

    Attributes:
        values: Its entries that are single numbers or strings, by name.
        shapes: The shapes of its tensors, by name, as llama.cpp writes them: the axis along which
            numbers lie next to each other first.
    """

    values: Mapping[str, Scalar]
    shapes: Mapping[str, tuple[int, ...]]


def read_header(path: Path) -> GgufContents:
    """Return the header of a GGUF file.

    Raises:
        JomaError: The gguf package is missing, or the header does not fit the file.
    """
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise JomaError(f"reading {path} needs gguf: {how_to_install('hf')}") from error
    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    with open(path, "rb") as file:
        cursor = _Cursor(file, path.stat().st_size)
        try:
            header = _header(cursor, sizes)
        except JomaError as error:
            raise JomaError(
                f"{path} is cut short, damaged or not a GGUF file ({printable(str(error), 300)})"
            ) from error
    return header


class _Cursor:
    """A place in a file, from which nothing is read that lies beyond its end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size, self.at = file, size, 0

    def skip(self, count: int) -> None:
        if count > self.size - self.at:
            raise JomaError(f"it has {self.size} bytes, and {count} more should follow {self.at}")
        self.at += count

    def take(self, count: int) -> bytes:
        start = self.at
        self.skip(count)
        self.file.seek(start)
        return self.file.read(count)

    def number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]

    def string(self) -> str:
        length = self.number("Q")
        shown = self.take(min(length, _LONGEST_NAME))
        self.skip(length - len(shown))
        return shown.decode(errors="replace")


def _header(cursor: _Cursor, sizes: Mapping[int, tuple[int, int]]) -> GgufContents:
    if cursor.take(4) != b"GGUF":
        raise JomaError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        raise JomaError(f"its version must be 2 or 3, got {version}")
    tensor_count, entry_count = cursor.number("Q"), cursor.number("Q")
    if tensor_count > _MOST_TENSORS or entry_count > _MOST_ENTRIES:
        raise JomaError(f"it has {tensor_count} tensors and {entry_count} entries by its header")
    values: dict[str, Scalar] = {}
    elements = 0
    for _ in range(entry_count):
        name, kind = cursor.string(), cursor.number("I")
        if kind == _ARRAY:
            elements += _skipped_array(cursor, name)
        elif kind == _STRING:
            values[name] = cursor.string()
        elif kind in _SCALARS:
            values[name] = cursor.number(_SCALARS[kind])
        else:
            raise JomaError(f"its entry {name} has the unknown type {kind}")
        if elements > _MOST_ELEMENTS:
            raise JomaError(f"its arrays have more than {_MOST_ELEMENTS} elements")
    _check_values(values, tensor_count)
    return GgufContents(values, _shapes(cursor, tensor_count, sizes, values))


def _skipped_array(cursor: _Cursor, name: str) -> int:
    kind, length = cursor.number("I"), cursor.number("Q")
    if kind not in _SCALARS and kind != _STRING:
        raise JomaError(f"its array {name} has the unknown type {kind}")
    if length > _LONGEST_ARRAY:
        raise JomaError(f"its array {name} has {length} elements, more than {_LONGEST_ARRAY}")
    if kind == _STRING:
        for _ in range(length):
            cursor.skip(cursor.number("Q"))
    else:
        cursor.skip(length * struct.calcsize("<" + _SCALARS[kind]))
    return length


def _check_values(values: Mapping[str, Scalar], tensors: int) -> None:
    """Raise JomaError where a size is none that a model of so many tensors has."""
    for name, value in values.items():
        word = name.rpartition(".")[2]
        if isinstance(value, str | bool) or name.startswith(("tokenizer.", "general.")):
            continue
        if word == "context_length":
            most = _LONGEST_CONTEXT
        elif word == "block_count":
            most = min(_MOST_LAYERS, tensors)
        elif word.endswith(("_count", "_length", "_size", "_count_kv", "_dim")):
            most = _WIDEST
        else:
            continue
        if not 0 <= value <= most:
            raise JomaError(f"its {name} must be at most {most}, got {value:.6g}")


def _shapes(
    cursor: _Cursor,
    count: int,
    sizes: Mapping[int, tuple[int, int]],
    values: Mapping[str, Scalar],
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    ends: dict[str, int] = {}
    total = 0
    for _ in range(count):
        name = cursor.string()
        axes = cursor.number("I")
        if axes > _MOST_AXES:
            raise JomaError(f"{name} has {axes} axes, more than {_MOST_AXES}")
        shape = tuple(cursor.number("Q") for _ in range(axes))
        kind, offset = cursor.number("I"), cursor.number("Q")
        if kind not in sizes:
            raise JomaError(f"{name} has the unknown type {kind}")
        if name in shapes:
            raise JomaError(f"{name} is in it twice")
        block, size = sizes[kind]
        stored = math.prod(shape) // block * size
        shapes[name], ends[name] = shape, offset + stored
        total += stored
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment > cursor.size:
        raise JomaError(f"its alignment must be a small number, got {alignment}")
    data = -(-cursor.at // alignment) * alignment
    for name, end in ends.items():
        if data + end > cursor.size:
            raise JomaError(
                f"it has {cursor.size} bytes, and {name} should end at byte {data + end}"
            )
    if data + total > cursor.size:
        raise JomaError("its tensors lie over each other")
    return shapes


def read_gguf(path: Path, header: GgufContents) -> tuple["PreTrainedConfig", dict[str, Tensor]]:
    """Return the configuration and weights of a GGUF file, under the names transformers gives them.

    Args:
        path: The file.
        header: What `read_header` gave of it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with (
        reading(
            lambda said: (
                f"{path} is cut short, damaged or not a GGUF file transformers reads ({said})"
            )
        ),
        quietly(),
        # The one progress bar that does not follow the switch of transformers.
        patch("transformers.modeling_gguf_pytorch_utils.tqdm", lambda items, **_: items),
    ):
        config = AutoConfig.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True
        )
        check_config(config.to_dict(), str(path))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        # Names are llama.cpp's: sizes alone can be compared before the numbers are read.
        numbers = sum(map(math.prod, header.shapes.values()))
        check_sizes(config, type(model), {}, str(path), numbers=numbers)
        contents = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=_Named(model))
    config.architectures = [type(model).__name__]
    return config, contents["tensors"]


@contextmanager
def one_reader() -> Iterator[None]:
    """Let transformers parse a GGUF file once for all that it reads of it inside the block.

    It makes a reader each for configuration, weights and tokenizer, which takes seconds: every
    token of the vocabulary is a slice of a memory map, and NumPy's subclass for these is slow.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        def _get(self, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data = self.data.view(np.ndarray)
            return super()._get(*args, **kwargs)

    with patch.object(gguf, "GGUFReader", functools.cache(Reader)):
        yield


class _Named:
    """A model of which only the parameters' names are asked.

    Given a model, transformers asks it and every module in it again, which takes longer than all
    the rest and adds nothing: every name is known to the whole.
    """

    def __init__(self, model: nn.Module) -> None:
        self.config = model.config
        self.state_dict = model.state_dict

    def named_children(self) -> tuple[()]:
        return ()
