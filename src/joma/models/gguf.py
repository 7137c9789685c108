"""GGUF files, the format of llama.cpp: a check of the header, and the dequantised weights.

The reader of `gguf` trusts what a file says of itself: lengths, and numbers of entries. Here it
reads nothing beyond the file's end, and no more entries than models have.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from joma.common.quiet import quietly, reading
from joma.errors import JomaError, how_to_install
from joma.models._size_checks import check_config, check_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_MOST_ENTRIES, _MOST_TENSORS = 65_536, 500_000
_MOST_ELEMENTS = 3 << 20
"""Elements of all arrays; the reader makes an object of each."""


@dataclass(frozen=True)
class GgufContents:
    """What a GGUF file says of itself.

    Attributes:
        values: Its entries that are single numbers or strings, by name.
        shapes: The shapes of its tensors, by name, as llama.cpp writes them: the axis along which
            numbers lie next to each other first.
    """

    values: Mapping[str, int | float | bool | str]
    shapes: Mapping[str, tuple[int, ...]]


def read_header(path: Path) -> GgufContents:
    """Return the header of a GGUF file.

    Raises:
        JomaError: The gguf package is missing, or the header does not fit the file.
    """
    try:
        import gguf
    except ImportError as error:
        raise JomaError(f"reading {path} needs gguf: {how_to_install('hf')}") from error
    with (
        reading(lambda said: f"{path} is cut short, damaged or not a GGUF file ({said})"),
        one_reader(),
    ):
        reader = gguf.GGUFReader(str(path))
        values = {it.name: it.contents() for it in reader.fields.values() if len(it.types) == 1}
        shapes = {it.name: tuple(map(int, it.shape)) for it in reader.tensors}
        if sum(it.n_bytes for it in reader.tensors) > len(reader.data):
            raise ValueError("its tensors lie over each other")
    check_config(values, str(path))
    return GgufContents(values, shapes)


@contextmanager
def one_reader() -> Iterator[None]:
    """Let a GGUF file be parsed once for all that is read of it inside the block, within bounds.

    transformers makes a reader each for configuration, weights and tokenizer, which takes seconds:
    every token of the vocabulary is a slice of a memory map, and NumPy's subclass for these is
    slow.
    """
    import gguf

    if isinstance(gguf.GGUFReader, functools._lru_cache_wrapper):
        yield
        return

    class BoundedReader(gguf.GGUFReader):
        elements = 0

        def _get(self, offset: Any, dtype: Any, count: Any = 1, *order: Any, **named: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data = self.data.view(np.ndarray)
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"it has {len(self.data)} bytes, and byte {end} is read of it")
            return super()._get(offset, dtype, count, *order, **named)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == gguf.GGUFValueType.ARRAY:
                kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
                self.elements += int(length[0])
                if self.elements > _MOST_ELEMENTS or kind[0] == gguf.GGUFValueType.ARRAY:
                    raise ValueError(f"its arrays are nested, or longer than {_MOST_ELEMENTS}")
            return super()._get_field_parts(orig_offs, raw_type)

        def _build_fields(self, offs: int, count: int) -> Any:
            if count > _MOST_ENTRIES:
                raise ValueError(f"it has {count} entries by its header")
            return super()._build_fields(offs, count)

        def _build_tensor_info(self, offs: int, count: int) -> Any:
            if count > _MOST_TENSORS:
                raise ValueError(f"it has {count} tensors by its header")
            return super()._build_tensor_info(offs, count)

    with patch.object(gguf, "GGUFReader", functools.cache(BoundedReader)):
        yield


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
